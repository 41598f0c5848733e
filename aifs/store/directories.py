"""The directories of a store: which may become one, their contents, giving them up. Blocks."""

import os
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timezone
from itertools import filterfalse

from aifs.core.config import DIRECTORY_FILE, Config, is_directory_source
from aifs.core.errors import StoreError
from aifs.core.log import logger
from aifs.core.names import absolute, is_path
from aifs.data.directory_storage import erase_directory
from aifs.data.marker import FORMAT, NAME, Marker, read_marker
from aifs.data.naming import PROBE
from aifs.data.server import DataServer
from aifs.data.storage import ASIDE, CLAIM
from aifs.data.storages import storage_at
from aifs.meta.lmdb_database import UNCHECKED
from aifs.store.owner import NAME as OWNER_NAME

_METADATA = {OWNER_NAME, "data.mdb", "journal.0", "journal.1", UNCHECKED}

_OWN_NAMES = {
    "meta": _METADATA,
    "replica": _METADATA,
    "data": {"objects", "backup", CLAIM},
    "burst": {"objects", "blocks", CLAIM},
}

_log = logger(__name__)


def recorded_path(config: Config, path: str) -> str:
    """Relative for what lies below a source directory, so that the whole can be moved."""
    below = (
        is_path(path)
        and is_directory_source(config.source)
        and os.path.commonpath([config.source, path]) == config.source
    )
    return os.path.relpath(path, config.source) if below else path


def same_directories(named: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """The ``known`` path that each of ``named`` means, if any. Symlinks are followed only for paths
    written differently: what is behind may hang."""
    by_words = {absolute(path): path for path in known}
    same = {path: by_words[absolute(path)] for path in named if absolute(path) in by_words}
    others = [path for path in named if path not in same and is_path(path)]
    if others:
        left = [path for path in known if path not in same.values() and is_path(path)]
        by_links = {os.path.realpath(path): path for path in left}
        same |= {
            path: by_links[real] for path in others if (real := os.path.realpath(path)) in by_links
        }
    return same


def require_distinct(paths: list[str], written: Collection[str] = ()) -> None:
    """Raises StoreError if one is, holds, or lies in another. ``written``: not to be touched
    now."""
    buckets: dict[str, str] = {}
    for address in filterfalse(is_path, paths):
        prefix = address.partition("?")[0].rstrip("/")
        if prefix in buckets:
            raise StoreError(f"{address}: is {buckets[prefix]}; each server needs its own prefix")
        buckets[prefix] = address
    seen: dict[str, str] = {}
    for path in filter(is_path, paths):
        real = os.path.abspath(path) if path in written else os.path.realpath(path)
        for other, named in seen.items():
            if os.path.commonpath([real, other]) in (real, other):
                raise StoreError(
                    f"{path}: is, holds, or lies in {named}; each needs a directory of its own"
                )
        seen[real] = path


def require_usable(role: str, path: str, *, force: bool = False, store: str = "") -> None:
    """Require a missing or empty directory, or, with ``force``, an erasable store. Raises
    StoreError. ``store``: with only its marker and claim it counts as empty: adding it was
    interrupted."""
    if not is_path(path):
        _require_unmarked(path, force, store)
        return
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise StoreError(f"{path}: is not a directory; name one for the {role} files") from None
    held = set(names) - {ASIDE, PROBE}  # a probe may have been killed
    if not held:
        return
    foreign = sorted(held - {NAME} - _OWN_NAMES[role])
    if foreign:
        raise StoreError(
            f"{path}: holds {foreign[0]!r}, which is not a store's; use an empty directory"
        )
    if store and NAME in held:
        marker = read_marker(path)
        if marker.store == store and held <= {NAME, CLAIM}:
            return
        if marker.store == store:
            raise StoreError(
                f"{path}: holds what {marker.role} server {marker.id} of this store had, which is "
                "stale; use an empty directory, or, if aifs meta copy was interrupted, run it again"
            )
        raise StoreError(f"{path}: is of another store, {marker.store}; use an empty directory")
    if not force:
        raise StoreError(f"{path}: holds a store already; --force erases it and all files in it")


def require_empty_source(config: Config) -> None:
    """Require that a directory SOURCE holds only the configuration's files. Raises StoreError."""
    if not os.path.isdir(config.source):
        return
    places = (config.meta.directory, *config.servers, *config.burst.directories, config.log.file)
    own = {os.path.relpath(path, config.source).partition("/")[0] for path in places}
    for name in sorted(set(os.listdir(config.source)) - own - {ASIDE, DIRECTORY_FILE}):
        if not any(name.startswith(f"{each}.") for each in own):
            raise StoreError(f"{config.source}: holds {name!r}; use an empty directory")


def _require_unmarked(address: str, force: bool, store: str) -> None:
    storage = storage_at(address)
    try:
        marker = storage.read_marker()
    except StoreError:
        return
    if marker.store == store and next(storage.list_all(), None) is None:
        return  # adding it was interrupted
    if not force:
        raise StoreError(f"{address}: holds a store already; --force erases it and all files in it")


def require_erasable(path: str, store: str) -> None:
    """Require that nobody uses the directory, besides claims: hosts of a shared store have
    sessions. Raises StoreError. ``store``: one without."""
    try:
        marker = storage_at(path).read_marker()
    except StoreError:
        return
    if marker.database and marker.store != store:
        raise StoreError(
            f"{path}: is of store {marker.store}, which hosts share by {marker.database}, and may "
            "be in use there: --force with a SOURCE of that store erases it; if it is gone for "
            f"ever: rm -r {path}"
        )


def mark(path: str, store: str, role: str, number: int, database: str = "") -> None:
    """Mark, and make if missing, the directory of the store, durably. ``database``: the url of its
    metadata, if any."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    storage_at(path).mark(Marker(FORMAT, store, role, number, created, database))


def erase(role: str, path: str) -> None:
    """Delete a store's contents durably, except the held owner file of metadata."""
    if _OWN_NAMES[role] is _METADATA:
        erase_directory(path, _OWN_NAMES[role] - {OWNER_NAME} | {NAME})
    else:
        storage_at(path).erase()


def give_up(server: DataServer) -> None:
    """Take marker, claim, backups and empty directories out of a server that the store gave up, if
    there. Problems are logged: the number is never used again, so it is refused."""
    storage = server.storage
    try:
        marker = storage.read_marker()
        if (marker.store, marker.role, marker.id) == (server.store, server.role, server.number):
            storage.give_up()
    except (OSError, StoreError) as error:
        _log.info("%s: its marker stays, which does no harm: %s", storage.address, error)
