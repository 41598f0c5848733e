"""The check of shared chunks: their records against the containers, and their references against
the extents that name them.

Memory: 52 bytes for each shared chunk (its digest, the beginning of it to find it by, a count, a
length), so that ten million of them, 40 TB in chunks of 4 MiB, take 520 MB.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from aifs.check import repair
from aifs.check.findings import RECORDS, RECOVERY
from aifs.check.records import Records
from aifs.core.errors import FsError
from aifs.layout.interleaved import Location
from aifs.meta import keys, shared

DIGEST_BYTES = 32

_NONE = -1


class SharedCheck:
    """To be called in order: ``record`` for all ``h`` records, ``name`` for all extents that name
    one, ``references`` for all records again."""

    def __init__(self, records: Records, what_is_wrong: Callable[[Location], str]) -> None:
        """``what_is_wrong``: says why a chunk cannot lie in a place, or nothing."""
        self._records = records
        self._what_is_wrong = what_is_wrong
        # Rows in order of digests, as the records are.
        self._beginnings = array("Q")
        self._digests = bytearray()
        """By row, the digest, DIGEST_BYTES each."""
        self._lengths = array("I")
        """By row, the bytes of the chunk; 0 if its record cannot be read."""
        self._counts = array("Q")
        """By row, how many extents name it."""
        self._bad: dict[bytes, str] = {}  # digests of chunks that cannot be read, and why
        self._unreadable: dict[bytes, str] = {}
        """By digest, the faults of records that cannot be read."""
        self.hides_places = False
        """Whether extents name chunks that may lie anywhere, as their records are missing or wrong.
        """

    def record(self, key: bytes, value: bytes) -> Location | None:
        """Returns the chunk's place, if it can be read."""
        digest = keys.shared_digest(key)
        self._beginnings.append(_beginning(digest))
        self._digests += digest
        self._lengths.append(0)
        self._counts.append(0)
        try:
            place = shared.decode_shared(digest, value).place
        except FsError as error:
            self._unreadable[digest] = str(error)
            self._bad[digest] = f"the record of {describe(digest)} is damaged"
            return None
        self._lengths[-1] = place.raw
        wrong = self._what_is_wrong(place)
        if wrong:
            self._bad[digest] = f"{describe(digest)} {wrong}"
        return place

    def name(self, digest: bytes, length: int) -> str:
        """An extent of ``length`` bytes names this chunk; returns why its bytes cannot be had, or
        nothing.
        """
        row = self._find(digest)
        if row == _NONE:
            self.hides_places = True
            return f"{describe(digest)} is not in the store"
        self._counts[row] += 1
        if digest in self._bad:
            self.hides_places = True
            return self._bad[digest]
        if self._lengths[row] != length:
            return (
                f"{describe(digest)} has {self._lengths[row]} bytes, not the {length} of the file"
            )
        return ""

    def references(self, key: bytes, value: bytes, complete: bool) -> None:
        """``complete``: all lists could be read, so that nobody else names the chunk. Without that
        a count may be too high, or be right."""
        digest = keys.shared_digest(key)
        row = self._find(digest)
        if row == _NONE:
            return
        counted = self._counts[row]
        if digest in self._unreadable:
            forget = partial(repair.delete, key=key) if complete and not counted else None
            reason = self._unreadable[digest]
            self._records.problem("unreadable-record", describe(digest), reason, forget)
            return
        recorded = shared.decode_shared(digest, value).references
        if counted == recorded or (counted < recorded and not complete):
            return
        # Relative, as recovery takes references away. What counts too few it would delete too
        # early.
        fix = partial(repair.shift_references, digest=digest, change=counted - recorded)
        detail = f"counts {recorded} references, extents of files name it {counted} times"
        stage = RECOVERY if counted > recorded else RECORDS
        self._records.problem("wrong-references", describe(digest), detail, fix, stage)

    def _find(self, digest: bytes) -> int:
        beginning = _beginning(digest)
        row = bisect_left(self._beginnings, beginning)
        while row < len(self._beginnings) and self._beginnings[row] == beginning:
            if self._digests[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)] == digest:
                return row
            row += 1
        return _NONE


def describe(digest: bytes) -> str:
    """A shared chunk as text."""
    return f"shared chunk {digest.hex()[:16]}"


def _beginning(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
