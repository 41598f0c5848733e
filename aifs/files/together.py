"""Hosts that read the same large file at the same time pass its bytes on (docs/design/homes.md).

A host that begins asks the file's *meeting place* for other readers, which hear of it. Each MiB has
a *fetcher* among them, with the largest weight of host and MiB: it asks the servers, others ask it.
Any message may be lost, and waits are short.

No two hosts wait for each other: a host asked to load a MiB asks only one of larger weight to load
it. From others, which may have read it before, it takes only what is there.
"""

from typing import Any

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.data.checks import HASHED
from aifs.data.objects.together import Giver, find_kept
from aifs.data.reading.patterns import WINDOW_MAX
from aifs.data.reading.read_cache import ReadCache
from aifs.data.storage import Key
from aifs.layout.placement import weight
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Peer

_JOIN, _LEAVE, _MET, _GIVE = "together.join", "together.leave", "together.met", "together.give"

_WAIT_S = 2.0
"""Longest wait for a host, which then counts as no reader. On a slow network, what several ask
ahead may take some tenths of a second."""

_MEET_S = 0.1
"""How long a file's meeting place is waited for."""

_UNKNOWN = 1 << 63
"""How far a host has come that has not said so yet: it may have all of the file."""


class Together:
    """What this host reads together with others. Used from one trio thread."""

    def __init__(self, cache: ReadCache, peers: Peers) -> None:
        self._cache = cache
        self._peers = peers
        self._readings: dict[Key, _Reading] = {}
        """What is read here, by the file's objects."""
        self._readers: dict[Key, set[str]] = {}
        """The hosts that read what has its meeting place here."""
        self.received_bytes = 0
        """That others have given since the mount."""
        self.given_bytes = 0
        """That others were given."""
        peers.serve(_GIVE, self._give)
        peers.serve(_JOIN, self._serve_join)
        peers.hear(_LEAVE, self._hear_leave)
        peers.hear(_MET, self._hear_met)

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may read, too."""
        return self._peers.is_shared

    @property
    def own(self) -> str:
        """This host's name."""
        return self._peers.sessions[self._peers.session]

    def join(self, key: Key, giver: Giver) -> "_Reading":
        """See objects.together.Join."""
        reading = self._readings.get(key)
        if reading is None:
            reading = self._readings[key] = _Reading(self, self._peers, key)
        reading.givers.append(giver)
        return reading

    async def meet(self, key: Key) -> list[str]:
        """The hosts that read the file, too, which hear of us; none if nobody says so soon."""
        host = self._meeting_place(key)
        if host == self.own:
            return self._joined(key, host)
        if host not in self._peers.connected:
            return []
        try:
            answer = await self._peers.call(host, _JOIN, [*key], timeout_s=_MEET_S)
        except FsError:
            return []
        return list(answer.value)

    def leave(self, key: Key) -> None:
        """The file is read here no more."""
        del self._readings[key]
        self._tell(self._meeting_place(key), _LEAVE, [*key])

    def _meeting_place(self, key: Key) -> str:
        return max(self._peers.sessions.values(), key=lambda name: weight(name, key[1]))

    def _tell(self, host: str, name: str, arguments: list[Any]) -> None:
        own = self.own
        if host != own:
            self._peers.tell(host, name, arguments)
        else:
            hear = {_LEAVE: self._hear_leave, _MET: self._hear_met}[name]
            hear(Peer("", own, self._peers.session), arguments, b"")

    # --- what others tell; whatever they say, it does no harm ---

    async def _serve_join(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Add a reader of a file that meets here, by [inode number, oid]. Returns its other
        readers."""
        ino, oid = arguments
        return Answer(self._joined((ino, oid), asker.name))

    def _joined(self, key: Key, name: str) -> list[str]:
        readers = self._readers.setdefault(key, set())
        readers &= set(self._peers.sessions.values())
        others = sorted(readers - {name})
        for other in others:
            self._tell(other, _MET, [*key, name, 0, True])
        readers.add(name)
        return others

    def _hear_leave(self, peer: Peer, arguments: Any, body: Body) -> None:
        """It reads it no more."""
        ino, oid = arguments
        readers = self._readers.get((ino, oid), set())
        readers.discard(peer.name)
        if not readers:
            self._readers.pop((ino, oid), None)

    def _hear_met(self, peer: Peer, arguments: Any, body: Body) -> None:
        """Note a reader of the file, by [inode number, oid, its name, its position, whether to tell
        it of us]."""
        ino, oid, name, end, is_new = arguments
        reading = self._readings.get((ino, oid))
        if reading is not None:
            reading.hosts[name] = end
            if is_new:
                self._tell(name, _MET, [ino, oid, self.own, reading.end_of_known, False])

    async def _give(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """A MiB of a file, by [inode number, oid, offset, whether to load it]; empty if it is not
        here. And whether the file is read here. Raises Unavailable."""
        ino, oid, offset, load = arguments
        reading = self._readings.get((ino, oid))
        if reading is not None:
            data = await reading.givers[0].give(offset, load)
        else:
            data = find_kept(self._cache, (ino, oid), offset)
        is_read = reading is not None
        if data is None:
            return Answer(is_read)
        self.given_bytes += len(data)
        return Answer(is_read, data)

    def status(self) -> dict[str, int]:
        """What ``aifs status`` shows."""
        return {
            "files": sum(not reading.is_alone for reading in self._readings.values()),
            "received_bytes": self.received_bytes,
            "given_bytes": self.given_bytes,
        }


class _Reading:
    """A file that is read here. See objects.together.Others."""

    def __init__(self, together: Together, peers: Peers, key: Key) -> None:
        self._together = together
        self._peers = peers
        self._key = key
        self._own = together.own
        self._met: trio.Event | None = None
        """Set when it is known who else reads it; None: nobody has been asked."""
        self._end = 0
        """Up to where it has been read here."""
        self.givers: list[Giver] = []
        """What reads it here; any of them can give."""
        self.hosts: dict[str, int] = {}
        """The others that read it, and up to where each may have had it when we met."""

    @property
    def is_alone(self) -> bool:
        return not self.hosts

    @property
    def end_of_known(self) -> int:
        """Bytes from there on are not here: nothing further ahead has been fetched."""
        return self._end + WINDOW_MAX

    async def meet(self) -> None:
        if self._met is None:
            self._met = trio.Event()
            try:
                for name in await self._together.meet(self._key):
                    self.hosts.setdefault(name, _UNKNOWN)  # unless it has told us
            finally:
                self._met.set()
        elif not self._met.is_set():
            await self._met.wait()

    def read_to(self, end: int) -> None:
        self._end = max(self._end, end)

    async def fetch(self, offset: int, part: memoryview) -> bool:
        while self.hosts:
            host, load = self._whom_to_ask(offset)
            if not host:
                return False
            asked = [*self._key, offset, load]
            try:
                answer = await self._peers.call(host, _GIVE, asked, into=part, timeout_s=_WAIT_S)
            except Unavailable:
                self.hosts.pop(host, None)
                continue
            except FsError:  # such as Busy: it has too much to do
                return False
            data = answer.body
            assert isinstance(data, bytes | bytearray | memoryview)
            if len(data) == len(part):
                if memoryview(data).obj is not part.obj:
                    part[:] = data
                self._together.received_bytes += len(data)
                return True
            if answer.value is not False:
                return False
            self.hosts.pop(host, None)  # it reads the file no more
        return False

    def _whom_to_ask(self, offset: int) -> tuple[str, bool]:
        """The host for a MiB, and whether it loads it; '': the servers."""
        own, number = self._own, offset // HASHED
        host = max([own, *self.hosts], key=lambda name: weight(name, number))
        if host != own:
            return host, True
        host = max(self.hosts, key=lambda name: self.hosts[name])
        return (host if offset < self.hosts[host] else ""), False

    def end(self, giver: Giver) -> None:
        self.givers.remove(giver)
        if not self.givers:
            self._together.leave(self._key)
