"""Identity markers: the file ``.aifs`` in every directory of a store. A directory without the right
marker (an unmounted export, a swapped disk) is never written to.

One JSON object with ``format`` ("aifs 2"), ``store`` (UUID), ``role`` ("meta", "replica", "data" or
"burst"), ``id`` (number within its role) and ``created`` (ISO 8601, UTC), ended by a newline. Of
several hosts, each metadata directory is a "replica", and all directories name the ``database``
with the metadata, which alone knows the hosts.
"""

import json
import os
from dataclasses import asdict, dataclass
from typing import NamedTuple

from aifs.core import files
from aifs.core.errors import StoreError

NAME = ".aifs"
FORMAT = "aifs 2"
"""Of stores. Before the first release it was a number, from which these stores are told."""
ROLES = ("meta", "replica", "data", "burst")


class Identity(NamedTuple):
    """Whose storage it is, as its marker says."""

    store: str
    """UUID."""
    role: str
    """'data' or 'burst'."""
    id: int
    """Number within the role."""


@dataclass(frozen=True, slots=True)
class Marker:
    format: str
    """FORMAT."""
    store: str
    """UUID."""
    role: str
    """One of ROLES."""
    id: int
    """Number within the role."""
    created: str
    """ISO 8601, UTC."""
    database: str = ""
    """The url of the database that had the metadata when it was written; "": none."""


def write_marker(directory: str, marker: Marker) -> None:
    """Put ``marker`` into the existing ``directory``; durable on return. Blocks. Raises OSError."""
    files.replace_file(os.path.join(directory, NAME), encode_marker(marker))


def encode_marker(marker: Marker) -> bytes:
    fields = asdict(marker)
    if not marker.database:
        del fields["database"]
    return json.dumps(fields).encode() + b"\n"


def read_marker(directory: str) -> Marker:
    """The marker of ``directory``. Blocks. Raises StoreError, naming directory and fault."""
    path = os.path.join(directory, NAME)
    try:
        content = files.read_file(path)
    except OSError as error:
        raise StoreError(f"{directory}: its marker cannot be read: {error.strerror}") from error
    if content is None:
        if not os.path.isdir(directory):
            raise StoreError(f"{directory}: there is no such directory; is its filesystem mounted?")
        raise StoreError(
            f"{directory}: not a directory of a store (it has no marker {NAME}); is its filesystem "
            "mounted?"
        )
    return decode_marker(content, path)


def decode_marker(content: bytes, path: str) -> Marker:
    """``path``: where it is, for messages. Raises StoreError."""
    try:
        marker = Marker(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path}: damaged marker; restore it from another copy of the directory"
        ) from error
    if type(marker.format) is int:
        raise StoreError(
            f"{path}: of a store that an unreleased version of AIFS made, which alone can read it: "
            "copy its files out with that version, and make a new store"
        )
    if marker.format != FORMAT:
        raise StoreError(
            f"{path}: format {marker.format!r}, but this version knows {FORMAT!r} alone"
        )
    kinds = type(marker.store), type(marker.id), type(marker.database)
    if marker.role not in ROLES or kinds != (str, int, str):
        raise StoreError(f"{path}: damaged marker; restore it from another copy of the directory")
    return marker


def check_identity(address: str, marker: Marker, identity: Identity) -> None:
    """Raises StoreError if it is the marker of something else."""
    if (marker.store, marker.role, marker.id) != identity:
        raise StoreError(
            f"{address}: its marker says {marker.role} {marker.id} of store {marker.store}, not "
            f"{identity.role} {identity.id} of store {identity.store}; put the right directory "
            "there"
        )
