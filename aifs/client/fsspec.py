"""``aifs://``: the filesystem for programs that use fsspec (pandas, pyarrow, datasets, torch's
distributed checkpoints), with the host's paths: ``aifs:///mnt/aifs/run``.

It works on a mount and elsewhere like a local filesystem, and adds two things. A **transaction**
publishes: a new directory appears whole and durable, or not at all, with a manifest, as a
checkpoint does; a file in an existing directory appears whole and durable by itself. ``checksum``
of a checkpoint's file is the digest stored in its manifest.
"""

import errno
import os
from contextlib import ExitStack, suppress
from typing import Any

from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.transaction import Transaction
from fsspec.utils import stringify_path

from aifs.client.checkpoints import locks, manifest
from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.saving import checkpoint
from aifs.core import files, trees


class TransactionFile(LocalFileOpener):
    """A file that is written in a transaction, under the name ``place`` until that commits."""

    def __init__(self, place: str, target: str, fd: int) -> None:
        """``fd``: open until the file may count as abandoned; -1: its directory says that."""
        self.target = target
        self._fd = fd
        super().__init__(place, "wb")

    def sync(self) -> None:
        """Make it durable, with the mode of the file that it replaces. Raises OSError."""
        fd = files.open_file(self.path, write=False)
        try:
            with suppress(FileNotFoundError):
                files.copy_mode(fd, os.stat(self.target))
            files.sync_file(fd)
        finally:
            files.close_file(fd)

    def commit(self) -> None:
        """It gets its name. Not synced. Raises OSError."""
        files.rename(self.path, self.target)
        self._let_go()

    def discard(self) -> None:
        """It was never there. Raises OSError."""
        self.close()
        with suppress(FileNotFoundError):
            files.unlink(self.path)
        self._let_go()

    def _let_go(self) -> None:
        if self._fd != -1:
            files.close_file(self._fd)
            self._fd = -1


class FsspecTransaction(Transaction):
    """The files and directories that an ``AifsFileSystem`` writes until the transaction ends."""

    def __init__(self, fs: "AifsFileSystem") -> None:
        super().__init__(fs)
        self._made: list[str] = []  # directories that were asked for, in that order
        self._pending: dict[str, str] = {}  # those that get their name at the end -> where they are
        self._publications = ExitStack()
        self._beside: list[TransactionFile] = []
        self._inside: list[TransactionFile] = []

    def make(self, path: str) -> None:
        """The directory ``path``, which is missing, will be there with its missing parents."""
        if path not in self._made:
            self._made.append(path)

    def open(self, path: str, mode: str, auto_mkdir: bool) -> TransactionFile:
        """Write the file ``path`` anew. Raises ValueError for in-place modes; CheckpointError,
        OSError."""
        if mode not in ("wb", "xb"):
            raise ValueError(f"{path}: mode {mode!r}: a transaction writes files anew ('wb')")
        if mode == "xb" and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            if auto_mkdir:
                self.make(parent)
            top = self._missing_above(parent)
            place = os.path.join(self._begin(top), os.path.relpath(path, top))
            trees.make_dir(os.path.dirname(place))
            self._inside.append(TransactionFile(place, path, -1))
            return self._inside[-1]
        place, fd = locks.create_beside(os.path.realpath(path))
        self._beside.append(TransactionFile(place, os.path.realpath(path), fd))
        return self._beside[-1]

    def _missing_above(self, directory: str) -> str:
        """The topmost directory to make above ``directory``. Raises FileNotFoundError if none may
        be."""
        if not any(made == directory or made.startswith(f"{directory}/") for made in self._made):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        while not os.path.isdir(os.path.dirname(directory)):
            directory = os.path.dirname(directory)
        return directory

    def _begin(self, top: str) -> str:
        """Where the directory ``top`` is written."""
        if top not in self._pending:
            made = self._publications.enter_context(checkpoint(top, latest=None))
            self._pending[top] = str(made)
        return self._pending[top]

    def complete(self, commit: bool = True) -> None:
        """Publish, or drop, all of it: new directories, then file by file. After a failure, files
        with names stay, the rest is dropped. Raises ValueError for an open file, CheckpointError,
        OSError."""
        try:
            if commit:
                self._publish()
            else:
                self._drop(CheckpointError("the transaction was given up"))
        except BaseException as error:
            self._drop(error)
            raise
        finally:
            self.files.clear()
            super().complete(commit)

    def _publish(self) -> None:
        for file in self._beside + self._inside:
            if not file.closed:
                raise ValueError(f"{file.target}: is still open, so it cannot be committed")
        for file in self._beside:
            file.sync()
        self._publications.close()
        while self._beside:
            self._beside[0].commit()
            files.sync_dir(os.path.dirname(self._beside.pop(0).target))
        for path in self._made:
            trees.make_durable_dir(path)

    def _drop(self, error: BaseException) -> None:
        for file in self._beside + self._inside:
            file.discard()
        self._beside.clear()
        self._inside.clear()
        self._publications.__exit__(type(error), error, error.__traceback__)


class AifsFileSystem(LocalFileSystem):
    """See the module. Registered with fsspec under the protocol ``aifs``."""

    protocol = "aifs"
    transaction_type = FsspecTransaction

    def __init__(self, auto_mkdir: bool = True, **kwargs: Any) -> None:
        """``auto_mkdir``: make directories on the way, as zarr, pandas and others expect of a
        URL."""
        super().__init__(auto_mkdir=auto_mkdir, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """The host's absolute path, whatever slashes are left: ``datasets`` makes ``aifs:///mnt/x``
        of ``aifs://mnt/x``."""
        path = stringify_path(path)
        if isinstance(path, str) and path.startswith("aifs:"):
            path = "/" + path.removeprefix("aifs:").lstrip("/")
        return super()._strip_protocol(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        path = self._strip_protocol(path)
        if self._intrans and not os.path.lexists(path):
            self.transaction.make(path)
        else:
            super().makedirs(path, exist_ok=exist_ok)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        if mode == "rb" or kwargs.get("autocommit", True):
            return super()._open(path, mode, block_size, **kwargs)
        return self.transaction.open(self._strip_protocol(path), mode, self.auto_mkdir)

    def checksum(self, path: str) -> int:
        """The stored BLAKE3 of a checkpoint's unchanged file; for others, a number by size and
        times."""
        path = os.path.realpath(self._strip_protocol(path))
        with suppress(CheckpointError, OSError, ValueError):
            return int(_stored_digest(path), 16)
        return super().checksum(path)


def _stored_digest(path: str) -> str:
    """In hex. Raises FileNotFoundError if none is stored of these bytes; CheckpointError,
    OSError."""
    found, directory = os.stat(path), os.path.dirname(path)
    while directory != os.path.dirname(directory):
        listed = manifest.read(directory)
        if listed is not None:
            digest = listed.files.get(os.path.relpath(path, directory))
            written = os.stat(os.path.join(directory, manifest.NAME)).st_mtime_ns
            if digest and digest.size == found.st_size and found.st_ctime_ns < written:
                return digest.blake3  # '' if it was not taken, which is no number
            break
        directory = os.path.dirname(directory)
    raise FileNotFoundError(errno.ENOENT, "no digest is stored", path)
