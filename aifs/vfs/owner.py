"""One owner per metadata directory: its file ``owner``, which is locked (flock) as long as a process uses the store.

Format, 4096 bytes, overwritten in place: on a full disk there is room for nothing else. A JSON object with the fields of
``Owner``, filled up with spaces, or zeros if nobody uses the store; from byte 3584 on the *epoch*, 20 decimal digits: that of
the last claim (data/claim.py) that was made with these metadata. A torn write of it leaves one that is not smaller.
"""

import fcntl
import json
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from aifs.core import files
from aifs.core.errors import StoreBusy, from_oserror

NAME = "owner"

_RECORD_BYTES = 3584
_EPOCH_DIGITS = 20


@dataclass(frozen=True)
class Owner:
    """Who has the store open; ``mountpoint`` is empty for a command such as fsck."""

    pid: int
    host: str
    mountpoint: str


class OwnerLock:
    """Held from construction to ``release``, or to the death of the process. Raises StoreBusy naming the owner."""

    def __init__(self, meta_directory: str, mountpoint: str) -> None:
        self._fd = files.open_file(os.path.join(meta_directory, NAME), create=True)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            files.close_file(self._fd)
            raise StoreBusy(_describe(meta_directory)) from None
        digits = files.read_at(self._fd, _EPOCH_DIGITS, _RECORD_BYTES)
        self.epoch = int(digits) if digits.isdigit() else 0
        """Of the last claim that was made with these metadata."""
        me = json.dumps(asdict(Owner(os.getpid(), socket.gethostname(), mountpoint))).encode()
        files.write_at(self._fd, me.ljust(_RECORD_BYTES)[:_RECORD_BYTES], 0)

    def advance(self, epoch: int) -> None:
        """Claims of that epoch are made from here on. Durable on return. Raises NoSpace, Unavailable."""
        try:
            digits = b"%0*d" % (_EPOCH_DIGITS, epoch)
            files.write_at(self._fd, digits.ljust(4096 - _RECORD_BYTES, b"\0"), _RECORD_BYTES)
            files.sync_file(self._fd)
        except OSError as error:
            raise from_oserror(error) from error
        self.epoch = epoch

    def release(self, orderly: bool, stuck: Sequence[threading.Thread] = ()) -> None:
        """Let go. ``orderly``: everything acknowledged is safe; the next one to read the file sees no owner. While threads are
        ``stuck``, or this process cannot end because they are, nobody else gets the store: what they do would land late.

        Raises NoSpace or Unavailable, with the store let go, if that cannot be written.
        """
        try:
            if orderly:
                files.write_at(self._fd, bytes(_RECORD_BYTES), 0)
        except OSError as error:
            raise from_oserror(error) from error
        finally:
            if stuck:
                threading.Thread(target=self._release_after, args=(stuck,), daemon=True).start()
            else:
                files.close_file(self._fd)

    def _release_after(self, stuck: Sequence[threading.Thread]) -> None:
        for thread in stuck:
            thread.join()
        files.close_file(self._fd)


def read_owner(meta_directory: str) -> Owner | None:
    """Who has the store, or had it and did not close it in order; else None."""
    try:
        record = (files.read_file(os.path.join(meta_directory, NAME)) or b"")[:_RECORD_BYTES]
        return Owner(**json.loads(record.strip(b"\0 ")))
    except (ValueError, TypeError):
        return None


def _describe(meta_directory: str) -> str:
    owner = read_owner(meta_directory)
    if owner is None:
        return f"{meta_directory}: the store is in use by another process"
    where = f", mounted at {owner.mountpoint}" if owner.mountpoint else ""
    return f"{meta_directory}: the store is in use by pid {owner.pid} on host {owner.host}{where}"
