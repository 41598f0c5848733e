"""Records of a store whose metadata go from a host's directory into a database, or back. Pure.

The store was closed in order, drained, and its open containers are sealed. Records that only a host
can use stay behind. docs/design/moving.md has the table; each kind of keys.py is in one of the sets
below, or has a function.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge

from blake3 import blake3

from aifs.core.errors import StoreError, Unavailable
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from aifs.meta import groups, keys
from aifs.meta.records import decode_garbage, decode_inode, has_copy

KEPT = frozenset(b"CPQRTUcdefhkloqrtuxz")
"""Kinds of records that stay as they are, of ``o`` the orphans' own: they name no host."""

DROPPED = frozenset(b"DLabpvw")
"""Kinds that stay behind: delegations; homes of locks; open containers, which have been sealed;
burst copies, which are caches; hosts, and their windows of ids, which are used up; marks of files
that may differ from their records, which none does."""

Pair = tuple[bytes, bytes]


class Crossing:
    """``pairs`` has the records as they will be."""

    def __init__(self, host: int, extra: Mapping[bytes, bytes]) -> None:
        """``host``: sees to groups from now on; 0: the only one. ``extra``: new or replaced
        records, superblock and table of servers among them."""
        self._host = host
        self._extra = extra
        self.kinds: dict[int, Callable[[bytes, bytes], bytes | None]] = {
            ord("g"): self._garbage,
            ord("i"): _inode,
            ord("j"): _job,
            ord("m"): lambda key, value: value if keys.stray_parts(key)[1] < BURST_FIRST else None,
            ord("n"): self._group,
            ord("y"): lambda key, value: keys.host_value(0),  # nobody makes the list any more
        }
        """Records of kinds that have a function: the new value, or None."""

    def pairs(self, found: Iterable[Pair]) -> Iterator[Pair]:
        """Convert all records, in order. Raises StoreError for a damaged or unknown one."""
        return merge(self._changed(found), sorted(self._extra.items()))

    def _changed(self, found: Iterable[Pair]) -> Iterator[Pair]:
        for key, value in found:
            kind = key[0]
            if kind in DROPPED or kind in b"Ss" or key in self._extra:
                continue
            if kind in KEPT:
                if kind != ord("o") or not keys.is_hold(key):
                    yield key, value
                continue
            try:
                kept = self.kinds[kind](key, value)
            except (KeyError, Unavailable) as error:
                raise StoreError(
                    f"the record {keys.describe(key)} is not copied: {error}; aifs fsck --repair "
                    "comes first"
                ) from error
            if kept is not None:
                yield key, kept

    def _garbage(self, key: bytes, value: bytes) -> bytes | None:
        """Without its maker; garbage in burst directories goes with them."""
        garbage = decode_garbage(value)
        left = tuple(server for server in garbage.layout.servers if server < BURST_FIRST)
        layout = Striped(garbage.layout.unit, left)
        return garbage._replace(layout=layout, maker=0).encode() if left else None

    def _group(self, key: bytes, value: bytes) -> bytes | None:
        """Only the part of the new host."""
        if keys.is_group(key):
            return groups.decode_group(value)._replace(host=self._host).encode()
        return value if keys.part_host(key) is None else None


def _inode(key: bytes, value: bytes) -> bytes:
    """Without its burst copy, a cache. Raises Unavailable if that is all there is."""
    if not has_copy(value):
        return value
    inode = decode_inode(keys.number(key), value)
    if inode.in_burst:
        raise Unavailable(f"inode {inode.ino} is undrained, and no record of its copy says so")
    inode.copy = None
    return inode.encode()


def _job(key: bytes, value: bytes) -> bytes | None:
    unlisted = keys.job(b"unlisted")
    is_burst = key.startswith(unlisted) and key[len(unlisted) :][:2] >= BURST_FIRST.to_bytes(
        2, "big"
    )
    return None if is_burst else value


class Tally:
    """Counts pairs that pass, in order, and takes a digest of them."""

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        """Of keys and values."""
        self._hash = blake3()

    def through(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for key, value in pairs:
            self.records += 1
            self.bytes += len(key) + len(value)
            self._hash.update(b"%d %d " % (len(key), len(value)))
            self._hash.update(key)
            self._hash.update(value)
            yield key, value

    @property
    def digest(self) -> str:
        """BLAKE3-256 in hex: of each pair decimal lengths, each with a space, then key and
        value."""
        return self._hash.hexdigest()
