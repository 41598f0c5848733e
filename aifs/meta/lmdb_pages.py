"""The pages of LMDB's file, checked without LMDB, which ends the process at some that are damaged.
Reads alone.

What is checked of the format of LMDB 0.9. All numbers are little-endian; the first number is the
offset in the page or node:

    page          0 u64 its own number, 10 u16 kind (1 branch, 2 leaf, 4 overflow), 12 u16 lower, 14
                  u16 upper. The offsets of its nodes (u16) lie between 16 and lower, the nodes
                  between upper and the end of the page.
    pages 0, 1    16 u32 magic, 20 u32 version, 40 u32 length of a page, 80 u64 root of the free
                  list, 128 u64 root of the list of databases, 136 u64 last page, 144 u64
                  transaction. The one of the later transaction counts.
    overflow page 12 u32 number of pages that the value fills, this one being the first
    node          0 u16 low, 2 u16 high, 4 u16 flags, 6 u16 length of the key, 8 key, value. Of a
                  branch, low, high and flags are the number of the page below. Of a leaf, low and
                  high are the length of the value; with flag 1, the number of its overflow page
                  stands in its place; with flag 2 the value is a database, whose root is at 40 in
                  it.
"""

import os
import struct
from collections import deque
from collections.abc import Iterator

from aifs.core import files

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _DATABASE = 1, 2
_NO_PAGE = (1 << 64) - 1
_META = struct.Struct("<16xII16xI36xQ40xQQQ")
_PAGE = struct.Struct("<QHHHH")
_OVERFLOW_PAGE = struct.Struct("<QHHI")
_NODE = struct.Struct("<HHHH")
_NUMBER = struct.Struct("<Q")


class BrokenPage(Exception):
    """The message names the page, and says what is wrong with it."""


class PageCheck:
    """A check of every page in use of LMDB's file; ``thorough``: also of every node. Files without
    LMDB's beginning pass: LMDB refuses them. Raises OSError. All methods block."""

    def __init__(self, path: str, thorough: bool) -> None:
        self._fd = files.open_file(path, write=False)
        self._thorough = thorough
        self._walk: Iterator[tuple[int, bytes]] = iter(())
        self._transaction = -1  # the one whose pages ``_walk`` looks at
        self._place = 0, b""
        """A database, by its place in the list, and a key in it: all before that is done."""

    def look(self, most: int | None = None) -> bool:
        """Check ``most`` more leaves, or all; whether all are done. Takes 5 us a page in memory; 20
        if thorough. LMDB may commit between calls, not during one. Raises BrokenPage, OSError."""
        head = files.read_at(self._fd, _META.size, 0)
        if len(head) < _META.size or _META.unpack(head)[:2] != (_MAGIC, _VERSION):
            return True
        if most is None:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_WILLNEED)
        self._follow(page_bytes=_META.unpack(head)[2])
        for count, self._place in enumerate(self._walk, 1):
            if count == most:
                return False
        return True

    def close(self) -> None:
        files.close_file(self._fd)

    def _follow(self, page_bytes: int) -> None:
        """After a commit of LMDB, go on from the same place in its newest pages."""
        if page_bytes not in (1 << shift for shift in range(8, 17)):
            raise BrokenPage(f"page 0: says that pages have {page_bytes} bytes")
        starts = [files.read_at(self._fd, page_bytes, n * page_bytes) for n in (0, 1)]
        metas = [_META.unpack(start[: _META.size]) for start in starts]
        _, _, _, free, main, last, transaction = max(metas, key=lambda meta: meta[-1])
        if transaction != self._transaction:
            self._transaction = transaction
            self._walk = self._look(_Pages(self._fd, page_bytes, last), free, main)

    def _look(self, pages: "_Pages", free: int, main: int) -> Iterator[tuple[int, bytes]]:
        """Yields the place reached, for each leaf."""
        done, key = self._place
        databases: list[int] = []
        # The list of databases is short, and leads to all other pages but the free list: its nodes
        # are always looked at.
        deque(pages.look(main, databases), maxlen=0)
        if not done and not key:  # its keys are numbers; LMDB writes it anew when it commits
            deque(pages.look(free, [] if self._thorough else None, in_order=False), maxlen=0)
        for number in range(done, len(databases)):
            for reached in pages.look(databases[number], [] if self._thorough else None, key):
                yield number, reached
            key = b""


