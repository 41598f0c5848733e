"""Damages to a store, each with what fsck finds of it; the store that is damaged, as a fixture."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aifs.check.findings import FsckReport
from aifs.data import chunk_codec
from aifs.meta import journal, shared
from aifs.meta.shared import Shared
from tests.support.damaged import COMMON, DamagedStore

Found = list[tuple[str, str]]


@dataclass
class Damage:
    """What to do to a store, the findings (kind, where), and where paths are after the repair
    (None: gone).

    ``{/path}`` stands for an inode number, ``{server N}`` for a server's directory.
    """

    do: Callable[[DamagedStore], None]
    found: Found
    moves: dict[str, str | None]

    def expected(self, store: DamagedStore) -> Found:
        return sorted((kind, fill(store, where)) for kind, where in self.found)


def register(
    damages: dict[str, Damage], *found: tuple[str, str], moves: dict[str, str | None] | None = None
) -> Callable:
    """Add a damage to *damages*; *found* is what fsck finds of it."""
    return lambda do: damages.setdefault(do.__name__, Damage(do, list(found), moves or {}))


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
