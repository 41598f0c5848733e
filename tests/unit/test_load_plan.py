"""What ``aifs checkpoint plan`` says is what the loaders read then."""

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp

from aifs.cli.main import main
from aifs.client import startup
from aifs.client.torch import gathered, load_plan, save_safetensors
from aifs.client.torch.distributed import AifsReader, AifsWriter
from aifs.client.torch.gather_files import FileRange, LoadPlan, distinct_bytes, merged
from aifs.client.torch.load_plan import plan_load
from aifs.client.torch.parallel import parallel_load, parallel_save
from aifs.core import files
from tests.support import gloo

RANKS, HOSTS, PIECE = 4, 2, 100_000
STATE = {
    "model": {"first": torch.arange(50_000.0), "second": torch.ones(300, 70)},
    "step": torch.tensor(5),
}
NAMES = ["model.first", "model.second", "step"]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "PIECE", PIECE)
    monkeypatch.setattr(gathered, "PIECE", PIECE)


def save_parts(path: Path, count: int) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(
            pool.map(lambda rank: parallel_save(STATE, path, ("state", rank, count)), range(count))
        )


# --- what is read is what was planned ---


def recorded() -> list[FileRange]:
    """What ``gathered`` reads in this process, from now on."""
    read_into, found = files.read_into, []

    def record(fd: int, buffer: memoryview, offset: int) -> int:
        done = read_into(fd, buffer, offset)
        found.append(FileRange(os.readlink(f"/proc/self/fd/{fd}"), offset, offset + done))
        return done

    files.read_into = record
    return found


def shared_loads(rank: int, directory: Path) -> None:
    gathered.host_name = lambda: f"host {rank * HOSTS // RANKS}"
    os.environ |= {"AIFS_START_DIR": str(directory / "job"), "AIFS_START_RUN": "1"}
    os.environ["RANK"] = str(rank)
    found = recorded()
    for target, load, options in (
        (directory / "parts", parallel_load, {}),
        (directory / "state.pt", gathered.read, {"together": True}),
    ):
        planned = plan_load([target], RANKS, HOSTS, **options)
        found.clear()
        load(target)
        assert found == planned.ranks[rank].ranges
    planned = plan_load([directory / "parts"], RANKS, 1)
    gathered.host_name = lambda: "one host"
    found.clear()
    parallel_load(directory / "parts")
    assert found == planned.ranks[rank].ranges


def test_hosts_read_what_was_planned(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "state.pt")
    save_parts(tmp_path / "parts", 3)
    assert gloo.run_ranks(shared_loads, tmp_path, RANKS) == [""] * RANKS
    _, stages = startup.report(str(tmp_path / "job"))  # they are stages of the start, too
    assert {stage.stage: stage.ranks for stage in stages} == {
        "parallel_load": RANKS,
        "gathered.read": RANKS,
    }


class _Recorded(io.FileIO):
    """A file whose reads are noted."""

    found: list[FileRange]

    def readinto(self, buffer: Any) -> int:
        begin = self.tell()
        done = super().readinto(buffer)
        self.found.append(FileRange(self.name, begin, begin + done))
        return done

    def read(self, size: int | None = -1) -> bytes:
        begin = self.tell()
        data = super().read(size)
        self.found.append(FileRange(self.name, begin, begin + len(data)))
        return data


def recorded_reader(path: Path) -> tuple[AifsReader, list[FileRange]]:
    reader, found = AifsReader(path), []

    @contextmanager
    def create_stream(path: Path, mode: str) -> Iterator[io.FileIO]:
        with _Recorded(os.fspath(path), mode) as file:
            file.found = found
            yield file

    reader.fs.create_stream = create_stream
    return reader, found


