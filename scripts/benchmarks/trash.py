"""What a trash costs those who remove files, and how soon a removed tree is there again."""

import os
import statistics
import time
from pathlib import Path

from report import Row, rate
from systems import Aifs

from aifs.cli.trash import remove_tree
from aifs.core import ioctl

RATIO = 0.85
RESTORED_S = 50e-3
RESTORES = 5


def trash_row(base: Path, files: int, rounds: int) -> Row:
    rates: dict[str, list[float]] = {}
    with Aifs("gone", base) as plain, Aifs("kept", base) as keeping:
        os.setxattr(keeping.path, "user.aifs.trash", b"7d")
        for number in range(2 * rounds):
            for system in (plain, keeping) if number % 2 else (keeping, plain):
                for work in ("create", "rename"):
                    system.run(work, f"round{number}", count=files)
                took_s = system.run("unlink", f"round{number}", count=files)
                rates.setdefault(system.name, []).append(files / took_s)
    kept, gone = max(rates["kept"]), max(rates["gone"])
    return Row(
        "unlink, trash on",
        f"off {rate(gone, 'files/s')}",
        None,
        None,
        None,
        rate(kept, "files/s"),
        f"{kept / gone:.3f} of off >= {RATIO}",
        kept / gone >= RATIO,
    )


def restore_row(place: Path, name: str, entries: int) -> Row:
    """``name``: of a tree in the directory ``place``, which has ``entries`` files."""
    os.setxattr(place, "user.aifs.trash", b"7d")
    median_s = statistics.median(_restore(place, name) for _ in range(RESTORES))
    return Row(
        f"restore {entries:,} files",
        "",
        None,
        None,
        None,
        f"{median_s * 1e3:.1f} ms",
        f"<= {RESTORED_S * 1e3:.0f} ms",
        median_s <= RESTORED_S,
    )


def _restore(place: Path, name: str) -> float:
    """Seconds until a tree that was removed is there again."""
    remove_tree(str(place), name)
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    begin_s = time.perf_counter()
    ioctl.call(fd, "restore", path=name)
    took_s = time.perf_counter() - begin_s
    os.close(fd)
    assert (place / name).is_dir()
    return took_s
