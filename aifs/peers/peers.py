"""The other hosts of a store: names, connections, calls by name, and pushes to all.

The host with the younger session dials: it found the other in the database, which need not know it
yet. The dialed host believes the handshake's proof.
"""

import logging
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple

import trio

from aifs.core.errors import ConfigError, Unavailable
from aifs.core.kinds import split_endpoint
from aifs.core.secret import Stranger, Strangers, source_of
from aifs.core.waiting import HOST, waits_for
from aifs.peers.transport import (
    SILENCE_S,
    Answer,
    Body,
    Listener,
    Peer,
    PeerLink,
    Refused,
    Service,
    head_of,
    shake_hands,
)

log = logging.getLogger(__name__)

CALL_S = 5.0
"""How long a call waits for its connection and its answer, unless it says otherwise."""
_AGAIN_MIN_S, _AGAIN_MAX_S = 0.05, 1.0
"""Between two attempts to dial a host: doubled from one to the next."""
_STRANGERS = 512
"""Places for unproved connections from known hosts' addresses; as many for all others."""
_BACKLOG = 1024
_SAID_AGAIN_S = 60.0
"""The same fault of the same host is a line in the log no more often."""
_FAULTS_KEPT = 1024


class PeerAddress(NamedTuple):
    """A host that has a session."""

    name: str
    session: int
    address: str
    """``address:port``, where it can be dialed."""


