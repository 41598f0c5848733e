"""Identity markers."""

import json
import re
from dataclasses import replace

import pytest

from aifs.core.errors import StoreError
from aifs.data.marker import Marker, read_marker, write_marker

MARKER = Marker(
    "aifs 2", "5a0cbd2e-4d0b-4f7a-b6b7-0d5f7c5f6a10", "data", 3, "2025-01-01T00:00:00+00:00"
)
FIELDS = json.loads(
    '{"format": "aifs 2", "store": "5a0cbd2e-4d0b-4f7a-b6b7-0d5f7c5f6a10", "role": "data", "id": '
    "3, "
    '"created": "2025-01-01T00:00:00+00:00"}'
)


def test_the_file_is_as_documented(tmp_path):
    write_marker(str(tmp_path), MARKER)
    assert [entry.name for entry in tmp_path.iterdir()] == [".aifs"]
    content = (tmp_path / ".aifs").read_bytes()
    assert content.endswith(b"}\n")
    assert json.loads(content) == FIELDS
    assert read_marker(str(tmp_path)) == MARKER


def test_the_database_of_a_store_is_named(tmp_path):
    shared = replace(MARKER, database="postgresql://aifs@10.0.0.1:5432/aifs")
    write_marker(str(tmp_path), shared)
    assert json.loads((tmp_path / ".aifs").read_bytes()) == FIELDS | {"database": shared.database}
    assert read_marker(str(tmp_path)) == shared


def test_a_marker_can_be_replaced(tmp_path):
    write_marker(str(tmp_path), MARKER)
    other = Marker("aifs 2", "another", "meta", 0, "2025-01-02T00:00:00+00:00")
    write_marker(str(tmp_path), other)
    assert read_marker(str(tmp_path)) == other


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "damaged marker"),
        (b"\xff\xfe", "damaged marker"),
        (b"[]", "damaged marker"),
        (b"{}", "damaged marker"),
        (json.dumps(FIELDS | {"extra": 1}).encode(), "damaged marker"),
        (json.dumps(FIELDS | {"role": "tape"}).encode(), "damaged marker"),
        (json.dumps(FIELDS | {"id": "3"}).encode(), "damaged marker"),
        (json.dumps(FIELDS | {"store": None}).encode(), "damaged marker"),
        (json.dumps(FIELDS | {"database": 1}).encode(), "damaged marker"),
        (json.dumps(FIELDS | {"format": "aifs 1"}).encode(), "format 'aifs 1', but this version"),
        (json.dumps(FIELDS | {"format": 1}).encode(), "an unreleased version of AIFS made"),
    ],
)
def test_a_damaged_marker_is_refused_by_name(tmp_path, content, complaint):
    (tmp_path / ".aifs").write_bytes(content)
    with pytest.raises(StoreError, match=f"^{re.escape(str(tmp_path))}.*{complaint}"):
        read_marker(str(tmp_path))


def test_missing_directories_and_markers_are_told_apart(tmp_path):
    with pytest.raises(
        StoreError, match=f"^{re.escape(str(tmp_path))}: not a directory of a store"
    ):
        read_marker(str(tmp_path))
    with pytest.raises(
        StoreError, match=f"^{re.escape(str(tmp_path))}/gone: there is no such directory"
    ):
        read_marker(f"{tmp_path}/gone")
    (tmp_path / ".aifs").mkdir()
    with pytest.raises(StoreError, match="cannot be read: Is a directory"):
        read_marker(str(tmp_path))
