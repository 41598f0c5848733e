"""Grouped files: the ranks of a job save together, and are told when all is durable.

    group = Group("step", rank, world, directory="/mnt/aifs/run/step-100")
    saved = group_putfile("rank0.safetensors", tensors, group)      # returns at once
    saved.buffered.result()                                         # the tensors may change
    saved.durable.result()                                          # all ranks' files are durable

See docs/guide/grouped.md.
"""

import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aifs.client.checkpoints import attributes
from aifs.client.checkpoints.publishing import PathLike, plain, require_free
from aifs.client.coordination import (
    JOB_NAME,
    Coordinator,
    GroupError,
    InvalidGroup,
    LoneRank,
    RankOptions,
    job_of_environment,
)
from aifs.client.mounted_group import MountedGroup
from aifs.client.putting import Future, Saved, getfile, in_background, write_content
from aifs.client.torch.contents import Content, Loaded, content_of
from aifs.core import trees
from aifs.core.units import parse_size

CHUNK_MIN, CHUNK_MAX = 64 << 10, 4 << 20
_TIME_MAX_S = 10.0**9
_NAME = re.compile(r"[A-Za-z0-9_.:@+-]{1,63}")


class Group:
    """One rank of a grouped write. Making one joins it: this process is rank ``rank`` of ``world``
    until it has committed, and if it ends before, the group fails for all. Where ``directory`` is
    not on AIFS the ranks know nothing of each other: each group is of this rank alone.

    ``directory``: where the files go, made if it is not there. ``dedup``: bytes that are compared
    at a time, at most, from 64KiB to 4MiB; 'file' is 4MiB. ``timeout_s``: until all ranks have
    committed. ``grace_s``: how long a rank that died may stay away. ``publish``: the name that the
    directory gets, beside itself, when all have committed; on AIFS alone. ``files_per_rank``: the
    rank commits with its last file; None: by ``commit()``. ``same_size``: all files must have the
    size of those of the first rank that commits. ``job``: a name that all ranks of this job give,
    and no other run of it; None: the name that the launcher gives.

    As a context manager it waits at its end until all is durable, or cancels the group if the block
    raises. Raises InvalidGroup, FileExistsError if ``publish`` is taken, OSError; ``durable``
    raises GroupError and below.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        *,
        directory: PathLike,
        dedup: str | int = "4MiB",
        timeout_s: float = 600.0,
        grace_s: float = 0.0,
        publish: str | None = None,
        files_per_rank: int | None = 1,
        same_size: bool = False,
        job: str | None = None,
    ) -> None:
        path = plain(directory)
        self._options = RankOptions(
            name,
            rank,
            world,
            path,
            _chunk(dedup),
            timeout_s,
            grace_s,
            publish or "",
            same_size,
            job or "",
            bool(job),
        )
        _check(self._options, files_per_rank)
        self._target = os.path.join(os.path.dirname(path), publish) if publish else path
        """The directory's path when published: its own, or that of ``publish``."""
        if publish:
            require_free(self._target, replace=False)
        trees.make_durable_dir(path)
        self._is_on_aifs = attributes.is_aifs(path)
        """Whether ``directory`` lies on a mount, where ranks know of each other."""
        if publish and not self._is_on_aifs:
            raise InvalidGroup(
                f"{self._options}: publish={publish!r}: the directory is not on AIFS, where ranks "
                f"cannot agree on this; save with aifs.client.checkpoint, which publishes anywhere"
            )
        self.process_group: Any = None
        """Of torch, if it was made from one; else None."""
        self._files_left = files_per_rank
        self._has_committed = False
        """This rank has committed, or its last file is about to."""
        self._is_closed = False
        """The rank puts no more files."""
        self._changing = threading.Lock()
        """Held while the two above, and the puts, are read and changed."""
        self._ending = threading.Lock()
        """Held by each thread that ends the group."""
        if job is None:
            self._options = replace(self._options, job=job_of_environment())
        kind = MountedGroup if self._is_on_aifs else LoneRank
        self.coordinator: Coordinator = kind(self._options)
        """The rank's link to the others; outside of AIFS there are none."""
        # path in the directory -> bytes of the last put there
        self._sizes: dict[str, int] = {}
        # path in the directory -> the last put of it
        self._puts: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1, "aifs-group")
        """The thread in which files are written."""
        self.durable: Future[None] = Future()
        """Done when all ranks' files (outside AIFS: this rank's) are durable, and published if
        wanted."""
        in_background("aifs-group-watch", self._watch)

    @classmethod
    def from_torch(cls, process_group: Any = None, *, name: str, **options: Any) -> "Group":
        """A group of the ranks of a torch.distributed process group (None: the default), called by
        all. If one cannot join, all raise GroupError."""
        import torch.distributed as dist

        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        group, problem, told = None, "", [os.urandom(8).hex()]

        def join() -> None:
            nonlocal group, problem
            try:
                group = cls(name, rank, world, **options, job=told[0])
            except Exception as error:
                problem = " ".join(f"{type(error).__name__}: {error}".split())

        if rank == 0:
            join()
            told = told if group is not None else [""]
        leader = 0 if process_group is None else dist.get_global_rank(process_group, 0)
        dist.broadcast_object_list(told, leader, process_group)
        if rank != 0 and told[0]:
            join()
        problems: list[Any] = [None] * world
        dist.all_gather_object(problems, problem, process_group)
        for other, found in enumerate(problems):
            if found:
                if group is not None:
                    group.cancel(f"rank {other} could not join")
                raise GroupError(f"{name}: rank {other} could not join: {found}", other)
        assert group is not None
        group.process_group = process_group if process_group is not None else dist.group.WORLD
        return group

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.durable.result()
        else:
            self.cancel(" ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":"))

    @property
    def directory(self) -> str:
        """Where the files are: from the publish on, under the final name."""
        is_published = self.durable.done() and self.durable.exception() is None
        return self._target if is_published else self._options.directory

    def path(self, path: PathLike) -> str:
        """A file of the group, from a relative or absolute path. Raises InvalidGroup if it is
        elsewhere."""
        wanted = plain(os.path.join(self.directory, path))
        if not wanted.startswith(os.path.join(self.directory, "")):
            raise InvalidGroup(
                f"{wanted}: lies not in {self.directory}, so it is no file of group "
                f"{self._options.name}"
            )
        return wanted

    def put(self, path: PathLike, data: Any, metadata: Mapping[str, str] | None = None) -> Saved:
        """See ``group_putfile``."""
        content, target = content_of(data, metadata), self.path(path)
        with self._changing:
            self._require_open()
            buffered: Future[None] = Future()
            saved = Saved(target, buffered, self.durable if self._is_on_aifs else buffered)
            if self._files_left is not None:
                self._files_left -= 1
            self._has_committed = is_last = self._files_left == 0
            name = os.path.relpath(target, self.directory)
            self._puts[name], self._sizes[name] = saved.buffered, content.size
            self._pool.submit(self._run, saved.buffered, content, target, is_last)
        return saved

    def await_put(self, target: str) -> None:
        """Wait until this rank's last put there, if any, is in the buffer. Raises its error."""
        put = self._puts.get(os.path.relpath(target, self.directory))
        if put is not None:
            put.result()

    def commit(self) -> Saved:
        """Commit this rank: for ``files_per_rank=None``, or fewer files. ``buffered`` is done then.
        Raises InvalidGroup if it has committed, GroupError if the group has failed."""
        with self._changing:
            self._require_open()
            self._has_committed = True
            saved = Saved(self._options.directory, Future(), self.durable)
            self._pool.submit(self._run, saved.buffered, None, "", True)
        return saved

    def cancel(self, reason: str = "was cancelled") -> None:
        """Fail the group for all ranks, unless complete. Files stay."""
        with self._changing:
            if not self._is_closed:
                self.coordinator.fail(reason)
        self._end(
            GroupError(f"{self._options}: rank {self._options.rank}: {reason}", self._options.rank)
        )

    def _require_open(self) -> None:
        if self.durable.done():
            self.durable.result()
        if self._has_committed:
            raise InvalidGroup(
                f"{self._options}: rank {self._options.rank} has committed already",
                self._options.rank,
            )

    def _run(
        self, buffered: Future[None], content: Content | None, target: str, is_last: bool
    ) -> None:
        """Write, commit, or both; in the group's thread, in order."""
        try:
            if self.durable.done():
                self.durable.result()
            if content is not None:
                write_content(target, content)
        except BaseException as error:
            self.cancel(" ".join(f"{type(error).__name__}: {error}".split()))
            buffered.set_exception(error)
            return
        try:
            if is_last:
                self.coordinator.commit(*self._named_file())
        except BaseException as error:
            self._end(error)
            buffered.set_exception(error)
        else:
            buffered.set_result(None)

    def _named_file(self) -> tuple[str, int]:
        """One of this rank's files, and its size, if all must have one. Raises InvalidGroup, for
        all, if its own differ."""
        if not self._options.same_size:
            return "", 0
        first, *rest = self._sizes.items() or [("", 0)]
        problem = "" if first[0] else "has put no file, and all must have one size"
        for name, size in rest:
            if size != first[1]:
                problem = f"{name} has {size} bytes, not the {first[1]} of {first[0]}"
        if problem:
            rank = self._options.rank
            error = InvalidGroup(f"{self._options}: rank {rank}: {problem}", rank)
            self._end(error)
            self.coordinator.fail(problem)
            raise error
        return first

    def _watch(self) -> None:
        """Report the end: after success nothing of the group is left before; after a failure all
        hear first, because a file may be on its way."""
        try:
            self.coordinator.watch()
            has_failed = False
        except BaseException as error:
            has_failed = True
            self._end(error)
        with suppress(RuntimeError):  # the process is ending, which closes everything
            with self._changing:
                closing = self._pool.submit(self._close)
                self._pool.shutdown(wait=False)
            if not has_failed:
                closing.result()
        if not has_failed:
            self._end(None)

    def _close(self) -> None:
        with self._changing, suppress(OSError):  # somebody has removed the directory
            self._is_closed = True
            self.coordinator.close()

    def _end(self, error: BaseException | None) -> None:
        with self._ending:
            if self.durable.done():
                return
            if error is None:
                self.durable.set_result(None)
            else:
                self.durable.set_exception(error)


def group_putfile(
    path: PathLike, data: Any, group: Group, metadata: Mapping[str, str] | None = None
) -> Saved:
    """Save ``data`` as the file ``path`` of the group, in the background; see ``putfile`` for its
    types.

    ``path``: in the group's directory. If it is the rank's last file (``files_per_rank``), the rank
    commits, and ``buffered`` is done when it has. Not on AIFS both futures mean this file alone: it
    is durable in its filesystem. Raises TypeError, ValueError for what cannot be
    saved, InvalidGroup if the rank has committed, GroupError if the group has failed already.
    """
    return group.put(path, data, metadata)


def group_getfile(path: PathLike, group: Group, *, together: bool = False) -> Loaded:
    """The file ``path`` of the group, mapped: ranks of one host fetch bytes once. Waits until this
    rank's put is buffered. Other ranks' files are there when the group is durable; before, older
    ones may be. Raises OSError.

    ``together``: all ranks of a torch.distributed group read it; hosts read a part each and pass it
    on. Raises CheckpointError, in all ranks, if one cannot read.
    """
    target = group.path(path)
    group.await_put(target)
    if not together:
        return getfile(target)
    if group.process_group is None:
        raise InvalidGroup(f"{target}: only the ranks of Group.from_torch can read together")
    from aifs.client.torch.gathered import read

    return Loaded(target, read(target, group.process_group))


def _chunk(dedup: str | int) -> int:
    try:
        size = (
            CHUNK_MAX if dedup == "file" else dedup if isinstance(dedup, int) else parse_size(dedup)
        )
    except ValueError as error:
        raise InvalidGroup(f"dedup={dedup!r}: {error}") from None
    if size < CHUNK_MIN:
        raise InvalidGroup(f"dedup={dedup!r}: chunks have 64KiB at least")
    return min(size, CHUNK_MAX)


def _check(options: RankOptions, files_per_rank: int | None) -> None:
    if not _NAME.fullmatch(options.name):
        raise InvalidGroup(
            f"{options.name!r}: a group's name has 1 to 63 letters, digits and characters of _.:@+-"
        )
    if not JOB_NAME.fullmatch(options.job):
        raise InvalidGroup(
            f"{options}: job={options.job!r}: has up to 63 printable ASCII characters, and no comma"
        )
    if not 0 <= options.rank < options.world:
        raise InvalidGroup(
            f"{options}: rank {options.rank} of {options.world}: ranks are 0 to {options.world - 1}"
        )
    if (
        options.publish
        and os.path.basename(options.publish) != options.publish
        or options.publish in (".", "..")
    ):
        raise InvalidGroup(
            f"{options}: publish={options.publish!r} is no name beside the directory"
        )
    if files_per_rank is not None and files_per_rank < 1:
        raise InvalidGroup(
            f"{options}: files_per_rank={files_per_rank}: a rank puts one file at least, or None"
        )
    if not (0 < options.timeout_s < _TIME_MAX_S and 0 <= options.grace_s < _TIME_MAX_S):
        raise InvalidGroup(
            f"{options}: timeout_s={options.timeout_s}, grace_s={options.grace_s}: times are "
            "positive"
        )
