"""What scripts/bench measures on, and with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.machines import Network

pytestmark = pytest.mark.sweep

BENCHMARKS = Path(__file__).resolve().parents[2] / "scripts/benchmarks"
SMALL, FILES = 100_000, 20


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def used_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_a_small_file_takes_no_huge_page_of_the_medium() -> None:
    """With huge=always each took 2 MiB, which the drain cleared while requests waited: small files
    were read at one of two speeds, by whether the drain was done."""
    from systems import medium

    with medium(None) as base:
        before = used_bytes(base)
        for number in range(FILES):
            (base / str(number)).write_bytes(bytes(SMALL))
        assert used_bytes(base) - before < 2 * FILES * SMALL


def test_a_missing_tool_makes_a_row_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import environments

    monkeypatch.setenv("PATH", str(tmp_path))
    rows = environments.env_rows(tmp_path, environments.Amounts(1, 1, 1, ()), 0, tmp_path)
    assert [(row.work, row.target, row.passed) for row in rows] == [
        ("tar x, find, rm -rf", "not done: tar is not installed", True),
        ("rsync", "not done: rsync is not installed", True),
        ("git", "not done: git is not installed", True),
        ("pip install", f"not done: there are no wheels in {tmp_path}", True),
    ]


LONG_PARTS = ("create", "cached names", "own copies", "remote copy", "locks", "one file on 4 hosts")


@pytest.mark.parametrize(
    "part", ["seen", *(pytest.param(part, marks=pytest.mark.long) for part in LONG_PARTS)]
)
def test_hosts_are_measured(part: str) -> None:
    """Each row has been measured; what is said of old bytes and names does not depend on time."""
    import hosts
    from systems import medium

    try:
        Network().close()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    amount = hosts.Amount(files=24, mib=8, checks=90, locks=40)
    with medium(None) as base:
        rows = list(hosts.hosts_rows(base, amount, 1, [part]))
    assert rows
    for row in rows:
        assert "not measured" not in row.target
        assert row.passed or not row.work.startswith("something old")


def test_a_part_of_hosts_that_is_not_there() -> None:
    import hosts

    with pytest.raises(SystemExit, match=r"there is no part sene; there are: create, .*seen"):
        hosts.main(["--quick", "sene"])


@pytest.mark.long
def test_the_environments_are_measured() -> None:
    command = [sys.executable, BENCHMARKS / "bench.py", "--quick", "--json", "env"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert [row["work"].split()[0] for row in rows] == [
        *("tar", "find", "rm", "rsync", "git", "git", "pip", "import", "import")
    ]


@pytest.mark.long
def test_what_nobody_should_feel_is_measured() -> None:
    command = [sys.executable, BENCHMARKS / "bench.py", "--quick", "--json", "background"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert [row["work"].split()[0] for row in rows] == [*["stat"] * 4, *["read"] * 3, "write-4"]


@pytest.mark.long
def test_looking_at_a_mount_is_measured(scratch: Path) -> None:
    import operations

    rows = operations.operations_rows(scratch, FILES, 1)
    assert [row.work for row in rows] == [
        "create, metrics on",
        "stat, metrics on",
        "read /metrics",
        "create, quota on",
    ]
    assert "KiB" in rows[-2].aifs


@pytest.mark.long
def test_a_trash_and_clones_are_measured(scratch: Path) -> None:
    import clones
    import trash

    rows = [*trash.trash_rows(scratch, FILES, FILES, 1)]
    rows += clones.clones_rows(scratch, FILES, FILES, 1)
    assert [row.work.split()[0] for row in rows] == ["unlink,", "restore", "clone", "create"]
    assert rows[2].aifs.endswith(" 0 bytes")


def test_hosts_that_start_at_once_are_measured() -> None:
    """How even they are depends on the machine; that each has told its stage does not."""
    import start_hosts
    from systems import medium

    try:
        Network().close()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    with medium(None) as base:
        rows = start_hosts.start_hosts_rows(base, 2, 16)
    assert [row.work.partition(",")[0] for row in rows] == ["2 hosts", "2 hosts"]


@pytest.mark.long
def test_starts_are_measured() -> None:
    """A container, and a package that is imported: only that each row is measured."""
    import starts
    from systems import medium

    with medium(None) as base:
        rows = starts.start_rows(
            base, starts.QUICK, 1, None, ["import", "environment", "container"]
        )
    assert [row.work.partition(" ")[0] for row in rows] == [
        "import",
        "the",
        "recorded",
        "bytes",
        "blocks",
        "cost",
        "environment",
        "aifs",
        "container:",
        "container:",
    ]
