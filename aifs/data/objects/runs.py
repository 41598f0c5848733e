"""Which parts of a request's memory lie in which object of a striped file."""

from collections.abc import Sequence

from aifs.layout.striped import Striped

Run = tuple[int, int, list[memoryview]]
"""Index of an object, offset in it, and the parts of a request's memory that lie there one after
the other.
"""


def runs_of(layout: Striped, offset: int, memory: memoryview) -> list[Run]:
    """Where ``memory``, which is a file's from ``offset`` on, lies in the data columns: one run for
    each.
    """
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


def ranges_of(
    layout: Striped,
    runs: Sequence[Run],
    sources: Sequence[int | None],
    others: Sequence[int],
    size: int,
) -> list[tuple[int, int, int]]:
    """The ranges to read for runs of a file of ``size`` bytes, as (column, offset, length) without
    overlaps. ``sources``: the column to read each data column from; ``others``: those that tell one
    that has none."""
    ends: dict[int, list[tuple[int, int]]] = {}
    for index, offset, parts in runs:
        end, source = offset + sum(map(len, parts)), sources[index]
        for column in others if source is None else [source]:
            last = min(end, layout.object_length(column, size)) if source is None else end
            if offset < last:
                ends.setdefault(column, []).append((offset, last))
    ranges: list[tuple[int, int, int]] = []
    for column, spans in ends.items():
        for start, end in sorted(spans):
            if ranges and ranges[-1][0] == column and start <= sum(ranges[-1][1:]):
                ranges[-1] = column, ranges[-1][1], max(end - ranges[-1][1], ranges[-1][2])
            else:
                ranges.append((column, start, end - start))
    return ranges
