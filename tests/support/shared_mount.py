"""A mount whose store has another host, which a test is: by way of a socket.

``python -m tests.support.shared_mount SOURCE MOUNTPOINT`` serves it in the foreground. Each line
that it reads on standard input is JSON, a call of a method of OtherHost; it answers one line each,
when that is shown. ``SharedMount`` starts it, and makes the calls.
"""

import json
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import trio

from aifs.core import log
from aifs.core.config import DIRECTORY_FILE
from aifs.meta import namespace
from aifs.vfs import Filesystem
from tests.support.mounts import ROOT, TIMEOUT_S, aifs
from tests.support.other_host import OtherHost, SharedEngine


class SharedMount:
    """The store in ``directory``/store, mounted on ``directory``/mnt. Calls that are not here are
    those of OtherHost, with text for bytes."""

    def __init__(self, directory: Path) -> None:
        self.path, self.source = directory / "mnt", directory / "store"
        self.path.mkdir()
        self.source.mkdir()
        (self.source / DIRECTORY_FILE).write_text("data: {movers: 0}\n")
        aifs("format", self.source)
        command = [sys.executable, "-m", "tests.support.shared_mount", self.source, self.path]
        self._daemon = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
        )

    def __enter__(self) -> Self:
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", self.path], check=True, timeout=TIMEOUT_S)
        self._daemon.communicate(timeout=TIMEOUT_S)
        assert self._daemon.returncode == 0
        aifs("fsck", self.source)

    def _answer(self) -> Any:
        assert self._daemon.stdout is not None
        assert select.select([self._daemon.stdout], [], [], TIMEOUT_S)[0], "no answer"
        return json.loads(self._daemon.stdout.readline())

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **fields: Any) -> Any:
            assert self._daemon.stdin is not None
            print(json.dumps([name, args, fields]), file=self._daemon.stdin, flush=True)
            answer = self._answer()
            assert "error" not in answer, answer["error"]
            return answer["result"]

        return call


# --- the daemon -----------------------------------------------------------------------------------


class _Calls:
    """What the test may call, besides methods of OtherHost."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs, self._other = fs, OtherHost(fs)
        self._show = trio.Event()

    async def serve(self) -> None:
        async for line in trio.wrap_file(sys.stdin):
            name, args, fields = json.loads(line)
            args = [arg.encode() if isinstance(arg, str) else arg for arg in args]
            fields = {
                key: value.encode("latin-1") if isinstance(value, str) else value
                for key, value in fields.items()
            }
            try:
                own = getattr(self, name, None)
                result = await (own or getattr(self._other, name))(*args, **fields)
                answer = {"result": getattr(result, "ino", result)}
            except Exception as error:  # noqa: BLE001 (the test is told)
                answer = {"error": repr(error)}
            print(json.dumps(answer), flush=True)

    async def hold_back(self) -> None:
        self._other.engine.hold_back()

    async def let_go(self) -> None:
        self._other.engine.let_go()

    async def until_waiting(self) -> None:
        """A program of this host waits until what it has changed is shown."""
        while not self._other.engine.waiting:
            await trio.sleep(0.001)

    async def before_next(self, change: bytes, *calls: list[Any]) -> None:
        """Before the next transaction that this host calls so, and within the request for it, the
        other host makes these calls; the kernel hears of them afterwards."""
        engine, kernel = self._other.engine, self._fs.kernel
        transact, forget, answered = engine.transact, kernel.forget, trio.Event()

        async def forget_later(*args: Any) -> Any:
            await answered.wait()
            return await forget(*args)

        async def transact_later(function: Any, *args: Any) -> Any:
            named = [function, *args[1:2]]  # it may be given to one that checks something first
            if change.decode() not in [getattr(one, "__name__", "") for one in named]:
                return await transact(function, *args)
            engine.transact, kernel.forget = transact, forget_later  # type: ignore[method-assign]
            seq = engine.until_shown
            engine.until_shown = trio.lowlevel.checkpoint  # type: ignore[method-assign]
            for name, *others in calls:
                others = [arg.encode() if isinstance(arg, str) else arg for arg in others]
                await getattr(self._other, name)(*others)
            engine.until_shown = seq  # type: ignore[method-assign]
            try:
                return await transact(function, *args)
            finally:
                kernel.forget = forget  # type: ignore[method-assign]
                answered.set()

        engine.transact = transact_later  # type: ignore[method-assign]

    async def before_shown(self, *call: Any) -> None:
        """The other host makes this call. The kernel hears of it at ``show``."""
        engine, kernel = self._other.engine, self._fs.kernel
        forget, until_shown = kernel.forget, engine.until_shown

        async def forget_later(*args: Any) -> Any:
            await self._show.wait()
            kernel.forget = forget  # type: ignore[method-assign]
            return await forget(*args)

        self._show = trio.Event()
        kernel.forget = forget_later  # type: ignore[method-assign]
        engine.until_shown = trio.lowlevel.checkpoint  # type: ignore[method-assign]
        name, *args = call
        await getattr(self._other, name.decode())(*args)
        engine.until_shown = until_shown  # type: ignore[method-assign]

    async def show(self) -> None:
        self._show.set()
        await self._other.engine.until_shown()

    async def remove_unheard(self, parent: int, name: bytes) -> None:
        """What the other host removes, and nobody is told of."""
        await self._fs.store.engine.transact(namespace.unlink, parent, name, 1)

    async def find(self, parent: int, name: bytes) -> int:
        return (await self._fs.store.engine.view(namespace.get_dentry, parent, name)).ino

    async def make_unheard(self, parent: int, name: bytes) -> int:
        """A file that the other host makes before this one is told."""
        follower, self._other.engine.follower = self._other.engine.follower, None
        try:
            inode = await self._other.make(parent, name, 0o100644, b"unheard")
        finally:
            self._other.engine.follower = follower
        return inode.ino


def _main(source: str, mountpoint: str) -> None:
    from aifs.core.config import load
    from aifs.fuse import session
    from aifs.fuse.options import MountOptions
    from aifs.peers.peers import Alone
    from aifs.store import store

    store.LmdbEngine = SharedEngine  # type: ignore[misc]
    Alone.is_shared = True
    open_filesystem = session.open_filesystem

    @asynccontextmanager
    async def open_and_listen(*args: Any, **others: Any) -> AsyncIterator[Filesystem]:
        async with open_filesystem(*args, **others) as fs, trio.open_nursery() as nursery:
            nursery.start_soon(_Calls(fs).serve)
            yield fs
            nursery.cancel_scope.cancel()

    session.open_filesystem = open_and_listen  # type: ignore[assignment]
    config = load(source, {})
    log.setup(None, config.log.level)
    ready = partial(print, '"ready"', flush=True)
    session.serve(config, mountpoint, MountOptions(), ready)


if __name__ == "__main__":
    _main(*sys.argv[1:])
