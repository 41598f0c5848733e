"""The results of a scrub, in the metadata (key ``j scrub``), so that a restart goes on: JSON with
the fields of ``ScrubState``. ``wrong``: at most WRONG_MAX unrepaired files."""

import json
from collections.abc import Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from aifs.core.errors import Unavailable
from aifs.core.log import logger
from aifs.layout.placement import BURST_FIRST
from aifs.meta import keys, namespace, paths
from aifs.meta.kv import MAX_VALUE_BYTES, Engine, ReadTransaction, Transaction
from aifs.meta.records import decode_dentry
from aifs.meta.slices import Walk, read_slice
from aifs.upkeep.scrubbing import Lost, ScrubResult, joined

_log = logger(__name__)

WRONG_MAX = 1000
UNTOLD_MAX = 10_000
_NAMES_MAX = 8
_RECORD_MAX = MAX_VALUE_BYTES // 2
KEY = keys.job(b"scrub")

FILES, CONTAINERS, PUT_OFF, DONE = "files", "containers", "put off", ""
"""Phases: all inodes by number, all containers, then those put off."""

COUNTS = {
    "objects": "sets of them: files and containers",
    "read_bytes": "read from data servers and burst directories",
    "flaws": "ranges of objects, or whole ones, that were wrong",
    "repaired": "those of them that were repaired in place",
    "rebuilding": "those that were handed to the rebuild",
    "dropped_copies": "burst copies that were wrong, and given up",
    "from_copies": "files that were made whole from their burst copies",
    "unverified": "object sets that were being changed, or whose servers did not answer, each time",
}


@dataclass(slots=True)
class ScrubState:
    """Times are seconds since the epoch."""

    phase: str = DONE
    """One of FILES, CONTAINERS, PUT_OFF and DONE."""
    cursor: int = 0
    """All numbers of this phase below it are done."""
    begun_s: float = 0
    """When the pass began; 0: there was none."""
    ended_s: float = 0
    """When it ended; 0: it has not."""
    repair: bool = True
    """Whether wrong bytes are repaired."""
    bandwidth: int | None = None  # None: as configured
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    """Of COUNTS."""
    put_off: list[list[int]] = field(default_factory=list)
    """(inode, oid) of those that are looked at once more at the end."""
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Ranges of files that are not repaired, at most WRONG_MAX of them."""
    untold: list[int] = field(default_factory=list)
    """Oids of files that have lost bytes on data servers, at most UNTOLD_MAX of them."""
    untold_before: list[int] = field(default_factory=list)
    """The same of earlier passes, until this one has verified them."""

    def add(self, found: ScrubResult) -> None:
        for name in ("flaws", "repaired", "rebuilding"):
            self.counts[name] += getattr(found, name)
        lost = (one for one in found.lost if one.ino)
        untold = {one.oid for one in lost if min(one.servers, default=0) < BURST_FIRST}
        self.untold += sorted(untold - set(self.untold))[: UNTOLD_MAX - len(self.untold)]


class Findings:
    """The state of the present or last pass; made before the parts that ask, and before the
    scrub."""

    def __init__(self) -> None:
        self.state = ScrubState()

    def begin(self, state: ScrubState) -> None:
        self.state = state

    def wrong_objects(self) -> Set[int]:
        """Oids of files that have lost bytes on the data servers, by the present or last pass."""
        return {*self.state.untold_before, *self.state.untold}

    def restored(self, ino: int) -> None:
        """The file is whole again."""
        self.state.wrong = [entry for entry in self.state.wrong if entry["inode"] != ino]


async def load(engine: Engine) -> ScrubState:
    """The recorded state; else that of a store that was scrubbed when it was made."""

    record, created_s = await engine.view(lambda tx: (tx.get(KEY), _created_s(tx)))
    try:
        return decode(record) if record else ScrubState(begun_s=created_s)
    except Unavailable:
        _log.warning("the record of scrubs is damaged: it begins anew")
        return ScrubState(begun_s=created_s)


def decode(record: bytes) -> ScrubState:
    """Raises Unavailable for a damaged record."""
    try:
        return ScrubState(**json.loads(record))
    except (ValueError, TypeError):
        raise Unavailable("the record of scrubs is damaged") from None


def _created_s(tx: ReadTransaction) -> float:
    return json.loads(tx.get(keys.SUPERBLOCK) or b"{}").get("created_s", 0)


async def save(engine: Engine, state: ScrubState) -> None:
    """Record it, with as many of ``wrong`` as fit: paths may be long."""
    fields = asdict(state)
    while len(record := json.dumps(fields).encode()) > _RECORD_MAX and fields["wrong"]:
        del fields["wrong"][len(fields["wrong"]) // 2 :]
    await engine.transact(_put, record)


def _put(tx: Transaction, record: bytes) -> None:
    tx.put(KEY, record)


async def note(engine: Engine, state: ScrubState, lost: list[Lost]) -> None:
    """Add unrepaired, existing files, with all their names, and log each once."""
    for item in joined(lost):
        ino, oid, start, end, servers, reason, for_good, _ = item
        names = await names_of(engine, ino) if ino else [f"container {oid}"]
        if not names:
            continue
        if not any((entry["inode"], entry["object"]) == (ino, oid) for entry in state.wrong):
            where = f"bytes {start} to {end - 1}, on data servers {', '.join(map(str, servers))}"
            path = names[0].encode("utf-8", "backslashreplace").decode()
            _log.error("scrub: %s: %s: %s", path, where, reason)
        if len(state.wrong) < WRONG_MAX:
            entry = {"paths": names, "inode": ino, "object": oid, "start": start, "end": end}
            entry |= {"servers": list(servers), "reason": reason, "for_good": for_good}
            state.wrong.append(entry)


async def names_of(engine: Engine, ino: int) -> list[str]:
    """A file's paths as text (surrogates for no UTF-8), several for several names, sought in all
    directories; none if it is gone."""
    inode = await engine.view(namespace.find_inode, ino)
    if inode is None or not inode.links:
        return []
    path = await engine.view(paths.find_path, ino)
    if path is not None:
        return [path.decode("utf-8", "surrogateescape")]
    found: list[tuple[int, bytes]] = []
    async for place in Walk(engine, b"d", _find_names, ino):
        found.append(place)
        if len(found) == min(inode.nlink, _NAMES_MAX):
            break
    names = []
    for parent, name in found:
        above = await engine.view(paths.find_path, parent)
        above = b"/?" if above is None else above.rstrip(b"/")
        names.append((above + b"/" + name).decode("utf-8", "surrogateescape"))
    return names or [f"inode {ino}"]


def _find_names(
    tx: ReadTransaction, start: bytes, end: bytes, ino: int
) -> tuple[list[tuple[int, bytes]], bytes]:
    """(directory, name) of an inode in a slice of all names; and where to go on, b"" at the end."""
    found = []
    records, following = read_slice(tx, start, end)
    for key, value in records:
        with suppress(Unavailable):
            if decode_dentry(value).ino == ino:
                found.append(keys.dentry_parts(key))
    return found, following
