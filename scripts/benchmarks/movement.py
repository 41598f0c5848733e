"""What the tiers cost: draining and staging against cp, writing meanwhile, the first read of what
is not in the burst tier, and the daemon's processor time while bytes flow past it."""

import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from report import Row, at_least
from systems import Aifs, System

FILES = 4
DRAIN_TARGET, MEANWHILE_TARGET, STAGE_TARGET, CPU_TARGET = 0.8, 0.7, 0.8, 0.03


class PatientAifs(Aifs):
    """AIFS that drains when it is told to."""

    def __init__(self, name: str, base: Path) -> None:
        super().__init__(name, base)
        self.command = [*self.command, "-o", "burst.drain_delay=1h"]

    def files(self, directory: str) -> list[Path]:
        return sorted((self.path / directory).iterdir())

    def ask(self, path: Path, what: str) -> None:
        os.setxattr(path, f"user.aifs.{what}", b"")

    def drain(self, directory: str) -> float:
        """Seconds until all below ``directory`` is on the capacity tier."""
        begin = time.perf_counter()
        self.ask(self.path / directory, "drain")
        while json.loads(os.getxattr(self.path / directory, "user.aifs.drain"))["files"]:
            time.sleep(0.01)
        return time.perf_counter() - begin


def movement_rows(base: Path, mib: int, rounds: int) -> list[Row]:
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with System("cp", base) as plain, PatientAifs("moving", base) as aifs:
        for _ in range(rounds):
            _one_round(plain, aifs, mib, note)
    middle = {name: statistics.median(values) for name, values in found.items()}
    return [
        at_least(
            "drain, with checksums", "cp + fsync", middle["cp-sync"], middle["drain"], DRAIN_TARGET
        ),
        at_least(
            "write while draining",
            "write alone",
            middle["alone"],
            middle["meanwhile"],
            MEANWHILE_TARGET,
        ),
        at_least("stage", "cp", middle["cp"], middle["stage"], STAGE_TARGET),
        at_least(
            "first read of a striped file",
            "plain",
            middle["plain-read"],
            middle["first-read"],
            0.25,
        ),
        Row(
            "daemon's processor while writing",
            "",
            None,
            None,
            None,
            f"{middle['cpu']:.1%} of one",
            f"< {CPU_TARGET:.0%}",
            middle["cpu"] < CPU_TARGET,
        ),
    ]


def _one_round(
    plain: System, aifs: PatientAifs, mib: int, note: Callable[[str, float], None]
) -> None:
    total = FILES * mib
    plain.run("write", "from", jobs=FILES, mib=mib)
    plain.run("write", "warm", jobs=FILES, mib=mib)  # the memory that the copies will take
    plain.remove("warm")
    note("cp-sync", total / _copy(plain.path / "from", plain.path / "to", sync=True))
    plain.remove("to")
    note("cp", total / _copy(plain.path / "from", plain.path / "to", sync=False))
    plain.remove("to")
    note("plain-read", mib / plain.run("read", "from", jobs=1, mib=mib, cold=1))
    plain.remove("from")

    cpu, begin = aifs.cpu_s(), time.perf_counter()
    aifs.run("write", "moved", jobs=FILES, mib=mib)
    note("cpu", (aifs.cpu_s() - cpu) / (time.perf_counter() - begin))
    note("alone", mib / aifs.run("write", "beside", jobs=1, mib=mib))
    aifs.remove("beside")
    note("drain", total / aifs.drain("moved"))
    for file in aifs.files("moved"):
        aifs.ask(file, "evict")
    note("first-read", mib / aifs.run("read", "moved", jobs=1, mib=mib, cold=1))
    begin = time.perf_counter()
    for file in aifs.files("moved"):
        os.setxattr(file, "user.aifs.tier", b"pinned")  # it gets a copy
        aifs.ask(file, "stage")
    while not all(_has_copy(file) for file in aifs.files("moved")):
        time.sleep(0.01)
    note("stage", total / (time.perf_counter() - begin))
    aifs.remove("moved")

    aifs.run("write", "moved", jobs=FILES, mib=mib)
    drain = threading.Thread(target=aifs.drain, args=("moved",))
    drain.start()
    note("meanwhile", mib / aifs.run("write", "beside", jobs=1, mib=mib))
    drain.join()
    aifs.remove("moved")
    aifs.remove("beside")


def _has_copy(file: Path) -> bool:
    return json.loads(os.getxattr(file, "user.aifs.state"))["copy"]


def _copy(source: Path, target: Path, sync: bool) -> float:
    """Seconds that cp's way of copying takes: the kernel's, a file at a time."""
    target.mkdir()
    begin = time.perf_counter()
    for file in sorted(source.iterdir()):
        with file.open("rb") as reader, (target / file.name).open("wb") as writer:
            size = os.fstat(reader.fileno()).st_size
            while size:
                size -= os.copy_file_range(reader.fileno(), writer.fileno(), size)
            if sync:
                os.fsync(writer.fileno())
    return time.perf_counter() - begin
