"""One rank of a training job over hosts, started by torchrun: it goes on from the newest
checkpoint, whatever the number of ranks that saved it, and saves at each step.

torchrun ... tests/support/hosts_rank.py DIRECTORY LAST_STEP HOW

HOW: "shards", a file of torch.save by each rank; "dcp", torch.distributed.checkpoint.

Says "resumed STEP" and, for each step that is durable and visible, "saved STEP".
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from aifs import client
from aifs.client.torch import AifsReader, AifsWriter

WIDTH = 60_000
PATIENCE_S = 120


def expected(step: int) -> torch.Tensor:
    """All parameters after a step."""
    parameters = torch.arange(WIDTH, dtype=torch.float64)
    for number in range(1, step + 1):
        parameters = trained(parameters, number)
    return parameters


def trained(part: torch.Tensor, step: int) -> torch.Tensor:
    return part * 0.5 + step


class Shards:
    """Each rank's part is a file of its own."""

    def load(self, path: Path) -> torch.Tensor:
        shards = sorted(path.glob("shard-*.pt"), key=lambda path: int(path.stem[6:]))
        whole = torch.cat([torch.load(path) for path in shards])
        return whole.tensor_split(dist.get_world_size())[dist.get_rank()].clone()

    def save(self, part: torch.Tensor, path: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        with client.checkpoint(path, ranks=world, rank=rank, timeout_s=PATIENCE_S) as directory:
            torch.save(part, directory / f"shard-{rank}.pt")


class Distributed:
    """Parts are those of one tensor, which torch divides anew among other ranks."""

    def __init__(self) -> None:
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def load(self, path: Path) -> torch.Tensor:
        whole = torch.zeros(WIDTH, dtype=torch.float64)
        state = {"whole": distribute_tensor(whole, self._mesh, [Shard(0)])}
        dcp.load(state, storage_reader=AifsReader(path))
        return state["whole"].to_local()

    def save(self, part: torch.Tensor, path: Path) -> None:
        whole = DTensor.from_local(part, self._mesh, [Shard(0)])
        dcp.save({"whole": whole}, storage_writer=AifsWriter(path))


def main(run: Path, last: int, how: str) -> None:
    dist.init_process_group("gloo")
    way = Distributed() if how == "dcp" else Shards()
    rank, world = dist.get_rank(), dist.get_world_size()
    newest = client.latest(run)
    step = 0 if newest is None else int(newest.name.removeprefix("step-"))
    seen = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(seen, torch.tensor([float(step)]))
    assert {int(one) for one in seen} == {step}, f"hosts have other newest checkpoints: {seen}"
    part = expected(step).tensor_split(world)[rank].clone()
    if newest is not None:
        assert torch.equal(way.load(newest), part), f"{newest} has other parameters"
    print(f"resumed {step}", flush=True)
    while step < last:
        step += 1
        part = trained(part, step)
        total = part.sum()
        dist.all_reduce(total)
        assert torch.isclose(total, expected(step).sum())
        way.save(part, run / f"step-{step}")
        print(f"saved {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
