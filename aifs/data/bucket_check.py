"""Checks of a bucket for ``aifs doctor``: access, rights, clock, speed."""

import os
import time
from collections.abc import Iterator
from itertools import pairwise

from aifs.core.errors import StoreError
from aifs.data.bucket import PART, Bucket
from aifs.data.bucket_storage import require_conditions
from aifs.data.naming import PROBE

_CLOCK_S = 60.0
"""S3 refuses requests of clocks that differ by 15 minutes."""

_SLOW = 10
"""MiB per second, of one upload or download, that are reported."""


def check_bucket(address: str) -> Iterator[tuple[str, str, str]]:
    """Name, finding and advice ("": nothing is wrong) of each check, up to the first error. An
    object of two parts is put, read and deleted."""
    name = f"bucket {address.partition('?')[0]}"
    try:
        bucket = Bucket(address)
        next(bucket.pages("", size=1), None)
        require_conditions(bucket)
        try:
            took_s, ahead_s = _move(bucket)
        finally:
            bucket.delete([PROBE])
    except (OSError, StoreError) as error:
        yield name, str(error), "see there"
        return
    yield name, "objects can be listed, put, also on conditions, read and deleted", ""
    fix = "have the clock of this host set by NTP: the store refuses requests of wrong clocks"
    off = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} that of the bucket"
    yield f"clock of {name}", off, fix if abs(ahead_s) > _CLOCK_S else ""
    rates = [2 * PART / seconds / (1 << 20) for seconds in took_s]
    fix = "is the bucket in a region far away, or the network busy? Drains and reads wait for it"
    moved = "one upload {:.0f} MiB/s, one download {:.0f} MiB/s".format(*rates)
    yield f"speed of {name}", moved, fix if min(rates) < _SLOW else ""


def _move(bucket: Bucket) -> tuple[list[float], float]:
    """Seconds of an upload and a download, and how far our clock is ahead (s). Raises OSError."""
    data, buffer = os.urandom(2 * PART), bytearray(2 * PART)
    times_s = [time.monotonic()]
    with bucket.upload(PROBE) as upload:
        upload.write(data)
    times_s.append(time.monotonic())
    now_s = time.time()
    bucket.read_into(PROBE, memoryview(buffer), 0)
    times_s.append(time.monotonic())
    found = bucket.head(PROBE)
    if buffer != data or found is None:
        raise StoreError(f"{bucket.where(PROBE)}: does not read as it was put")
    return [after - before for before, after in pairwise(times_s)], now_s - found.modified_s
