"""``user.aifs.publish-as``: publishing by an extended attribute (protocol: docs/grouped.md)."""

import os
from typing import Any, Protocol

from aifs.core.json_text import parse_object
from aifs.files import permissions
from aifs.files.types import CallerLike
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction
from aifs.meta.publishing import Publication
from aifs.store.store import Store

_KEYS = {
    "final": str,
    "latest": str,
    "tracker": str,
    "content": str,
    "manifest": str,
    "replace": bool,
    "exclusive": bool,
}


class Host(Protocol):
    """What this hint needs of the filesystem."""

    store: Store

    async def publish(self, what: Publication, caller: CallerLike) -> None: ...


async def publish_as(fs: Host, ino: int, text: str, caller: CallerLike) -> None:
    """JSON {"final": ..., "latest": ..., "tracker": ..., "content": ..., "manifest": ..., "replace"
    or "exclusive": true}.

    ``final`` is looked for from the directory that ``ino`` lies in, or, with a slash before it,
    from the root of the mount. Raises as ``Filesystem.publish``.
    """
    asked = parse_object("publish-as", text, _KEYS)
    values: dict[str, Any] = {
        key: os.fsencode(value) if isinstance(value, str) else value for key, value in asked.items()
    }
    way, _, name = values.pop("final", b"").rpartition(b"/")
    parent = await fs.store.engine.view(
        _walk, ino, way, os.fsencode(asked.get("final", "")).startswith(b"/"), caller
    )
    await fs.publish(Publication(ino, parent, name, **values), caller)


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
