"""One rank of a training job over hosts, started by torchrun: it goes on from the newest
checkpoint, whatever the number of ranks that saved it, and saves at each step.

torchrun ... tests/support/hosts_rank.py DIRECTORY LAST_STEP

Says "resumed STEP" and, for each step that is durable and visible, "saved STEP".
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from aifs import client

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


def main(run: Path, last: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    newest = client.latest(run)
    step = 0 if newest is None else int(newest.name.removeprefix("step-"))
    seen = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(seen, torch.tensor([float(step)]))
    assert {int(one) for one in seen} == {step}, f"hosts have other newest checkpoints: {seen}"
    whole = expected(0)
    if newest is not None:
        shards = sorted(newest.glob("shard-*.pt"), key=lambda path: int(path.stem[6:]))
        whole = torch.cat([torch.load(path) for path in shards])
        assert torch.equal(whole, expected(step)), f"{newest} has other parameters"
    print(f"resumed {step}", flush=True)
    part = whole.tensor_split(world)[rank].clone()
    while step < last:
        step += 1
        part = trained(part, step)
        total = part.sum()
        dist.all_reduce(total)
        assert torch.isclose(total, expected(step).sum())
        with client.checkpoint(
            run / f"step-{step}", ranks=world, rank=rank, timeout_s=PATIENCE_S
        ) as directory:
            torch.save(part, directory / f"shard-{rank}.pt")
        print(f"saved {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
