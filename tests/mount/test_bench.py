"""What scripts/bench measures on, and with."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL, FILES = 100_000, 20


def used_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_a_small_file_takes_no_huge_page_of_the_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    """With huge=always each took 2 MiB, which the drain cleared while requests waited: small files
    were read at one of two speeds, by whether the drain was done.
    """
    monkeypatch.syspath_prepend(ROOT / "scripts/benchmarks")
    from systems import medium

    with medium(None) as base:
        before = used_bytes(base)
        for number in range(FILES):
            (base / str(number)).write_bytes(bytes(SMALL))
        assert used_bytes(base) - before < 2 * FILES * SMALL
