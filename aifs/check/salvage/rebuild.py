"""``aifs fsck --rebuild-from-servers``: a store without metadata, rebuilt from what its servers can
tell alone.

1. The servers say which store it is, and which of them they are (markers). Those that are missing
   count as lost.
2. Every object, container and burst copy is looked at: labels, headers, records of files, lengths
   (``inventory``).
3. For each inode the newest generation is taken of which all bytes are there, or can be told from
   redundancy (``striped``, ``containers``). Where there are checksums the bytes are compared with
   them.
4. Paths come from hints (``tree``), and a new metadata directory is written (``metadata``).

Nothing is changed on the servers, and nothing is deleted: what no file is made of stays where it
is, and fsck names it. What only the metadata knew is lost: files that were inline, empty files and
directories, links, symlinks, extended attributes, policies, changes of mode, owner or name since a
file was stored. Files that were deleted come back where their bytes are still there.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import trio

from aifs.check.findings import Progress, printable
from aifs.check.salvage import metadata, striped
from aifs.check.salvage.containers import SavedContainers
from aifs.check.salvage.inventory import Inventory, Saved
from aifs.check.salvage.metadata import Plan
from aifs.check.salvage.striped import Incomplete, best_label, piece_together
from aifs.check.salvage.tree import Directory, Named, plant
from aifs.core import files
from aifs.core.budget import Budget
from aifs.core.config import Config, is_directory_source
from aifs.core.errors import StoreError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data import naming
from aifs.data.marker import read_marker
from aifs.data.patience import FOR_EVER
from aifs.data.servers import Servers
from aifs.layout.placement import LOST
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.servers import ServerRecord, read_table
from aifs.store import directories
from aifs.store.ids import WINDOW
from aifs.store.owner import OwnerLock
from aifs.store.ownership import end_rights, follow, require_unused
from aifs.store.restore import Found, find
from aifs.store.server_table import id_of

_log = logger(__name__)

_IDS_LOST_AT_MOST = 1 << 32
"""Ids that may have been given out without leaving an object."""

_AT_ONCE = 4
"""Files that are read at the same time."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a file that is not simply there again: "incomplete" (not recovered),
    "doubtful", "renamed", "newer" (merge: it has newer bytes now); or of a "server" or "container".
    """

    state: str
    where: str
    reason: str


@dataclass(slots=True)
class Result:
    """``counts``: files, bytes, directories, undrained, checked (files), incomplete, doubtful,
    unused (objects), and more.
    """

    meta: str
    rows: list[Row] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Every file that there are traces of is there again, with all its bytes."""
        return all(row.state in ("renamed", "newer") for row in self.rows)


