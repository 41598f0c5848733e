"""The same pictures, read once in shuffled order by AIFS and by the loaders of others (peer_epoch):
on a plain tmpfs, and on mounts, from burst copies and from data servers that take 1 ms more for
each request, of which nothing is in memory.

They take turns in each round, each time in a new process. What cannot be imported (extra
``peers``) is left out.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
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

_PROGRAM = (sys.executable, HERE / "peer_epoch.py")

Rates = dict[str, dict[str, float]]
"""Pictures per second, by place and peer: medians."""


def peer_rates(base: Path, pictures: int, rounds: int) -> Rates:
    """What each reads in a second, in each place."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        there = {name: stack.enter_context(reader) for name in PEERS if (reader := _reader(name))}
        plain = stack.enter_context(System("peers-plain", base))
        places: dict[str, System] = {
            "plain": plain,
            "burst": stack.enter_context(Aifs("peers-burst", base)),
            "far": stack.enter_context(DelayedAifs("peers-far", base)),
        }
        for number, name in enumerate(there):
            made = plain.path / str(number)
            made.mkdir()
            _write(name, made, pictures)
            places["far"].use_capacity_tier(str(number))
            for place in ("burst", "far"):
                shutil.copytree(made, places[place].path / str(number), dirs_exist_ok=True)
        for system in places.values():
            system.rest()
        for _ in range(rounds):
            for place, system in places.items():
                for number, name in enumerate(there):
                    system.forget()
                    told = there[name].read(system.path / str(number))
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


def _write(name: str, directory: Path, pictures: int) -> None:
    command = [*_PROGRAM, "write", name, directory, str(pictures)]
    with tempfile.TemporaryDirectory() as scratch:
        # LitData would remove whatever there is in /tmp/data.
        folders = ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER")
        environment = os.environ | {name: f"{scratch}/{name}" for name in folders}
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=REPOSITORY
        )


class _Reader:
    """A process that reads directories by one peer; a context manager."""

    def __init__(self, name: str) -> None:
        pipe = subprocess.PIPE
        command = [*_PROGRAM, "read", name]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=REPOSITORY
        )

    def __enter__(self) -> "_Reader":  # noqa: PYI034 (Self needs Python 3.11)
        return self

    def __exit__(self, *exception: object) -> None:
        with self._process:  # its input ends
            pass

    def is_ready(self) -> bool:
        return self._answer("ready") != ""

    def read(self, directory: Path) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{directory}\n")
        self._process.stdin.flush()
        answer = self._answer("{")
        if not answer:
            raise RuntimeError(f"{directory} was not read: see above")
        return json.loads(answer)

    def _answer(self, beginning: str) -> str:
        """The next line that begins so, past what they say themselves; '': it has ended."""
        assert self._process.stdout is not None
        lines = (line for line in self._process.stdout if line.startswith(beginning))
        return next(lines, "")


def _reader(name: str) -> _Reader | None:
    """None: what it imports is not there, which it has said."""
    reader = _Reader(name)
    if reader.is_ready():
        return reader
    Console(stderr=True).print(f"{name} is left out")
    reader.__exit__()
    return None
