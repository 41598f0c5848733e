"""The journal: bytes on disk, what replay takes for a record, appends that fail."""

import errno
import os
import struct
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import StoreError
from aifs.meta import journal
from aifs.meta.journal import FIRST_RECORD, Journal, changes, decode, encode
from tests.support.data_servers import failing

SALT = 0x01020304
WRITES = st.dictionaries(
    st.binary(min_size=1, max_size=511), st.none() | st.binary(max_size=300), min_size=1, max_size=5
)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 64 << 10)


def replayed(directory, applied=0):
    opened = Journal.open(str(directory))
    try:
        return list(opened.replay(applied))
    finally:
        opened.close()


def test_golden_record():
    record = encode(7, {b"key": b"value", b"gone": None}, SALT)
    assert record.hex() == (
        "180000003f1bd78f07000000000000000300050000006b657976616c75650400ffffffff676f6e65"
    )


def test_golden_segment_header(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(1, count + 1)))
    Journal.create(str(tmp_path)).close()
    for name in ("journal.0", "journal.1"):
        content = (tmp_path / name).read_bytes()
        assert content[:20].hex() == "414946536a726e6c0100000001020304b3aa9f97"
        assert content[20:] == bytes(journal.SEGMENT_BYTES - 20)


@pytest.mark.sweep
@given(st.lists(WRITES, max_size=5), st.integers(1, 1 << 60), st.binary(max_size=40))
def test_decode_returns_what_was_encoded_up_to_the_end(batches, first, tail):
    records = [encode(seq, batch, SALT) for seq, batch in enumerate(batches, first)]
    data = bytes(FIRST_RECORD) + b"".join(records) + tail
    assert [(seq, changes(payload)) for seq, payload in decode(data, SALT)] == list(
        enumerate(batches, first)
    )


@given(st.data())
def test_a_damaged_byte_ends_the_journal_before_its_record(data):
    records = [encode(seq, {b"k": bytes([seq]) * seq}, SALT) for seq in range(1, 6)]
    victim = data.draw(st.integers(0, 4))
    broken = bytearray(records[victim])
    broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    content = bytes(FIRST_RECORD) + b"".join([*records[:victim], broken, *records[victim + 1 :]])
    assert [seq for seq, _ in decode(content, SALT)] == list(range(1, victim + 1))


def test_a_record_made_with_another_salt_is_none():
    assert not list(decode(bytes(FIRST_RECORD) + encode(1, {b"k": b"v"}, SALT + 1), SALT))


def test_replay_follows_the_records_through_both_segments(tmp_path):
    log = Journal.create(str(tmp_path))
    for seq in range(1, 10):
        log.append(seq, {b"k%d" % seq: b"v"})
        if seq in (3, 6):  # 1-3 are overwritten by 7-9
            log.switch(seq)
    log.close()
    assert [seq for seq, _ in replayed(tmp_path, applied=3)] == [4, 5, 6, 7, 8, 9]
    assert [seq for seq, _ in replayed(tmp_path, applied=8)] == [9]
    assert replayed(tmp_path, applied=9) == []


def test_records_of_the_last_lap_behind_the_end_are_not_replayed(tmp_path):
    log = Journal.create(str(tmp_path))
    for seq in range(1, 6):
        log.append(seq, {b"k": b"%d" % seq})
    log.switch(5)
    log.switch(5)
    log.append(6, {b"k": b"6"})  # as long as record 1: record 2 stands right behind it
    log.close()
    assert [seq for seq, _ in replayed(tmp_path, applied=5)] == [6]


def test_nothing_is_replayed_after_a_gap_between_the_segments(tmp_path):
    log = Journal.create(str(tmp_path))
    log.append(1, {b"k": b"1"})
    log.append(2, {b"k": b"2"})
    log.switch(2)
    log.append(3, {b"k": b"3"})
    log.close()
    length = len(encode(1, {b"k": b"1"}, 0))
    with open(tmp_path / "journal.0", "r+b") as file:
        file.seek(FIRST_RECORD + length)
        file.write(bytes(length))
    assert [seq for seq, _ in replayed(tmp_path)] == [1]


