"""Whether the files of a group have one size, where they must."""

from collections.abc import Sequence

import trio

from aifs.meta import paths
from aifs.meta.kv import Engine, ReadTransaction
from aifs.saves.group import DirectoryGroup, File

_SLICE = 256
_RESERVED = (".aifs-", "..aifs-")  # names of what ranks tell each other in a checkpoint's directory


async def find_unequal(engine: Engine, group: DirectoryGroup) -> str:
    """Which file has another size than the first one, in words; '' if none has."""
    while group.differs:
        files, closes = group.closed_now, group.closes
        whose, size = next(((f"rank {rank}", size) for rank, size in group.sizes.items()), ("", 0))
        first: File | None = None  # whose size counts, and may change meanwhile
        for start in range(0, len(files), _SLICE):
            for file, path in await engine.view(paths_of, files[start : start + _SLICE]):
                if path.rpartition("/")[2].startswith(_RESERVED):
                    continue
                if not whose:
                    whose, first = path, file
                size = size if first is None else first.size
                if file.size != size:
                    return f"{path} has {file.size} bytes, not the {size} of {whose}"
            await trio.lowlevel.checkpoint()
        if group.closes == closes:
            break
    return ""


def paths_of(tx: ReadTransaction, files: Sequence[File]) -> list[tuple[File, str]]:
    return [
        (file, paths.describe(tx, file.ino).encode(errors="replace").decode()) for file in files
    ]
