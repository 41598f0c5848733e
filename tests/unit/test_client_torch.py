"""Checkpoints of PyTorch in plain directories: the file of torch.save, pipelined, in parts, through
the adapters."""

import errno
import io
import itertools
import json
import runpy
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs import client
from aifs.client import CheckpointError
from aifs.core import files, mountinfo

torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from aifs.client.torch import (
    AifsReader,
    AifsWriter,
    CheckpointEngine,
    PipelinedCheckpointer,
    archive,
    helper,
    load_safetensors,
    parallel,
    parallel_load,
    parallel_save,
    pipelined,
    save,
    save_safetensors,
    sinks,
)
from aifs.client.torch.arena import Arena
from tests.support import gloo
from tests.unit import test_borders

RANKS = 4
_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool "
    "complex64 complex128"
)
DTYPES = [getattr(torch, name) for name in _NAMES.split()]


def state() -> dict[str, Any]:
    """Of every kind of tensor."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(60, 50, generator=generator)
    return {
        "dtypes": {
            str(dtype): (torch.randn(3, 5, generator=generator) * 3).to(dtype) for dtype in DTYPES
        },
        "base": base,
        "view": base[5:9],
        "transposed": base.t(),
        "strided": base[::7, ::3],
        "empty": torch.empty(0),
        "empty rows": torch.empty(3, 0),
        "scalar": torch.tensor(1.5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "expanded": torch.ones(1).expand(4),
        "large": torch.randn(300_000, generator=generator),
        "step": 17,
        "text": "ä",
        "none": None,
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if not isinstance(left, torch.Tensor):
        return left == right
    kinds = (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
    return kinds and torch.equal(
        *(x.detach().contiguous().flatten().view(torch.uint8) for x in (left, right))
    )


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user's."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    monkeypatch.setattr(sinks, "_known", {})
    return directory


# --- save -----------------------------------------------------------------------------------------


@pytest.mark.sweep("method")
@pytest.mark.parametrize("method", [sinks.BUFFERED, sinks.DIRECT])
@pytest.mark.parametrize("name", ["model.pt", "noext", "a.b.c"])
@pytest.mark.parametrize("crc", [True, False])
def test_save_writes_the_file_of_torch_save(
    tmp_path: Path, method: str, name: str, crc: bool
) -> None:
    (tmp_path / "torch").mkdir()
    torch.serialization.set_crc32_options(crc)
    try:
        torch.save(state(), tmp_path / "torch" / name)
        save(state(), tmp_path / name, method=method)
    finally:
        torch.serialization.set_crc32_options(True)
    assert (tmp_path / name).read_bytes() == (tmp_path / "torch" / name).read_bytes()
    assert same(torch.load(tmp_path / name, weights_only=True), state())
    assert same(torch.load(tmp_path / name, mmap=True), state())
    assert names(tmp_path) == {"torch", name}


def test_shared_storages_are_written_once(tmp_path: Path) -> None:
    base = torch.arange(100_000.0)
    save({"a": base, "b": base.view(100, 1000), "c": base[7:]}, tmp_path / "x.pt", sync=False)
    assert (tmp_path / "x.pt").stat().st_size < 1.1 * base.nbytes
    found = torch.load(tmp_path / "x.pt")
    found["a"][7] = -1
    assert found["b"][0, 7] == -1 and found["c"][0] == -1
    with pytest.raises(RuntimeError, match="different types"):
        save([base, base.view(torch.int32)], tmp_path / "y.pt")
    assert names(tmp_path) == {"x.pt"}


@pytest.mark.sweep
def test_more_records_than_16_bits_count() -> None:
    image = archive.Image("x", b"pickle", (1,) * 66_000, "0" * 20)
    stream = Written()
    archive.write_archive(
        image, ([memoryview(b"%d" % (number % 10))] for number in range(66_000)), stream
    )
    with zipfile.ZipFile(stream) as found:
        assert len(found.infolist()) == 66_006
        assert found.read("x/data/65999") == b"9" and found.getinfo(
            "x/data/65999"
        ).CRC == zlib.crc32(b"9")


def test_what_torch_saves_is_cut_at_its_tensors(tmp_path: Path) -> None:
    state = {
        "a": torch.arange(100_000),
        "b": torch.ones(3),
        "c": torch.zeros(1 << 20, dtype=torch.bfloat16),
    }
    torch.save(state, tmp_path / "state.pt")
    data = (tmp_path / "state.pt").read_bytes()
    found = test_borders.ranges(data)
    test_borders.require_cover(found, len(data))
    begins = {offset for offset, _ in found}
    for tensor in (state["a"], state["c"]):
        raw = tensor.view(torch.uint8).numpy().tobytes()
        at = data.index(raw)
        assert at in begins and (at + len(raw) in begins or at + len(raw) == len(data))


class Written(io.BytesIO):
    """A sink."""

    def skip(self, size: int) -> bool:
        return False


class Skeleton:
    """What is written, but for the bytes of large pieces."""

    def __init__(self) -> None:
        self.position, self.pieces = 0, bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < 1 << 20:
            self.pieces += view
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        pass

    def skip(self, size: int) -> bool:
        return False


def test_sizes_and_offsets_beyond_32_bits() -> None:
    huge = [torch.empty((1 << 32) + 5, dtype=torch.uint8), torch.empty(0), torch.ones(2)]
    huge += [torch.empty((1 << 32) - 1, dtype=torch.uint8), torch.ones(3)]
    ours, theirs = Skeleton(), Skeleton()
    torch.serialization.set_crc32_options(False)
    try:
        from aifs.client.torch.records import chunks_of, describe

        image, storages = describe(huge, "archive")
        length = archive.write_archive(image, map(chunks_of, storages), ours)
        torch.save(huge, theirs)
    finally:
        torch.serialization.set_crc32_options(True)
    assert (ours.position, ours.pieces) == (theirs.position, theirs.pieces)
    assert length == ours.position == archive.length_of(image)


@pytest.mark.sweep
@pytest.mark.parametrize("method", [sinks.BUFFERED, sinks.DIRECT])
@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.integers(0, 3 * sinks.ALIGNMENT)
        | st.sampled_from([sinks.BUFFER, sinks.BUFFER + 1, 1 << 20]),
        max_size=6,
    )
)
def test_a_sink_writes_what_it_is_given(
    tmp_path_factory: pytest.TempPathFactory, method: str, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("sink") / "file"
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    fd = files.open_file(str(path), create=True)
    try:
        sink = sinks.open_sink(fd, method)
        for piece in pieces:
            data = bytearray(piece)
            sink.write(data)
            data[:] = bytes(len(data))  # the caller may do what it likes with it
        sink.finish()
    finally:
        files.close_file(fd)
    assert path.read_bytes() == b"".join(pieces)
    path.unlink()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.sweep("method")
@pytest.mark.parametrize("method", [sinks.BUFFERED, sinks.DIRECT])
def test_a_full_device(small: Path, method: str) -> None:
    (small / "x.pt").write_text("old")
    with pytest.raises(OSError, match="No space left") as caught:
        save(torch.ones(12 << 20), small / "x.pt", method=method)
    assert caught.value.errno == errno.ENOSPC
    assert names(small) == {"x.pt"} and (small / "x.pt").read_text() == "old"


def test_the_probe_is_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    monkeypatch.setattr(mountinfo, "is_in_memory", lambda path: False)
    monkeypatch.setattr(sinks, "SIZE", 1 << 16)
    measure = sinks.faster_method
    monkeypatch.setattr(sinks, "faster_method", lambda path: measured.append(path) or measure(path))

    def ask() -> str:
        return sinks.writing_method(str(tmp_path), 1 << 20)

    assert sinks.writing_method(str(tmp_path), 1) == sinks.BUFFERED and not measured
    first = ask()
    assert json.loads((cache / "aifs" / "writing.json").read_text()) == {
        sinks.device_of(str(tmp_path)): first
    }
    monkeypatch.setattr(sinks, "_known", {})
    assert ask() == ask() == first and len(measured) == 1
    (cache / "aifs" / "writing.json").write_text("damaged")
    monkeypatch.setattr(sinks, "_known", {})
    monkeypatch.setattr(sinks.DirectSink, "__init__", lambda self, fd: _refuse())
    assert ask() == sinks.BUFFERED and len(measured) == 2
    assert names(tmp_path) == set()


def _refuse() -> None:
    raise OSError(errno.EINVAL, "no")


# --- pipelined ------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_pipelined_saves_what_the_state_was(tmp_path: Path) -> None:
    now = state()
    with PipelinedCheckpointer(tmp_path / "step-{step}", keep="last=2") as checkpointer:
        for step in range(3):
            now["step"] = step
            checkpointer.save(now, step)
            now["step"] = -1
            checkpointer.wait()
            now["large"] += 1
        now["large"] = torch.ones(900_000)  # larger than before
        checkpointer.save(now, 3)
    assert names(tmp_path) == {"latest", "step-2", "step-3"}
    expected = state()
    found = torch.load(tmp_path / "step-2" / "state-0.pt")
    assert torch.equal(found["large"], expected["large"] + 1 + 1)
    assert same(found["dtypes"], expected["dtypes"]) and found["step"] == 2
    assert torch.equal(torch.load(tmp_path / "latest" / "state-0.pt")["large"], now["large"])
    assert client.verify(tmp_path / "latest") == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11")
def test_the_helper_imports_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "isal.py").write_text("open('imported', 'w')")
    monkeypatch.chdir(tmp_path)
    with PipelinedCheckpointer("step-{step}") as checkpointer:
        checkpointer.save(state(), 1)
    assert names(tmp_path) == {"isal.py", "latest", "step-1"}


def test_pipelined_says_what_failed(tmp_path: Path, small: Path) -> None:
    with PipelinedCheckpointer(tmp_path / "step-{step}") as checkpointer:
        checkpointer.save({"a": torch.ones(3)}, 1)
        checkpointer.save({"a": torch.ones(4)}, 1)
        with pytest.raises(FileExistsError, match="step-1"):
            checkpointer.wait(durable=True)
        checkpointer.wait()  # once is enough
        with pytest.raises(AttributeError, match="pickle"):
            checkpointer.save(lambda: None, 2)
        checkpointer.save({"a": torch.ones(5)}, 2)
        checkpointer.wait(durable=True)
        helper = checkpointer.helper
        assert helper is not None
        helper.process.kill()
        helper.process.wait()
        with pytest.raises(
            CheckpointError,
            match=r"step-3: was not saved: the helper process has ended \(exit code -9\)",
        ):
            checkpointer.save({"a": torch.ones(1 << 20)}, 3)
            checkpointer.wait(durable=True)
        checkpointer.save({"a": torch.ones(6)}, 4)
    assert names(tmp_path) == {"step-1", "step-2", "step-4", "latest", "small"}
    full = PipelinedCheckpointer(small / "step-{step}")
    full.save({"a": torch.ones(3 << 20)}, 1)
    with pytest.raises(OSError, match="No space left") as caught:
        full.close()
    assert caught.value.errno == errno.ENOSPC
    assert names(small) == set()


@pytest.mark.sweep("size")
@pytest.mark.parametrize("size", [0, 1, helper.CHUNK, 2 * helper.CHUNK, 2 * helper.CHUNK + 65])
def test_pipelined_saves_states_of_every_size(tmp_path: Path, size: int) -> None:
    saved = torch.full((size,), 7, dtype=torch.uint8)
    with PipelinedCheckpointer(tmp_path / "step-{step}", latest=None) as checkpointer:
        for step in range(2):
            checkpointer.save([saved], step)
    for step in range(2):
        assert torch.equal(
            torch.load(tmp_path / f"step-{step}" / "state-0.pt", mmap=True)[0], saved
        )


def test_the_end_of_the_training_process_ends_the_helper(tmp_path: Path) -> None:
    """Before all was staged: nothing is published."""
    arena = Arena()
    started = pipelined.Helper(arena)
    arena.grow(1 << 20)
    image = archive.Image("x", b"", (1 << 20,), "")
    started.connection.send(helper.SaveJob(str(tmp_path / "step-1"), "x.pt", image, {}))
    started.connection.close()
    assert started.process.wait(60) == 1
    arena.close()
    assert names(tmp_path) == set()


# --- parallel -------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 45), st.integers(1, 5000))
def test_parts_are_balanced_to_the_byte(length: int, count: int) -> None:
    parts = parallel.split(length, count)
    sizes = [end - begin for begin, end in parts]
    assert parts[0][0] == 0 and parts[-1][1] == length and max(sizes) - min(sizes) <= 1
    assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))


@given(st.lists(st.integers(0, 3), min_size=1))
def test_one_writer_is_chosen_of_each_place(places: list[int]) -> None:
    assert parallel.choose(places) == sorted(places.index(place) for place in set(places))


def run_ranks(body: Callable[[int, Path], None], directory: Path) -> None:
    def together(rank: int, directory: Path) -> None:
        body(rank, directory)
        dist.barrier()
        dist.destroy_process_group()

    problems = gloo.run_ranks(together, directory, RANKS)
    assert problems == [""] * RANKS, "\n".join(problems)


@pytest.mark.sweep
def test_replicas_save_and_load_together(tmp_path: Path) -> None:
    run_ranks(save_and_load, tmp_path)
    parts = sorted((tmp_path / "step-1").glob("state.pt.*"))
    assert len(parts) == RANKS
    sizes = [part.stat().st_size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    whole = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    assert same(torch.load(whole), state())
    assert same(parallel_load(tmp_path / "step-1"), state())
    assert len(list((tmp_path / "step-2").glob("state.pt.*"))) == 1  # one device, one host
    assert client.verify(tmp_path / "step-1") == client.verify(tmp_path / "step-2") == []
    assert names(tmp_path) == {"step-1", "step-2", "dcp-1", "dcp-2", "latest"}
    assert client.verify(tmp_path / "dcp-1") == client.verify(tmp_path / "dcp-2") == []


def save_and_load(rank: int, directory: Path) -> None:
    parallel_save(state(), directory / "step-1", hash=rank < RANKS)
    assert same(parallel_load(directory / "step-1"), state())
    parallel_save(state(), directory / "step-2", writers="device")
    assert same(parallel_load(directory / "latest"), state())
    with pytest.raises(CheckpointError, match="rank 2 does not hold the same tensors as rank 0"):
        parallel_save({"a": torch.ones(4 + (rank == 2))}, directory / "step-3")
    dist.barrier()
    with pytest.raises(CheckpointError, match="rank 0: .*holds parts of no files"):
        parallel_load(directory)
    mine = {"shared": torch.arange(10.0), f"own {rank}": torch.full((1000,), rank)}
    dcp.save(mine, storage_writer=AifsWriter(directory / "dcp-1", latest=None))
    blank = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    dcp.load(blank, storage_reader=AifsReader(directory / "dcp-1"))
    assert same(blank, mine)
    done = dcp.async_save(
        mine, storage_writer=AifsWriter(directory / "dcp-2", step=2, tracker=None, latest=None)
    )
    done.result(60)
    blank = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    dcp.load(blank, storage_reader=dcp.FileSystemReader(directory / "dcp-2"))
    assert same(blank, mine)
    with pytest.raises(dcp.api.CheckpointException, match="of this name is there already"):
        dcp.save(mine, storage_writer=AifsWriter(directory / "dcp-2"))


def named(directory: Path, states: list[Any]) -> list[str]:
    """Save as a group without torch.distributed, by threads; what each rank raised."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(states)) as pool:
        saves = [
            pool.submit(parallel_save, one, directory, ("model", rank, len(states)), timeout_s=60)
            for rank, one in enumerate(states)
        ]
        return [str(one.exception() or "") for one in saves]


