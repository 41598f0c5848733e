"""Sums of requests, and what has changed between two states of a mount."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from aifs.cli import status as stats
from aifs.cli.main import cli
from aifs.core.served import BUCKETS, UNIT_NS, Served, quantile
from aifs.watch import usage


def record(**changed: Any) -> dict[str, Any]:
    """As ``aifs trace --json`` prints it."""
    of = {"operation": "read", "path": "/a/b/c/d", "uid": 0, "pid": 0, "waited_us": {}}
    return of | {"bytes": 10, "errno": 0, "duration_us": 5} | changed


@pytest.mark.parametrize(
    ("by", "changed", "key"),
    [
        ("operation", {}, "read"),
        ("path", {}, "/a/b"),
        ("path", {"path": "/a"}, "/"),
        ("path", {"path": "/"}, "/"),
        ("path", {"path": None}, "not known"),
        ("user", {}, "root"),
        ("user", {"uid": 123456789}, "123456789"),
        ("user", {"uid": None}, "not known"),
        ("process", {}, "the kernel"),
        ("process", {"pid": None}, "not known"),
        ("process", {"pid": 1 << 23}, str(1 << 23)),  # there is none beyond 2**22
    ],
)
def test_whose_a_request_is(by: str, changed: dict[str, Any], key: str) -> None:
    assert list(usage.summed([record(**changed)], by)) == [key]


def test_requests_are_summed_up() -> None:
    records = [record(errno=2), record(errno=5, duration_us=15), record(operation="open", bytes=0)]
    sums = usage.summed(records, "operation")
    told = {"requests": 2, "errors": 1, "seconds": 2e-5, "slowest_s": 1.5e-5, "bytes": 20}
    assert sums["read"].told() == told
    usage.summed([record(operation="open", duration_us=99, bytes=0)], "operation", sums)
    assert [key for key, _ in usage.ordered(sums, "time")] == ["open", "read"]
    assert [key for key, _ in usage.ordered(sums, "bytes")] == ["read", "open"]
    assert [key for key, _ in usage.ordered(sums, "requests")] == ["open", "read"]  # as many


def test_a_profile_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    records = [record(path=f"/p{number}/x") for number in range(12)]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    runner = CliRunner()
    told = json.loads(runner.invoke(cli, ["profile", str(file), "--json"]).stdout)
    assert list(told) == ["process", "user", "path", "operation", "cause"]
    assert told["operation"][0]["requests"] == 12 and len(told["path"]) == 12
    printed = runner.invoke(cli, ["profile", str(file), "--by", "path"]).stdout.splitlines()
    assert len(printed) == 12 and printed[-1] == "and 2 more"
    file.write_text(json.dumps(record()) + "\n{}\n")
    wrong = runner.invoke(cli, ["profile", str(file)])
    assert wrong.exit_code == 2 and "trace:2: is not a line of aifs trace --json" in wrong.output
    wrong = runner.invoke(cli, ["profile", str(file), "--for", "1s"])
    assert wrong.exit_code == 2 and "--for is for a mount" in wrong.output


def test_where_the_seconds_of_a_job_went(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    records = [
        record(duration_us=100, waited_us={"journal": 60, "data server 2": 30}),
        record(duration_us=50, waited_us={"journal": 50}, errno=5),
        record(operation="open", duration_us=7, waited_us={"journal": 8}),  # rounded
    ]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    runner = CliRunner()
    command = ["profile", str(file), "--by", "cause"]
    told = json.loads(runner.invoke(cli, [*command, "--json"]).stdout)
    assert list(told) == ["cause"]
    found = [(one["cause"], one["operation"], one["seconds"]) for one in told["cause"]]
    assert found == [
        ("journal", "read", 110e-6),
        ("data server 2", "read", 30e-6),
        ("the daemon itself", "read", 10e-6),
        ("journal", "open", 8e-6),
    ]
    assert (told["cause"][0]["requests"], told["cause"][0]["errors"]) == (2, 1)
    head, first, *_ = runner.invoke(cli, command).stdout.splitlines()
    assert head.split()[:3] == ["cause", "operation", "requests"]
    assert first.split()[:3] == ["journal", "read", "2"]


@given(st.lists(st.integers(0, (UNIT_NS << BUCKETS - 2) - 1), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_an_upper_bound(durations_ns: list[int], fraction: float) -> None:
    served = Served()
    for duration_ns in durations_ns:
        served.add(duration_ns)
    within_s = quantile(served.buckets, fraction)
    assert within_s is not None
    within_ns = round(within_s * 1e9)
    assert sum(one < within_ns for one in durations_ns) >= fraction * len(durations_ns) - 1e-6
    below = within_ns // 2 if within_ns > UNIT_NS else 0
    assert sum(one < below for one in durations_ns) < fraction * len(durations_ns) + 1e-6


def test_nothing_has_no_quantile() -> None:
    assert quantile([0, 0], 0.5) is None


def state(uptime_s: float, requests: int, pid: int = 1) -> dict[str, Any]:
    served = {"count": requests, "bytes": 10 * requests, "buckets": [requests], "errors": {}}
    return {
        "pid": pid,
        "uptime_s": uptime_s,
        "requests": {"read": served} if requests else {},
        "burst": {
            "devices": [{"dirty_bytes": 7}, {"dirty_bytes": None}],
            "throttled_writers": 0,
            "grown_bytes": 50 * requests,
        },
        "drain": {"drained_bytes": 100 * requests, "oldest_age_s": 0.0},
        "process": {"resident_bytes": 5},
    }


def test_what_has_changed_between_two_states() -> None:
    told = stats.between(state(10.0, 0), state(12.0, 4))
    assert (told["requests_per_s"], told["read_bytes_per_s"]) == (2.0, 20.0)
    assert told["grown_bytes_per_s"] == 100.0
    assert (told["drained_bytes_per_s"], told["dirty_bytes"], told["seconds"]) == (200, 7, 2.0)
    assert told["written_bytes_per_s"] == told["errors_per_s"] == 0 and told["p99_s"] == 8e-6
    assert stats.between(state(12.0, 4), state(13.0, 4))["p99_s"] is None
    for before in (None, state(99.0, 99, pid=2)):  # another mount was there before
        assert stats.between(before, state(2.0, 4))["requests_per_s"] == 2.0