def rebuild(
    config: Config,
    to: str = "",
    force: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Make a metadata directory, the configured one or ``to``, of what the servers can tell.
    Blocks; durable on return.

    ``force``: even if there is one that can be opened (it is moved aside), or a backup. Without
    ``verify`` bytes of striped files are not read, and these have no checksums then. Raises
    StoreError, StoreBusy, NoSpace, Unavailable.
    """
    meta = os.path.abspath(to) if to else config.meta.directory
    places = (*config.servers, *config.burst.directories)
    require_unused(places)
    _require_need(meta, force)
    store, backups = find(config, "")
    if not force and _has_whole_chain(backups):
        raise StoreError(
            f"{config.source}: there are backups of its metadata on the servers, of which 'aifs meta restore' loses less; "
            "copy them to a safe place and use --force to do without them: the next mount replaces them"
        )
    servers, table = _servers_of(config, store)
    try:
        result = trio.run(
            _rebuild, config, meta, store, servers, table, backups, verify, progress or _silent
        )
    finally:
        servers.close()
    if to:
        follow(meta, places)
    else:
        end_rights(meta, store, places, wait=False)
    return result


def _has_whole_chain(backups: Found) -> bool:
    try:
        backups.whole_chain(None)
    except StoreError:
        return False
    return True


def _silent(what: str, done: int, total: int) -> None:
    pass


def _require_need(meta: str, force: bool) -> None:
    """The directory is empty, or missing; if it is damaged beyond use, or ``force``, what is there
    is moved aside.
    """
    if not os.path.isdir(meta) or not set(os.listdir(meta)) - {directories.LOST_AND_FOUND}:
        return
    owner = OwnerLock(meta, "")  # nobody uses it
    try:
        usable = _can_be_opened(meta)
    finally:
        owner.release(orderly=False)
    if usable and not force:
        raise StoreError(
            f"{meta}: holds metadata that can be used: check it with fsck; --force moves it aside"
        )
    number = 1
    while os.path.lexists(aside := f"{meta}.aside-{number}"):
        number += 1
    try:
        files.rename(meta, aside)
        files.sync_dir(os.path.dirname(meta))
    except OSError as error:
        raise StoreError(
            f"{meta}: cannot be moved aside, so empty it yourself: {error.strerror}"
        ) from error
    _log.warning("%s was moved to %s", meta, aside)


def _can_be_opened(meta: str) -> bool:
    if not os.path.exists(os.path.join(meta, "data.mdb")):
        return False
    try:
        read_marker(meta)  # the last thing that a restore or rebuild writes
        engine = LmdbEngine(meta)
    except (StoreError, Unavailable, OSError):
        return False
    try:
        return bool(trio.run(engine.view, read_table))
    except Unavailable:
        return False
    finally:
        engine.abandon()


# --- servers ---


def _servers_of(config: Config, store: str) -> tuple[Servers, dict[int, ServerRecord]]:
    """The servers, and the table that the store will have. Those that are configured but missing
    count as lost.
    """
    table: dict[int, ServerRecord] = {}
    missing: list[tuple[int, str]] = []
    domains = {place.path: place.domain for place in config.places}
    paths = list(config.servers)
    if is_directory_source(config.source):  # others may have been added
        beside = os.path.join(config.source, "data")
        names = sorted(os.listdir(beside)) if os.path.isdir(beside) else []
        paths += [
            path
            for name in names
            if (path := os.path.join(beside, name)) not in paths and os.path.isdir(path)
        ]
    for role, directory in [("data", path) for path in paths] + [
        ("burst", path) for path in config.burst.directories
    ]:
        try:
            marker = read_marker(directory)
            if (marker.store, marker.role) != (store, role):
                raise StoreError(
                    f"{directory}: its marker says {marker.role} of store {marker.store}"
                )
        except StoreError as error:
            _log.info("not used: %s", error)
            if role == "data":
                missing.append((paths.index(directory), directory))
            continue
        record = ServerRecord(
            directories.recorded_path(config, directory), domain=domains.get(directory, "")
        )
        number = id_of(role, marker.id)
        if number in table:
            raise StoreError(
                f"{directory}: has the marker of {table[number].path}; take the one that is a copy away"
            )
        table[number] = record
    for index, directory in missing:
        if directory in config.servers and index not in table:
            table[index] = ServerRecord(directories.recorded_path(config, directory), LOST)
    return _open(config, store, table), table


def _open(config: Config, store: str, table: dict[int, ServerRecord]) -> Servers:
    paths = {number: os.path.join(config.source, record.path) for number, record in table.items()}
    servers = Servers(
        paths,
        store,
        threads=config.data.threads,
        budget=Budget(config.memory.budget),
        patience_s=config.data.timeout_s or FOR_EVER,
    )
    try:
        for number, record in table.items():
            servers.classify(number, record.state, record.domain, None)
        servers.check_identity(read_only=True)
    except BaseException:
        servers.close()
        raise
    return servers


# --- the whole ---


async def _rebuild(
    config: Config,
    meta: str,
    store: str,
    servers: Servers,
    table: dict[int, ServerRecord],
    backups: Found,
    verify: bool,
    progress: Progress,
) -> Result:
    result = Result(meta)
    for number, record in table.items():
        if record.state == LOST:
            result.rows.append(
                Row(
                    "server",
                    f"data server {number} ({record.path})",
                    "is missing, and counts as lost",
                )
            )
    inventory = Inventory()
    await inventory.take(
        servers, progress, lambda text: result.rows.append(Row("server", "", text))
    )
    named = _named_servers(inventory) - table.keys()
    if named:
        for number in sorted(named):
            table[number] = ServerRecord(f"unknown-{number}", LOST)
            reason = "files were on it, but it is not configured: it counts as lost"
            result.rows.append(Row("server", f"data server {number}", reason))
        with_lost = _open(config, store, table)
        try:
            return await _save(
                meta, store, with_lost, table, inventory, backups, verify, progress, result
            )
        finally:
            with_lost.close()
    return await _save(meta, store, servers, table, inventory, backups, verify, progress, result)


def _named_servers(inventory: Inventory) -> set[int]:
    """The numbers of all servers that labels name, as far as the columns there were not found
    elsewhere.
    """
    named: set[int] = set()
    for parts in inventory.sets.values():
        label = best_label(parts)
        if label is not None:
            found = {part.column for part in parts}
            named |= {
                number for column, number in enumerate(label.layout.servers) if column not in found
            }
    return named


async def _save(
    meta: str,
    store: str,
    servers: Servers,
    table: dict[int, ServerRecord],
    inventory: Inventory,
    backups: Found,
    verify: bool,
    progress: Progress,
    result: Result,
) -> Result:
    containers = SavedContainers(
        servers, {oid: parts for (ino, oid), parts in inventory.sets.items() if not ino}, progress
    )
    await containers.scan()
    result.rows += [Row("container", str(number), reason) for number, reason in containers.problems]
    generations = all_generations(inventory, containers)
    drained = await find_drained(
        servers, inventory, containers, verify, progress, result, generations
    )
    copies = await striped.undrained(servers, inventory.copies, drained, verify)
    newer = {saved.ino for saved in copies if saved.ino}
    saved = [one for one in drained if one.ino not in newer] + copies

    highest = max(naming.id_bound(server.path) for server in servers.values() if not server.absent)
    highest = max([highest, *(ino for ino, _ in inventory.sets), *(one.ino for one in saved)])
    next_id = highest + _IDS_LOST_AT_MOST

    def take_id() -> int:
        nonlocal next_id
        next_id += 1
        return next_id - 1

    for one in copies:
        one.ino = one.ino or take_id()
    places, named = plant(saved, take_id)
    first_seq = max((name.seq or name.after for name in backups.sizes), default=0)
    plan = Plan(store, table, places, named, containers, next_id + 2 * WINDOW, first_seq)
    await metadata.build(meta, plan)
    _report(result, inventory, places, named, copies)
    return result


def all_generations(inventory: Inventory, containers: SavedContainers) -> dict[int, set[int]]:
    """The oids that objects or chunks have, by inode."""
    generations = {ino: set(oids) for ino, oids in containers.generations.items()}
    for ino, oid in inventory.sets:
        if ino:
            generations.setdefault(ino, set()).add(oid)
    return generations


async def find_drained(
    servers: Servers,
    inventory: Inventory,
    containers: SavedContainers,
    verify: bool,
    progress: Progress,
    result: Result,
    generations: Mapping[int, set[int]],
) -> list[Saved]:
    """Of each inode the newest of these generations that is whole; if none is, ``result`` gets a
    row that says why.
    """
    found: list[Saved] = []
    following = iter(generations.items())

    async def work() -> None:
        for ino, oids in following:
            await trio.lowlevel.checkpoint()
            progress("files", len(found), len(generations))
            saved = await _newest(
                servers, inventory, containers, verify, ino, sorted(oids, reverse=True), result
            )
            if saved is not None:
                found.append(saved)

    await run_all(*[work] * _AT_ONCE)
    return found


async def _newest(
    servers: Servers,
    inventory: Inventory,
    containers: SavedContainers,
    verify: bool,
    ino: int,
    oids: Sequence[int],
    result: Result,
) -> Saved | None:
    doubtful, reason = None, ""
    for oid in oids:
        try:
            parts = inventory.sets.get((ino, oid))
            if parts is None:
                return await containers.piece_together(ino, oid, verify)
            saved = piece_together(servers, ino, oid, parts)
            if verify:
                await striped.verify(servers, saved)
            if not saved.note:
                return saved
            doubtful = doubtful or saved
        except Incomplete as error:
            reason = reason or str(error)
    if doubtful is None:
        result.rows.append(Row("incomplete", _hint(inventory, containers, ino, oids), reason))
    return doubtful


def _hint(inventory: Inventory, containers: SavedContainers, ino: int, oids: Sequence[int]) -> str:
    for oid in oids:
        label = best_label(inventory.sets.get((ino, oid), ()))
        generation = containers.generations.get(ino, {}).get(oid)
        path = (
            label.path
            if label
            else generation.record.path
            if generation and generation.record
            else b""
        )
        if path:
            return printable(path)
    return f"inode {ino}"


def _report(
    result: Result,
    inventory: Inventory,
    places: list[Directory],
    named: list[Named],
    copies: list[Saved],
) -> None:
    used = {(one.saved.ino, one.saved.oid) for one in named}
    used |= {(0, place.container) for one in named for place in one.saved.places}
    for one in named:
        if one.saved.note:
            result.rows.append(Row("doubtful", printable(one.path), one.saved.note))
        elif one.renamed:
            result.rows.append(
                Row("renamed", printable(one.path), "another file has its path, too")
            )
    states_found = [row.state for row in result.rows]
    result.counts = {
        "files": len(named),
        "directories": len(places),
        "bytes": sum(one.saved.size for one in named),
        "undrained": len(copies),
        "checked": sum(bool(one.saved.digests or one.saved.extents) for one in named),
        "incomplete": states_found.count("incomplete"),
        "doubtful": states_found.count("doubtful"),
        "degraded": sum(bool(one.saved.lost) for one in named),
        "unused_objects": sum(
            len(parts) for key, parts in inventory.sets.items() if key not in used
        ),
        "unused_copies": len(inventory.copies) - sum(one.saved.copy is not None for one in named),
        "unlabelled_objects": inventory.unlabelled,
        "foreign_files": inventory.foreign,
    }
