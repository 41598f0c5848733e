"""Secrets: that of a cluster, the password of its database, which its hosts also know each other
by; and that of clients that may ask a mount for its metrics.

Each is a file with one line of text, that nobody may read but its owner.
"""

import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from aifs.core.errors import StoreError

BYTES_MAX = 1024

FROM_DATABASE = (
    "copy it from the host that serves the database (aifs meta serve prints where it is)"
)


def read_secret(path: str, of: str = "the cluster", source: str = FROM_DATABASE) -> str:
    """Raises StoreError that says what is wrong with the file, and what to do: ``source`` is where
    to get it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise StoreError(
            f"{path}: the secret of {of} cannot be read: {error.strerror}; {source}"
        ) from None
    if mode & 0o077:
        raise StoreError(f"{path}: others may read the secret of {of}: chmod 600 {path}")
    secret = text.decode("utf-8", "replace").strip()
    if not secret or not secret.isprintable() or len(text) > BYTES_MAX:
        raise StoreError(
            f"{path}: is not a secret, which is one line of up to {BYTES_MAX} characters"
        )
    return secret


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
    """Places for connections whose other end has not proved yet whose it is. Anybody may open them,
    so none is refused: when all places are taken one of the address that has most of them gives
    way, a silent one before one that has spoken, the oldest first. So an address keeps no other one
    out, and one that opens connections without end drives out its own. Used from one trio thread.
    """

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
