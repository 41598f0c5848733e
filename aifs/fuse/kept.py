"""What outlives a daemon, so that the next one can go on with its mount: a file in memory that the
keeper has (``keeper.py``), which all daemons of the mount have mapped. Touches that file and the
mount's descriptor.

    offset      bytes
    0           4096        struct kept of opens.h: INIT, and what the bridge has counted last
    4096        786432      struct lent of opens.h, for each inode that is lent
    HEAD        4096        64 words: see Head; the newest order
    DONE        524288      a ring of slots, by the kernel's number of a request: done requests
    SLOTS       134217728   slots for handles and backing ids, each where there was room
    NOTES       ...         notes (KeptState), 512 bytes each: a number, lengths, key, value

A word has 8 bytes, in the order of the machine; a slot has four. The first word of a slot is
written last, and says that it is in use: a kill at any moment leaves all of a slot, or nothing. So
has a note: the one with the larger number replaces the other one of its key.
"""

import errno
import fcntl
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import aifs
from aifs.core.errors import MountError
from aifs.core.log import logger
from aifs.core.waiting import current_unique
from aifs.files.kept import Done, KeptHandle, KeptState
from aifs.files.types import LENT
from aifs.fuse.keeper import HEAD_AT, ORDER_AT, ORDER_MAX, REFUSED, describe_death

_log = logger(__name__)

FORMAT = 2
"""A daemon goes on with a mount only if it has this format of the file."""

_NAME = "aifs-kept"
_WORD, _SLOT, _PAGE = 8, 4, 4096
_put_rest = struct.Struct("=QQQ").pack_into
"""Writes a slot without its first word."""
_KEPT = struct.Struct("=QI252xQQIi")  # granted, size of INIT; unique, ino, opens, backing
LENT_SLOT = struct.Struct("=Q24xIi8x")  # ino, opens, backing
LENT_AT, LENT_COUNT = _PAGE, 16384
_DONE_AT, _DONE_COUNT = HEAD_AT + _PAGE, 16384
_SLOTS_AT = _DONE_AT + _DONE_COUNT * _SLOT * _WORD
_SLOTS_MAX = 1 << 22
_HEAD, _DONE, _SLOTS = HEAD_AT // _WORD, _DONE_AT // _WORD, _SLOTS_AT // _WORD
"""Where they begin, in words."""
NOTES_AT = _SLOTS_AT + _SLOTS_MAX * _SLOT * _WORD
NOTE_BYTES, _NOTES_MAX = 512, 1 << 16
_NOTE = struct.Struct("=QHH")
_BYTES = NOTES_AT + _NOTES_MAX * NOTE_BYTES

RESENT = 1 << 63
"""Of the number of a request that was sent to an earlier daemon, too."""

_BACKING = 1 << 62
"""Of the first word of a slot that is a backing id's. No handle has it."""

_NEVER = (1 << 64) - 1
"""Of a request that is going to be done: no transaction has this number."""

_DIRECT = 1 << 32
_BACKING_CLOSE = 0x4004E502
_RESEND = struct.Struct("=IiQ").pack(16, 7, 0)  # FUSE_NOTIFY_RESEND


class Head(IntEnum):
    """The words of the head; the keeper reads and writes those up to DEATH."""

    FORMAT = 0
    SERVED = 1
    """How many daemons have served."""
    ENDED = 2
    """1: the mount has ended in order, and nothing follows."""
    RESTARTS = 3
    """How many daemons have been started since the mount was made."""
    DEATH = 4
    """How the last one ended: a status of waitpid(2)."""
    USED = 5
    """Slots that have ever been in use."""
    MOUNTED = 6
    """When the mount was made, in seconds since the epoch."""
    ORDER = 7
    """How many orders there were to go on with another version of AIFS; the newest is behind the
    words: the path of an interpreter, and a zero byte."""
    READY = 8
    """The process that stands by, when it is ready."""
    FINISHED = 9
    """The newest order that has been carried out, or with REFUSED has failed."""
    NOTES = 10
    """Notes that have ever been in use."""
    ALIVE = 11
    """When the daemon was at work last, in seconds of the monotonic clock."""


