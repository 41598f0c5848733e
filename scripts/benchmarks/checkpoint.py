"""Checkpoints of PyTorch: the client's save against torch.save and dd in the same plain directory,
and what a checkpoint at each iteration costs a loop whose iteration is longer than its write.
Without torch there is nothing to measure. With DEVICE ``cuda`` the state lies on the first GPU,
which computes the iterations, too.

    python scripts/benchmarks/checkpoint.py [DIRECTORY] [MIB] [ROUNDS] [DEVICE]
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from report import Row, rate, show

TENSORS = 16
SAVE_TARGET, DD_TARGET, SLOWDOWN_TARGET = 1.5, 0.85, 0.05
ITERATIONS = 6
LONGER = 2.0
"""An iteration to the time that a save takes by itself."""


def checkpoint_rows(base: Path, mib: int, rounds: int, device: str = "cpu") -> list[Row]:
    if find_spec("torch") is None:
        return []
    import torch

    from aifs.client.torch import save

    directory = base / "checkpoint"
    directory.mkdir()
    size = (mib << 20) // TENSORS
    state = {
        f"layer {number}": torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
        for number in range(TENSORS)
    }
    path = directory / "state.pt"
    dd = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={mib}"]
    ways: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: torch.save(state, path),
        "dd": lambda: subprocess.run(dd, check=True, stderr=subprocess.DEVNULL),
        "save": lambda: save(state, path, sync=False),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, work in ways.items():
            taken[way].append(_seconds(work))
            path.unlink()
    rates = {
        way: mib / statistics.median(times[1:]) for way, times in taken.items()
    }  # the first one warms up
    to_torch, to_dd, saved = (
        rates["save"] / rates["torch.save"],
        rates["save"] / rates["dd"],
        rate(rates["save"], "MiB/s"),
    )
    saved_mib = mib if device != "cpu" else mib // TENSORS  # processors have to copy it themselves
    part = state if device != "cpu" else {"layer 0": state["layer 0"]}
    slowdown = _slowdown(directory, part, rounds, device)
    shutil.rmtree(directory)
    return [
        Row(
            f"save of {mib} MiB",
            f"torch.save {rate(rates['torch.save'], 'MiB/s')}",
            None,
            to_torch,
            None,
            saved,
            f">= {SAVE_TARGET}",
            to_torch >= SAVE_TARGET,
        ),
        Row(
            "the same",
            f"dd {rate(rates['dd'], 'MiB/s')}",
            None,
            to_dd,
            None,
            saved,
            f">= {DD_TARGET}",
            to_dd >= DD_TARGET,
        ),
        Row(
            f"a checkpoint of {saved_mib} MiB at each iteration",
            "",
            None,
            None,
            None,
            f"{slowdown:+.1%}",
            f"< {SLOWDOWN_TARGET:.0%} slower",
            slowdown < SLOWDOWN_TARGET,
        ),
    ]


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _slowdown(directory: Path, state: dict[str, Any], rounds: int, device: str) -> float:
    """How much longer iterations take that save."""
    import torch

    from aifs.client.torch import PipelinedCheckpointer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix, step = torch.randn((512, 512) if device == "cpu" else (8192, 8192), device=device), 0

    def compute(times: int) -> None:
        for _ in range(times):
            matrix @ matrix
        if device != "cpu":
            torch.cuda.synchronize()

    one = statistics.median(_seconds(lambda: compute(1)) for _ in range(50))
    with PipelinedCheckpointer(directory / "step-{step}", keep="last=1") as checkpointer:

        def save() -> None:
            nonlocal step
            step += 1
            checkpointer.save(state, step)

        def alone() -> None:
            save()
            checkpointer.wait(durable=True)

        alone()  # the helper has started
        length = LONGER * statistics.median(_seconds(alone) for _ in range(3))

        def iterate(with_saving: bool) -> None:
            if with_saving:
                save()
            compute(round(length / one))
            checkpointer.wait()
            for tensor in state.values():
                tensor += 1  # the optimizer's step

        def saving() -> float:
            taken = _seconds(lambda: iterate(True))
            checkpointer.wait(durable=True)  # or it would slow the other iteration down
            return taken

        both = [(_seconds(lambda: iterate(False)), saving()) for _ in range(ITERATIONS * rounds)]
    torch.set_num_threads(threads)
    plain, saved = (statistics.median(times) for times in zip(*both, strict=True))
    return saved / plain - 1


if __name__ == "__main__":
    given = [*sys.argv[1:], *("/dev/shm", "1024", "3", "cpu")[len(sys.argv) - 1 :]][:4]
    show(checkpoint_rows(Path(given[0]), int(given[1]), int(given[2]), given[3]), as_json=False)
