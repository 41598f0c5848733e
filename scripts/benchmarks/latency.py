"""Do stripes and read-ahead hide a slow server? A cold sequential read of 1 MiB at a time with 1 ms
added to every server request, against the same read with the kernel's default read-ahead, which has
hardly more than one request under way, and against single requests of 1 MiB."""

import os
import statistics
from pathlib import Path

from report import Row, rate
from systems import DelayedAifs

KERNEL_DEFAULT_KIB = 128
TARGET = 5.0


def latency_row(base: Path, mib: int, rounds: int) -> Row:
    found: dict[str, list[float]] = {"ahead": [], "default": [], "single": []}
    with DelayedAifs("delayed", base) as system:
        device = os.stat(system.path).st_dev
        setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        chosen = setting.read_text()
        system.use_capacity_tier("slow")
        system.run("write", "slow", jobs=1, mib=mib)
        for _ in range(rounds):
            found["ahead"].append(mib / system.run("read", "slow", jobs=1, mib=mib, cold=1))
            found["single"].append(mib / system.run("read-single", "slow", jobs=1, mib=mib, cold=1))
            setting.write_text(str(KERNEL_DEFAULT_KIB))
            found["default"].append(mib / system.run("read", "slow", jobs=1, mib=mib, cold=1))
            setting.write_text(chosen)
    ahead, default, single = (statistics.median(rates) for rates in found.values())
    return Row(
        "read, 1 ms more per server request",
        f"default read-ahead {rate(default, 'MiB/s')}",
        None,
        None,
        None,
        rate(ahead, "MiB/s"),
        f"{ahead / default:.1f} x default read-ahead >= {TARGET:.0f} ({ahead / single:.1f} x "
        "single requests of 1 MiB)",
        ahead / default >= TARGET,
    )
