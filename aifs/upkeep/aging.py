"""Old files move to another class of data servers, or are compressed, in the background.

A directory's rule (``user.aifs.age``, core/aging.py) holds for all files below, up to the next one,
old ones included. A file moves as a whole, by relayout: programs read on, and a file that is
changed meanwhile stays. It keeps its protection, or stays. Nothing moves back: a file that is
written anew goes where new files go.

Striped files move; to be compressed they move into containers, whose chunks have codecs and
checksums. Files in containers stay: they are small and share objects, or are compressed. Files with
several names stay, because their directories are unknown.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from aifs.burst.transfer import Limiter, Mover
from aifs.core.aging import AgeRule, format_age_rule, parse_age_rule
from aifs.core.errors import FsError, Invalid, NotFound, Stale, Unavailable
from aifs.core.upkeep import Work
from aifs.files import rights
from aifs.files.asks import DIRECTORY, Hint
from aifs.files.containers import Containers
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.interleaved import may_list
from aifs.layout.striped import Striped
from aifs.meta import degraded, keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Inode, decode_inode
from aifs.meta.slices import Walk, read_slice
from aifs.upkeep.passes import Results
from aifs.upkeep.relayout import FileSubject, Relayout

_INTERVAL_S = 3600.0
_SLICE = 64  # inodes that are looked at in one go


class Aged(NamedTuple):
    """A file that is to move, and where."""

    ino: int
    oid: int
    storage_class: str
    level: int
    """Of zstd, 0 for no compression."""


class Aging:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        containers: Containers,
    ) -> None:
        config, engine, servers = services.config, services.engine, services.servers
        upkeep, ids = services.upkeep, services.ids
        self._engine = engine
        self._servers = servers
        self._io = io
        self._containers = containers
        self._upkeep = upkeep
        self.limiter = Limiter(config.rebuild.bandwidth)
        """Of all moves."""
        self._mover = Mover(servers.budget, self.limiter, config.burst.ioprio)
        movers = io.sets.movers(self._mover)
        self._relayout = Relayout(io, ids, movers, config.data.min_spare)
        self._last = Results("some old files stay where they are for now")
        """Of the last pass that has ended: files that are old enough, and stay where they are."""

    # --- rules ---

    async def set_rule(self, ino: int, text: str) -> None:
        """Set the rule of a directory, '' to remove it; a pass begins. Durable like metadata.
        Raises Invalid, NotFound, NotADirectory."""
        try:
            rule = parse_age_rule(text) if text else None
        except ValueError as error:
            raise Invalid(str(error)) from None
        if rule is not None and rule.storage_class:
            known = {server.storage_class for server in self._servers.capacity()} - {""}
            if rule.storage_class not in known:
                raise Invalid(
                    f"age: no data server has the class {rule.storage_class!r}; "
                    f"classes: {', '.join(sorted(known)) or 'none'}"
                )
        recorded = "" if rule is None else format_age_rule(rule)
        await self._engine.transact(_put_rule, ino, recorded.encode())
        self._upkeep.wake(Work.AGING)

    async def rule_of(self, ino: int) -> str:
        """The rule of the directory itself, '' if it has none."""
        return (await self._engine.view(lambda tx: tx.get(keys.age_rule(ino)) or b"")).decode()

    HINTS = (
        Hint(
            "age",
            DIRECTORY,
            "what becomes of files below that nobody uses for so long: 30d:cold,compress=zstd:3",
            rights.reader,
            rights.owner,
            get=lambda aging, ask: aging.rule_of(ask.ino),
            set=lambda aging, ask: aging.set_rule(ask.ino, ask.text),
            remove="",
        ),
    )

    # --- in the background ---

    async def work(self) -> float:
        """Move all that is old enough; in how many seconds to look again."""
        rules = await self._engine.view(_read_rules)
        found = self._last.following()
        if not rules:
            self._last = found
            return _INTERVAL_S
        classes = {server.id: server.storage_class for server in self._servers.capacity()}
        above: dict[int, AgeRule | None] = {ino: rule for ino, rule in rules.items()}
        asked = above, classes, time.time_ns()
        async for aged in Walk(self._engine, b"i", _find_aged, *asked, share=self._upkeep.share):
            try:
                await self._move(aged)
            except (NotFound, Stale):
                pass  # it has been deleted
            except FsError as error:
                await found.fail(self._engine, aged.ino, aged.oid, str(error))
        self._last = found
        return _INTERVAL_S

    async def _move(self, aged: Aged) -> None:
        """Raises Unavailable, NoSpace if it stays though nobody uses it."""
        if not self._servers.candidates(aged.storage_class):
            raise Unavailable(f"no data server of {_described(aged)} can be used")
        file = await self._io.inodes.acquire(aged.ino)
        try:
            inode = file.inode
            before = inode.objects
            subject = FileSubject(self._io, self._engine, file)
            if subject.is_busy or before is None or inode.oid != aged.oid:
                return
            capacity = self._io.capacity
            if aged.level:
                allowed = (inode.policy or DEFAULT_POLICY).servers
                asked = capacity.redundancy(inode), allowed, aged.storage_class
                slots = self._containers.slots(*asked)
                _require(before, slots, aged)
                await self._relayout.compress(subject, slots, aged.level)
            else:
                layout = capacity.place(inode, storage_class=aged.storage_class)
                _require(before, [layout], aged)
                await self._relayout.lay_out(subject, layout)
        finally:
            with trio.CancelScope(shield=True):
                await self._io.inodes.release(file)

    def status(self) -> dict[str, Any]:
        """Figures for ``aifs status``."""
        return {
            "files": self._relayout.files,
            "compressed_files": self._relayout.compressed,
            "bytes": self._mover.moved_bytes,
            "left_files": self._last.failing,
            "reason": self._last.failed[0].reason if self._last.failed else "",
        }


def _require(before: Striped, after: Sequence[Striped], aged: Aged) -> None:
    """Raises Unavailable if a file would be less protected than ``before``."""
    if any(layout.tolerates < before.tolerates for layout in after):
        raise Unavailable(
            f"{_described(aged)} has too few data servers for the protection that files have"
        )


def _described(aged: Aged) -> str:
    return f"the class {aged.storage_class}" if aged.storage_class else "the class of new files"


@grows
def _put_rule(tx: Transaction, ino: int, rule: bytes) -> None:
    namespace.get_directory(tx, ino)
    if rule:
        tx.put(keys.age_rule(ino), rule)
    else:
        tx.delete(keys.age_rule(ino))


def _read_rules(tx: ReadTransaction) -> dict[int, AgeRule]:
    """By directory, without damaged ones, which fsck names."""
    rules = dict[int, AgeRule]()
    for key, value in tx.range(*keys.all_of(b"f")):
        with suppress(ValueError):
            rules[keys.number(key)] = parse_age_rule(value.decode())
    return rules


def _find_aged(
    tx: ReadTransaction,
    start: bytes,
    end: bytes,
    above: dict[int, AgeRule | None],
    classes: Mapping[int, str],
    now_ns: int,
) -> tuple[list[Aged], bytes]:
    """Files to move in a slice of the inodes, and where the next slice starts (b"": nowhere).
    ``above``: known rules by directory, to which it adds."""
    found = []
    records, following = read_slice(tx, start, end, _SLICE)
    for key, value in records:
        with suppress(Unavailable):  # damaged: fsck names it
            inode = decode_inode(keys.number(key), value)
            layout = inode.objects
            if layout is None or inode.in_burst or not inode.nlink:
                continue
            rule = _rule_above(tx, inode, above)
            if rule is None or max(inode.mtime_ns, inode.atime_ns) + rule.age_s * 1e9 > now_ns:
                continue
            level = rule.level if may_list(inode.size, inode.blocks * 512) else 0
            found_in = {classes.get(server, "") for server in layout.servers}
            is_elsewhere = rule.storage_class and found_in != {rule.storage_class}
            if (is_elsewhere or level) and not degraded.is_marked(tx, inode.oid):  # mended first
                storage_class = rule.storage_class or min(found_in)
                found.append(Aged(inode.ino, inode.oid, storage_class, level))
    return found, following


def _rule_above(
    tx: ReadTransaction, inode: Inode, above: dict[int, AgeRule | None]
) -> AgeRule | None:
    passed, rule = [], None
    directory = inode.parent
    while directory != namespace.SEVERAL:
        if directory in above:
            rule = above[directory]
            break
        passed.append(directory)
        parent = namespace.find_inode(tx, directory)
        if parent is None or directory == keys.ROOT_INO:
            break
        directory = parent.parent
    above.update(dict.fromkeys(passed, rule))
    return rule
