"""Checkpoints of what lies on a GPU, in plain directories. Needs one NVIDIA GPU."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aifs import client

torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")
if not torch.cuda.is_available():
    pytest.skip("there is no NVIDIA GPU", allow_module_level=True)

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from aifs.client.torch import (
    AifsReader,
    AifsWriter,
    PipelinedCheckpointer,
    gathered,
    load_safetensors,
    parallel_load,
    parallel_save,
    records,
    save,
    save_safetensors,
)

CUDA = torch.device("cuda", 0)


def state() -> dict[str, Any]:
    """Of several kinds, one longer than what is copied at a time, some of them empty or views."""
    generator = torch.Generator(CUDA).manual_seed(1)
    long = torch.randint(
        0, 255, (2 * records.CHUNK + 12_345,), dtype=torch.uint8, device=CUDA, generator=generator
    )
    weights = torch.randn(300, 70, device=CUDA, generator=generator)
    return {
        "long": long,
        "weights": weights,
        "half": weights.to(torch.bfloat16),
        "rows": weights[5:9],
        "transposed": weights.t(),
        "empty": torch.empty(0, device=CUDA),
        "host": torch.arange(1000),
        "pinned": torch.arange(999).pin_memory(),
        "step": 7,
    }


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name].to(one[name].device))
        if isinstance(one[name], torch.Tensor)
        else one[name] == other[name]
        for name in one
    )


def test_save_writes_what_torch_writes(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    for method in ("buffered", "direct"):
        save(state(), tmp_path / "archive.pt", method=method)
        assert (tmp_path / "archive.pt").read_bytes() == buffer.getvalue()


def test_what_was_saved_is_loaded_to_the_gpu(tmp_path: Path) -> None:
    save(state(), tmp_path / "state.pt")
    assert same(torch.load(tmp_path / "state.pt"), state())
    loaded = torch.load(tmp_path / "state.pt", mmap=True, map_location="cpu")
    assert loaded["long"].device.type == "cpu" and same(loaded, state())


def test_pipelined_saves_are_of_the_moment_of_save(tmp_path: Path) -> None:
    """Also where the state is written in a stream of the user's own, and is not there yet when
    ``save`` is called."""
    stream, values = torch.cuda.Stream(), torch.zeros(48 << 20, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    with PipelinedCheckpointer(tmp_path / "step-{step}") as checkpointer:
        for step in range(1, 4):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)  # some 100 ms
                values.fill_(step)
                checkpointer.save({"values": values, "small": values[:3].clone()}, step)
            checkpointer.wait()
            with torch.cuda.stream(stream):
                values.fill_(200)
    for step in range(1, 4):
        found = torch.load(tmp_path / f"step-{step}" / "state-0.pt")
        assert int(found["values"].min()) == int(found["values"].max()) == step
        assert found["small"].tolist() == [step] * 3


def test_copying_does_not_wait_for_what_is_queued_after_save(tmp_path: Path) -> None:
    values = torch.ones(48 << 20, dtype=torch.uint8, device=CUDA)
    with PipelinedCheckpointer(tmp_path / "step-{step}") as checkpointer:
        checkpointer.save({"values": values}, 0)
        checkpointer.wait(durable=True)  # memory is locked
        checkpointer.save({"values": values}, 1)
        torch.cuda._sleep(20_000_000_000)  # some 10 s of the next iteration
        computed = torch.cuda.Event()
        computed.record()
        checkpointer.wait()
        assert not computed.query()


def test_pipelined_saves_of_everything(tmp_path: Path) -> None:
    with PipelinedCheckpointer(tmp_path / "step-{step}") as checkpointer:
        checkpointer.save({"weights": torch.ones(5, device=CUDA)}, 1)
        checkpointer.save(state(), 2)
        checkpointer.save({}, 3)
    assert same(torch.load(tmp_path / "step-2" / "state-0.pt"), state())
    assert client.latest(tmp_path) == tmp_path / "step-3"


def test_an_optimizer_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            generator = torch.Generator(CUDA).manual_seed(step)
            batch = torch.randn(16, 64, device=CUDA, generator=generator)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def fresh() -> tuple[Any, Any]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)
        )
        model.to(CUDA)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    model, optimizer = fresh()
    with PipelinedCheckpointer(tmp_path / "step-{step}") as checkpointer:
        train(model, optimizer, range(5))
        checkpointer.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 5)
        checkpointer.wait()
        train(model, optimizer, range(5, 9))
    resumed, resumed_optimizer = fresh()
    found = torch.load(client.latest(tmp_path) / "state-0.pt")
    resumed.load_state_dict(found["model"])
    resumed_optimizer.load_state_dict(found["optimizer"])
    train(resumed, resumed_optimizer, range(5, 9))
    assert same(model.state_dict(), resumed.state_dict())


def test_safetensors(tmp_path: Path) -> None:
    tensors = {name: value for name, value in state().items() if isinstance(value, torch.Tensor)}
    save_safetensors(tensors, tmp_path / "model.safetensors")
    found = load_safetensors(tmp_path / "model.safetensors", CUDA)
    assert all(tensor.device == CUDA for tensor in found.values()) and same(found, tensors)
    one = client.getfile(tmp_path / "model.safetensors").to_tensor("rows", CUDA)
    assert one.device == CUDA and torch.equal(one, tensors["rows"])


def test_what_is_loaded_is_not_overwritten_by_what_had_its_memory_before(tmp_path: Path) -> None:
    """That is free for the program, while the GPU has not used it yet."""
    tensors = {str(number): torch.full((5 << 20,), number) for number in range(4)}
    save_safetensors(tensors, tmp_path / "model.safetensors")
    torch.cuda.empty_cache()
    before = [torch.zeros(5 << 20, dtype=torch.int64, device=CUDA) for _ in range(4)]
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # some 500 ms
    for tensor in before:
        tensor.fill_(77)
    addresses = {tensor.data_ptr() for tensor in before}
    del before, tensor
    found = load_safetensors(tmp_path / "model.safetensors", "cuda")
    assert addresses & {value.data_ptr() for value in found.values()}
    torch.cuda.synchronize()
    assert same(found, tensors)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{tmp_path}/rendezvous",
        rank=0,
        world_size=1,
        device_id=CUDA,
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_parallel_save_and_load_over_nccl(tmp_path: Path) -> None:
    parallel_save(state(), tmp_path / "run" / "step-1")
    assert same(parallel_load(client.latest(tmp_path / "run")), state())


@pytest.mark.usefixtures("nccl")
def test_a_file_is_got_over_nccl(tmp_path: Path) -> None:
    save(state(), tmp_path / "state.pt")
    content = gathered.read(str(tmp_path / "state.pt"), None)
    assert same(torch.load(io.BytesIO(bytes(content))), state())


@pytest.mark.usefixtures("nccl")
def test_distributed_checkpoints(tmp_path: Path) -> None:
    tensors = {name: value for name, value in state().items() if isinstance(value, torch.Tensor)}
    dcp.save(dict(tensors), storage_writer=AifsWriter(tmp_path / "step-1"))
    dcp.async_save(dict(tensors), storage_writer=AifsWriter(tmp_path / "step-2")).result()
    for step in (1, 2):
        found = {name: torch.zeros_like(value) for name, value in tensors.items()}
        dcp.load(found, storage_reader=AifsReader(tmp_path / f"step-{step}"))
        assert same(found, tensors)


def test_what_has_no_use_for_a_gpu_leaves_it_alone(tmp_path: Path) -> None:
    """A rank takes no memory of the first GPU because it saves what lies in its own memory."""
    program = (
        "import sys, torch; from aifs.client.torch import PipelinedCheckpointer, save\n"
        "state, directory = {'a': torch.ones(3)}, sys.argv[1]\n"
        "save(state, directory + '/a.pt')\n"
        "with PipelinedCheckpointer(directory + '/step-{step}') as checkpointer:\n"
        "    checkpointer.save(state, 1)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
