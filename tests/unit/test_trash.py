"""Records of the trash, and rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from aifs.core.errors import Invalid, Unavailable
from aifs.core.upkeep import Upkeep
from aifs.meta import keys, trash
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine
from aifs.meta.trash import Entry
from aifs.upkeep.trash_rules import TrashRules
from tests.support.memory_engine import MemoryEngine

U64 = some.integers(0, (1 << 64) - 1)
I64 = some.integers(-(1 << 63), (1 << 63) - 1)
UNTIL = some.integers(0, (1 << 63) - 1)
NAMES = some.binary(min_size=1, max_size=255)
ENTRIES = some.builds(
    Entry, U64, U64, NAMES, I64, UNTIL, some.integers(0, (1 << 32) - 1), I64, some.booleans()
)
ENTRY = Entry(0x102, 0x304, b"name", 5, 6, 7, -1, True)


def test_golden_records() -> None:
    assert keys.trash_rule(0x102) == b"R" + bytes(6) + b"\1\2"
    assert ENTRY.key == b"T" + bytes(6) + b"\1\2" + bytes(6) + b"\3\4"
    assert keys.turn(6, 0x304) == b"U" + bytes(7) + b"\6" + bytes(6) + b"\3\4"
    assert ENTRY.encode() == (
        b"\1\1" + b"\5" + bytes(7) + b"\6" + bytes(7) + b"\7\0\0\0" + b"\xff" * 8 + b"name"
    )
    assert trash.encode_rule(1) == b"\1\1" + bytes(7)
    assert trash.encode_turn(0x102) == b"\2\1" + bytes(6)


@given(ENTRIES)
def test_entries_come_back(entry: Entry) -> None:
    assert trash.decode_entry(entry.key, entry.encode()) == entry
    turn = keys.turn(entry.until_ns, entry.ino)
    assert trash.decode_turn(turn, trash.encode_turn(entry.parent)) == entry.key


@given(U64)
def test_rules_come_back(period_ns: int) -> None:
    assert trash.decode_rule(trash.encode_rule(period_ns)) == period_ns


@pytest.mark.parametrize(
    "record", [b"", b"\1", b"\2" + ENTRY.encode()[1:]], ids=["empty", "short", "later format"]
)
def test_damaged_records_are_refused(record: bytes) -> None:
    with pytest.raises(Unavailable):
        trash.decode_entry(ENTRY.key, record)
    with pytest.raises(Unavailable):
        trash.decode_rule(record[:9] if len(record) < 9 else b"\2" + bytes(8))
    with pytest.raises(Unavailable):
        trash.decode_turn(keys.turn(1, 2), record)


@pytest.mark.parametrize("text", ["never", "-1d", "0s", "20y", "4000d"])
async def test_wrong_rules_are_refused(text: str) -> None:
    engine: Engine = MemoryEngine()
    with pytest.raises(Invalid, match="trash"):
        await TrashRules(engine, Upkeep(), 0).set(ROOT_INO, text)
