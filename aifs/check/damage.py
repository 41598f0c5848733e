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
    start = b"\0"
    while True:
        last, detail = await engine.view(_read, start)
        if last is None:
            return found
        if detail:
            found[last] = _problem(last, detail)
        start = last + b"\0"
        await trio.lowlevel.checkpoint()


def _read(tx: ReadTransaction, start: bytes) -> tuple[bytes | None, str]:
    """The last key of a batch, None at the end; and what is wrong with the record there."""
    key = None
    try:
        for key, _ in tx.range(start, _LAST, _BATCH):
            pass
    except DamagedRecord as error:
        return error.key, str(error)
    return key, ""


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
