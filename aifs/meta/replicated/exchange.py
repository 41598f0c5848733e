"""Messages between engines of hosts: committed rows, and what has been shown.

They are for speed and may be lost: the database has the rows, beats what hosts have shown.

    row     to all: a row of the feed, from the host that committed it; none too large for a frame
    ask     to all: the sender waits until this number is shown
    shown   to the host that asked: what the sender has shown
    recall  a request: the host gives up what is delegated to its session of these directories; the
            number of the row that says so, or of a later one
"""

import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aifs.core.errors import Unavailable
from aifs.meta import keys
from aifs.meta.replicated.database import Row, of_keys, to_keys
from aifs.peers.peers import PeerAddress, Peers
from aifs.peers.transport import MAX_BODY, Answer, Body, Peer

_LENGTH = struct.Struct("<I")


class Exchange:
    """The engine's side of this host's connections. Does not block. Used from one trio thread."""

    def __init__(self, peers: Peers | None) -> None:
        """``peers``: None: nobody is told anything."""
        self._peers = peers
        self._session = 0
        self._shown = 0
        """What this host has shown."""
        self._asked: dict[str, int] = {}
        """Hosts that wait until it has shown more, and how much."""

    def begin(
        self,
        session: int,
        hear_rows: Callable[[Iterable[Row]], None],
        hear_shown: Callable[[int, int], None],
        give_up: Callable[[list[bytes]], Awaitable[int]],
    ) -> None:
        """In the name of ``session``, call ``hear_rows`` with rows of others, ``hear_shown`` with a
        session and what it has shown, ``give_up`` with keys of delegations that others need."""
        if self._peers is None:
            return
        self._session = session

        def hear_row(peer: Peer, fields: Any, body: Body) -> None:
            seq, author, number, absolute = map(int, fields)
            (length,) = _LENGTH.unpack_from(body)
            content = bytes(body[_LENGTH.size :])
            names, values = to_keys(content[:length]), to_keys(content[length:])
            hear_rows([Row(seq, author, number, absolute, names, values)])

        async def serve_recall(peer: Peer, directories: Any, body: Body) -> Answer:
            return Answer(await give_up([keys.delegation(int(ino)) for ino in directories]))

        self._peers.serve("recall", serve_recall)
        self._peers.hear("row", hear_row)
        self._peers.hear("ask", self._hear_ask)
        self._peers.hear("shown", lambda peer, seq, body: hear_shown(peer.session, int(seq)))

    def update(self, hosts: Iterable[PeerAddress]) -> None:
        """These sessions have not ended."""
        if self._peers is not None:
            self._peers.update(self._session, hosts)

    def announce(self, row: Row) -> None:
        """This host has committed a row."""
        if self._peers is None or self._peers.is_alone:
            return
        names, values = of_keys(row.keys), of_keys(row.values)
        if len(names) + len(values) <= MAX_BODY - _LENGTH.size:
            fields = (row.seq, row.session, row.number, row.absolute)
            self._peers.push("row", fields, b"".join((_LENGTH.pack(len(names)), names, values)))

    async def recall(self, session: int, delegations: Iterable[bytes]) -> int:
        """Have a session give these delegations (keys) up: a row number by which it has. Raises
        Unavailable if unknown."""
        name = self._peers.sessions.get(session) if self._peers is not None else None
        if self._peers is None or name is None:
            raise Unavailable(f"session {session} is not there")
        directories = [keys.number(key) for key in delegations]
        answer = await self._peers.call(name, "recall", directories, session=session)
        return int(answer.value)

    def ask(self, seq: int) -> None:
        """Somebody here waits until all have shown ``seq``."""
        if self._peers is not None:
            self._peers.push("ask", seq)

    def note_shown(self, seq: int) -> None:
        """This host has shown the feed up to ``seq``."""
        self._shown = max(self._shown, seq)
        if self._asked and self._peers is not None:
            for host in [host for host, wanted in self._asked.items() if wanted <= self._shown]:
                del self._asked[host]
                self._peers.tell(host, "shown", self._shown)

    def _hear_ask(self, peer: Peer, seq: Any, body: Body) -> None:
        self._asked[peer.name] = max(int(seq), self._asked.get(peer.name, 0))
        self.note_shown(self._shown)
