"""``aifs doctor``: the limits of a mount's speed, and the changes that lift them."""

import os
import socket
import stat
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from aifs.cli.command import PATH, Column, Report, Table, command
from aifs.cli.door import read_status, require_aifs
from aifs.cli.output import count, describe_error, duration, size
from aifs.cli.status import refusal_of
from aifs.core.errors import MountError, StoreError, UserError
from aifs.core.limits import within
from aifs.core.names import is_path

if TYPE_CHECKING:
    from aifs.core.config import Config
    from aifs.meta.replicated.blocking import BlockingDatabase, LiveHost

_CHECKS = (
    Column("check", "name"),
    Column("state", lambda check: _word(check)),
    Column("why"),
    Column("what to change", "fix"),
)


@command(
    "doctor",
    short_help="Show what limits the speed of a mount, and what to change.",
    examples="aifs doctor\naifs doctor /srv/store\naifs doctor /mnt/store --json",
)
@click.argument("place", required=False, type=PATH, metavar="[MOUNTPOINT|SOURCE]")
def doctor_command(place: str | None) -> Report:
    """Check the needs of a mount at full speed: on this machine, for the store SOURCE, or of the
    mount at MOUNTPOINT.

    Prints the parts that are in use, those that are not, why, and what to change. Exit code 0 if
    nothing limits the speed, else 1.
    """
    checks = checks_of(place)
    return Report(checks, Table(_CHECKS, checks), code=1 if any(map(_limits, checks)) else 0)


def checks_of(place: str | None) -> list[dict[str, Any]]:
    """The checks of a mount, a store, or this machine, and their results."""
    from aifs.core import config
    from aifs.data.bucket_check import check_bucket
    from aifs.fuse.probe import probe

    mountpoint = _mountpoint(place)
    if mountpoint:
        status = read_status(mountpoint)
        loaded = config.load(status["source"], {})
        found = probe(loaded, mountpoint, status["bridge"])
        checks = [check._asdict() for check in found] + missing_checks(status["bridge"])
        checks += burst_checks(status["burst"]) + drain_checks(status["drain"])
        addresses = [server["path"] for server in status["servers"]]
    else:
        # Without a place the machine alone is looked at, with the default configuration.
        loaded = config.load(place or "/", {} if place else {"burst.directories": ""})
        fault = _fault_of_store(loaded) if place else ""
        if fault:
            loaded = config.load(place or "/", {"burst.directories": ""})
        checks = [check._asdict() for check in probe(loaded)]
        if fault:
            checks.insert(0, _check("store", fault, "see there"))
        addresses = list(loaded.servers)
    if loaded.is_cluster:
        checks += [_check(*check) for check in cluster_checks(loaded)]
    for address in addresses:  # at last: obstore's threads do not survive the forks of others
        if not is_path(address):
            checks += [_check(*check) for check in check_bucket(address)]
    return checks


def _fault_of_store(loaded: "Config") -> str:
    """Why there is no store, or the caller cannot see it; or ''. For a cluster see
    ``cluster_checks``."""
    from aifs.data.marker import read_marker
    from aifs.store.store import require_metadata

    if not loaded.is_cluster:
        try:
            require_metadata(loaded)
            read_marker(loaded.meta.directory)
        except (StoreError, OSError) as error:
            return describe_error(error)
    return ""


def missing_checks(bridge: dict[str, Any]) -> list[dict[str, Any]]:
    """From ``bridge`` in a mount's status: missing parts, why, and what to change."""
    return [
        {
            "name": each["what"],
            "ok": False,
            "in_use": False,
            "why": each["why"],
            "fix": f"{each['fix']}; mount again",
        }
        for each in bridge["missing"]
    ]


def burst_checks(burst: dict[str, Any]) -> list[dict[str, Any]]:
    """From ``burst`` in a mount's status: whether each device takes new files, and whether they
    wait."""
    checks = []
    for device in burst["devices"]:
        refuses = refusal_of(device)
        fix = (
            "aifs drain and aifs evict make room; see burst.high_water, burst.reserve, "
            "burst.capacity"
        )
        checks.append(
            _check(
                f"room in {device['path']}",
                refuses or "new files are admitted",
                fix if refuses else "",
            )
        )
    if not burst["devices"]:
        fix = "make a store with burst.directories on a local disk"
        checks.append(_check("burst tier", "the store has none", fix))
    if burst["pause_s"]:
        fix = "faster data servers, more burst.drain_workers, no burst.drain_bandwidth"
        checks.append(_check("draining", "new files have to wait for it", fix))
    return checks


def drain_checks(drain: dict[str, Any]) -> list[dict[str, Any]]:
    """Of ``drain`` in the status of a mount: files that cannot be drained."""
    if not drain["failing_files"]:
        return []
    fix = "put the data server right, or make room there; it is tried again and again"
    return [
        _check(f"draining of {count(drain['failing_files'], 'file')}", drain["last_error"], fix)
    ]


def _check(name: str, why: str, fix: str) -> dict[str, Any]:
    return {"name": name, "ok": not fix, "in_use": None, "why": why, "fix": fix}


def _mountpoint(place: str | None) -> str | None:
    if place is None or not stat.S_ISDIR(os.stat(place).st_mode):
        return None
    try:
        return require_aifs(place)
    except MountError:
        return None


def _limits(check: dict[str, Any]) -> bool:
    return not check["ok"] or check["in_use"] is False


def _word(check: dict[str, Any]) -> str:
    if check["in_use"] is None:
        return "ok" if check["ok"] else "limits"
    return "in use" if check["in_use"] else "not in use"


# --- a host of many -------------------------------------------------------------------------------

_SLOW_S = 0.005
"""A round trip to the database that takes longer is told: each change waits for one."""

