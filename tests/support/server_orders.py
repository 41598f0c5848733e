"""Orders of `aifs server` to add, drain, replace and remove servers, and their outcomes."""

import trio

from aifs.files.types import ROOT
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Caller
from aifs.vfs.filesystem import Filesystem
from tests.support import stores


async def order(fs: Filesystem, what: str, caller: Caller = ROOT, **fields: object) -> None:
    await stores.put(fs, ROOT_INO, f"server-{what}", fields, caller)


async def described(fs: Filesystem) -> dict:
    return await stores.ask(fs, ROOT_INO, "servers")


async def row(fs: Filesystem, number: int, role: str = "data") -> dict:
    return next(
        s for s in (await described(fs))["servers"] if (s["role"], s["id"]) == (role, number)
    )


async def until_empty(fs: Filesystem, number: int, role: str = "data") -> None:
    while (left := (await row(fs, number, role))["left"]) is None or left["objects"]:
        await trio.sleep(0.01)


async def removed(fs: Filesystem, **fields: object) -> dict:
    """The outcome of a removal."""
    await order(fs, "remove", **fields)
    while True:
        for removal in (await described(fs))["removals"]:
            if removal["id"] == fields["id"] and removal["outcome"] is not None:
                return removal["outcome"]
        await trio.sleep(0.01)
