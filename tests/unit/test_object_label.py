"""Labels of objects: their bytes."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.data.objects import object_label
from aifs.data.objects.object_label import HINT_MAX, Label
from aifs.layout.striped import Striped

STORE = "00112233-4455-6677-8899-aabbccddeeff"
GOLDEN = (
    "4149464c01010103012004000000010000112233445566778899aabbccddeeff0700000000000000080000000000000039300000000000"
    "00a4810000e803000064000000000057c07e681618050001000300"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2f612f62"
)


def striped(unit: int, servers: list[int], replicas: int, parity: int) -> Striped:
    if parity and len(servers) > parity:
        return Striped(unit, tuple(servers), 1, parity)
    if len(servers) % replicas:
        replicas = 1
    return Striped(unit, tuple(servers), replicas)


layouts = st.builds(
    striped,
    st.integers(1, (1 << 32) - 1),
    st.lists(st.integers(0, 65535), min_size=1, max_size=32, unique=True),
    st.integers(1, 8),
    st.integers(0, 8),
)
u64, u32 = st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1)
labels = st.builds(
    Label,
    u64,
    u64,
    layouts,
    u64,
    u32,
    u32,
    u32,
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.just(b"") | st.binary(min_size=32, max_size=32),
    st.binary(max_size=HINT_MAX),
)


@given(labels, st.uuids(), st.data())
def test_round_trip(label: Label, store: uuid.UUID, data) -> None:
    column = data.draw(st.integers(0, len(label.layout.servers) - 1))
    value = object_label.encode(label, str(store), column)
    assert object_label.decode(value) == (label, str(store), column)


@given(labels, st.data())
def test_damage_is_noticed(label: Label, data) -> None:
    value = bytearray(object_label.encode(label, STORE, 0))
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="label"):
        object_label.decode(bytes(value))


@given(st.binary(max_size=200))
def test_what_is_no_label_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="label"):
        object_label.decode(value)


def test_golden() -> None:
    label = Label(
        7,
        8,
        Striped(65536, (5, 1, 3), 1, 1),
        12345,
        0o100644,
        1000,
        100,
        0x1816687EC0570000,
        bytes(range(32)),
        b"/a/b",
    )
    value = object_label.encode(label, STORE, 1)
    assert value[:-4].hex() == GOLDEN
    assert object_label.decode(value)[0] == label


@given(labels, st.uuids(), u64)
def test_labels_of_burst_copies(label: Label, store: uuid.UUID, copy_id: int) -> None:
    of_copy = label._replace(oid=copy_id, layout=None)
    value = object_label.encode_copy(of_copy, str(store))
    assert len(value) <= 60
    found = object_label.decode_copy(value, str(store), copy_id)
    assert label.path.endswith(found.path)
    assert (found.ino, found.mode, found.uid, found.gid) == (
        label.ino,
        label.mode,
        label.uid,
        label.gid,
    )
    with pytest.raises(ValueError, match="label"):
        object_label.decode_copy(value, str(store), copy_id ^ 1)
    with pytest.raises(ValueError, match="label"):
        object_label.decode_copy(value[:-1], str(store), copy_id)


def test_golden_of_burst_copies() -> None:
    value = object_label.encode_copy(
        Label(7, 8, None, mode=0o100644, uid=1000, gid=100, path=b"/a/b"), STORE
    )
    assert value[:-4].hex() == "b1a4810000e8030000640000000700000000000000" + b"/a/b".hex()
