"""The same pictures, read once in shuffled order by AIFS and by the loaders of others (peer_epoch):
on a plain tmpfs, and on mounts, from burst copies and from data servers that take 1 ms more for
each request, of which nothing is in memory.

They take turns in each round, each in a process of its own. What cannot be imported (extra
``peers``) is left out.
"""

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from peer_epoch import PEERS
from report import Row, rate
from rich.console import Console
from systems import HERE, REPOSITORY, Aifs, DelayedAifs, System

PLACES = {
    "plain": "a plain tmpfs",
    "burst": "a mount, from burst copies",
    "far": "a mount, from servers with 1 ms",
}

OURS = "AIFS, a directory of files"

Rates = dict[str, dict[str, float]]
"""Pictures per second, by place and peer: medians."""


def peer_rates(base: Path, pictures: int, rounds: int) -> Rates:
    """What each reads in a second, in each place."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        places: dict[str, System] = {
            "plain": stack.enter_context(System("peers-plain", base)),
            "burst": stack.enter_context(Aifs("peers-burst", base)),
            "far": stack.enter_context(DelayedAifs("peers-far", base)),
        }
        there = [name for name in PEERS if _can_be_imported(name)]
        for place, system in places.items():
            for number, name in enumerate(there):
                directory = system.path / str(number)
                directory.mkdir()
                if place == "far":
                    system.use_capacity_tier(str(number))
                _run("write", name, str(directory), str(pictures))
            system.rest()
        for _ in range(rounds):
            for place, system in places.items():
                for number, name in enumerate(there):
                    system.forget()
                    told = json.loads(_run("read", name, str(system.path / str(number))))
                    if told["samples"] != pictures:
                        raise RuntimeError(f"{name} has read {told['samples']} of {pictures}")
                    found[place][name].append(told["samples"] / told["seconds"])
    return {
        place: {name: statistics.median(rates) for name, rates in of_place.items()}
        for place, of_place in found.items()
    }


def peer_rows(base: Path, pictures: int, rounds: int) -> list[Row]:
    """Ours beside each; on the mounts it is to be ahead."""
    rows = []
    for place, rates in peer_rates(base, pictures, rounds).items():
        ours = rates[OURS]
        for name, theirs in rates.items():
            if name == OURS:
                continue
            is_aimed = place != "plain" and not name.startswith("AIFS")
            rows.append(
                Row(
                    f"pictures, {PLACES[place]}: {OURS} / {name}",
                    rate(theirs, "/s"),
                    None,
                    ours / theirs,
                    None,
                    rate(ours, "/s"),
                    ">= 1" if is_aimed else "",
                    not is_aimed or ours >= theirs,
                )
            )
    return rows


def _can_be_imported(name: str) -> bool:
    words = [sys.executable, "-c", f"import {PEERS[name].module}, torch"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it ended"])[-1]
        Console(stderr=True).print(f"{name} is left out: {why}")
    return done.returncode == 0


def _run(*words: str) -> str:
    command = [sys.executable, HERE / "peer_epoch.py", *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY
    )
    return (done.stdout.splitlines() or [""])[-1]  # what they say themselves comes before
