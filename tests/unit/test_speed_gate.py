"""The gate for speed: what it makes of times that are known, and its table of rows."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "scripts/benchmarks"
ROUNDS = 5
OF_VISIT, OF_DAEMON = 0.02, 0.005
"""How much visits, and daemons, are off by."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gate

    return gate


def rounds_of(slower: float, seed: int, other_load: bool = False, count: int = ROUNDS) -> list:
    """Rounds of a tree that is so much slower than the other one, on a machine that is up to twice
    as slow in one round as in another."""
    rng = random.Random(seed)

    def visit(daemon: float, machine: float) -> float:
        met = rng.expovariate(3) if other_load and rng.random() < 0.2 else 0.0
        return math.exp(daemon + machine + rng.gauss(0, OF_VISIT) + met)

    rounds = []
    for _ in range(count):
        machine = rng.uniform(0, math.log(2))
        this = rng.gauss(math.log1p(slower), OF_DAEMON)
        that = rng.gauss(0, OF_DAEMON)
        visits = ([visit(daemon, machine) for _ in range(4)] for daemon in (this, that))
        rounds.append(tuple(visits))
    return rounds


def test_a_tenth_is_found(gate: ModuleType) -> None:
    found = [gate.compare(rounds_of(0.1, seed)) for seed in range(200)]
    assert sum(one.is_slower for one in found) >= 190
    assert all(one.is_slower or not one.is_clear for one in found), "what is missed is not cleared"
    assert all(0.05 < one.ratio - 1 < 0.15 for one in found)


@pytest.mark.sweep
@pytest.mark.parametrize("count", [ROUNDS, 8])
@pytest.mark.parametrize("other_load", [False, True])
def test_a_tree_is_not_slower_than_itself(gate: ModuleType, other_load: bool, count: int) -> None:
    found = [gate.compare(rounds_of(0.0, seed, other_load, count)) for seed in range(500)]
    assert not any(one.is_slower for one in found)
    if not other_load:
        assert sum(one.is_clear for one in found) >= 490


def test_a_tree_that_is_faster_is_not_slower(gate: ModuleType) -> None:
    found = [gate.compare(rounds_of(-0.2, seed)) for seed in range(50)]
    assert all(one.is_faster and one.is_clear and not one.is_slower for one in found)


def test_noise_is_not_taken_for_slowness(gate: ModuleType) -> None:
    """Nor is a row cleared that nobody can tell about."""
    rng = random.Random(1)
    rounds = [([rng.uniform(1, 3)] * 2, [rng.uniform(1, 3)] * 2) for _ in range(ROUNDS)]
    found = gate.compare(rounds)
    assert not found.is_slower and not found.is_clear


@pytest.mark.sweep
def test_processor_time_is_that_of_all_descendants(gate: ModuleType) -> None:
    """Of those that live, and of those that have ended and were waited for."""
    from trees import processor_s

    burn = "import time\nwhile time.process_time() < 0.1: pass\n"
    grandchild = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n"
    before_s = processor_s([os.getpid()])
    command = [sys.executable, "-c", f"{burn}{grandchild}print(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert processor_s([os.getpid()]) - before_s > 0.18
        assert processor_s([child.pid]) > 0.18
        child.communicate(b"\n")


def test_a_tree_is_driven_by_the_newest_spelling_that_it_has(
    gate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trees

    program = tmp_path / "aifs"
    program.write_text('#!/bin/sh\ntest "$1 $2" = "make --help" || test "$1 $2" = "old --help"\n')
    program.chmod(0o755)
    spelled = {"format": (("new", "make", "{source}"), ("make", "{source}"), ("old", "{source}"))}
    monkeypatch.setattr(trees, "SPELLINGS", {**spelled, "mount": (("mount", "{path}"),)})
    tree = trees.Tree("a tree", program)
    assert tree.command("format", source="/srv") == [str(program), "make", "/srv"]
    with pytest.raises(trees.Absent):
        tree.command("mount", path="/mnt")


def test_the_table_has_30_rows_of_which_12_are_quick(gate: ModuleType) -> None:
    rows = [row for course in gate.COURSES for row in course.rows]
    assert len(rows) == len({row.name for row in rows}) == 30
    assert sum(row.quick for row in rows) == 12


def test_a_row_that_this_tree_alone_lacks_is_named(gate: ModuleType) -> None:
    row = next(iter(gate.ROWS.values()))
    assert gate.Found(row, absent={gate.THIS: "no such command"}).is_named
    assert not gate.Found(row, absent={gate.THAT: "no such command"}).is_named
    assert not gate.Found(row, absent={gate.THIS: "", gate.THAT: ""}).is_named


def test_processor_time_counts_where_the_daemon_works(gate: ModuleType) -> None:
    """A row is slower if either of what is compared is."""
    row = next(iter(gate.ROWS.values()))

    def found(processor: float) -> object:
        costs = {
            gate.THIS: [[gate.Cost(1.0, 1.2 * processor)] * 4] * ROUNDS,
            gate.THAT: [[gate.Cost(1.0, processor)] * 4] * ROUNDS,
        }
        return gate.Found(row, costs)

    assert found(0.5).slower == ["processor"]
    told = json.loads(json.dumps(gate._as_json(found(0.5))))
    assert told["named"] and told["verdict"] == "slower (processor)"
    assert told["compared"]["processor"]["ratio"] == pytest.approx(1.2)
    assert not found(0.01).slower
