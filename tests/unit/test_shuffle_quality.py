"""What scripts/bench data --quality trains on. Skipped where torch is not installed."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.sweep

pytest.importorskip("torch", reason="torch is not installed (the demo extra)")

BENCHMARKS = Path(__file__).resolve().parents[2] / "scripts/benchmarks"


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import shuffle_quality

    return shuffle_quality


def test_each_order_has_every_row_once(quality: ModuleType) -> None:
    rows = 3200
    for shuffle in quality.SHUFFLES:
        sequence = quality._sequence(rows, shuffle, 1)
        assert sorted(sequence) == list(range(rows))
        assert (sequence == sorted(sequence)) == (shuffle == "none")


def test_an_order_by_blocks_mixes_the_corpus(quality: ModuleType) -> None:
    """A batch has rows of most of ten topics; in a window of rows there are two at most."""
    rows, batch = 12_800, 32

    def topics(shuffle: str) -> list[int]:
        sequence = quality._sequence(rows, shuffle, 1)
        batches = [sequence[at : at + batch] for at in range(0, rows, batch)]
        return [len({number * 10 // rows for number in numbers}) for numbers in batches]

    assert min(topics("blocks")) >= 5
    assert max(topics("window")) <= 2


@pytest.mark.long
def test_losses_are_told() -> None:
    words = ("--quick", "--json", "--quality", "data")
    command = [sys.executable, BENCHMARKS / "bench.py", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert [row["work"].rpartition("=")[2] for row in json.loads(done.stdout)] == [
        *("rows", "blocks", "window", "none")
    ], done.stderr
