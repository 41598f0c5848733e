"""Secrets: that of a cluster, the password of its database, which its hosts also know each other
by; and that of clients that may ask a mount for its metrics.

Each is a file with one line of text, that nobody may read but its owner.
"""

import os

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
