"""Records of the metadata that are not as they were stored, told by their check values."""

from functools import partial

import trio

from aifs.check import repair
from aifs.check.findings import RECORDS, RECOVERY, Problem
from aifs.meta import keys
from aifs.meta.kv import DamagedRecord, Engine, ReadTransaction

_BATCH = 2048
_LAST = b"\xff" * 512
_MARKS = b"aowuy"
"""Kinds whose keys say all: their values are empty."""


async def find_damaged(engine: Engine) -> dict[bytes, Problem]:
    """The problems by key. Reads all records; an engine that reads damaged ones as something else
    finds none.
    """
    found: dict[bytes, Problem] = {}

    def read(tx: ReadTransaction, start: bytes) -> bytes | None:
        """Returns where to go on; None at the end."""
        key = None
        try:
            for key, _ in tx.range(start, _LAST, _BATCH):
                pass
        except DamagedRecord as error:
            key = error.key
            found[key] = _problem(key, str(error))
        return None if key is None else key + b"\0"

    start: bytes | None = b"\0"
    while start is not None:
        start = await engine.view(read, start)
        await trio.lowlevel.checkpoint()
    return found


def _problem(key: bytes, detail: str) -> Problem:
    fix, stage = None, RECORDS  # what may take its place is for those to say who know the kind
    if key[0] in _MARKS:
        fix, stage = partial(repair.put, key=key, value=b""), RECOVERY
    elif key[:1] == b"x":
        fix = partial(repair.delete, key=key)
    where = f"record {keys.describe(key)}"
    return Problem("damaged-record", where, detail, fix, stage, where)


def is_whole(tx: ReadTransaction, key: bytes) -> bool:
    """Whether the record can be read by now, or is gone."""
    try:
        tx.get(key)
    except DamagedRecord:
        return False
    return True
