"""Secrets: a cluster's, its database's password, by which hosts know each other; and that of
clients of a mount's metrics. Each is a file with one line, readable by its owner alone."""

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
    """Raises StoreError with the file's fault, and advice: ``source``, where to get it."""
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
    """Places for connections not yet authenticated. None is refused: without free places, one of
    the address with most gives way, silent before speaking ones, the oldest first. So an address
    drives out only its own. Used from one trio thread."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._here: dict[str, dict[Stranger, None]] = {}
        """By source, the oldest first."""
        self._taken = 0
        """Places."""

    @contextmanager
    def place(self, source: str) -> Iterator[Stranger]:
        """For a connection from ``source`` (``source_of``). The block is cancelled, and left, to
        give way."""
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
    """Of equal counts, one whose first is silent gives way."""
    return len(of_source), not next(iter(of_source)).has_spoken