class _Notes:
    """The notes in the file."""

    def __init__(self, file: mmap.mmap, words: memoryview) -> None:
        """``file``: its bytes, and the same as words."""
        self.values: dict[bytes, bytes] = {}
        """By key."""
        self._file = file
        self._words = words
        self._places: dict[bytes, int] = {}
        """By key, where the note is."""
        self._free: list[int] = []
        """Places that were in use."""
        self._number = 0
        """Of the newest one."""
        found = []
        for place in range(self._words[_HEAD + Head.NOTES]):
            at = NOTES_AT + place * NOTE_BYTES
            number, length, more = _NOTE.unpack_from(file, at)
            if number:
                text = file[at + _NOTE.size : at + _NOTE.size + length + more]
                found.append((number, place, text[:length], text[length:]))
            else:
                self._free.append(place)
        for number, place, key, value in sorted(found):
            if key in self._places:  # it was about to be replaced
                self.put(key, b"")
            self._places[key], self.values[key] = place, value
            self._number = number

    def put(self, key: bytes, value: bytes) -> None:
        """As ``note`` of KeptState."""
        old = self._places.pop(key, None)
        self.values.pop(key, None)
        if value and _NOTE.size + len(key) + len(value) <= NOTE_BYTES:
            self._add(key, value)
        if old is not None:
            self._words[(NOTES_AT + old * NOTE_BYTES) // _WORD] = 0
            self._free.append(old)

    def _add(self, key: bytes, value: bytes) -> None:
        if self._free:
            place = self._free.pop()
        else:
            place = self._words[_HEAD + Head.NOTES]
            if place == _NOTES_MAX:
                return
            self._words[_HEAD + Head.NOTES] = place + 1
        at = NOTES_AT + place * NOTE_BYTES
        note = _NOTE.pack(0, len(key), len(value)) + key + value
        self._file[at : at + len(note)] = note
        self._number += 1
        self._words[at // _WORD] = self._number
        self._places[key], self.values[key] = place, value


class KeptMount(KeptState):
    """Of one mount. ``device``: its descriptor, if another daemon has begun it, else -1."""

    is_on = True

    def __init__(self, table: int | None = None, device: int = -1) -> None:
        """``table``: the file of another daemon; None: there is none. Raises MountError for one of
        another version."""
        self.device = device
        """The mount's descriptor; -1: it is not mounted yet."""
        self._unique: Callable[[], int] = lambda: 0
        """The kernel's number of the request read last."""
        self.is_taken = table is not None
        """See KeptState."""
        self.table = os.memfd_create(_NAME, os.MFD_CLOEXEC) if table is None else table
        """A descriptor of the file."""
        if table is None:
            os.truncate(self.table, _BYTES)
        self._map = mmap.mmap(self.table, _BYTES)
        """Its bytes."""
        self._words = memoryview(self._map).cast("Q")
        """The same as words."""
        self._slots: dict[int, int] = {}
        """By first word, where the slot is, in words."""
        self._free: list[int] = []
        """Slots that were in use."""
        self._handles: list[KeptHandle] = []
        """Those that another daemon has left."""
        self._backings: dict[int, tuple[int, int]] = {}
        """The same of backing ids."""
        self._opens: dict[int, int] = {}
        """By handle, how many open files had it when the mount was taken over."""
        if table is None:
            self._put_head(Head.FORMAT, FORMAT)
            self._put_head(Head.MOUNTED, int(time.time()))
        else:
            _require_format(self.head(Head.FORMAT))
            self._load()
        self._notes = _Notes(self._map, self._words)

    def head(self, word: Head) -> int:
        return self._words[_HEAD + word]

    def _put_head(self, word: Head, value: int) -> None:
        self._words[_HEAD + word] = value

    def begin(self, unique: Callable[[], int]) -> None:
        """The bridge is about to mount; ``unique()`` is the kernel's number of the request read
        last."""
        self._unique = unique

    def mounted(self, device: int) -> None:
        """This is the mount's descriptor."""
        self.device = device

    def unique(self) -> int:
        """The kernel's number of the request read last. Ask before anything is awaited."""
        return self._unique()

    # --- slots ---

    def _put(self, key: int, one: int, two: int, three: int) -> None:
        at = self._slots.get(key)
        if at is None:
            if self._free:
                at = self._free.pop()
            else:
                used = self.head(Head.USED)
                if used == _SLOTS_MAX:
                    return  # a program that has it open gets EBADF after a restart
                self._put_head(Head.USED, used + 1)
                at = _SLOTS + used * _SLOT
            self._slots[key] = at
        self._fill(at, key, one, two, three)

    def _fill(self, at: int, key: int, one: int, two: int, three: int) -> None:
        words = self._words
        words[at] = 0
        _put_rest(self._map, _WORD * at + _WORD, one, two, three)
        words[at] = key

    def _erase(self, key: int) -> None:
        at = self._slots.pop(key, None)
        if at is not None:
            self._words[at] = 0
            self._free.append(at)

    # --- what happens ---

    def add(self, handle: KeptHandle) -> None:
        if unique := current_unique():  # first: without the handle nothing has been done
            at, number, words = self._done_at(unique), unique & ~RESENT, self._words
            if words[at] == number:  # it is a CREATE: its transaction counts, too
                words[at + 2], words[at + 3] = handle.handle, handle.opens
            else:
                self._fill(at, number, 0, handle.handle, handle.opens)
        self.know(handle)

    def know(self, handle: KeptHandle) -> None:
        flags = handle.flags & 0xFFFFFFFF | handle.opens << 32
        self._put(handle.handle, handle.ino, flags, handle.backing | _DIRECT * handle.direct)

    def set_opens(self, handle: int, opens: int) -> None:
        if not opens:
            self._erase(handle)
        elif (at := self._slots.get(handle)) is not None:
            self._words[at + 2] = self._words[at + 2] & 0xFFFFFFFF | opens << 32

    def attach(self, backing: int, place: tuple[int, int]) -> None:
        self._put(_BACKING | backing, *place, 0)

    def detach(self, backing: int) -> None:
        self._erase(_BACKING | backing)

    def closing(self, handle: int, opens: int) -> None:
        # Nobody has closed the last open file of a handle of ours but by this request: it is done
        # if the table has no such handle.
        if (opens or handle >= LENT) and (unique := current_unique()):
            self._fill(self._done_at(unique), unique & ~RESENT, 0, handle, opens)

    def commits(self, unique: int, number: int) -> None:
        at, words = self._done_at(unique), self._words
        if words[at] != unique & ~RESENT:
            self._fill(at, unique & ~RESENT, number or _NEVER, 0, 0)
        elif not number or words[at + 1] in (0, _NEVER):
            words[at + 1] = number or _NEVER  # of several ones the first one counts

    def about(self, ino: int) -> None:
        if unique := current_unique():
            self._fill(self._done_at(unique), unique & ~RESENT, _NEVER, ino, 0)

    def appends(self, offset: int) -> None:
        if unique := current_unique():
            self._fill(self._done_at(unique), unique & ~RESENT, 0, offset, 0)

    def repeated(self) -> Done | None:
        return self.done(current_unique())

    @property
    def notes(self) -> Mapping[bytes, bytes]:
        return self._notes.values

    def note(self, key: bytes, value: bytes) -> None:
        self._notes.put(key, value)

    # --- requests that have been done ---

    def _done_at(self, unique: int) -> int:
        return _DONE + (unique >> 1) % _DONE_COUNT * _SLOT

    def done(self, unique: int) -> Done | None:
        """What has been done of a request that the kernel has sent again; None: nothing."""
        at = self._done_at(unique)
        if not unique & RESENT or self._words[at] != unique & ~RESENT:
            return None
        return Done(self._words[at + 2], self._words[at + 3])

    def was_closed(self, unique: int, handle: int) -> bool:
        """Whether a RELEASE that the kernel has sent again has been done."""
        done = self.done(unique)
        return done is not None and self._opens.get(handle, 0) == done.opens

    def settle(self, is_done: Callable[[int], bool]) -> None:
        words = self._words
        for at in range(_DONE, _SLOTS, _SLOT):
            if words[at] and not is_done(words[at + 1]):
                words[at] = 0

    # --- taking over ---

    def _load(self) -> None:
        words = self._words
        for at in range(_SLOTS, _SLOTS + self.head(Head.USED) * _SLOT, _SLOT):
            key, one, two, three = words[at : at + _SLOT]
            if not key:
                self._free.append(at)
                continue
            self._slots[key] = at
            if key & _BACKING and not key & LENT:
                self._backings[key & ~_BACKING] = one, two
            else:
                direct = bool(three & _DIRECT)
                self._handles.append(
                    KeptHandle(key, one, two & 0xFFFFFFFF, two >> 32, three & ~_DIRECT, direct)
                )
        self._load_lent()
        self._opens = {each.handle: each.opens for each in self._handles}

    def _load_lent(self) -> None:
        """Inodes that were lent are lent no more: their handles are as others."""
        _, _, unique, counted_ino, counted, _ = _KEPT.unpack_from(self._map)
        known = {each.handle for each in self._handles}
        lent = self._map[LENT_AT:HEAD_AT]
        for ino, opens, backing in LENT_SLOT.iter_unpack(lent):
            if unique and ino == counted_ino:
                opens = counted  # it was about to be written
            if ino and opens and LENT | ino not in known:
                handle = KeptHandle(LENT | ino, ino, os.O_RDONLY, opens, backing, False)
                self._handles.append(handle)
                self.know(handle)
        self._map[LENT_AT:HEAD_AT] = bytes(len(lent))

    @property
    def handles(self) -> Sequence[KeptHandle]:
        return self._handles

    @property
    def backings(self) -> Mapping[int, tuple[int, int]]:
        return self._backings

    def give_back(self, backing: int) -> None:
        try:
            fcntl.ioctl(self.device, _BACKING_CLOSE, struct.pack("=I", backing))
        except OSError as error:
            if error.errno != errno.ENOENT:
                _log.warning("the kernel keeps a backing file: %s", error)
        self.detach(backing)

    # --- the life of the mount ---

    def ask_again(self) -> None:
        """Have the kernel send the requests again that an earlier daemon has not answered. Raises
        OSError."""
        os.write(self.device, _RESEND)

    def serves(self) -> None:
        """From now on another daemon can go on with the mount."""
        self.show_alive()
        self._put_head(Head.SERVED, self.head(Head.SERVED) + 1)

    def show_alive(self) -> None:
        """This daemon is at work: say it each second."""
        self._put_head(Head.ALIVE, int(time.monotonic()))

    def end(self) -> None:
        """The mount ends in order."""
        self._put_head(Head.ENDED, 1)

    def status(self) -> dict[str, Any]:
        finished = self.head(Head.FINISHED)
        return {
            "program": sys.executable,
            "version": aifs.__version__,
            "orders": self.head(Head.ORDER),
            "finished": finished & ~REFUSED,
            "is_refused": finished & REFUSED != 0,
            "mounted_s": self.head(Head.MOUNTED),
            "restarts": self.head(Head.RESTARTS),
            "last_death": describe_death(self.head(Head.DEATH)) if self.is_taken else "",
        }


def order(pid: int, program: bytes) -> None:
    """Have the AIFS of another interpreter go on with the mount of this daemon. Only who may
    trace the daemon can: programs in a container, which have the mount alone, cannot have the host
    run something. Raises MountError, OSError."""
    if not program or len(program) >= ORDER_MAX:
        raise MountError(f"{os.fsdecode(program)}: the path is too long")
    table = os.open(kept_file(pid), os.O_RDWR)
    try:
        at, word = HEAD_AT + _WORD * Head.ORDER, struct.Struct("=Q")
        (orders,) = word.unpack(os.pread(table, _WORD, at))
        os.pwrite(table, program + b"\0", ORDER_AT)
        os.pwrite(table, word.pack(orders + 1), at)
    finally:
        os.close(table)


def kept_file(pid: int) -> str:
    """The path of the file of a daemon, or of a keeper. Raises MountError, OSError."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError):
            if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                return path
    raise MountError(f"the process {pid} has nothing to go on with")


def stand_by(table: int, turn: int) -> bool:
    """Wait until it is this process's turn; False: it never is. ``turn``: see ``keeper.py``. Raises
    MountError for a file of another version."""
    word = struct.Struct("=Q")
    (found,) = word.unpack(os.pread(table, _WORD, HEAD_AT + _WORD * Head.FORMAT))
    _require_format(found)
    os.pwrite(table, word.pack(os.getpid()), HEAD_AT + _WORD * Head.READY)
    return bool(os.read(turn, 1))


def _require_format(found: int) -> None:
    if found != FORMAT:
        raise MountError(
            f"the mount was begun by a daemon with format {found} of what is kept; this AIFS goes "
            f"on with format {FORMAT} alone"
        )
