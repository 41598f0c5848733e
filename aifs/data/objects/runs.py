"""Which parts of a request's memory lie in which object of a striped file."""

from aifs.layout.striped import Striped

Run = tuple[int, int, list[memoryview]]
"""Index of an object, offset in it, and the parts of a request's memory that lie there one after the other."""


def runs_of(layout: Striped, offset: int, memory: memoryview) -> list[Run]:
    """Where ``memory``, which is a file's from ``offset`` on, lies in the data columns: one run for each."""
    unit, count = layout.unit, layout.width
    number, within = divmod(offset, unit)
    if within + len(memory) <= unit:
        return [(number % count, number // count * unit + within, [memory])]
    runs: dict[int, Run] = {}
    for index, object_offset, file_offset, length in layout.extents(offset, len(memory)):
        start = file_offset - offset
        run = runs.setdefault(index, (index, object_offset, []))
        run[2].append(memory[start : start + length])
    return list(runs.values())
