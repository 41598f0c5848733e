"""Whether all columns of object sets have the bytes that they should have, judged by the servers
alone: the part of a scrub that is carried out wherever there is room for it (see movers).

If something is not right, or cannot be read, the answer says no more than where. The scrub, which
knows the metadata, looks there again (scrubbing).
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from aifs.burst.making import MakingTools, never
from aifs.core.tasks import run_each
from aifs.data.checking.checks import ContainerCheck, FileCheck
from aifs.data.checking.digests import HASHED
from aifs.data.inspecting.inspection import STEP, Inspection
from aifs.data.inspecting.window import Span
from aifs.data.objects.columns import Columns
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.layout.interleaved import STRIPE
from aifs.meta.moves import SetRecord

_PRIORITY = "best-effort"
_AT_ONCE = 4  # object sets
_WINDOWS_AT_ONCE = 2  # of one file

Known = tuple[bytes | memoryview, Sequence[Span]]
"""See Inspection.known."""

NOTHING: Known = (b"", ())


class ObjectRange(NamedTuple):
    """A part of an object set that nobody changes, to be read from all its servers."""

    objects: SetRecord
    unread: int
    """Mask of columns that are not to be read."""
    start: int
    """The first byte; of a file, where a window begins (Inspection.step)."""
    end: int
    """The one behind the last; of a file, where another window begins, or the file's end. The last
    window of a container begins before it, and may end behind it."""
    digests: bytes = b""
    """The checksums of a file from ``start`` on, for all its windows; b"": it has none."""
    known: Known = NOTHING
    """Of a container: the results of the windows before ``start``."""


class Inspected(NamedTuple):
    """The result of a range."""

    read_bytes: int
    """From all columns together."""
    next: int
    """All before it has been read, and is right but for ``wrong``."""
    wrong: Sequence[int] = ()
    """Where windows begin that are not right. The first one of a container ends the work, at
    ``next``, because the following ones depend on it."""
    excess: bool = False
    """Whether an object is longer than it should be; only looked for with the end of a protected
    file."""
    known: Known = NOTHING
    """Of a container: as ``ObjectRange.known``, for the window that begins at ``next``."""

    @property
    def is_right(self) -> bool:
        return not self.wrong and not self.excess


def inspection_of(
    servers: Servers, buffers: BudgetedBuffers, objects: SetRecord, unread: int
) -> Inspection:
    """As scrubs use it, so that a second look sees the same windows. To be closed."""
    ino, oid, layout, size = objects
    step = STEP if ino else 2 * STRIPE
    columns = Columns(servers, layout, ino, oid, background=_PRIORITY)
    return Inspection(servers, buffers, columns, size, unread=unread, step=step)


async def inspect(
    ranges: Sequence[ObjectRange], tools: MakingTools, cancelled: Callable[[], bool] = never
) -> Sequence[Inspected] | None:
    """The result of each range, in order; None if ``cancelled`` has become true meanwhile."""
    found: dict[int, Inspected] = {}

    async def look(numbered: tuple[int, ObjectRange]) -> None:
        number, asked = numbered
        if not cancelled():
            about = tools.servers, tools.buffers, asked.objects, asked.unread
            with closing(inspection_of(*about)) as inspection:
                inspect_one = _inspect_file if asked.objects.ino else _inspect_container
                found[number] = await inspect_one(asked, inspection)

    await run_each(min(_AT_ONCE, len(ranges)), enumerate(ranges), look)
    return None if len(found) < len(ranges) else [found[number] for number in range(len(ranges))]


async def _inspect_file(asked: ObjectRange, inspection: Inspection) -> Inspected:
    layout, size = asked.objects.layout, asked.objects.size
    check = FileCheck(size, asked.start // HASHED, asked.digests)
    wrong, read_bytes = set[int](), 0

    async def judge(at: int) -> None:
        nonlocal read_bytes
        verdict = await inspection.judge(at, check)
        read_bytes += verdict.read_bytes
        if not verdict.is_right:
            wrong.add(at)

    starts = await inspection.starts(bool(asked.digests), asked.start, asked.end)
    await run_each(min(_WINDOWS_AT_ONCE, len(starts)), starts, judge)
    has_end = layout.is_protected and asked.end == size
    excess = bool(await inspection.excess()) if has_end else False
    return Inspected(read_bytes, asked.end, sorted(wrong), excess)


async def _inspect_container(asked: ObjectRange, inspection: Inspection) -> Inspected:
    layout = asked.objects.layout
    check = ContainerCheck(layout.row if layout.parity else 1)
    at, read_bytes, known = asked.start, 0, asked.known
    while at < asked.end:
        inspection.known = known
        verdict = await inspection.judge(at, check)
        read_bytes += verdict.read_bytes
        if not verdict.is_right:
            return Inspected(read_bytes, at, (at,), known=known)
        at, known = verdict.next, inspection.known
    return Inspected(read_bytes, at, known=known)
