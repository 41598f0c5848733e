"""What ``aifs doctor`` looks at for a host of many: its secret, the database, the clock, the
replica's disk.
"""

import os
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from aifs.core.config import Config
from aifs.core.kinds import split_endpoint
from aifs.core.limits import within

if TYPE_CHECKING:
    from aifs.meta.replicated.blocking import BlockingDatabase, LiveHost

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
    """What was looked at, what was found, and what to do about it ("": nothing is wrong)."""

    name: str
    why: str
    fix: str = ""


_LOCKS = ClusterCheck(
    "locks of files",
    "flock and fcntl locks of regular files hold over all hosts; flock of directories and FIFOs, "
    "and leases (F_SETLEASE), hold on one host alone: no FUSE mount hears of them",
)


def cluster_checks(config: Config) -> list[ClusterCheck]:
    """What follows from a fault that is told is left out."""
    from aifs.core.errors import StoreError
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
    why = f"PostgreSQL {database.version} answers in {1000 * middle_s:.1f} ms"
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


def _store(config: Config, database: "BlockingDatabase") -> list[ClusterCheck]:
    from aifs.core.errors import StoreError
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


def _network(config: Config, others: "list[LiveHost]") -> list[ClusterCheck]:
    """Whether others can know where this host is, and it reaches them."""
    from aifs.core.errors import UserError
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
    from aifs.core.filesystems import is_local
    from aifs.core.units import describe_size

    place = directory
    while not os.path.exists(place):
        place = os.path.dirname(place)
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    taken = 0
    for name in os.listdir(place) if place == directory else ():
        taken += os.stat(os.path.join(place, name)).st_blocks * 512
    why = (
        f"{describe_size(free)} free in {place}; the metadata take {describe_size(needed)} in the "
        "database"
    )
    if not is_local(place):
        fix = "it is read all the time: name a meta.directory on a local disk"
        return ClusterCheck("replica", f"{place} is on a network filesystem", fix)
    is_little = free + taken < _ROOM * needed
    fix = "make room there, or name another meta.directory" if is_little else ""
    return ClusterCheck("replica", why, fix)