class _Pages:
    """The pages of one file; none may be in use twice."""

    def __init__(self, fd: int, page_bytes: int, last: int) -> None:
        self._fd = fd
        self._page_bytes = page_bytes
        self._last = last
        self._left = last + 1

    def _read(self, page: int) -> bytes:
        self._left -= 1
        if not 1 < page <= self._last or self._left < 0:
            raise BrokenPage(f"a page leads to page {page}, which cannot be")
        return files.read_at(self._fd, self._page_bytes, page * self._page_bytes)

    def look(
        self, root: int, databases: list[int] | None, after: bytes = b"", in_order: bool = True
    ) -> Iterator[bytes]:
        """The tree below page ``root`` from key ``after`` on, in order. Yields, for each leaf, the
        key before which all is done. ``databases``: takes the roots of databases found in leaves;
        None: no nodes are checked."""
        last_key = b""
        todo = [] if root == _NO_PAGE else [(root, b"")]
        while todo:
            page, first_key = todo.pop()
            data = self._read(page)
            try:
                number, _, kind, lower, upper = _PAGE.unpack_from(data)
                if number != page or kind not in (_BRANCH, _LEAF) or lower <= _PAGE.size:
                    raise BrokenPage(f"page {page}: is not a page of a tree")
                offsets = struct.unpack_from(f"<{(lower - _PAGE.size) >> 1}H", data, _PAGE.size)
                if (
                    not lower
                    <= upper
                    <= min(offsets)
                    <= max(offsets)
                    <= self._page_bytes - _NODE.size
                ):
                    raise BrokenPage(f"page {page}: its nodes are not where they may be")
                if kind == _BRANCH:
                    children = [_child(data, offset) for offset in offsets]
                    children[0] = (children[0][0], first_key)
                    while len(children) > 1 and children[1][1] <= after:
                        del children[0]
                    todo += reversed(children)
                    continue
                if databases is not None:
                    for offset in offsets:
                        key = self._check_node(page, data, offset, databases)
                        if in_order and not (last_key < key and first_key <= key):
                            raise BrokenPage(f"page {page}: key {key.hex()} is out of order")
                        last_key = key
            except struct.error:
                raise BrokenPage(f"page {page}: ends too early") from None
            yield first_key

    def _check_node(self, page: int, data: bytes, offset: int, databases: list[int]) -> bytes:
        low, high, flags, length = _NODE.unpack_from(data, offset)
        start, size = offset + _NODE.size, low | high << 16
        value = start + length
        if flags & _BIG:
            (first,) = _NUMBER.unpack_from(data, value)
            self._check_overflow(first, size)
        elif value + size > self._page_bytes:
            raise BrokenPage(f"page {page}: a record is longer than the page")
        elif flags & _DATABASE:
            databases += _NUMBER.unpack_from(data, value + 40)
        return data[start:value]

    def _check_overflow(self, page: int, size: int) -> None:
        number, _, kind, pages = _OVERFLOW_PAGE.unpack_from(self._read(page))
        if number != page or kind != _OVERFLOW or page + pages - 1 > self._last:
            raise BrokenPage(f"page {page}: is not a page of a long record")
        if _OVERFLOW_PAGE.size + size > pages * self._page_bytes:
            raise BrokenPage(f"page {page}: a record is longer than its pages")


def _child(data: bytes, offset: int) -> tuple[int, bytes]:
    """The page below a branch's node, and its first key."""
    low, high, top, length = _NODE.unpack_from(data, offset)
    start = offset + _NODE.size
    return low | high << 16 | top << 32, data[start : start + length]
