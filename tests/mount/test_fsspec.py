"""aifs:// on a mount: fsspec's own suite for filesystems, and the programs that use it."""

import os
from collections.abc import Iterator
from pathlib import Path

import blake3
import fsspec
import pytest
from fsspec.tests import abstract

from aifs.client.fsspec import AifsFileSystem
from tests.support.mounts import Mounted, mounted_store


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """One mount for all tests of the module."""
    with mounted_store(tmp_path_factory.mktemp("fsspec")) as store:
        yield store


@pytest.fixture
def directory(place: Mounted, request: pytest.FixtureRequest) -> Path:
    made = place.path / f"{abs(hash(request.node.nodeid)):x}"
    made.mkdir()
    return made


class Fixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self) -> AifsFileSystem:
        return AifsFileSystem()

    @pytest.fixture
    def fs_path(self, directory: Path) -> str:
        return os.fspath(directory)


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    test_get_glob_edge_cases = pytest.mark.sweep(abstract.AbstractGetTests.test_get_glob_edge_cases)


class TestPut(abstract.AbstractPutTests, Fixtures):
    test_put_glob_edge_cases = pytest.mark.sweep(abstract.AbstractPutTests.test_put_glob_edge_cases)


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass


def test_the_checksum_of_a_published_file_is_what_its_manifest_stores(directory: Path):
    fs = AifsFileSystem()
    with fs.transaction:
        fs.makedirs(f"{directory}/step-1")
        fs.pipe(f"{directory}/step-1/a", b"content")
        fs.pipe(f"{directory}/b", b"content")
    stored = int(blake3.blake3(b"content").hexdigest(), 16)
    assert fs.checksum(f"aifs://{directory}/step-1/a") == stored
    assert fs.checksum(f"{directory}/b") != stored
    (directory / "step-1/a").write_bytes(b"changed")
    assert fs.checksum(f"{directory}/step-1/a") != stored


def test_arrow_reads_and_writes_a_dataset(directory: Path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.dataset
    import pyarrow.parquet

    fs = fsspec.filesystem("aifs")
    table = arrow.table({"a": range(1000), "b": [str(n % 3) for n in range(1000)]})
    with fs.transaction:
        fs.makedirs(f"{directory}/set")
        for part in range(4):
            path = f"{directory}/set/{part}.parquet"
            pyarrow.parquet.write_table(table.slice(part * 250, 250), path, filesystem=fs)
    found = pyarrow.dataset.dataset(f"{directory}/set", filesystem=fs, format="parquet")
    assert found.to_table().sort_by("a").equals(table)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_saves_a_distributed_checkpoint_by_url(directory: Path):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state = {"weight": torch.arange(10_000), "step": torch.tensor(7)}
    dcp.save(state, storage_writer=FsspecWriter(f"aifs://{directory}/step-7"), no_dist=True)
    loaded = {"weight": torch.zeros(10_000, dtype=torch.int64), "step": torch.tensor(0)}
    dcp.load(loaded, storage_reader=FsspecReader(f"aifs://{directory}/step-7"), no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["step"] == 7
