"""Places for connections whose other end has not proved yet whose it is. Anybody may open them, so
none is refused: when all places are taken one of the address that has most of them gives way, a
silent one before one that has spoken, the oldest first. So an address keeps no other one out, and
one that opens connections without end drives out its own.
"""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager

import trio

_NETWORK = 64
"""Bits of an address of IPv6: its host may have all addresses that begin with them."""


def source_of(address: str) -> str:
    """The unit that places are counted by: an address, or the network of an address of IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _NETWORK), strict=False))


class Stranger:
    """One connection. ``has_spoken``: set when it has said something that makes sense."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.has_spoken = False
        self.scope = trio.CancelScope()


class Strangers:
    """Used from one trio thread."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._here: dict[str, dict[Stranger, None]] = {}
        """By source, the oldest first."""
        self._taken = 0
        """Places."""

    @contextmanager
    def place(self, source: str) -> Iterator[Stranger]:
        """Of a connection from ``source``, a name that ``source_of`` gives. The block is cancelled,
        and left, when the connection must give way."""
        if self._taken >= self._places:
            most = max(self._here.values(), key=_weight)
            leaving = next((one for one in most if not one.has_spoken), next(iter(most)))
            self._remove(leaving)
            leaving.scope.cancel()
        stranger = Stranger(source)
        self._here.setdefault(source, {})[stranger] = None
        self._taken += 1
        try:
            with stranger.scope:
                yield stranger
        finally:
            self._remove(stranger)

    def _remove(self, stranger: Stranger) -> None:
        of_source = self._here.get(stranger.source, {})
        if stranger in of_source:
            del of_source[stranger]
            self._taken -= 1
            if not of_source:
                del self._here[stranger.source]


def _weight(of_source: dict[Stranger, None]) -> tuple[int, bool]:
    """Of several with as many, one whose first is silent gives way."""
    return len(of_source), not next(iter(of_source)).has_spoken
