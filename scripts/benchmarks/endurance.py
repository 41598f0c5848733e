"""The daemon's memory: after listing very many files, while streaming, and over very many
operations.
"""

from pathlib import Path

from report import Row
from systems import Aifs, drop_names

MIB = 1 << 20
LIMIT = 200 * MIB
GROWTH_LIMIT = 8 * MIB
STREAM_MIB = 2048


def endurance_rows(base: Path, entries: int, stream_gib: int, operations: int) -> list[Row]:
    """Resident memory after listing ``entries`` files, while streaming, and its growth over
    ``operations``.
    """
    with Aifs("endurance", base) as system:
        return [
            _listing(system, entries),
            _streaming(system, stream_gib),
            _operations(system, operations),
        ]


def _listing(system: Aifs, entries: int) -> Row:
    system.run("create", "many", count=entries)
    drop_names()
    system.run("listing", "many", count=entries)
    return _memory_row(f"memory after listing {entries:,} files", system.resident_bytes(), LIMIT)


def _streaming(system: Aifs, gib: int) -> Row:
    largest = 0
    for _ in range(max(1, gib * 1024 // (2 * STREAM_MIB))):
        for kind in ("write", "read"):
            system.run(kind, "stream", jobs=1, mib=STREAM_MIB)
            largest = max(largest, system.resident_bytes())
    return _memory_row(f"memory while streaming {gib} GiB", largest, LIMIT)


def _operations(system: Aifs, operations: int) -> Row:
    """Growth from the end of the first tenth, when caches and pools have filled, to the end."""
    per_course = 4  # create, rename, unlink and the directory that they work in
    count = max(1, operations // (10 * per_course))
    sizes = []
    for course in range(11):
        for work in ("create", "stat", "rename", "unlink"):
            system.run(work, f"course{course}", count=count)
        sizes.append(system.resident_bytes())
    return _memory_row(
        f"memory growth over {operations:,} operations", max(0, sizes[-1] - sizes[0]), GROWTH_LIMIT
    )


def _memory_row(work: str, found: int, limit: int) -> Row:
    return Row(
        work, "", None, None, None, f"{found / MIB:.0f} MiB", f"< {limit // MIB} MiB", found < limit
    )
