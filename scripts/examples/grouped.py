"""Four ranks of a small data-parallel job save together, in the three ways of
docs/guide/grouped.md.

    python scripts/examples/grouped.py DIRECTORY [hint] [files] [published]

All ranks hold the same state: on a mount of AIFS its bytes are stored once. In any other directory
the same program runs.
"""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes

from aifs.client import Group, group_getfile, group_putfile
from aifs.client.torch import AifsReader, AifsWriter

RANKS = 4
STEPS = 2


class Replica:
    """One rank's copy of the model; ``train`` keeps the copies equal."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self, step: int) -> None:
        batch = torch.randn(
            32, 256, generator=torch.Generator().manual_seed(step * RANKS + self.rank)
        )
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()
        }


def save_with_a_hint(run: Path, replica: Replica) -> None:
    """The training code as it was: only the directory is told that its files belong together."""
    for step in range(1, STEPS + 1):
        replica.train(step)
        directory = run / f"step-{step}"
        if replica.rank == 0:
            directory.mkdir()
            with suppress(OSError):  # no mount of AIFS
                os.setxattr(directory, "user.aifs.group", f"name=step,ranks={RANKS}".encode())
        dist.barrier()
        torch.save(replica.tensors(), directory / f"rank{replica.rank}.pt")
    check(replica, torch.load(directory / f"rank{replica.rank}.pt"))


def save_files(run: Path, replica: Replica) -> None:
    """Two futures for each file: when the ranks may go on, and when the step is on the servers."""
    saved = None
    for step in range(1, STEPS + 1):
        replica.train(step)
        if saved is not None:
            saved.durable.result()  # the step before
        group = Group.from_torch(name="step", directory=run / f"step-{step}")
        saved = group_putfile(f"rank{replica.rank}.safetensors", replica.tensors(), group)
        saved.buffered.result()  # from here on the state may change
    saved.durable.result()
    check(replica, group_getfile(f"rank{replica.rank}.safetensors", group).to_tensors())


def save_published(run: Path, replica: Replica) -> None:
    """torch.distributed.checkpoint: the step appears whole or not at all; what has not changed is
    not stored again.
    """
    for step in range(1, STEPS + 1):
        replica.train(step)
        dcp.save(
            replica.tensors(), storage_writer=AifsWriter(run / f"step-{step}", group="name=step")
        )
    loaded = {name: torch.zeros_like(tensor) for name, tensor in replica.tensors().items()}
    dcp.load(loaded, storage_reader=AifsReader(run))
    check(replica, loaded)


WAYS = {"hint": save_with_a_hint, "files": save_files, "published": save_published}


def check(replica: Replica, loaded: dict[str, Any]) -> None:
    expected = replica.tensors()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def rank_main(rank: int, meeting_point: str, run: Path, ways: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS
    )
    for way in ways:
        if rank == 0:
            (run / way).mkdir(parents=True)
        dist.barrier()
        WAYS[way](run / way, Replica())
        dist.barrier()
        if rank == 0:
            print(
                f"{way}: {RANKS} ranks have saved and loaded {STEPS} steps in {run / way}",
                flush=True,
            )
    dist.destroy_process_group()


def main(run: Path, ways: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        arguments = (os.path.join(directory, "meeting-point"), run, ways or list(WAYS))
        processes.start_processes(rank_main, arguments, nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY [WAY...]")
    main(Path(sys.argv[1]), sys.argv[2:])
