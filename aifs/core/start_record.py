"""The files that the start of a job has touched, as a record (docs/guide/startup.md). Pure; the
daemon, which writes and follows such files, and the client share it.

A record is the file ``RUN.start`` in the directory of the job: JSON, compressed as gzip does, whose
checksum and length tell a torn one.

    version          1; a record of another one is none
    run, host        which start, and where
    began_s, took_s  since the epoch; how long it was recorded
    files            [path, inode, size, mtime_ns, [first, count, first, count, ...]], in the order
                     of first access; runs of blocks of BLOCK bytes, ascending

The path is from the root of the mount; bytes of it that are no text are as os.fsdecode has them.
The inode, its size and its time of change say whether the file there is still what it was.
"""

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from aifs.core.clock import require_time
from aifs.core.errors import Invalid

BLOCK = 1 << 20
SUFFIX = ".start"
KEPT = 3
"""Records of a job that are kept."""
FOLLOWED = 2
"""The newest of them, whose union is prefetched: a start may have ended early."""

_VERSION = 1
_GZIP = 16 + zlib.MAX_WBITS
STORED_MAX, _JSON_MAX = 16 << 20, 64 << 20
"""Bytes of a record, and of what is in it."""
FILES_MAX, _RUNS_MAX, _BLOCKS_MAX = 1 << 17, 1 << 19, 1 << 21
"""Of a record: files, runs and blocks of all of them, which are 2 TiB."""


class HotFile(NamedTuple):
    """A file that was touched, and of which bytes."""

    path: str
    """From the root of the mount."""
    ino: int
    """Its inode number."""
    size: int
    """Its bytes then, as ``mtime_ns``."""
    mtime_ns: int
    runs: tuple[tuple[int, int], ...]
    """Blocks that were touched, as (first, how many), ascending."""

    @property
    def bytes(self) -> int:
        """Of the blocks."""
        return sum(
            min((first + count) * BLOCK, self.size) - first * BLOCK for first, count in self.runs
        )

    @property
    def blocks(self) -> set[int]:
        """Their numbers."""
        return {first + n for first, count in self.runs for n in range(count)}

    def of(self, blocks: Iterable[int]) -> "HotFile":
        """The same file, and these blocks of it."""
        return self._replace(runs=runs_of(blocks))


class StartRecord(NamedTuple):
    """The files that one start has touched on one host."""

    run: str
    """Names the start."""
    host: str
    """Where it was recorded."""
    began_s: float
    """Since the epoch."""
    took_s: float
    """How long it was recorded."""
    files: tuple[HotFile, ...]
    """In the order of first access."""

    @property
    def bytes(self) -> int:
        """The bytes that were touched."""
        return sum(file.bytes for file in self.files)


def runs_of(blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers of blocks as runs."""
    runs: list[tuple[int, int]] = []
    for number in sorted(blocks):
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return tuple(runs)


def encode(record: StartRecord) -> bytes:
    """The file's content."""
    value = record._asdict() | {
        "version": _VERSION,
        "files": [[*file[:4], [n for run in file.runs for n in run]] for file in record.files],
    }
    packer = zlib.compressobj(wbits=_GZIP)
    return packer.compress(json.dumps(value, separators=(",", ":")).encode()) + packer.flush()


def decode(data: bytes) -> StartRecord:
    """Raises Invalid for what is torn, of another version, or no record."""
    try:
        unpacker = zlib.decompressobj(_GZIP)
        text = unpacker.decompress(data, _JSON_MAX)
        if not unpacker.eof:
            raise ValueError("it is torn, or too large")
        value = json.loads(text)
        if value["version"] != _VERSION:
            raise ValueError(f"its version is {value['version']}")
        if len(value["files"]) > FILES_MAX:
            raise ValueError(f"it has more than {FILES_MAX} files")
        files = tuple(_file_of(*fields) for fields in value["files"])
        if (
            sum(len(file.runs) for file in files) > _RUNS_MAX
            or sum(count for file in files for _, count in file.runs) > _BLOCKS_MAX
        ):
            raise ValueError(f"it has more than {_RUNS_MAX} runs, or {_BLOCKS_MAX} blocks")
        record = StartRecord(
            str(value["run"]),
            str(value["host"]),
            require_time(value["began_s"]),
            float(value["took_s"]),
            files,
        )
    except (ValueError, KeyError, TypeError, OverflowError, zlib.error, RecursionError) as error:
        raise Invalid(f"no record of a start: {error}") from None
    return record


def _file_of(path: Any, ino: Any, size: Any, mtime_ns: Any, numbers: Any) -> HotFile:
    """Raises ValueError, TypeError."""
    runs = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if not isinstance(path, str) or not all(
        type(number) is int for number in (ino, size, mtime_ns, *numbers)
    ):
        raise TypeError("a field has a wrong type")
    before = 0
    for first, count in runs:
        if first < before or count < 1:
            raise ValueError("runs are not in order")
        before = first + count
    if ino < 1 or size < 0 or before > -(-size // BLOCK):
        raise ValueError("blocks lie beyond the end of the file")
    os.fsencode(path)
    return HotFile(path, ino, size, mtime_ns, runs)


def union(records: Sequence[StartRecord]) -> list[HotFile]:
    """The files of these records, newest first: in the newest's order, then others'; each as the
    newest has it."""
    files: dict[int, HotFile] = {}
    for record in records:
        for file in record.files:
            known = files.setdefault(file.ino, file)
            if known is not file and known[1:4] == file[1:4]:
                files[file.ino] = known.of(known.blocks | file.blocks)
    return list(files.values())
