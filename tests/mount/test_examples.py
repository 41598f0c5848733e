"""The examples of docs/guide/grouped.md, on a mount and in a plain directory, and of
docs/guide/datasets.md, where a small model learns from each format. Skipped where torch is not
installed.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.groups import described, wait_durable
from tests.support.mounts import ROOT, Mounted

pytestmark = pytest.mark.sweep

pytest.importorskip("torch", reason="torch is not installed (the demo extra)")

WAYS = ("hint", "files", "published")
RUNNING_MAX_S = 250


def run_example(run: Path) -> None:
    command = [sys.executable, ROOT / "scripts/examples/grouped.py", run]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=RUNNING_MAX_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"{way}: 4 ranks have saved and loaded 2 steps in {run / way}" for way in WAYS
    ]


def test_on_a_mount_equal_bytes_are_stored_once(mounted: Mounted) -> None:
    run = mounted.path / "run"
    run_example(run)
    for way in WAYS:
        wait_durable(run / way / "step-2")
        told = described(run / way / "step-2")
        assert told["state"] == "durable" and told["error"] == ""
        if way != "published":  # there each tensor is in one file
            assert told["duplicate_bytes"] > 0.7 * told["bytes"]


@pytest.mark.long
def test_in_any_other_directory(tmp_path: Path) -> None:
    run_example(tmp_path / "run")


@pytest.mark.long  # eight times
def test_a_model_learns_from_each_format(mounted: Mounted) -> None:
    pytest.importorskip("pyarrow")
    command = [sys.executable, ROOT / "scripts/examples/datasets.py", mounted.path]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    formats = "parquet arrow jsonl text tar megatron records files".split()
    assert [line.partition(":")[0] for line in said.splitlines()] == formats
    assert said.count("100% of the pictures are known") == len(formats), said
