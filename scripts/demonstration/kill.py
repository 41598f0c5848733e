"""scripts/demo --kill: a training loop saves checkpoints while the daemon of its mount is killed
each second that it serves. The mount outlives its daemons, and the loop sees no error."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machines import AIFS, TIMEOUT_S, Failed
from rich.console import Console

KILLS = 20

TRAINING = """
import os, sys, time, torch
from aifs.client import checkpoint
run, stop = sys.argv[1:]
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.Adam(model.parameters())
step = 0
while not os.path.exists(stop):
    step, began_s = step + 1, time.monotonic()
    model(torch.randn(32, 1000)).square().mean().backward()
    optimizer.step()
    with checkpoint(f"{run}/step-{step}", keep="last=3") as directory:
        torch.save(model.state_dict(), directory / "model.pt")
    found = torch.load(f"{run}/latest/model.pt")
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    print(time.monotonic() - began_s, flush=True)
"""
"""Prints how long each step took."""


def demonstrate(work: Path, console: Console) -> None:
    """Raises Failed, OSError, CalledProcessError. Leaves nothing but what is in ``work``."""
    source, path, stop = work / "store", work / "mnt", work / "stop"
    path.mkdir()
    _aifs("format", source)
    _aifs("mount", "-o", "kernel.restarts=1000", source, path)
    command = [sys.executable, "-c", TRAINING, path, stop]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for number in range(1, KILLS + 1):
            pid = json.loads(os.getxattr(path, "user.aifs.status"))["pid"]  # when it serves
            time.sleep(1)
            os.kill(pid, signal.SIGKILL)
            console.print(f"kill -9 {pid}: daemon {number} of the mount")
        stop.touch()
        said, _ = training.communicate(timeout=TIMEOUT_S)
        if training.returncode:
            raise Failed(f"the training has ended with exit status {training.returncode}")
        steps = [float(line) for line in said.split()]
        console.print(
            f"The training has seen no error. It has saved {len(steps)} checkpoints, and loaded "
            f"each of them as it was saved. A step took {statistics.median(steps):.2f} s, and "
            f"{max(steps):.2f} s at most.",
            soft_wrap=True,
        )
        _aifs("umount", path)
        console.print(f"fsck: {_aifs('fsck', source).strip().splitlines()[-1]}", soft_wrap=True)
    finally:
        training.kill()
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def _aifs(*words: object) -> str:
    command = [*AIFS, *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
