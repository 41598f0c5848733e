"""Damages to a store, each with what fsck finds of it; the store that is damaged, as a fixture."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aifs.check.findings import FsckReport
from aifs.data import chunk_codec
from aifs.meta import journal, shared
from aifs.meta.shared import Shared
from tests.support.damaged import COMMON, DamagedStore

Do = Callable[[DamagedStore], Any]
Found = list[tuple[str, str]]


@dataclass
class Damage:
    """What to do to a store, the findings (kind, where), and where paths are after the repair
    (None: gone).

    ``{/path}`` stands for an inode number, ``{server N}`` for a server's directory.
    """

    do: Do
    found: Found
    moves: dict[str, str | None]

    def expected(self, store: DamagedStore) -> Found:
        return sorted((kind, fill(store, where)) for kind, where in self.found)


class Damages(dict[str, Damage]):
    """By name. A finding is written as its kind and where it is, with a space between."""

    def add(
        self, name: str, do: Do, *found: str, moves: dict[str, str | None] | None = None
    ) -> None:
        kinds = [(kind, where) for kind, _, where in (each.partition(" ") for each in found)]
        self[name] = Damage(do, kinds, moves or {})

    def of(self, *found: str, **more: dict[str, str | None]) -> Callable[[Do], None]:
        """Add the decorated function."""
        return lambda do: self.add(do.__name__, do, *found, **more)


def changed(path: str, **fields: Any) -> Do:
    """Set fields of the record of an inode."""
    return lambda store: store.change(path, **fields)


def put_at(path: str, key: Callable[[int], bytes], value: bytes = b"") -> Do:
    """Put a record with the key of an inode number."""
    return lambda store: store.put(key(store.ino[path]), value)


def put(key: bytes, value: bytes = b"") -> Do:
    return lambda store: store.put(key, value)


def fill(store: DamagedStore, text: str) -> str:
    """*text* with the numbers and directories of this store."""
    for path, ino in store.ino.items():
        text = text.replace(f"{{{path}}}", str(ino))
    for number, path in enumerate(store.config.servers):
        text = text.replace(f"{{server {number}}}", path)
    if "{shared container}" in text:
        text = text.replace("{shared container}", str(store.shared_container()[0]))
    if "{container}" in text:
        text = text.replace("{container}", str(store.container()[0]))
    return text


@pytest.fixture(scope="module")
def template() -> Iterator[DamagedStore]:
    with tempfile.TemporaryDirectory(prefix="aifs-fsck-", dir="/dev/shm") as directory:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "SEGMENT_BYTES", 256 << 10)
            filled = DamagedStore(Path(directory, "store"))
        yield filled


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, template: DamagedStore) -> Iterator[DamagedStore]:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 256 << 10)  # read at each opening of the store
    with tempfile.TemporaryDirectory(prefix="aifs-fsck-", dir="/dev/shm") as directory:
        yield template.copied_to(Path(directory, "store"))


def kinds_of(report: FsckReport) -> Found:
    return sorted((finding.kind, finding.where) for finding in report.findings)


COMMON_CHUNK = f"shared chunk {chunk_codec.digest_of(COMMON.data).hex()[:16]}"


def common(store: DamagedStore) -> Shared:
    return store.transact(lambda tx: shared.find_shared(tx, chunk_codec.digest_of(COMMON.data)))


def put_shared(store: DamagedStore, record: Shared) -> None:
    store.transact(lambda tx: shared.put_shared(tx, record))
