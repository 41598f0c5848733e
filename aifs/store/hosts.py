"""The hosts of a store, as one of them sees them, and the one with the role."""

import ipaddress
import logging
import socket
from typing import Any

import trio
from psycopg.conninfo import conninfo_to_dict

from aifs.core.config import Config
from aifs.core.errors import ConfigError, NotFound, StoreError, Unavailable
from aifs.core.kinds import split_endpoint
from aifs.core.secret import read_secret
from aifs.core.upkeep import Role
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.replicated.database import ANSWER_S, MapDatabase
from aifs.meta.replicated.engine import ReplicatedEngine
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.held import Held
from aifs.meta.replicated.joining import join
from aifs.meta.replicated.sessions import BEAT_S, Member, Session, end_session, holder_of
from aifs.peers.peers import PeerAddress, Peers

log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""How soon it is noticed that a beat has told of a session that has begun or ended."""

_SELDOM = 8
"""How many seconds the youngest hosts let pass between two looks for leases that are over."""


_POSTGRESQL_PORT = 5432

_EVERYWHERE = ("0.0.0.0", "::")


class Hosts:
    """Made with the session of this host. Used from one trio thread."""

    def __init__(
        self,
        session: Session,
        held: Held,
        database: MapDatabase,
        peers: Peers,
        exchange: Exchange,
    ) -> None:
        self.peers = peers
        self.role = Role(self.ask_live)
        self.members: list[Member] = []
        """Sessions that had not ended when that was asked last, the oldest one first."""
        self._session = session
        self._held = held
        self._database = database
        self._exchange = exchange
        self._seen = -1
        """How often sessions had begun or ended by then."""

    @property
    def session(self) -> int:
        """The number of this host's."""
        return self._session.number

    def own_status(self) -> dict[str, Any]:
        """As Session.status and Held.status. Does not block."""
        return {**self._session.status(), **self._held.status()}

    def live(self) -> frozenset[int]:
        """The sessions that are not known to have ended, our own among them."""
        return frozenset([self.session, *(one.session for one in self.members)])

    @property
    def holder(self) -> int:
        """The session that has the role, as far as is known; 0: none."""
        return holder_of(self.members)

    async def look(self) -> None:
        """Ask the database who is there. Raises Unavailable."""
        version = self._session.members
        self.members = await self._session.live()
        self._seen = version
        self._exchange.update(
            [PeerAddress(one.name, one.session, one.address) for one in self.members]
        )
        hosts = frozenset(one.host for one in self.members)
        self.role.tell(self.holder == self.session, hosts)

    async def ask_live(self) -> frozenset[int]:
        """The numbers of the hosts that have a session now. Raises Unavailable."""
        await self.look()
        return frozenset(one.host for one in self.members)

    # --- sessions ---

    async def fence(self, name: str, reason: str) -> None:
        """End the session of a host, whose later changes are refused. Raises NotFound without one;
        Unavailable, also if the database is away: no host is fenced later for that."""
        with trio.move_on_after(ANSWER_S):
            await self.look()
            for one in self.members:
                if one.name == name:
                    await end_session(self._database, one.session, reason)
                    log.warning("the session %d of host %s is ended: %s", one.session, name, reason)
                    await self.look()
                    return
            raise NotFound(f"host {name} does not have the store mounted")
        raise Unavailable(f"the database does not answer; look whether host {name} is fenced")

    async def run(self) -> None:
        """Keep up connections, and what is known of others, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.peers.run)
            nursery.start_soon(self._watch)
            nursery.start_soon(self._end_silent)

    async def _watch(self) -> None:
        while True:
            if self._session.members != self._seen:
                try:
                    await self.look()
                except Unavailable as error:
                    log.info("who is there is not known: %s", error)
                    await trio.sleep(BEAT_S)
            await trio.sleep(_LOOK_S)

    async def _end_silent(self) -> None:
        """End sessions whose lease is over. After an absence of the database all are: so it acts
        only for a host with an unbroken lease."""
        rounds = 0
        while True:
            await trio.sleep(BEAT_S)
            rounds += 1
            place = sum(one.session < self.session for one in self.members)
            if rounds % min(1 + place, _SELDOM):
                continue
            try:
                if await self._session.end_silent():
                    await self.look()
            except Unavailable as error:
                log.info("whose lease is over is not known: %s", error)


async def enter(
    config: Config, store: str, local: LmdbEngine, goes_on: bool
) -> tuple[ReplicatedEngine, Hosts]:
    """Begin a session of this host: its engine, with ``local`` as replica, and the others.
    ``store``: the uuid. ``host.address`` is set. ``goes_on``: as of ``join``.

    Raises ConfigError if it cannot listen; StoreBusy, StoreError, Unavailable. Then ``local`` is
    still the caller's.
    """
    secret, name = read_secret(config.meta.secret), config.host.name
    peers = Peers(store, name, secret.encode(), split_endpoint(config.host.listen))
    try:
        database, exchange = MapDatabase(config.meta.url, secret), Exchange(peers)
        engine = await join(local, database, name, config.host.address, exchange, goes_on)
    except BaseException:
        peers.close()
        raise
    hosts = Hosts(engine.session, engine.held, database, peers, exchange)
    await hosts.look()
    return engine, hosts


def own_address(config: Config) -> str:
    """This host's address for others: configured, or listening; if everywhere, as the database sees
    it. Raises ConfigError, StoreError."""
    if config.host.address:
        return config.host.address
    address, port = split_endpoint(config.host.listen)
    if address not in _EVERYWHERE:
        return config.host.listen
    own = _seen_by(config.meta.url)
    if ipaddress.ip_address(own).is_loopback:
        raise ConfigError(
            f"{config.source}: host.address is missing: the database is on this machine ({own}), "
            "so nobody can tell where other hosts reach this one; set host.address, or "
            f"host.listen, to ADDRESS:{port}"
        )
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _seen_by(url: str) -> str:
    """This host's address for the database at ``url``, maybe of several servers."""
    about = conninfo_to_dict(url)
    ports = str(about.get("port") or _POSTGRESQL_PORT).split(",")
    faults: list[str] = []
    for at, name in enumerate(str(about.get("host") or "localhost").split(",")):
        port = int(ports[at if len(ports) > 1 else 0])
        try:
            family, kind, _, _, there = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as trial:
                trial.connect(there)  # which sends nothing
                return str(trial.getsockname()[0])
        except socket.gaierror as error:
            faults.append(f"the host {name} is not found: {error.strerror}")
        except OSError as error:
            faults.append(f"this host's own address is not known: {error}; say it (host.address)")
    raise StoreError(f"{url}: {'; '.join(faults)}")
