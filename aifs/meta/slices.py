"""Walking a range of records, a slice of it in each view, so that no view takes long."""

from aifs.meta.kv import ReadTransaction

SLICE = 512
"""Records that are looked at in one go, where each takes microseconds."""


def read_slice(
    tx: ReadTransaction, start: bytes, end: bytes, limit: int = 0
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The first ``limit`` records (0: SLICE) with start <= key < end, and where the next slice
    starts; b"" if there is none.
    """
    limit = limit or SLICE
    records = list(tx.range(start, end, limit))
    return records, records[-1][0] + b"\0" if len(records) == limit else b""