class Peers:
    """One host's connections to all others. Used from one trio thread. Parts answer by ``serve``
    and ``hear`` before ``run``; sessions report hosts by ``update``."""

    is_shared = True
    """Whether the store may have other hosts."""

    def __init__(
        self, store: str, name: str, secret: bytes, listen: tuple[str, int] | None
    ) -> None:
        """Listens at ``listen`` (address and port; 0 is a free one; None: nowhere) at once; ``run``
        answers. Raises ConfigError if it cannot."""
        self._own = Peer(store, name, 0)
        self._secret = secret
        self._services: dict[str, Service] = {}
        """What others may ask for, by name."""
        self._listeners: dict[str, Listener] = {}
        """What others may push, by name."""
        self._members: dict[str, PeerAddress] = {}
        """The others that are there, by name."""
        self._links: dict[str, PeerLink] = {}
        """The connections that have shaken hands, by the name of the other end."""
        self._changed = trio.Event()
        """Set when members or connections have changed."""
        self._said: dict[str, float] = {}
        """When a fault was logged, by trio's clock."""
        self._proved: dict[str, str] = {}
        """By host, the address from which it has dialed us."""
        self._known, self._unknown = Strangers(_STRANGERS), Strangers(_STRANGERS)
        self._socket = None if listen is None else _bound(listen)
        """Which listens."""
        self.port: int = 0 if self._socket is None else self._socket.getsockname()[1]
        """Where it listens."""

    def serve(self, name: str, service: Service) -> None:
        """Requests of this name are answered by ``service``."""
        self._services[name] = service

    def hear(self, name: str, listener: Listener) -> None:
        """What is pushed under this name is told to ``listener``."""
        self._listeners[name] = listener

    def update(self, session: int, members: Iterable[PeerAddress]) -> None:
        """The present hosts, and our session. Connections to gone hosts end; one younger than all
        may be unknown yet."""
        self._own = self._own._replace(session=session)
        members = list(members)
        self._members = {one.name: one for one in members if one.name != self._own.name}
        newest = max([session, *(one.session for one in members)])
        for name, link in self._links.items():
            known = self._members.get(name)
            if link.peer.session <= newest and (not known or known.session != link.peer.session):
                link.close()
        self._announce()

    @property
    def session(self) -> int:
        """Our own."""
        return self._own.session

    @property
    def sessions(self) -> dict[int, str]:
        """Names of present hosts by session, ours among them, at one moment."""
        others = {one.session: one.name for one in self._members.values()}
        return {self._own.session: self._own.name, **others}

    @property
    def connected(self) -> dict[str, int]:
        """The hosts to which there is a connection, with their sessions."""
        return {name: link.peer.session for name, link in self._links.items()}

    @property
    def is_alone(self) -> bool:
        """Whether nobody would hear what is pushed."""
        return not self._links

    async def call(
        self,
        host: str,
        name: str,
        arguments: Any = None,
        body: Body = b"",
        *,
        session: int = 0,
        into: memoryview | None = None,
        timeout_s: float = CALL_S,
    ) -> Answer:
        """Call the service ``name`` of a host with ``arguments`` (JSON) and an unchanging ``body``.
        The answer's bytes go ``into`` a buffer if they fit, untouched after the return.
        ``session``: only this one of the host's.

        Raises errors of the service; Unavailable, with the host's name, without an answer: it may
        have carried out the request, once, or does so yet.
        """
        with waits_for(f"{HOST} {host}"), trio.move_on_after(timeout_s):
            link = await self._link(host, session)
            return await link.request(name, arguments, body, into)
        raise Unavailable(f"host {host} has not answered for {timeout_s:g} s")

    def push(self, name: str, arguments: Any = None, body: Body = b"") -> None:
        """Tell all connected hosts; may be lost. Does not block; ``body`` must not change."""
        if self._links:
            head = head_of(name, arguments)
            for link in self._links.values():
                link.push(head, body)

    def tell(self, host: str, name: str, arguments: Any = None, body: Body = b"") -> None:
        """As ``push``, to one host."""
        if host in self._links:
            self._links[host].push(head_of(name, arguments), body)

    async def run(self) -> None:
        """Answer, dial and serve until cancelled; then nothing listens any more."""
        assert self._socket is not None
        with trio.socket.from_stdlib_socket(self._socket) as listening:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._accept, listening, nursery)
                await self._dial_all(nursery)

    def close(self) -> None:
        """Listen no more, if ``run`` has never begun."""
        if self._socket is not None:
            self._socket.close()

    async def _link(self, host: str, session: int) -> PeerLink:
        while True:
            link, member = self._links.get(host), self._members.get(host)
            if link is not None and session in (0, link.peer.session):
                return link
            if member is None or session not in (0, member.session):
                raise Unavailable(f"host {host} is not there")
            await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _accept(self, listening: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        while True:
            try:
                end, address = await listening.accept()
            except OSError as error:  # no descriptors, or it has gone already
                self._complain(f"accepting: {error}")
                await trio.sleep(_AGAIN_MAX_S)
                continue
            nursery.start_soon(self._welcome, trio.SocketStream(end), source_of(address[0]))

    async def _welcome(self, stream: trio.SocketStream, source: str) -> None:
        peer = None
        strangers = self._known if self._is_of_host(source) else self._unknown
        with strangers.place(source) as stranger:
            peer = await self._shake_hands(stream, None, source, stranger)
        if stranger.scope.cancelled_caught:
            flood = f"{source}: opens connections and says nothing; the oldest are closed"
            self._complain(flood, flood)
        if peer is not None:
            self._proved[peer.name] = source
            await self._use(stream, peer)

    def _is_of_host(self, source: str) -> bool:
        if source in self._proved.values():
            return True
        hosts = (one.address.rpartition(":")[0].strip("[]") for one in self._members.values())
        return any(source_of(host) == source for host in hosts)

    async def _shake_hands(
        self,
        stream: trio.SocketStream,
        dialed: str | None,
        address: str,
        stranger: Stranger | None = None,
    ) -> Peer | None:
        """The host at the other end; None, with the stream closed, for a stranger."""
        peer = None

        def heard() -> None:
            if stranger is not None:
                stranger.has_spoken = True

        try:
            with trio.move_on_after(SILENCE_S):
                peer = await shake_hands(stream, self._own, self._secret, dialed, heard)
        except Refused as error:
            self._complain(f"{address}: {error}", address)
        except (OSError, trio.BrokenResourceError):
            pass
        finally:
            if peer is None:
                await trio.aclose_forcefully(stream)
        return peer

    async def _use(self, stream: trio.SocketStream, peer: Peer) -> None:
        """Serve a connection, in place of an older one of that host, to its end."""
        link = PeerLink(stream, peer, self._services, self._listeners)
        older = self._links.get(peer.name)
        self._links[peer.name] = link
        try:
            if older is not None:  # what it serves has ended before another request comes
                older.close()
                with trio.CancelScope(shield=True):
                    await older.is_over.wait()
            self._announce()
            fault = await link.run()
            if fault:
                self._complain(fault)
        finally:
            if self._links.get(peer.name) is link:
                del self._links[peer.name]
                self._announce()

    async def _dial_all(self, nursery: trio.Nursery) -> None:
        """Dial each older host while it is there."""
        dialing: dict[PeerAddress, trio.CancelScope] = {}
        while True:
            own = self._own.session
            older = {one for one in self._members.values() if one.session < own}
            for member in dialing.keys() - older:
                dialing.pop(member).cancel()
            for member in older - dialing.keys():
                dialing[member] = trio.CancelScope()
                nursery.start_soon(self._dial, member, dialing[member])
            await self._changed.wait()

    async def _dial(self, member: PeerAddress, scope: trio.CancelScope) -> None:
        again_s = _AGAIN_MIN_S
        with scope:
            while True:
                stream = await self._connect(member)
                if stream is not None:
                    peer = await self._shake_hands(stream, member.name, member.address)
                    if peer is not None:
                        again_s = _AGAIN_MIN_S
                        await self._use(stream, peer)
                await trio.sleep(again_s)
                again_s = min(2 * again_s, _AGAIN_MAX_S)

    async def _connect(self, member: PeerAddress) -> trio.SocketStream | None:
        try:
            host, port = split_endpoint(member.address)
            with trio.move_on_after(SILENCE_S):
                return await trio.open_tcp_stream(host, port)
        except (OSError, ValueError) as error:
            log.debug("peers: host %s: %s", member.name, error)
        return None

    def _complain(self, fault: str, of: str = "") -> None:
        """Log a fault, not too often: one for each address."""
        now = trio.current_time()
        of = of or fault
        if len(self._said) >= _FAULTS_KEPT:
            self._said = {one: at for one, at in self._said.items() if now - at < _SAID_AGAIN_S}
        if of not in self._said and len(self._said) >= _FAULTS_KEPT:
            return  # many addresses of one mind
        if now - self._said.get(of, -_SAID_AGAIN_S) >= _SAID_AGAIN_S:
            self._said[of] = now
            log.warning("peers: %s", fault)


class Alone(Peers):
    """The other hosts of a store with one: none. Calls raise Unavailable; ``run`` is not called."""

    is_shared = False

    def __init__(self) -> None:
        super().__init__("", "", b"", None)
        self.update(1, [])


def _bound(listen: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    try:
        return socket.create_server(listen, family=family, backlog=_BACKLOG)
    except OSError as error:
        where = f"{listen[0]}:{listen[1]}"
        raise ConfigError(f"host.listen: cannot listen at {where}: {error.strerror}") from error
