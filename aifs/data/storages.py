"""The storage of an address: the path of a directory, or KIND://REST of a bucket."""

import os
from collections.abc import Callable

from aifs.core.errors import StoreError
from aifs.core.names import is_path
from aifs.data.bucket_storage import BucketStorage
from aifs.data.directory_storage import DirectoryStorage
from aifs.data.storage import Storage

KINDS: dict[str, Callable[[str], Storage]] = dict.fromkeys(("s3", "gs", "az"), BucketStorage)
"""Makers of storages that are no directories, by kind. Each takes the whole address."""


def storage_at(address: str) -> Storage:
    """Does no I/O. Raises StoreError if there are none of that kind."""
    if is_path(address):
        return DirectoryStorage(address)
    kind = address.partition("://")[0]
    if kind not in KINDS:
        raise StoreError(
            f"{address}: there are no data servers of kind {kind!r}; name a directory, or "
            "a bucket by s3://, gs:// or az://"
        )
    return KINDS[kind](address)


def below(source: str, address: str) -> str:
    """An address as recorded: a path may be relative to the SOURCE directory."""
    return os.path.join(source, address) if is_path(address) else address
