"""Much at a time on the hosts of a store: random system calls on one while the other one looks."""

from pathlib import Path

import pytest

from tests.support.agreement import require_agreement
from tests.support.hosts import Both, Cluster, many_hosts
from tests.support.posix_ops import generate
from tests.support.postgres import Postgres

LONG = pytest.mark.long


@pytest.fixture
def reference(scratch: Path) -> Path:
    """A directory of the local filesystem that temporary files are on."""
    directory = scratch / "reference"
    directory.mkdir()
    return directory


# --- random system calls ---

SHAPES = {
    "defaults": {},
    "drained": {
        "layout": {"unit": "4KiB", "inline_limit": 0},
        "burst": {"drain_delay": "0s"},
    },
    "tiny": {
        "layout": {"unit": "4KiB"},
        "burst": {
            "capacity": "256KiB",
            "high_water": 0.5,
            "low_water": 0.2,
            "reserve": 0,
            "drain_delay": "0s",
            "throttle_max": "1ms",
        },
        "meta": {"commit_interval": "10ms"},
        "data": {"writeback_interval": "100ms"},
    },
    "no-bridge": {"kernel": {"bridge": "off"}, "burst": {"drain_delay": "0s"}},
}


@pytest.mark.parametrize("number", [0, 1])
def test_random_system_calls_while_the_other_host_looks(
    two: Cluster, both: Both, reference: Path, number: int
) -> None:
    both[0].chmod(0o777)
    ops = generate(2000 + number, 500, bridged=True)
    require_agreement(both[number], reference, ops, both[1 - number])


@LONG
@pytest.mark.parametrize("shape", SHAPES)
def test_many_random_system_calls_while_the_other_host_looks(
    scratch: Path, a_postgres: Postgres, reference: Path, shape: str
) -> None:
    with many_hosts(scratch, a_postgres, settings=SHAPES[shape]) as hosts:
        for host in hosts:
            host.expected.append("is full: writers of files")
        for seed in range(20):
            ops = generate(3000 + seed, 1000, bridged=shape != "no-bridge")
            here, there = hosts.paths[seed % 2], hosts.paths[1 - seed % 2]
            require_agreement(here, reference, ops, there)
