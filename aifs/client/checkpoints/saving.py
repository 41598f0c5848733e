"""``with checkpoint(path, step=...) as tmp``: a save that appears whole or not at all."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aifs.client.checkpoints import attributes
from aifs.client.checkpoints.catalog import keep as keep_checkpoints
from aifs.client.checkpoints.catalog import parse_keep, remove_leftovers, set_policy
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import (
    PathLike,
    commit,
    pending_path,
    plain,
    pointers_to,
    publish_attempt,
    require_free,
)
from aifs.client.checkpoints.ranks import Ranks
from aifs.core import trees
from aifs.core.files import close_file, open_file
from aifs.core.log import logger

TIMEOUT_S = 1800.0

_log = logger(__name__)


@contextmanager
def checkpoint(
    path: PathLike,
    *,
    step: int | None = None,
    ranks: int = 1,
    rank: int = 0,
    latest: str | None = "latest",
    tracker: str | None = None,
    keep: str | None = None,
    hash: bool = True,
    replace: bool = False,
    timeout_s: float = TIMEOUT_S,
    check: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """Gives a directory to write into; at the end of the block it becomes the checkpoint ``path``.

    All ``ranks`` of a job call it with the same arguments except ``rank``, and get the same
    directory; each returns when the checkpoint is durable and visible. If the block raises, in any
    rank, there is no checkpoint. Files that a crashed attempt has left in the directory are
    removed.

    ``step``: by default the number at the end of the name. ``latest``: name of a symlink beside it
    that will lead to it; ``tracker``: of a file that will hold the step (Megatron:
    latest_checkpointed_iteration.txt); None: there is none. ``keep``: which checkpoints of the
    directory remain, such as 'last=3,every=1000'. ``hash``: take BLAKE3 of all files. ``replace``:
    a checkpoint that has the name already. ``check``: called by rank 0 with the directory when all
    have written, before it is published; if it raises, there is no checkpoint.

    Raises FileExistsError; CheckpointError if another rank has failed, or another process saves to
    this name; RanksMissing, which is a TimeoutError and names the ranks, if some did not do their
    part within ``timeout_s`` of this one's end."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: there are ranks from 0 to {ranks - 1}")
    target = plain(path)
    require_free(target, replace)
    pointers = pointers_to(target, step, latest, tracker)
    if keep is not None:
        parse_keep(keep)
    pending = str(pending_path(target))
    trees.make_dir(pending)
    group = Ranks(target, ranks, rank, timeout_s, hash) if ranks > 1 else None
    lock, by_mount = _lock(pending) if rank == 0 else -1, False
    try:
        try:
            if group is not None:
                group.begin()  # what fails from now on, the other ranks hear
                require_free(target, replace)  # a rank that was started anew may have come too late
            if rank == 0:
                # Before anything is written: not everybody may say what remains.
                by_mount = keep is not None and set_policy(
                    os.path.dirname(target), parse_keep(keep)
                )
                _prepare(pending, ranks, pointers.step)
            yield Path(pending)
            if rank == 0:
                if group is None:
                    commit(pending, rank, hash=hash)
                else:
                    group.lead()
                if check is not None:
                    check(Path(pending))
                if not _is_still(pending, lock):
                    # Fails, too, if the lock has gone with the mount's daemon.
                    raise CheckpointError(
                        f"{pending}: another process has taken its place meanwhile"
                    )
                attempt = group.attempt if group else ""
                publish_attempt(pending, target, pointers, ranks, replace, hash, attempt)
            else:
                assert group is not None
                group.follow()
        except BaseException as error:
            _give_up(pending, lock, group, error)
            raise
        if rank == 0 and group is not None:
            group.end()
    finally:
        if lock != -1:
            close_file(lock)
    if rank == 0 and keep is not None and not by_mount:
        try:
            keep_checkpoints(os.path.dirname(target), keep)
        except OSError as error:  # this one is saved, and that is what the caller has to know
            _log.warning("old checkpoints beside %s cannot be removed: %s", target, error)


def _lock(pending: str) -> int:
    """A descriptor that excludes other processes of this host. Raises CheckpointError."""
    while True:
        trees.make_dir(pending)
        try:
            fd = open_file(pending, write=False)
        except FileNotFoundError:  # it has just been published
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            close_file(fd)
            raise CheckpointError(f"{pending}: another process is saving to it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return fd
        if _is_still(pending, fd):
            return fd
        close_file(fd)


def _prepare(pending: str, ranks: int, step: int | None) -> None:
    """Remove crashed attempts' files, unless other ranks may have written; tell a mount the
    ranks."""
    remove_leftovers(os.path.dirname(pending))
    if ranks == 1:
        trees.empty_dir(pending)
    if attributes.is_aifs(pending):
        mark = f"ranks={ranks}" + ("" if step is None else f",step={step}")
        # Nothing counts that a crashed attempt, perhaps another user's, has committed.
        attributes.put(pending, attributes.PENDING, f"{mark},anew=yes")


def _give_up(pending: str, lock: int, group: Ranks | None, error: BaseException) -> None:
    try:
        if group is not None:
            group.leave(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"))
        elif _is_still(pending, lock):
            trees.remove_tree(pending)
    except OSError as failure:  # why the save failed is what the caller must hear
        _log.warning("%s: cannot be removed: %s", pending, failure)


def _is_still(pending: str, lock: int) -> bool:
    """Whether the name is still the locked directory's."""
    try:
        return os.stat(pending).st_ino == os.fstat(lock).st_ino
    except FileNotFoundError:
        return False
