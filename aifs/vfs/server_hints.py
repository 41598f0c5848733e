"""Orders concerning servers, as extended attributes of the root that the root user may set (see
hints.py).

    user.aifs.servers         get: JSON (ServerAdmin.describe)
    user.aifs.server-add      set: an absolute path; or JSON: path, role ("data"), domain (""),
                              class ("")
    user.aifs.burst-add       set: an absolute path
    user.aifs.server-drain    set, JSON: id, role ("data"), undo (false)
    user.aifs.server-replace  set, JSON: id, path
    user.aifs.server-remove   set, JSON: id, role ("data"), lost (false), lose_files (false)

``id`` is the number within the role. Fields with a default may be left out.
"""

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from aifs.core.aging import parse_class
from aifs.core.errors import Invalid
from aifs.core.kinds import parse_domain
from aifs.data.marker import ROLES
from aifs.store.server_table import id_of
from aifs.upkeep.server_admin import ServerAdmin


async def order(admin: ServerAdmin, name: bytes, text: str) -> None:
    """Raises Invalid for nonsense, and what the order raises."""
    try:
        fields = {"path": text} if text.startswith("/") else json.loads(text)
        if name == b"user.aifs.burst-add":
            fields["role"] = "burst"
        await ORDERS[name](admin, **fields)
    except (ValueError, TypeError) as error:
        raise Invalid(f"not what this hint takes: {error}") from None


async def _add(
    admin: ServerAdmin, path: str, role: str = "data", domain: str = "", **more: Any
) -> None:
    storage_class = parse_class(more.pop("class", ""))  # which is a word of Python's
    if more or not os.path.isabs(path):
        raise ValueError(f"{path!r} is not an absolute path" if not more else f"{[*more]}")
    await admin.add(path, _role(role), parse_domain(domain), storage_class)


async def _drain(admin: ServerAdmin, id: int, role: str = "data", undo: bool = False) -> None:
    await admin.drain(_id(role, id), bool(undo))


async def _replace(admin: ServerAdmin, id: int, path: str) -> None:
    if not os.path.isabs(path):
        raise ValueError(f"{path!r} is not an absolute path")
    await admin.replace(_id("data", id), path)


async def _remove(
    admin: ServerAdmin, id: int, role: str = "data", lost: bool = False, lose_files: bool = False
) -> None:
    await admin.remove(_id(role, id), bool(lost), bool(lose_files))


def _id(role: str, number: Any) -> int:
    if type(number) is not int or not 0 <= number < id_of("burst", 0):
        raise ValueError(f"{number!r} is no server's number")
    return id_of(_role(role), number)


def _role(role: str) -> str:
    if role not in ROLES[1:]:
        raise ValueError(f"role {role!r} is unknown; there are {', '.join(ROLES[1:])}")
    return role


ORDERS: dict[bytes, Callable[..., Awaitable[None]]] = {
    b"user.aifs.server-add": _add,
    b"user.aifs.burst-add": _add,
    b"user.aifs.server-drain": _drain,
    b"user.aifs.server-replace": _replace,
    b"user.aifs.server-remove": _remove,
}
