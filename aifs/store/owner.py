"""One owner per metadata directory: its file ``owner``, locked (flock) while a process uses the
store.

Format, 4096 bytes, overwritten in place, also on a full disk. A JSON object with the fields of
``Owner``, filled up with spaces, or zeros if nobody uses the store; from byte 3584 on the *epoch*,
20 decimal digits, a space and the token of the last claim (data/claim.py) made with these metadata.
A torn write leaves an epoch that is not smaller.
"""

import json
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from aifs.core import files
from aifs.core.connections import open_paths
from aifs.core.errors import StoreBusy, from_oserror
from aifs.core.processes import is_dying, lock_after_dying

NAME = "owner"

_RECORD_BYTES = 3584
_LAST_BYTES = 512

IN_ORDER, NOT_IN_ORDER = "in order", "not in order"


@dataclass(frozen=True)
class Owner:
    """The process that has the store open; no ``mountpoint`` for a command such as fsck. ``doing``:
    what it waits for, unmounted. ``closed``: IN_ORDER or NOT_IN_ORDER, while its calls have not
    ended."""

    pid: int
    host: str
    mountpoint: str
    doing: str = ""
    closed: str = ""


class OwnerLock:
    """Held from construction to ``release``, or the process's death. Raises StoreBusy, naming the
    owner."""

    def __init__(self, meta_directory: str, mountpoint: str) -> None:
        self.fd = files.open_file(os.path.join(meta_directory, NAME), create=True)
        """Its lock is held as long as any process lives that has it from us."""
        try:
            # Waits also for a holder without record, which just began or ends.
            lock_after_dying(self.fd, lambda: _is_alive(read_owner(meta_directory)))
        except OSError:
            files.close_file(self.fd)
            raise StoreBusy(_describe(meta_directory)) from None
        last = files.read_at(self.fd, _LAST_BYTES, _RECORD_BYTES).strip(b"\0 ")
        digits, _, token = last.partition(b" ")
        self.epoch = int(digits) if digits.isdigit() else 0
        self.token = token.decode("ascii", "replace")
        """Of the last claim that was made with these metadata."""
        self._me = Owner(os.getpid(), socket.gethostname(), mountpoint)
        self.put(self._me)

    def advance(self, epoch: int, token: str) -> None:
        """A claim is going to be made. Durable on return. Raises NoSpace, Unavailable."""
        try:
            last = b"%020d %s" % (epoch, token.encode())
            files.write_at(self.fd, last.ljust(_LAST_BYTES, b"\0"), _RECORD_BYTES)
            files.sync_file(self.fd)
        except OSError as error:
            raise from_oserror(error) from error
        self.epoch, self.token = epoch, token

    def tell(self, doing: str) -> None:
        """Say in the file what this process waits for. Blocks; not for long. Raises OSError."""
        self.put(replace(self._me, doing=doing))

    def put(self, record: Owner) -> None:
        encoded = json.dumps(asdict(record)).encode()
        files.write_at(self.fd, encoded.ljust(_RECORD_BYTES)[:_RECORD_BYTES], 0)

    def release(
        self, orderly: bool, stuck: Sequence[threading.Thread] = (), waits_for: str = ""
    ) -> None:
        """Let go. ``orderly``: all acknowledged is safe; the file shows no owner. While threads are
        ``stuck``, or keep the process from ending, nobody else gets the store: they would act late.
        ``waits_for``: their reason. Raises NoSpace or Unavailable, with the store let go, if
        unwritten."""
        try:
            if stuck:
                closed = IN_ORDER if orderly else NOT_IN_ORDER
                self.put(replace(self._me, doing=waits_for, closed=closed))
            elif orderly:
                files.write_at(self.fd, bytes(_RECORD_BYTES), 0)
        except OSError as error:
            raise from_oserror(error) from error
        finally:
            if stuck:
                threading.Thread(
                    target=self._release_after, args=(orderly, stuck), daemon=True
                ).start()
            else:
                files.close_file(self.fd)

    def _release_after(self, orderly: bool, stuck: Sequence[threading.Thread]) -> None:
        for thread in stuck:
            thread.join()
        if orderly:
            files.write_at(self.fd, bytes(_RECORD_BYTES), 0)
        files.close_file(self.fd)


def _is_alive(owner: Owner | None) -> bool:
    """If it was killed, its threads, or children, may still hold the lock."""
    return owner is not None and (owner.host != socket.gethostname() or not is_dying(owner.pid))


def read_owner(meta_directory: str) -> Owner | None:
    """The process that has the store, or had it and did not close it in order; else None."""
    try:
        record = (files.read_file(os.path.join(meta_directory, NAME)) or b"")[:_RECORD_BYTES]
        return Owner(**json.loads(record.strip(b"\0 ")))
    except (ValueError, TypeError):
        return None


def find_holder(meta_directory: str) -> int | None:
    """The pid of this host's process with the store, as the system confirms, or None."""
    owner = read_owner(meta_directory)
    if owner is None or owner.host != socket.gethostname():
        return None
    path = os.path.realpath(os.path.join(meta_directory, NAME))
    try:
        return owner.pid if path in open_paths(owner.pid) else None
    except OSError:
        return None


def _describe(meta_directory: str) -> str:
    owner = read_owner(meta_directory)
    if owner is None:
        return f"{meta_directory}: the store is in use by another process"
    who = f"{meta_directory}: the store is in use by pid {owner.pid} on host {owner.host}"
    if owner.closed:
        return f"{who}, which has unmounted it, and cannot end: {owner.doing}"
    where = f", mounted at {owner.mountpoint}" if owner.mountpoint else ""
    return f"{who}{where}"
