"""Places for connections whose other end has not proved yet whose it is. Anybody may open them, so
none is refused: when all places are taken one of the address that has most of them gives way, a
silent one before one that has spoken, the oldest first. So an address keeps no other one out, and
one that opens connections without end drives out its own.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

_NETWORK = 64
"""Bits of an address of IPv6: its host may have all addresses that begin with them."""


def source_of(address: str) -> str:
    """An address, or the network of one of IPv6: what counts as one."""
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
        self._here: list[Stranger] = []
        """The oldest first."""

    @contextmanager
    def place(self, source: str) -> Iterator[Stranger]:
        """Of a connection from ``source``, a name that ``source_of`` gives. The block is cancelled,
        and left, when the connection must give way."""
        if len(self._here) >= self._places:
            counts = Counter(one.source for one in self._here)
            leaving = min(self._here, key=lambda one: (-counts[one.source], one.has_spoken))
            self._here.remove(leaving)
            leaving.scope.cancel()
        stranger = Stranger(source)
        self._here.append(stranger)
        try:
            with stranger.scope:
                yield stranger
        finally:
            if stranger in self._here:
                self._here.remove(stranger)
