"""A tree of files as one tar archive, made while read. Pure.

Headers are ustar's, of 512 bytes, or pax for names that are long or not ASCII, 8 GiB or more, a
large owner. Owners are numbers.
"""

import stat
import tarfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from aifs.datasets.virtual import Buffer, Piece, SourceRange, cut

BLOCK = tarfile.BLOCKSIZE
_RECORD = tarfile.RECORDSIZE
_NAME_MAX = 100
_SIZE_AT, _SUM_AT, _SUM_BYTES = 124, 148, 8
_OWNER_END = 8**7
_SIZE_END = _TIME_END = 8**11
_NS = 10**9

_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


class ArchiveMember(NamedTuple):
    """A file, directory, symlink or fifo of the tree."""

    name: bytes
    """Below the tree's top, without a slash at either end."""
    source: int
    """The caller's name of it."""
    mode: int
    """As st_mode."""
    uid: int
    """The owner."""
    gid: int
    """The group."""
    size: int
    """Of a regular file; else 0."""
    mtime_ns: int
    """Since the epoch."""
    target: bytes = b""
    """Of a symlink."""


def is_member(mode: int) -> bool:
    """Whether an archive holds this st_mode: no sockets, no devices, which no unpacker should
    make."""
    return stat.S_IFMT(mode) in _TYPES


def header_of(member: ArchiveMember) -> bytes:
    """The bytes before those of a member."""
    if _is_plain(member) and not member.target:
        return _filled_in(_blank(member.mode, member.uid, member.gid), member)
    header = _encode(member)
    # Who finds pax headers takes all times for exact ones.
    return header if len(header) == BLOCK else _encode(member, exact_time=True)


def _encode(member: ArchiveMember, exact_time: bool = False) -> bytes:
    info = tarfile.TarInfo(member.name.decode("utf-8", "surrogateescape"))
    info.type = _TYPES[stat.S_IFMT(member.mode)]
    info.mode = stat.S_IMODE(member.mode)
    info.uid, info.gid, info.size = member.uid, member.gid, member.size
    info.linkname = member.target.decode("utf-8", "surrogateescape")
    seconds, rest_ns = divmod(member.mtime_ns, _NS)
    info.mtime = seconds
    if exact_time and seconds >= 0:
        info.pax_headers = {"mtime": f"{seconds}.{rest_ns:09}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


@lru_cache(maxsize=256)
def _blank(mode: int, uid: int, gid: int) -> bytes:
    """A nameless member's header with nothing else that differs among an owner's files."""
    return _encode(ArchiveMember(b"", 0, mode, uid, gid, 0, 0))


def _filled_in(blank: bytes, member: ArchiveMember) -> bytes:
    """The rest of it, a third of a header's cost (POSIX.1, ustar)."""
    name = member.name + b"/" if stat.S_ISDIR(member.mode) else member.name
    head = b"".join(
        (
            name.ljust(_NAME_MAX, b"\0"),
            blank[_NAME_MAX:_SIZE_AT],
            b"%011o\0%011o\0" % (member.size, member.mtime_ns // _NS),
        )
    )
    rest = blank[_SUM_AT + _SUM_BYTES :]
    total = sum(head) + sum(rest) + _SUM_BYTES * ord(" ")
    return b"".join((head, b"%06o\0 " % total, rest))


def _is_plain(member: ArchiveMember) -> bool:
    """Whether its header is surely one block."""
    name = member.name
    return (
        len(name) < _NAME_MAX
        and name.isascii()
        and member.target.isascii()
        and len(member.target) < _NAME_MAX
        and member.size < _SIZE_END
        and member.uid < _OWNER_END
        and member.gid < _OWNER_END
        and 0 <= member.mtime_ns < _TIME_END * _NS
    )


class Archive:
    """The ``VirtualBytes`` of a tar archive, members in order of adding; complete before it is
    read. Some 60 bytes and the name each."""

    def __init__(self) -> None:
        self.size = 0
        """In bytes, with the end of the archive."""
        self.sources = array("Q")
        """Of each member, the caller's name of it; its place here is its number as a source."""
        self.sizes = array("Q")
        """Of each member, in bytes; 0 if it is no regular file."""
        self.mtimes = array("q")
        """Of each member, in ns."""
        self._names = bytearray()  # of members
        self._name_ends = array("Q")  # in these
        self._modes = array("L")  # of members, as st_mode
        self._owners = array("Q")  # uid << 32 | gid
        self._targets: dict[int, bytes] = {}  # of symlinks, by place
        self._starts = array("Q", [0])  # of headers, and where the last member ends

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def memory(self) -> int:
        """As VirtualBytes."""
        targets = sum(160 + len(target) for target in self._targets.values())
        return 60 * len(self) + len(self._names) + targets

    def add(self, member: ArchiveMember) -> None:
        if member.target:
            self._targets[len(self)] = member.target
        self.sources.append(member.source)
        self.sizes.append(member.size)
        self.mtimes.append(member.mtime_ns)
        self._names += member.name
        self._name_ends.append(len(self._names))
        self._modes.append(member.mode)
        self._owners.append(member.uid << 32 | member.gid)
        header = BLOCK if _is_plain(member) else len(header_of(member))
        end = self._starts[-1] + header + _padded(member.size)
        self._starts.append(end)
        self.size = -(-(end + 2 * BLOCK) // _RECORD) * _RECORD

    def name(self, source: int) -> bytes:
        start = self._name_ends[source - 1] if source else 0
        return bytes(self._names[start : self._name_ends[source]])

    def member(self, number: int) -> ArchiveMember:
        """The member with this number."""
        owners = self._owners[number]
        return ArchiveMember(
            self.name(number),
            self.sources[number],
            self._modes[number],
            owners >> 32,
            owners & 0xFFFFFFFF,
            self.sizes[number],
            self.mtimes[number],
            self._targets.get(number, b""),
        )

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """As VirtualBytes."""
        number = bisect_right(self._starts, offset) - 1
        return cut(self._from(number), offset - self._starts[number], length)

    def columns(self) -> Iterable[Buffer]:
        """As VirtualBytes."""
        numbers = self.sources, self.sizes, self.mtimes, self._modes, self._owners
        return *numbers, self._name_ends, self._names, repr(self._targets).encode()

    def _from(self, first: int) -> Iterator[Piece]:
        for number in range(first, len(self)):
            member = self.member(number)
            yield header_of(member)
            if member.size:
                yield SourceRange(number, 0, member.size)
            if padding := _padded(member.size) - member.size:
                yield bytes(padding)
        yield bytes(self.size - self._starts[-1])


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