def test_a_named_group(tmp_path: Path) -> None:
    assert named(tmp_path / "step-1", [state()] * 3) == [""] * 3
    assert same(parallel_load(tmp_path / "step-1", ("model", 0, 3)), state())
    problems = named(tmp_path / "step-2", [state(), {**state(), "step": 18}])
    assert all("the replicas' states differ" in problem for problem in problems)
    assert not (tmp_path / "step-2").exists()
    next((tmp_path / "step-1").glob("model.pt.*.0001-of-0003")).unlink()
    with pytest.raises(CheckpointError, match="part 1 of 3 is missing"):
        parallel_load(tmp_path / "step-1")


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_shows_nothing_of_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"a": torch.ones(10), "b": "text"}
    finish = AifsWriter.finish
    monkeypatch.setattr(AifsWriter, "finish", lambda *args, **named: _refuse())
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save(mine, storage_writer=AifsWriter(tmp_path / "step-1"), no_dist=True)
    assert names(tmp_path) == {".step-1.pending"} and client.latest(tmp_path) is None
    monkeypatch.setattr(AifsWriter, "finish", finish)
    writer = AifsWriter(tmp_path / "step-1", tracker="tracker", keep="last=1")
    dcp.save(mine, storage_writer=writer, no_dist=True)
    mine["a"] += 1
    dcp.save(mine, checkpoint_id=tmp_path / "step-2", storage_writer=writer, no_dist=True)
    assert (
        names(tmp_path) == {"step-2", "latest", "tracker"}
        and (tmp_path / "tracker").read_text() == "2"
    )
    assert client.verify(tmp_path / "step-2") == []
    found = {"a": torch.zeros(10), "b": ""}
    dcp.load(found, storage_reader=AifsReader(tmp_path), no_dist=True)
    assert same(found, mine)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        AifsReader(empty)


