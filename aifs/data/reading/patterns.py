"""The pattern of a file's reads, and so the next ranges. Pure: offsets in, ranges out.

A file has several *streams*: threads, processes that map it, tensors loaded lazily. Each request
continues one that it fits, or begins one: *sequential* (it begins about where the last one ended,
or in an announced window) or *strided* (at a constant distance, either way).

As in Linux' on-demand read-ahead (Wu, Xi and Xu, 2008) a window is announced ahead, and the next,
twice as large, when half of it was read. Requests that fit nothing halve all windows.
"""

STREAMS = 16
"""How many streams are followed; the one that was used least recently makes room."""

WINDOW_MIN = 1 << 20
WINDOW_MAX = 32 << 20
STEPS_MAX = 16
"""How many requests of a strided stream are announced ahead of it."""

_STRIDED_AFTER = 2  # equal distances in a row
_RANDOM_AFTER = 4  # requests in a row that fit nothing


class _Stream:
    __slots__ = ("ahead", "distance", "end", "repeats", "start", "window")

    def __init__(self, start: int, end: int, distance: int) -> None:
        self.start = start  # of the last request
        self.end = end
        self.distance = distance  # a guess: from the start of a request nearby
        self.repeats = 1  # how often in a row that was the distance
        self.window = 0  # bytes to announce; more than 0 where a request has fitted
        self.ahead = end  # announced up to here; strided: where the last range announced begins

    @property
    def strided(self) -> bool:
        return self.repeats >= _STRIDED_AFTER

    def continued_by(self, offset: int, length: int) -> bool:
        if self.strided:
            return False
        # Where several requests are under way some overtake others.
        first = self.end - self.window if self.window else self.start + 1
        return first <= offset <= max(self.end + length, self.ahead)


class AccessPattern:
    """The streams of one open file. Bounded state; ``observe`` takes a few microseconds."""

    __slots__ = ("_last", "_misfits", "streams")

    def __init__(self) -> None:
        self.streams: list[_Stream] = []  # most recently used first
        self._misfits = 0
        self._last: _Stream | None = None

    @property
    def random(self) -> bool:
        """Whether the last requests had nothing in common: neighbours are not worth fetching."""
        return self._misfits >= _RANDOM_AFTER

    @property
    def following(self) -> bool:
        """Whether the last request continued a stream."""
        return self._last is not None

    def observe(self, offset: int, length: int, limit: int = WINDOW_MAX) -> list[tuple[int, int]]:
        """Note a request; returns ranges (offset, length) to fetch ahead, urgent first, often none,
        maybe beyond the file's end. Windows grow up to ``limit`` bytes."""
        for stream in self.streams:
            if stream.continued_by(offset, length):
                stream.start, stream.end = offset, max(stream.end, offset + length)
                self._fits(stream)
                return self._announce(stream, length, limit)
        for stream in self.streams:
            if stream.distance and offset == stream.start + stream.distance:
                if not stream.strided:
                    stream.ahead = offset
                stream.repeats += 1
                stream.start, stream.end = offset, offset + length
                self._fits(stream)
                return self._announce_strided(stream, length, limit)
        self._begin(offset, offset + length)
        return []

    def refused(self, begin: int, offset: int) -> None:
        """Nothing was fetched from ``offset`` on of the range at ``begin`` that ``observe``
        announced; it, and later ranges, are announced again."""
        stream = self._last
        if stream is not None:
            stream.ahead = begin - stream.distance if stream.strided else max(stream.end, offset)

    def _fits(self, stream: _Stream) -> None:
        self._misfits = 0
        self._last = stream
        if self.streams[0] is not stream:
            self.streams.remove(stream)
            self.streams.insert(0, stream)

    def _begin(self, start: int, end: int) -> None:
        self._misfits += 1
        self._last = None
        near = min(self.streams, key=lambda other: abs(other.start - start), default=None)
        for stream in self.streams:
            stream.window //= 2
        self.streams.insert(0, _Stream(start, end, start - near.start if near else 0))
        del self.streams[STREAMS:]

    def _announce(self, stream: _Stream, length: int, limit: int) -> list[tuple[int, int]]:
        first = max(stream.ahead, stream.end)
        if stream.window and first - stream.end >= stream.window // 2:
            return []
        stream.window = min(max(2 * stream.window, 2 * length, WINDOW_MIN), limit)
        stream.ahead = max(first, stream.end + stream.window)
        return [(first, stream.ahead - first)] if stream.ahead > first else []

    def _announce_strided(self, stream: _Stream, length: int, limit: int) -> list[tuple[int, int]]:
        announced = (stream.ahead - stream.start) // stream.distance
        steps = min(STEPS_MAX, stream.window // length)
        if stream.window and announced >= max(1, steps // 2):
            return []
        stream.window = min(max(2 * stream.window, 2 * length), limit)
        steps = min(STEPS_MAX, stream.window // length)
        ranges: list[tuple[int, int]] = []
        for _ in range(max(0, announced), steps):
            start = stream.start + (len(ranges) + max(0, announced) + 1) * stream.distance
            if start < 0:
                break
            ranges.append((start, length))
            stream.ahead = start
        return ranges
