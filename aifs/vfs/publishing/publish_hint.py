"""``user.aifs.publish-as``: publishing by an extended attribute (docs/design/publish.md)."""

import os
from typing import Any

from aifs.core.json_text import parse_object
from aifs.files import permissions
from aifs.files.types import CallerLike
from aifs.meta import keys, namespace
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.publishing import Publication

_KEYS = {
    "final": str,
    "latest": str,
    "tracker": str,
    "content": str,
    "manifest": str,
    "replace": bool,
    "exclusive": bool,
}


async def asked(engine: Engine, ino: int, text: str, caller: CallerLike) -> Publication:
    """What JSON {"final": ..., "latest": ..., "tracker": ..., "content": ..., "manifest": ...,
    "replace" or "exclusive": true} asks for, of the directory ``ino``.

    ``final`` is looked for from the directory that ``ino`` lies in, or, with a slash before it,
    from the root of the mount. Raises Invalid, NotFound, NotADirectory, AccessDenied.
    """
    told = parse_object("publish-as", text, _KEYS)
    values: dict[str, Any] = {
        key: os.fsencode(value) if isinstance(value, str) else value for key, value in told.items()
    }
    way, _, name = values.pop("final", b"").rpartition(b"/")
    absolute = told.get("final", "").startswith("/")
    parent = await engine.view(_walk, ino, way, absolute, caller)
    return Publication(ino, parent, name, **values)


def _walk(tx: ReadTransaction, ino: int, way: bytes, absolute: bool, caller: CallerLike) -> int:
    """The directory that ``way`` leads to. Raises NotFound, NotADirectory: also for a symlink;
    AccessDenied for one that ``caller`` may not search, whatever it holds."""
    place = namespace.get_directory(
        tx, keys.ROOT_INO if absolute else namespace.get_directory(tx, ino).parent
    )
    for name in way.split(b"/"):
        permissions.require_may(place, caller, permissions.SEARCH)
        if name == b"..":
            place = namespace.get_directory(tx, place.parent)
        elif name not in (b"", b"."):
            place = namespace.get_directory(tx, namespace.get_dentry(tx, place.ino, name).ino)
    return place.ino