def test_an_engine_as_deepspeed_calls_it(tmp_path: Path) -> None:
    engine = CheckpointEngine()
    path = tmp_path / "global_step5" / "mp_rank_00_model_states.pt"
    engine.create("global_step5")
    engine.makedirs(path.parent, exist_ok=True)
    engine.makedirs(path.parent, exist_ok=True)
    with pytest.raises(FileExistsError):
        engine.makedirs(path.parent)
    engine.save(state(), str(path))
    assert engine.commit("global_step5") is True
    assert same(engine.load(str(path), map_location="cpu"), state())
    assert names(path.parent) == {path.name}


def test_safetensors(tmp_path: Path) -> None:
    tensors = {name: one for name, one in state()["dtypes"].items() if "complex128" not in name}
    tensors |= {
        "strided": torch.randn(9, 8)[::2, ::3],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
    }
    save_safetensors(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found = load_safetensors(tmp_path / "x.safetensors")
    assert (
        all(same(found[name], one.contiguous()) for name, one in tensors.items())
        and found.keys() == tensors.keys()
    )
    with pytest.raises(TypeError, match="a: .*complex128"):
        save_safetensors({"a": torch.ones(1, dtype=torch.complex128)}, tmp_path / "y.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    for damaged in (b"", data[:7], b"\xff" * 8 + data, data[:8] + b"[" + data[9:], data[:-1]):
        (tmp_path / "y.safetensors").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="y.safetensors"):
            load_safetensors(tmp_path / "y.safetensors")


def test_safetensors_files_are_those_of_the_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    tensors = {f"{dtype}": torch.ones(5).to(dtype) for dtype in DTYPES if not dtype.is_complex}
    save_safetensors(tensors, tmp_path / "ours", {"a": "b"})
    package.save_file(tensors, tmp_path / "theirs", {"a": "b"})
    assert all(
        same(one, tensors[name]) for name, one in package.load_file(tmp_path / "ours").items()
    )
    assert all(
        same(one, tensors[name]) for name, one in load_safetensors(tmp_path / "theirs").items()
    )


@pytest.mark.sweep
def test_the_example_of_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "training.py"
    runpy.run_path(str(path))["main"](tmp_path)
    newest = [tmp_path / way / "step-4" for way in ("save", "pipelined", "parallel")]
    assert capsys.readouterr().out.split("\n")[:-1] == [
        f"{one.parent.name}: resumed from {one}" for one in newest
    ]
    assert all(names(one.parent) == {"step-3", "step-4", "latest"} for one in newest)
