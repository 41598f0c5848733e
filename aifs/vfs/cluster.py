"""The hosts of the store: their states, and the order that ends a session."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aifs.burst.tier import BurstTier
from aifs.core.errors import FsError, NotSupported
from aifs.core.tasks import run_all
from aifs.files import rights
from aifs.files.asks import ROOT, Hint
from aifs.meta import delegations
from aifs.meta.kv import Engine
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Peer

if TYPE_CHECKING:  # it needs packages that a store of one host does not
    from aifs.store.hosts import Hosts

_ANSWER_S = 2.0
"""How long a host is waited for that is to say how it is."""

_SERVICE = "status"


class Cluster:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        hosts: "Hosts | None",
        drain: Callable[[], dict[str, Any]],
        tier: BurstTier,
    ) -> None:
        """``hosts``: None where the store has one. ``drain``: what Drain.status says."""
        self._engine = engine
        self._peers = peers
        self._hosts = hosts
        self._drain = drain
        self._tier = tier
        peers.serve(_SERVICE, self._serve)

    async def _serve(self, peer: Peer, arguments: Any, body: Body) -> Answer:
        return Answer(self._undrained())

    def _undrained(self) -> dict[str, int]:
        """Bytes in this host's burst tier alone, and bytes kept for others."""
        state, mirrored = self._drain(), self._tier.mirror_bytes
        return {"files": state["files"], "bytes": state["bytes"], "mirrored": mirrored}

    def status(self) -> dict[str, Any]:
        """What this host knows without asking anybody."""
        hosts = self._hosts
        if hosts is None:
            return {"hosts": 0}
        own = next((one for one in hosts.members if one.session == hosts.session), None)
        return {
            "hosts": len(hosts.live()),
            "name": own.name if own is not None else None,
            "session": hosts.session,
            "connected": len(self._peers.connected),
            "has_role": hosts.role.held,
            **hosts.own_status(),
        }

    async def tell(self) -> dict[str, Any]:
        """All hosts, by the database and themselves. Raises NotSupported with one host;
        Unavailable."""
        hosts = self._require()
        await hosts.look()
        head = max(one.cursor for one in hosts.members)
        delegated = await self._engine.view(delegations.count)
        said: dict[int, dict[str, Any]] = {hosts.session: self._undrained()}

        async def ask(name: str, session: int) -> None:
            try:
                answer = await self._peers.call(name, _SERVICE, timeout_s=_ANSWER_S)
                said[session] = answer.value
            except FsError:
                pass  # it is not known

        others = [one for one in hosts.members if one.session != hosts.session]
        await run_all(*(lambda one=one: ask(one.name, one.session) for one in others))
        return {
            "hosts": [
                {
                    "name": one.name,
                    "address": one.address,
                    "session": one.session,
                    "state": one.state,
                    "age_s": round(one.age_s, 1),
                    "lease_left_s": round(max(0.0, one.lease_left_s), 1),
                    "lag": head - one.cursor,
                    "unshown": head - one.shown,
                    "undrained_files": said.get(one.session, {}).get("files"),
                    "undrained_bytes": said.get(one.session, {}).get("bytes"),
                    "mirror_bytes": said.get(one.session, {}).get("mirrored"),
                    "delegations": delegated[one.session],
                    "has_role": one.session == hosts.holder,
                    "is_this": one.session == hosts.session,
                }
                for one in hosts.members
            ]
        }

    async def fence(self, name: str) -> None:
        """End the session of a host. Raises NotFound, NotSupported, Unavailable."""
        hosts = self._require()
        own = next((one.name for one in hosts.members if one.session == hosts.session), "another")
        await hosts.fence(name, f"fenced by order, on host {own}")

    HINTS = (
        Hint(
            "hosts",
            ROOT,
            "the hosts that have the store mounted",
            rights.reader,
            get=lambda cluster, ask: cluster.tell(),
        ),
        Hint(
            "fence",
            ROOT,
            "the name of a host, whose session ends",
            change=rights.root,
            set=lambda cluster, ask: cluster.fence(ask.text),
        ),
    )

    def _require(self) -> "Hosts":
        if self._hosts is None:
            raise NotSupported("this store has one host (meta.engine is local)")
        return self._hosts
