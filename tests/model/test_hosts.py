"""Two hosts in process, over a real database, against the oracle: random operations through one of
them while the other looks at all there is; then it has the same.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from aifs.core.errors import NotFound, Stale, Unavailable
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem
from tests.support import model_ops, modes
from tests.support.joined import joined
from tests.support.kernel import Kernel
from tests.support.lockstep import Life
from tests.support.oracle import ROOT, Oracle, Stamp
from tests.support.postgres import TestDatabase

SMALL = {"layout.unit": "4KiB"}
SHAPES = {
    "defaults": {},
    "waiting": modes.WAITING | SMALL | {"layout.inline_limit": "0"},
    "eager": SMALL | {"meta.commit_interval": "10ms", "burst.drain_delay": "0s"},
    "quotas": modes.BY_DAEMON | SMALL | {"burst.drain_delay": "0s"},  # so limits are exact
}
GENERATORS = {"quotas": model_ops.generate_with_quotas}
LONG = pytest.mark.long
CASES = [
    ("eager", 0),
    ("quotas", 0),
    *(pytest.param(shape, seed, marks=LONG) for shape in SHAPES for seed in range(1, 8)),
]


async def look(fs: Filesystem, reads: bool) -> None:
    """List, stat and, if so, read all there is, again and again. What goes meanwhile may not be
    found."""
    while True:
        pending = [ROOT_INO]
        while pending:
            await trio.lowlevel.checkpoint()
            with suppress(NotFound, Stale):
                for _, inode, _ in list(await fs.readdir(pending.pop(), 0, 1000)):
                    if stat.S_ISDIR(inode.mode):
                        pending.append(inode.ino)
                    elif reads and stat.S_ISREG(inode.mode):
                        await read(fs, inode.ino)


async def read(fs: Filesystem, ino: int) -> None:
    with suppress(NotFound, Stale):
        opened = await fs.open(ino, os.O_RDONLY | os.O_NOATIME)
        try:
            with suppress(Stale, Unavailable):  # it is being erased
                await fs.read(opened.handle, 0, 1 << 16)
        finally:
            await fs.release(opened.handle)


@pytest.mark.parametrize(("shape", "seed"), CASES)
async def test_random_operations_while_the_other_host_looks(
    scratch: Path, database: TestDatabase, shape: str, seed: int
) -> None:
    generate = GENERATORS.get(shape, model_ops.generate)
    ops = generate(seed, 1000 if seed else 200)
    async with joined(scratch, database, 2, SHAPES[shape]) as (north, south):
        oracle, numbers = Oracle(), {ROOT: ROOT}
        real = await north.getattr(ROOT)
        for name in ("atime", "mtime", "ctime"):
            found = getattr(real, name + "_ns")
            setattr(oracle.inodes[ROOT], name, Stamp(found, found))
        async with Kernel(north) as kernel, trio.open_nursery() as nursery:
            # What is open there counts in quotas until it is closed, of which the oracle knows not.
            nursery.start_soon(look, south, shape not in GENERATORS)
            life = Life(kernel, oracle, numbers, north.store.config)
            for position, op in enumerate(ops):
                if op[0] not in ("crash", "remount"):
                    try:
                        await life.run(op)
                    except Exception as error:
                        error.add_note(f"at operation {position}: {op!r}"[:500])
                        raise
            await life.close_all()
            await life.run(("compare",))
            nursery.cancel_scope.cancel()
        await north.store.engine.shown()
        async with Kernel(south) as kernel:
            there = Life(kernel, oracle, numbers, south.store.config)
            await there.run(("compare",))
