#!/usr/bin/env python3
"""How long plans of grouped writes take: a model of 38 billion parameters on 64 ranks (target 0.1
s), 1,024 (target 2 s).

Parameters (2 bytes each) are shared by the ranks of a data-parallel set, optimizer state (12 bytes)
is divided among them (ZeRO-1), in chunks of 4 MiB. The last column: how much longer than the lower
bound the plan takes.

    python scripts/benchmarks/planning.py [--json]
"""

import argparse
import json
import statistics
import time
from typing import NamedTuple

from aifs.saves.planner import ChunkClass, Destination, Pattern, Source, plan

PARAMETERS, CHUNK = 38 * 10**9, 4 << 20
TENSOR = 8  # ranks that a layer is divided among


class Case(NamedTuple):
    ranks: int
    stages: int
    servers: int
    target_s: float


CASES = [Case(64, 2, 16, 0.1), Case(1024, 8, 128, 2.0)]


def pattern(case: Case) -> Pattern:
    parts = TENSOR * case.stages
    replicas = case.ranks // parts
    sources = [Source((25 if i % 5 else 18) * 10**9 // 8) for i in range(case.ranks)]
    destinations = [Destination((2 + i % 3) * 10**9) for i in range(case.servers)]
    classes = []
    for part in range(parts):
        stage, slice_ = divmod(part, TENSOR)
        holders = tuple(
            slice_ + TENSOR * (replica + replicas * stage) for replica in range(replicas)
        )
        classes.append(ChunkClass(CHUNK, PARAMETERS * 2 // parts // CHUNK, holders))
        state = max(1, PARAMETERS * 12 // parts // replicas // CHUNK)
        classes += [ChunkClass(CHUNK, state, (holder,)) for holder in holders]
    return Pattern(sources, destinations, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    rows = []
    arguments = parser.parse_args()
    for case in CASES:
        problem = pattern(case)
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            found = plan(problem)
            times.append(time.perf_counter() - begin)
        gap = found.time_s / found.lower_bound_s - 1
        rows.append({**case._asdict(), "plan_s": statistics.median(times), "gap": gap})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'ranks':>5} {'servers':>7} {'plan':>10} {'target':>7} {'gap':>7}")
    for row in rows:
        print(
            f"{row['ranks']:>5} {row['servers']:>7} {row['plan_s'] * 1e3:>7.1f} ms "
            f"{row['target_s']:>5g} s {row['gap']:>7.2%}"
        )


if __name__ == "__main__":
    main()
