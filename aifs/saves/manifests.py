"""What the manifest of a checkpoint says, as far as retention has to know it: the step, and whether
all is there.

core/manifest.py defines manifests. A manifest that is damaged here is *damaged* for
client/checkpoints/catalog.py, too.
"""

import json
import os
from typing import NamedTuple

from aifs.core import manifest
from aifs.core.errors import Invalid, NotADirectory, NotFound
from aifs.files.file_io import FileIO
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.saves.listed import first_wrong, path_below

NAME = manifest.NAME.encode()
RESERVED = tuple(each.encode() for each in manifest.RESERVED)
"""What names begin with that are no part of a checkpoint."""

_SIZE_MAX = 4 << 20  # about 30,000 files


class Listed(NamedTuple):
    """``complete``: it lists files, and every one is there with its size."""

    step: int | None
    complete: bool


async def read(engine: Engine, io: FileIO, directory: int) -> Listed | None:
    """None where there is no manifest, or one that is too large. Others run meanwhile. Raises
    Unavailable.
    """
    try:
        inode = await engine.view(namespace.lookup, directory, NAME)
        if not inode.is_file:
            return Listed(None, False)
        if inode.size > _SIZE_MAX:
            return None
        data = await io.read_whole(inode.ino)
    except (NotFound, NotADirectory):
        return None
    try:
        step, files = await io.waited_for.call(_parse, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Invalid):
        return Listed(None, False)
    return Listed(step, bool(files) and not await first_wrong(engine, io, directory, files))


def _parse(data: bytes) -> tuple[int | None, list[tuple[bytes, int]]]:
    value = json.loads(data)
    step = value["step"]
    if step is not None and type(step) is not int:
        raise ValueError("the step is no number")
    files = [(path_below(os.fsencode(path)), size) for path, (size, _) in value["files"].items()]
    if not all(type(size) is int for _, size in files):
        raise ValueError("a size is none")
    return step, files
