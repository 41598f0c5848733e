"""What programs see when the daemon of a mount is killed and the next one goes on: how long they
wait, and what it costs while no daemon is killed.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from report import Row, rate
from systems import REPOSITORY, Aifs
from works import Size, names

KEPT = "kernel.restarts=1000"

MEDIAN_S, WORST_S = 0.5, 2.0
"""Targets for a pause; of the one that 99 of 100 are shorter than."""

COST = 0.97
"""Target for rates with and without it."""

BETWEEN_S = 3.0
"""Between a daemon that serves and the next kill."""

REST_S = 0.002
"""Of a program between two turns: the processors are not what they wait for."""

FILES = 200

AIFS = ("-m", "aifs.cli.main")


def outlive_rows(base: Path, kills: int, size: Size, rounds: int) -> list[Row]:
    rows = []
    with kept(base) as mount:
        for number in range(FILES):
            (mount / f"{number:03}").write_bytes(os.urandom(4096))
        (mount / "passed-through").write_bytes(os.urandom(1 << 20))
        found = _pauses(mount, kills)
    for who, pauses in found.items():
        median, worst = statistics.median(pauses), sorted(pauses)[len(pauses) * 99 // 100]
        is_passed = who.startswith("reader of an open")
        target = (0.1, 0.1) if is_passed else (MEDIAN_S, WORST_S)
        rows.append(
            Row(
                f"{who}: pause at {kills} kills",
                "",
                None,
                None,
                None,
                f"median {median * 1e3:,.0f} ms, p99 {worst * 1e3:,.0f} ms",
                f"<= {target[0] * 1e3:.0f} ms, {target[1] * 1e3:,.0f} ms",
                median <= target[0] and worst <= target[1],
            )
        )
    return rows + _cost_rows(base, size, rounds)


@contextmanager
def kept(base: Path) -> Iterator[Path]:
    """A mount that outlives its daemons."""
    store, mount = base / "kept-store", base / "kept"
    mount.mkdir()
    aifs = [sys.executable, *AIFS]
    for words in (("format", store), ("mount", store, mount, "-o", KEPT)):
        subprocess.run([*aifs, *words], check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
    try:
        yield mount
    finally:
        subprocess.run([*aifs, "umount", mount], check=True, cwd=REPOSITORY)


def _pauses(mount: Path, kills: int) -> dict[str, list[float]]:
    """Of each program the longest wait after each kill, in seconds."""
    programs = {
        "reader that opens files": _read,
        "creator": _create,
        "reader of an open file that is passed through": _read_on,
    }
    running = {name: _Program(mount, work) for name, work in programs.items()}
    killed = []
    for _ in range(kills):
        time.sleep(BETWEEN_S)
        pid = json.loads(os.getxattr(mount, "user.aifs.status"))["pid"]
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)
        os.getxattr(mount, "user.aifs.status")
    time.sleep(BETWEEN_S)
    return {name: program.end(killed) for name, program in running.items()}


class _Program:
    """A process that repeats ``work``, and notes how long each turn took."""

    def __init__(self, mount: Path, work: Callable[[Path, int], None]) -> None:
        self._output, write = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                _repeat(mount, work, write)
            finally:
                os._exit(1)
        os.close(write)

    def end(self, killed: list[float]) -> list[float]:
        os.kill(self._pid, signal.SIGTERM)
        with os.fdopen(self._output) as output:
            turns = json.load(output)  # it says nothing if a turn has failed
        os.waitpid(self._pid, 0)
        limits = zip(killed, [*killed[1:], float("inf")], strict=True)
        return [
            max((took for end, took in turns if start <= end < stop), default=0.0)
            for start, stop in limits
        ]


def _repeat(mount: Path, work: Callable[[Path, int], None], output: int) -> None:
    turns: list[tuple[float, float]] = []
    ends = False

    def end(*_: object) -> None:
        nonlocal ends
        ends = True

    signal.signal(signal.SIGTERM, end)
    number, before = 0, time.monotonic()
    while not ends:
        work(mount, number)
        now = time.monotonic()
        if now - before > 0.001:
            turns.append((now, now - before))
        time.sleep(REST_S)
        number, before = number + 1, time.monotonic()
    with os.fdopen(output, "w") as file:
        json.dump(turns, file)
    os._exit(0)


def _read(mount: Path, number: int) -> None:
    with open(mount / f"{number % FILES:03}", "rb", buffering=0) as file:
        assert len(file.read(4096)) == 4096


def _create(mount: Path, number: int) -> None:
    path = mount / f"made-{number}"
    with open(path, "xb", buffering=0) as file:
        file.write(bytes(4096))
    path.unlink()


def _read_on(mount: Path, number: int) -> None:
    global _open
    if _open is None:
        _open = os.open(mount / "passed-through", os.O_RDONLY)
    assert len(os.pread(_open, 4096, number % 256 * 4096)) == 4096


_open: int | None = None


def _cost_rows(base: Path, size: Size, rounds: int) -> list[Row]:
    """Rates of names with and without it, in turns."""
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Aifs("alone", base) as alone, Aifs("outliving", base, AIFS, KEPT) as outliving:
        for round_ in range(rounds):
            for system in (alone, outliving) if round_ % 2 else (outliving, alone):
                for work, found in names(system, size, round_):
                    rates[work][system.name].append(found)
    rows = []
    for work, found in rates.items():
        without, with_it = (statistics.median(found[name]) for name in ("alone", "outliving"))
        rows.append(
            Row(
                f"{work}, outliving its daemon / not",
                f"not: {rate(without, '/s')}",
                None,
                None,
                None,
                f"{rate(with_it, '/s')}, {with_it / without:.2f}",
                f">= {COST}",
                with_it / without >= COST,
            )
        )
    return rows
