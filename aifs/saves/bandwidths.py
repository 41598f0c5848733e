"""How fast burst devices give bytes and data servers take them, as plans are made with: configured,
else measured.
"""

from collections.abc import Iterable

from aifs.core.config import Config
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.store.directories import same_directories

_UNKNOWN = 1 << 30  # only ratios matter, as long as nothing else is known
# by what fraction a rate has to differ from the one in use: measured ones are never the same twice
_NOTICEABLE = 0.35


class Bandwidths:
    """Bytes per second of each device. Used from one trio thread."""

    def __init__(self, config: Config, servers: Servers) -> None:
        self._servers = servers
        self._of_burst = config.burst.bandwidth
        self._configured = {place.path: place.bandwidth for place in config.places}
        same = same_directories(self._configured, [server.address for server in servers.capacity()])
        self._configured |= {same[path]: self._configured[path] for path in same}
        self._used: dict[int, int] = {}

    def of_burst(self, devices: Iterable[int]) -> dict[int, int]:
        """By number of the burst directory."""
        measured = {number: self._servers[number].giving.rate for number in devices}
        return {number: self._of_burst or rate for number, rate in self._steady(measured).items()}

    def of_servers(self) -> dict[int, int]:
        """By number of the data server."""
        servers = self._servers.capacity()
        measured = self._steady({server.id: server.writing.rate for server in servers})
        return {server.id: self._said_of(server) or measured[server.id] for server in servers}

    def free(self) -> dict[int, int | None]:
        """Bytes that each data server has left, as last seen."""
        return {
            server.id: server.seen.available if server.seen else None
            for server in self._servers.capacity()
        }

    def _said_of(self, server: DataServer) -> int:
        return self._configured.get(server.address, 0)

    def _steady(self, measured: dict[int, int]) -> dict[int, int]:
        """One that has not been measured is taken for as fast as the fastest. Those that hardly
        differ are taken for equal.
        """
        fastest = max(measured.values(), default=0) or _UNKNOWN
        for number, rate in measured.items():
            rate = rate or fastest
            if rate > fastest * (1 - _NOTICEABLE):
                rate = fastest
            used = self._used.get(number, 0)
            if abs(rate - used) > _NOTICEABLE * used:
                self._used[number] = rate
        return {number: self._used[number] for number in measured}