_ASKED = 5

_CLOCK_S = 0.5
"""Programs take times of files that differ by more for changes, or miss changes."""

_CONNECT_S = 3.0
"""A host that lives takes connections sooner."""

_ANSWER_S = 10.0
"""How long a data server may take to say whose it is."""

_ROOM = 2
"""Free space of the replica's filesystem that is enough, as a multiple of what the database has."""


class ClusterCheck(NamedTuple):
    """A check, its result, and what to do about it ("": nothing is wrong)."""

    name: str
    why: str
    fix: str = ""


_LOCKS = ClusterCheck(
    "locks of files",
    "flock and fcntl locks of regular files hold over all hosts; flock of directories and FIFOs, "
    "and leases (F_SETLEASE), hold on one host alone: no FUSE mount hears of them",
)


def cluster_checks(config: "Config") -> list[ClusterCheck]:
    """Checks that follow from a fault that is reported are left out."""
    from aifs.core.secret import read_secret
    from aifs.meta.replicated.blocking import BlockingDatabase

    try:
        read_secret(config.meta.secret)
    except StoreError as error:
        return [_LOCKS, ClusterCheck("secret", str(error), "see there")]
    checks = [_LOCKS, ClusterCheck("secret", f"{config.meta.secret} is its owner's alone")]
    try:
        with BlockingDatabase(config.meta.url, config.meta.secret) as database:
            checks += [_reached(database), _clock(database)]
            checks += _store(config, database)
    except StoreError as error:
        fix = "see there; aifs meta serve prints url and secret, and PostgreSQL's log"
        checks.append(ClusterCheck("database", str(error), fix))
    return checks


def _reached(database: "BlockingDatabase") -> ClusterCheck:
    took_s = []
    for _ in range(_ASKED):
        began_s = time.monotonic()
        database.clock_s()
        took_s.append(time.monotonic() - began_s)
    middle_s = sorted(took_s)[_ASKED // 2]
    why = f"PostgreSQL {database.version} answers in {duration(middle_s)}"
    fix = "each change waits for it: bring it nearer, or give it a faster machine"
    return ClusterCheck("database", why, fix if middle_s > _SLOW_S else "")


def _clock(database: "BlockingDatabase") -> ClusterCheck:
    began_s = time.time()
    there_s = database.clock_s()
    ahead_s = (began_s + time.time()) / 2 - there_s
    how = "ahead of" if ahead_s > 0 else "behind"
    why = f"{abs(ahead_s):.2f} s {how} that of the database's machine"
    fix = "have both set by NTP: times of files differ between hosts"
    return ClusterCheck("clock", why, fix if abs(ahead_s) > _CLOCK_S else "")


def _store(config: "Config", database: "BlockingDatabase") -> list[ClusterCheck]:
    from aifs.data.storages import storage_at
    from aifs.store.cluster import find_store, require_replica
    from aifs.store.owner import find_holder

    try:
        store = find_store(database)
    except StoreError as error:
        return [ClusterCheck("store", str(error), "see there")]
    wrong = ""
    for path in config.servers:
        try:
            marker = within(_ANSWER_S, storage_at(path).read_marker)
        except (StoreError, OSError) as error:
            wrong = wrong or str(error)
            continue
        if marker.store != store:
            wrong = f"{database.url} holds store {store}, and {path} is of store {marker.store}"
            break
    fix = "correct meta.url, or servers, in the SOURCE of this host" if wrong else ""
    checks = [
        ClusterCheck("store", wrong or f"the database holds {store}, as the servers say", fix)
    ]
    live = database.live_hosts()
    mine = [host for host in live if host.name == config.host.name]
    if mine and find_holder(config.meta.directory) is None:
        why = f"a host with the name {config.host.name} uses the store, at {mine[0].address}"
        checks.append(ClusterCheck("host.name", why, "give this host another one: host.name"))
    checks += _network(config, [host for host in live if host.name != config.host.name])
    try:
        require_replica(config.meta.directory, store, database.url)
        checks.append(_room(config.meta.directory, database.map_bytes()))
    except StoreError as error:
        checks.append(ClusterCheck("replica", str(error), "see there"))
    return checks


def _network(config: "Config", others: "list[LiveHost]") -> list[ClusterCheck]:
    """Whether others can know where this host is, and it reaches them."""
    from aifs.core.kinds import split_endpoint
    from aifs.store.hosts import own_address

    try:
        own = own_address(config)
    except UserError as error:
        return [ClusterCheck("host.address", str(error), "see there")]
    checks = [ClusterCheck("host.address", f"others reach this host at {own}")]
    for host in others:
        try:
            with socket.create_connection(split_endpoint(host.address), _CONNECT_S):
                pass
        except (OSError, ValueError) as error:
            fix = "is a firewall between, or its host.address wrong? It costs speed, and locks wait"
            why = f"is not reached at {host.address}: {error}"
            checks.append(ClusterCheck(f"host {host.name}", why, fix))
    return checks


def _room(directory: str, needed: int) -> ClusterCheck:
    from aifs.core.mountinfo import is_local

    place = directory
    while not os.path.exists(place):
        place = os.path.dirname(place)
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    taken = 0
    for name in os.listdir(place) if place == directory else ():
        taken += os.stat(os.path.join(place, name)).st_blocks * 512
    why = f"{size(free)} free in {place}; the metadata take {size(needed)} in the database"
    if not is_local(place):
        fix = "it is read all the time: name a meta.directory on a local disk"
        return ClusterCheck("replica", f"{place} is on a network filesystem", fix)
    is_little = free + taken < _ROOM * needed
    fix = "make room there, or name another meta.directory" if is_little else ""
    return ClusterCheck("replica", why, fix)
