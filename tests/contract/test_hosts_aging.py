"""Old files that one host compresses while another one has them open."""

import os
from pathlib import Path

import trio

from aifs.meta.keys import ROOT_INO
from aifs.vfs import SetAttr
from tests.support import modes
from tests.support.cluster import two_hosts
from tests.support.stores import ROOT, ask, moved_out, overwrite, put, read_file, write_file

LINE = b"the same words\n"
DATA = LINE * 100_000


async def test_what_is_compressed_here_is_read_and_changed_there(scratch: Path):
    settings = modes.STRIPED | {"layout.unit": "4KiB"}
    async with two_hosts(scratch / "s", settings) as (north, south, _):
        inos = [await write_file(north, name, DATA) for name in (b"f", b"g")]
        await moved_out(north, *inos)
        readers = [(await south.open(ino, os.O_RDONLY | os.O_NOATIME)).handle for ino in inos]
        for ino, reader in zip(inos, readers, strict=True):
            await south.read(reader, 0, 10)
            await north.setattr(ino, SetAttr(atime_ns=1, mtime_ns=1), ROOT)
        await put(north, ROOT_INO, "age", "1d:compress=zstd", ROOT)
        for ino, reader in zip(inos, readers, strict=True):
            with trio.fail_after(30):  # it stays while it changes here what the other has recorded
                while (await ask(north, ino, "info"))["form"] != "interleaved":
                    await north.aging.work()
            assert bytes(await south.read(reader, 50_000 * len(LINE), len(LINE))) == LINE
            await south.release(reader)
        await overwrite(south, inos[0], 0, b"THE")
        assert await read_file(north, inos[0]) == b"THE" + DATA[3:]
        assert await read_file(south, inos[1]) == DATA
