"""A small model is trained and saved in the three ways of docs/guide/training.md, then goes on from
the newest checkpoint.

python scripts/examples/training.py DIRECTORY             all three, one after the other
torchrun --nproc-per-node 4 scripts/examples/training.py DIRECTORY parallel
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aifs import client
from aifs.client.torch import PipelinedCheckpointer, parallel_load, parallel_save, save

WAYS = ("save", "pipelined", "parallel")
STEPS = 4


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.step = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def compute(self) -> None:
        """Forward and backward: changes gradients alone."""
        self.optimizer.zero_grad()
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(self.step))
        self.model(batch).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.step += 1


def save_each_step(run: Path, training: Training) -> None:
    """The loop stands still while it is saved."""
    while training.step < STEPS:
        training.compute()
        training.update()
        with client.checkpoint(run / f"step-{training.step}", keep="last=2") as directory:
            save(training.state(), directory / "state-0.pt")


def save_pipelined(run: Path, training: Training) -> None:
    """The next iteration computes meanwhile."""
    with PipelinedCheckpointer(run / "step-{step}", keep="last=2") as checkpointer:
        while training.step < STEPS:
            training.compute()
            checkpointer.wait()  # from here on the state may change
            training.update()
            checkpointer.save(training.state(), training.step)


def save_parallel(run: Path, training: Training) -> None:
    """Each replica writes its part."""
    group = None if dist.is_initialized() else ("state", 0, 1)
    while training.step < STEPS:
        training.compute()
        training.update()
        parallel_save(
            training.state(), run / f"step-{training.step}", group, file="state-0.pt", keep="last=2"
        )


def main(run: Path, ways: tuple[str, ...] = WAYS) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    loops = dict(zip(WAYS, (save_each_step, save_pipelined, save_parallel), strict=True))
    for way in ways:
        directory = run / way
        directory.mkdir(parents=True, exist_ok=True)
        loops[way](directory, Training())
        resumed = Training()
        newest = client.latest(directory)
        assert newest is not None
        resumed.load(
            parallel_load(newest) if way == "parallel" else torch.load(newest / "state-0.pt")
        )
        assert resumed.step == STEPS
        print(f"{way}: resumed from {newest}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY [WAY...]")
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or WAYS)
