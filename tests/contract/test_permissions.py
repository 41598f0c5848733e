"""Who may do what, on the filesystem in process: requests whose callers the kernel does not check, or not enough."""

import os
from functools import partial
from pathlib import Path

import pytest

from aifs.core.files import KEEP_SIZE, PUNCH_HOLE
from aifs.vfs import Caller, Filesystem, SetAttr
from tests.support import modes, stores
from tests.support.stores import OWNER

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)
SIZE = 40 << 10
SHAPE = modes.WAITING | {"layout.unit": "4KiB"}

opened = partial(stores.opened, base=SHAPE)


# --- set-id bits -------------------------------------------------------------------------------------


async def _punch(fs: Filesystem, handle: int, caller: Caller) -> None:
    await fs.fallocate(handle, PUNCH_HOLE | KEEP_SIZE, 0, 4096, caller)


async def _allocate(fs: Filesystem, handle: int, caller: Caller) -> None:
    await fs.fallocate(handle, 0, 0, 2 * SIZE, caller)


async def _copy(fs: Filesystem, handle: int, caller: Caller) -> None:
    await fs.copy_file_range(handle, 0, handle, SIZE // 2, 4096, caller)


@pytest.mark.parametrize("change", [_punch, _allocate, _copy])
@pytest.mark.parametrize("drained", [False, True])
async def test_set_id_bits_go_with_what_another_changes(
    directory: Path, change: object, drained: bool
) -> None:
    async with opened(directory) as fs:
        for caller, left in ((OTHER, 0o777), (OWNER, 0o777), (Caller(), 0o6777)):
            ino = await stores.write_file(fs, b"%d" % caller.uid, b"x" * SIZE, ROOT, OWNER)
            if drained:
                await stores.moved_out(fs, ino)
            await fs.setattr(ino, SetAttr(mode=0o6777), OWNER)
            handle, *_ = await fs.open(ino, os.O_RDWR)
            await change(fs, handle, caller)
            assert (await fs.getattr(ino)).mode & 0o7777 == left
            await fs.release(handle)
            assert (await fs.getattr(ino)).mode & 0o7777 == left
