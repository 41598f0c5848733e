"""Chunks that are looked at together have the digests that each has alone."""

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from aifs.core import files
from aifs.core.errors import Unavailable
from aifs.saves import digests
from aifs.saves.digests import ZEROS, HashSource, digest

PART = 16


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_PART_MAX", PART)
    monkeypatch.setattr(digests, "_NOTHING", memoryview(bytearray(PART)))
    monkeypatch.setattr(digests, "_local", threading.local())


class Device:
    """Files in memory; ``reads``: number and offset of each read."""

    name = "burst directory 0"
    giving = SimpleNamespace(measure=lambda count, function, *args: function(*args))

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = contents
        self.reads: list[tuple[int, int]] = []

    def read(self, key: tuple[int, int], fd: int, part: memoryview, offset: int) -> int:
        self.reads.append((fd, offset))
        data = self.contents[fd][offset : offset + len(part)]
        part[: len(data)] = data
        return len(data)

    def where(self, key: tuple[int, int]) -> str:
        return str(key[1])

    def call(self, op, where, function, *args):
        return function(*args)


def sources(device: Device, sparse: bool = False) -> list[HashSource]:
    return [
        HashSource(device, (0, number), number, sparse) for number in range(len(device.contents))
    ]


def alone(data: bytes) -> bytes:
    return blake3(data).digest() if any(data) else ZEROS


@st.composite
def likenesses(draw: st.DrawFn) -> list[bytes]:
    """Chunks of one length that share beginnings, parts and ends."""
    parts = draw(st.integers(0, 5))
    rest = draw(st.integers(1, PART))
    one = st.sampled_from(
        [bytes(PART), b"a" * PART, b"a" * (PART - 1) + b"b", b"b" + b"a" * (PART - 1)]
    )
    chunk = st.lists(one, min_size=parts + 1, max_size=parts + 1).map(
        lambda some: b"".join(some)[: parts * PART + rest]
    )
    return draw(st.lists(chunk, min_size=1, max_size=6))


@pytest.mark.sweep
@given(likenesses(), st.data())
def test_digests_are_those_of_each_alone(contents: list[bytes], data: st.DataObject) -> None:
    shifts = [data.draw(st.integers(0, 3)) for _ in contents]
    device = Device(
        [b"x" * shift + content for shift, content in zip(shifts, contents, strict=True)]
    )
    found = digest(len(contents[0]), list(zip(sources(device), shifts, strict=True)))
    assert found.digests == [alone(content) for content in contents]
    assert len(set(device.reads)) == len(device.reads)  # every byte is read once
    kinds = len(set(contents))
    assert found.compared <= (len(contents) - 1) * len(contents[0])
    if kinds == 1:
        assert found.compared == (len(contents) - 1) * len(contents[0])


def test_what_is_equal_up_to_some_part_is_hashed_once_up_to_there() -> None:
    first = bytes(PART) + b"a" * 3 * PART
    device = Device([first, first[:-1] + b"b", first])
    found = digest(4 * PART, [(source, 0) for source in sources(device)])
    assert found.digests == [alone(content) for content in device.contents]
    assert found.compared == 3 * 2 * PART + PART


def test_one_that_cannot_be_read_does_not_spoil_it_for_the_others() -> None:
    """Also where the others have been compared with it."""
    content = os.urandom(3 * PART)
    device = Device([content[: 2 * PART + 1], content, content])
    short, *whole = digest(3 * PART, [(source, 0) for source in sources(device)]).digests
    assert isinstance(short, Unavailable) and "0 ends before" in str(short)
    assert whole == [alone(content)] * 2


def test_one_that_changes_meanwhile_does_not_spoil_it_for_the_others() -> None:
    content = os.urandom(4 * PART)

    class Changing(Device):
        def read(self, key, fd, part, offset):
            if (fd, offset) == (0, 2 * PART):
                self.contents[0] = b"x" * len(content)
            return super().read(key, fd, part, offset)

    device = Changing([content] * 3)
    found = digest(len(content), [(source, 0) for source in sources(device)]).digests
    assert found[1:] == [alone(content)] * 2
    # Of what was read, whatever that is worth.
    assert found[0] == alone(content[: 2 * PART] + b"x" * 2 * PART)


def test_holes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def data_ranges(fd: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
        return [(offset, length)] if any(device.contents[fd][offset : offset + length]) else []

    monkeypatch.setattr(files, "data_ranges", data_ranges)
    device = Device([bytes(PART), b"a" * PART])
    places = [(source, 0) for source in sources(device, sparse=True)]
    assert digest(PART, places).digests == [ZEROS, alone(b"a" * PART)]
    assert digest(PART // 2, places[:1]).digests == [ZEROS]
    assert device.reads == [(1, 0)]
