"""The error tree and the one table that maps it to errno.

* ``FsError`` and below: answers of a filesystem call, each with one errno, which the FUSE edge
  replies. Raising one is normal operation.
* ``UserError`` and below: a command cannot do what was asked. The CLI prints it as one line and
  exits with ``exit_code``.

Anything else that reaches the FUSE edge is a bug: logged with its stack, answered with EIO.
"""

import errno
import os


class AifsError(Exception):
    """Root of the tree."""


class FsError(AifsError):
    """A filesystem call fails with ``errno``."""

    errno = errno.EIO

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or os.strerror(self.errno))


class NotFound(FsError):
    errno = errno.ENOENT


class Exists(FsError):
    errno = errno.EEXIST


class CrossDevice(FsError):
    errno = errno.EXDEV


class NotADirectory(FsError):
    errno = errno.ENOTDIR


class IsADirectory(FsError):
    errno = errno.EISDIR


class NotEmpty(FsError):
    errno = errno.ENOTEMPTY


class Invalid(FsError):
    errno = errno.EINVAL


class NameTooLong(FsError):
    errno = errno.ENAMETOOLONG


class TooManyLinks(FsError):
    errno = errno.EMLINK


class NotPermitted(FsError):
    errno = errno.EPERM


class AccessDenied(FsError):
    errno = errno.EACCES


class NoSpace(FsError):
    errno = errno.ENOSPC


class QuotaExceeded(FsError):
    errno = errno.EDQUOT


class ReadOnly(FsError):
    errno = errno.EROFS


class FileTooLarge(FsError):
    errno = errno.EFBIG


class Stale(FsError):
    errno = errno.ESTALE


class BadHandle(FsError):
    errno = errno.EBADF


class NoAttribute(FsError):
    errno = errno.ENODATA


class ResultTooLarge(FsError):
    errno = errno.ERANGE


class ArgumentTooBig(FsError):
    errno = errno.E2BIG


class NoSuchAddress(FsError):
    """An offset beyond the end of the file."""

    errno = errno.ENXIO


class NotSupported(FsError):
    errno = errno.EOPNOTSUPP


class NoSuchIoctl(FsError):
    errno = errno.ENOTTY


class TimedOut(FsError):
    errno = errno.ETIMEDOUT


class OutOfMemory(FsError):
    """The daemon has no memory, or descriptors: not the fault of caller or data server."""

    errno = errno.ENOMEM


class Busy(FsError):
    errno = errno.EBUSY


class WouldBlock(FsError):
    """Somebody else holds a lock."""

    errno = errno.EAGAIN


class Deadlock(FsError):
    """The caller holds a lock that the holder of its wanted one waits for, maybe through others."""

    errno = errno.EDEADLK


class MemberDied(FsError):
    """A rank of a group has ended before it committed."""

    errno = errno.EOWNERDEAD


class GroupCancelled(FsError):
    errno = errno.ECANCELED


class GroupTimeout(FsError):
    """Not all ranks of a group have committed in its time."""

    errno = errno.ETIME


class Unavailable(FsError):
    """A data server cannot be used, or bytes that should be there are not."""

    errno = errno.EIO


_BY_ERRNO: dict[int, type[FsError]] = {}
for _class in FsError.__subclasses__():
    _BY_ERRNO[_class.errno] = _class


def from_oserror(error: OSError, detail: str = "") -> FsError:
    """The FsError for an operating-system error below us (a data server, the journal). Without a
    row it is ``Unavailable`` (EIO): a disk's error (ENODEV, ETIMEDOUT, ...) is no answer about a
    file."""
    passed_on = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
    number = errno.ENOMEM if error.errno in (errno.EMFILE, errno.ENFILE) else error.errno
    kind = _BY_ERRNO[number] if number in passed_on else Unavailable
    return kind(f"{detail}: {error}" if detail else str(error))


def without_frames(error: FsError) -> FsError:
    """Return the error without its traceback, which would keep frames' memory alive."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class UserError(AifsError):
    """The command cannot be done; the message says why, where, and what to do. One line."""

    exit_code = 1


class ConfigError(UserError):
    """A wrong configuration: file, line, key."""

    exit_code = 3


class StoreError(UserError):
    """The store or one of its directories is not what it should be (missing, foreign, damaged)."""

    exit_code = 4


class DatasetError(UserError):
    """Files are no dataset, or not the one that was indexed: which, where, and its fault."""

    exit_code = 9


class StoreBusy(StoreError):
    """Another process owns the store."""

    exit_code = 5


class MountError(UserError):
    """The mount cannot be made, or is not there."""

    exit_code = 6


class TimeoutReached(UserError):
    """The event that a command waits for has not happened in the time that it was given."""

    exit_code = 7