def distributed_loads(rank: int, directory: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    whole = {
        "first": torch.arange(50_000.0),
        "second": torch.ones(302, 70),
        "step": torch.tensor(5),
        "epoch": 3,
    }

    def shard(value: Any) -> Any:
        is_sharded = isinstance(value, torch.Tensor) and value.dim()
        return distribute_tensor(value, mesh, [Shard(0)]) if is_sharded else value

    sharded = {name: shard(value) for name, value in whole.items()}
    dcp.save(sharded, storage_writer=AifsWriter(directory / "sharded"))
    dcp.save(whole, storage_writer=AifsWriter(directory / "whole"))
    for name in ("sharded", "whole"):
        for state, options in ((whole, {}), (sharded, {"sharded": True})):
            planned = plan_load([directory / name], RANKS, HOSTS, **options)
            wanted = planned.ranks[rank].ranges
            reader, found = recorded_reader(directory / name)
            dcp.load(dict(state), storage_reader=reader)
            assert distinct_bytes([*wanted, *found]) == distinct_bytes(wanted)
            assert distinct_bytes(found) > 0.97 * distinct_bytes(wanted)  # not what fills up
            touched = [
                number
                for path, begin, _ in found
                for number, planned_ in enumerate(wanted)
                if path == planned_.path and planned_.begin <= begin < planned_.end
            ]
            assert list(dict.fromkeys(touched)) == list(range(len(wanted)))


@pytest.mark.sweep
def test_torch_distributed_reads_what_was_planned(tmp_path: Path) -> None:
    assert gloo.run_ranks(distributed_loads, tmp_path, RANKS) == [""] * RANKS
    quarter = plan_load([tmp_path / "sharded"], RANKS, sharded=True)
    whole = plan_load([tmp_path / "sharded"], RANKS)
    assert {one.name for one in whole.tensors} == {"first", "second", "step", "epoch"}
    for each, all_ in zip(quarter.ranks, whole.ranks, strict=True):
        assert distinct_bytes(each.ranges) < 0.3 * distinct_bytes(all_.ranges)


def test_tensors_lie_where_the_plan_says(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "state.pt")
    save_parts(tmp_path / "parts", 3)
    save_safetensors({"w": STATE["model"]["first"]}, tmp_path / "w.safetensors")
    found = plan_load([tmp_path / "state.pt"], 1)
    assert found.loader == "torch.load" and [one.name for one in found.tensors] == NAMES
    assert _bytes_of(found, "model.first") == bytes(STATE["model"]["first"].numpy())
    assert _bytes_of(plan_load([tmp_path / "parts"], 1), "model.second") == bytes(
        STATE["model"]["second"].numpy()
    )
    mapped = plan_load([tmp_path / "w.safetensors"], 2)
    assert mapped.loader == "load_safetensors"
    assert _bytes_of(mapped, "w") == bytes(STATE["model"]["first"].numpy())


def _bytes_of(planned: LoadPlan, name: str) -> bytes:
    (ranges,) = [ranges for found, ranges in planned.tensors if found == name]
    return b"".join(Path(path).read_bytes()[begin:end] for path, begin, end in ranges)


# --- the command ---


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["checkpoint", "plan", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["checkpoint", "plan", *map(str, words)])
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("aifs: ") and err.count("\n") == 1, err
    return code, err


def test_the_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(STATE, tmp_path / "state.pt")
    path, size = str(tmp_path / "state.pt"), (tmp_path / "state.pt").stat().st_size
    words = (path, "--ranks", 4, "--hosts", 2, "--together")
    table = said(capsys, *words, "--tensors")
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["loader", "gathered.read"]
    assert [row[:2] for row in rows if row[:1] and row[0] in "0123" and len(row) > 2] == [
        ["0", "0"],
        ["1", "0"],
        ["2", "1"],
        ["3", "1"],
    ]
    assert [name for name in NAMES if f" {name} " in table] == NAMES
    facts = json.loads(said(capsys, *words, "--json"))
    assert (facts["loader"], facts["way"], facts["server_bytes"]) == ("gathered.read", "gather", 0)
    assert facts["files"] == [{"path": path, "bytes": size, "place": "not on AIFS"}]
    assert [rank["host"] for rank in facts["ranks"]] == [0, 0, 1, 1]
    assert [rank["bytes"] > 0 for rank in facts["ranks"]] == [True, False, True, False]
    assert sum(rank["bytes"] for rank in facts["ranks"]) == size
    reads = [(read["begin"], read["end"]) for rank in facts["ranks"] for read in rank["reads"]]
    assert merged(reads) == [(0, size)]


def test_a_file_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(11):
        torch.save(torch.ones(rank + 1), tmp_path / f"state-{rank}.pt")
    facts = json.loads(said(capsys, tmp_path, "--ranks", 11, "--json"))
    read = [Path(rank["reads"][0]["path"]).name for rank in facts["ranks"]]
    assert read == [f"state-{rank}.pt" for rank in range(11)]
    files_ = (tmp_path / "state-3.pt", tmp_path / "state-1.pt")
    facts = json.loads(said(capsys, *files_, "--json"))
    assert [rank["reads"][0]["path"] for rank in facts["ranks"]] == list(map(str, files_))


def test_a_pointer_to_a_checkpoint_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As latest, which each save makes; files may be symlinks, too."""
    save_parts(tmp_path / "step-1", 2)
    torch.save(STATE, tmp_path / "state.pt")
    (tmp_path / "link.pt").symlink_to("state.pt")
    facts = json.loads(said(capsys, tmp_path / "latest", "--json"))
    assert [Path(file["path"]).parent for file in facts["files"]] == [tmp_path / "step-1"] * 2
    facts = json.loads(said(capsys, tmp_path / "link.pt", "--json"))
    assert facts["ranks"][0]["bytes"] == (tmp_path / "state.pt").stat().st_size


def test_what_is_no_weights_has_no_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"path": Path("x"), "w": torch.ones(5)}, tmp_path / "more.pt")
    assert "order" in said(capsys, tmp_path / "more.pt")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("none.pt",), 1, "No such file"),
        (("text",), 8, "neither a file of torch.save nor one of tensors"),
        (("cut.pt",), 8, "cut.pt: "),
        (("empty",), 8, "empty: holds no files of a checkpoint"),
        (("two", "--ranks", "3"), 8, "2 files are in"),
        (("state.pt", "text", "--ranks", "3"), 8, "2 files are given"),
        (("state.pt", "--hosts", "2"), 2, "1 ranks cannot run on 2 hosts"),
        (("state.pt", "--sharded"), 2, "has no shards"),
        (("parts", "--together"), 2, "only a file is read together"),
        (("two", "--ranks", "2", "--together"), 2, "only one file"),
        (("hole",), 8, "part 0 of 2 is missing"),
        (("evil",), 8, "cannot be read: it holds posix.system"),
        (("torn",), 8, ".metadata: cannot be read"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(STATE, "state.pt")
    Path("text").write_text("not tensors, but text")
    Path("cut.pt").write_bytes(Path("state.pt").read_bytes()[:5000])
    for name in ("empty", "two", "hole", "evil", "torn"):
        Path(name).mkdir()
    for name in ("0.pt", "1.pt"):
        torch.save(STATE, Path("two") / name)
    save_parts(Path("parts"), 2)
    (part,) = Path("parts").glob("*0001-of-0002")
    (Path("hole") / part.name).touch()
    Path("evil/.metadata").write_bytes(pickle.dumps(_Evil()))
    Path("torn/.metadata").write_bytes(b"\x80\x04\x95")
    found, line = refused(capsys, *words)
    assert found == code and message in line
    assert not Path("ran").exists()


class _Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch ran",)
