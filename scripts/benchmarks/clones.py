"""What a clone of a tree costs: its seconds, the bytes that it moves, and what making files beside
the originals costs afterwards. Then the clone is what is restored out of a trash: to make and drain
a tree of so many files takes a minute."""

import os
import time
from pathlib import Path

from report import Row, rate
from systems import Aifs
from trash import restore_row

from aifs.cli.clone import clone

CLONED_PER_S, CREATE_RATIO = 10_000, 0.97
FILE_BYTES = 4 << 10
"""Of each: not in its record, so that there are bytes to share; but that is all they are for."""


def clones_rows(base: Path, files: int, entries: int, rounds: int) -> list[Row]:
    """``entries``: how many files the tree has that is cloned, and restored."""
    rates: dict[str, list[float]] = {"original": [], "other": []}
    with Aifs("clones", base) as system:
        system.run("small-write", "original/files", count=entries, bytes=FILE_BYTES)
        system.rest()
        before, begin_s = _stored(system), time.perf_counter()
        clone(str(system.path / "original"), str(system.path / "clone"))
        took_s, moved = time.perf_counter() - begin_s, _stored(system) - before
        for number in range(2 * rounds):
            for name in sorted(rates, reverse=bool(number % 2)):
                found = files / system.run("create", f"{name}/round{number}", count=files)
                rates[name].append(found)
        restored = restore_row(system.path, "clone", entries)
    per_s = entries / took_s
    # The best of all rounds, as other load makes every one slower.
    ratio = max(rates["original"]) / max(rates["other"])
    return [
        Row(
            f"clone of {entries:,} files",
            "",
            None,
            None,
            None,
            f"{took_s:.1f} s, {moved} bytes",
            f"<= {entries / CLONED_PER_S:.1f} s, 0 bytes",
            per_s >= CLONED_PER_S and not moved,
        ),
        Row(
            "create beside what is cloned",
            rate(max(rates["other"]), "files/s"),
            None,
            None,
            None,
            rate(max(rates["original"]), "files/s"),
            f"{ratio:.3f} of elsewhere >= {CREATE_RATIO}",
            ratio >= CREATE_RATIO,
        ),
        restored,
    ]


def _stored(system: Aifs) -> int:
    """Bytes on the data servers and in the burst tier."""
    objects = (system.base / "store").glob("*/**/objects/**/*")
    return sum(os.stat(path).st_blocks * 512 for path in objects if path.is_file())
