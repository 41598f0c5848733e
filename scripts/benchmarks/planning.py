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

from aifs.group.cache import PlanCache
from aifs.group.pattern import ChunkClass, Destination, Pattern, Source
from aifs.group.planner import plan

PARAMETERS, CHUNK = 38 * 10**9, 4 << 20
TENSOR = 8  # ranks that a layer is divided among


class Case(NamedTuple):
    ranks: int
    stages: int
    servers: int
    replicas: int
    link: int | None
    target_s: float | None


CASES = [
    Case(64, 2, 16, 1, None, 0.1),
    Case(64, 2, 16, 2, None, 0.1),
    Case(64, 2, 16, 1, 200 * 10**6, 0.1),
    Case(64, 2, 16, 2, 200 * 10**6, 0.1),
    Case(1024, 8, 128, 1, None, 2.0),
    Case(1024, 8, 128, 2, None, 2.0),
    Case(1024, 8, 64, 2, 100 * 10**6, None),
]


def pattern(case: Case) -> Pattern:
    parts = TENSOR * case.stages
    replicas = case.ranks // parts
    sources = tuple(
        Source(f"rank{i}", (25 if i % 5 else 18) * 10**9 // 8) for i in range(case.ranks)
    )
    destinations = tuple(
        Destination(f"server{i}", (2 + i % 3) * 10**9) for i in range(case.servers)
    )
    classes = []
    for part in range(parts):
        stage, slice_ = divmod(part, TENSOR)
        holders = tuple(
            slice_ + TENSOR * (replica + replicas * stage) for replica in range(replicas)
        )
        classes.append(ChunkClass(CHUNK, PARAMETERS * 2 // parts // CHUNK, holders))
        state = max(1, PARAMETERS * 12 // parts // replicas // CHUNK)
        classes += [ChunkClass(CHUNK, state, (holder,)) for holder in holders]
    pairs = ((source, server) for source in range(case.ranks) for server in range(case.servers))
    links = {pair: case.link for pair in pairs} if case.link else {}
    return Pattern(sources, destinations, tuple(classes), links, case.replicas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    rows = []
    arguments = parser.parse_args()
    for case in CASES:
        problem = pattern(case)
        times, cached = [], []
        for _ in range(3):
            begin = time.perf_counter()
            found = plan(problem)
            times.append(time.perf_counter() - begin)
        cache = PlanCache()
        cache.plan(problem)
        for _ in range(3):
            again = pattern(case)
            begin = time.perf_counter()
            cache.plan(again)
            cached.append(time.perf_counter() - begin)
        rows.append(
            {
                **case._asdict(),
                "plan_s": statistics.median(times),
                "cached_s": statistics.median(cached),
                "gap": found.gap,
            }
        )
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'ranks':>5} {'servers':>7} {'replicas':>8} {'links':>8} {'plan':>10} {'cached':>10} "
        f"{'target':>7} {'gap':>7}"
    )
    for row in rows:
        links = f"{row['link'] // 10**6} MB/s" if row["link"] else "none"
        target = f"{row['target_s']:g} s" if row["target_s"] else ""
        print(
            f"{row['ranks']:>5} {row['servers']:>7} {row['replicas']:>8} {links:>8} "
            f"{row['plan_s'] * 1e3:>7.1f} ms {row['cached_s'] * 1e3:>7.1f} ms {target:>7} "
            f"{row['gap']:>7.2%}"
        )


if __name__ == "__main__":
    main()
