"""The example of docs/guide/datasets.md: a small model learns from each format, on a mount."""

import subprocess
import sys

import pytest

from tests.support.mounts import ROOT, Mounted


@pytest.mark.long  # eight times
def test_a_model_learns_from_each_format(mounted: Mounted) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    command = [sys.executable, ROOT / "scripts/examples/datasets.py", mounted.path]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    formats = "parquet arrow jsonl text tar megatron records files".split()
    assert [line.partition(":")[0] for line in said.splitlines()] == formats
    assert said.count("100% of the pictures are known") == len(formats), said