@pytest.mark.parametrize("written", [0, 1, 20, 600])
def test_after_a_failed_append_the_next_takes_its_place(tmp_path, monkeypatch, written):
    log = Journal.create(str(tmp_path))
    log.append(1, {b"a": b"1"})
    used = log.used_bytes
    pwrite = os.pwrite
    calls = iter([written])

    def short(fd, data, offset):
        for count in calls:
            if count:
                return pwrite(fd, data[:count], offset)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", short)
        with pytest.raises(OSError, match="full"):
            log.append(2, {b"b": b"x" * 1000})
    assert log.used_bytes == used
    assert [seq for seq, _ in replayed(tmp_path)] == [1]
    log.append(2, {b"c": b"3"})
    log.close()
    assert replayed(tmp_path) == [(1, {b"a": b"1"}), (2, {b"c": b"3"})]


def test_a_segment_grows_beyond_its_reserve_and_shrinks_when_it_is_free(tmp_path):
    log = Journal.create(str(tmp_path))
    for seq in range(1, 201):
        log.append(seq, {b"k": b"x" * 1000})
    assert (tmp_path / "journal.0").stat().st_size > 200_000
    assert len(replayed(tmp_path)) == 200
    log.switch(200)
    log.cut()
    log.close()
    assert (tmp_path / "journal.0").stat().st_size == journal.SEGMENT_BYTES


@pytest.mark.parametrize("size", [100, 5000])
def test_records_around_the_end_of_the_first_look_are_read(tmp_path, monkeypatch, size):
    log = Journal.create(str(tmp_path))
    seqs = range(1, 12)
    for seq in seqs:
        log.append(seq, {b"k": b"x" * size})
    log.close()
    end = FIRST_RECORD + len(seqs) * (len(encode(1, {b"k": b"x" * size}, SALT)))
    for first_look in (FIRST_RECORD, FIRST_RECORD + 20, end - 1, end, end + 15, end + 16):
        monkeypatch.setattr(journal, "_FIRST_LOOK", first_look)
        assert [seq for seq, _ in replayed(tmp_path)] == list(seqs), first_look


def test_unsynced_names_the_old_segment_until_it_is_durable(tmp_path):
    log = Journal.create(str(tmp_path))
    log.append(1, {b"k": b"1"})
    first = log.unsynced(0)
    log.switch(1)
    both = log.unsynced(0)
    second = log.unsynced(1)
    log.close()
    assert len(first) == len(second) == 1
    assert both == first + second and first != second


def test_the_reserve_is_allocated(tmp_path):
    Journal.create(str(tmp_path)).close()
    assert (tmp_path / "journal.0").stat().st_blocks * 512 >= journal.SEGMENT_BYTES


def header(version=1, magic=b"AIFSjrnl"):
    head = struct.pack("<8sII", magic, version, SALT)
    return head + struct.pack("<I", crc32(head))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing"),
        (b"", "not a metadata journal"),
        (b"x" * 5000, "not a metadata journal"),
        (header(version=2), "format 2"),
        (header(magic=b"other***"), "journal format"),
    ],
)
def test_a_wrong_segment_is_refused_by_name(tmp_path, content, message):
    Journal.create(str(tmp_path)).close()
    path = tmp_path / "journal.1"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=f"journal.1: .*{message}"):
        Journal.open(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_holds_records(tmp_path):
    assert not Journal.holds_records(str(tmp_path))
    log = Journal.create(str(tmp_path))
    assert not Journal.holds_records(str(tmp_path))
    log.append(1, {b"k": b"v"})
    log.close()
    assert Journal.holds_records(str(tmp_path))


def test_nothing_of_a_journal_that_cannot_be_made_stays_open(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    full = failing("allocate", str(tmp_path / "journal.1"), errno.ENOSPC)
    with full, pytest.raises(OSError, match="No space left"):
        Journal.create(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == descriptors
