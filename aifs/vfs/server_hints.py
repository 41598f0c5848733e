"""Hints about servers, scrubs and backups, on the root directory. A server's ``id`` is the number
within its role. Fields with a default may be left out."""

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aifs.core.aging import parse_class
from aifs.core.config import Config
from aifs.core.errors import Invalid
from aifs.core.kinds import parse_domain
from aifs.core.log import logger
from aifs.core.names import is_path
from aifs.data.marker import ROLES
from aifs.data.servers import Servers
from aifs.files import rights
from aifs.files.asks import ROOT, Ask, Hint
from aifs.files.kept import KeptState
from aifs.files.services import ServeOptions
from aifs.files.types import Caller, CallerLike
from aifs.store.backup import Backup
from aifs.store.server_table import id_of
from aifs.upkeep.scrub import Scrub
from aifs.upkeep.server_admin import ServerAdmin

_log = logger(__name__)


async def _add(
    admin: ServerAdmin, path: str, role: str = "data", domain: str = "", **more: Any
) -> None:
    storage_class = parse_class(more.pop("class", ""))  # which is a word of Python's
    if more:
        raise ValueError(f"{[*more]}")
    _require_whole(path)
    await admin.add(path, _role(role), parse_domain(domain), storage_class)


def _require_whole(address: str) -> None:
    if is_path(address) and not os.path.isabs(address):
        raise ValueError(f"{address!r} is not an absolute path")


async def _add_burst(admin: ServerAdmin, path: str) -> None:
    await _add(admin, path, "burst")


async def _drain(admin: ServerAdmin, id: int, role: str = "data", undo: bool = False) -> None:
    await admin.drain(_id(role, id), bool(undo))


async def _replace(admin: ServerAdmin, id: int, path: str) -> None:
    _require_whole(path)
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


def _order(name: str, takes: str, give: Callable[..., Awaitable[None]]) -> Hint:
    async def order(orders: "ServerOrders", ask: Ask) -> None:
        text = os.fsdecode(ask.value)
        try:
            await give(
                orders.admin, **({"path": text} if text.startswith("/") else json.loads(text))
            )
        except (ValueError, TypeError) as error:
            raise Invalid(f"not what this hint takes: {error}") from None

    return Hint(name, ROOT, takes, change=rights.root, set=order)


class ServerOrders:
    """The servers of the store, and work on all of it."""

    HINTS = (
        Hint(
            "servers",
            ROOT,
            "the data servers and burst directories",
            rights.reader,
            get=lambda orders, ask: orders.describe(ask),
        ),
        _order("server-add", "a path, or JSON: path, role (data), domain (), class ()", _add),
        _order("burst-add", "an absolute path", _add_burst),
        _order("server-drain", "JSON: id, role (data), undo (false)", _drain),
        _order("server-replace", "JSON: id, path", _replace),
        _order("server-remove", "JSON: id, role, lost (false), lose_files (false)", _remove),
        Hint(
            "scrub",
            ROOT,
            "what a scrub has found; set: start[,no-repair][,bandwidth=SIZE] or stop",
            rights.reader,
            rights.root,
            get=lambda orders, ask: rights.without_paths(orders.scrub.status(), ask.caller),
            set=lambda orders, ask: orders.order_scrub(ask.text),
        ),
        Hint(
            "backup",
            ROOT,
            "TOKEN:[DIRECTORY]: back up the metadata, to a directory by its absolute path",
            change=rights.root,
            set=lambda orders, ask: orders.back_up(os.fsdecode(ask.value)),
        ),
    )

    def __init__(
        self, admin: ServerAdmin, scrub: Scrub, backup: Backup, options: ServeOptions
    ) -> None:
        self.admin = admin
        self.scrub = scrub
        self._backup = backup
        self._options = options

    async def describe(self, ask: Ask) -> dict[str, Any]:
        """All servers, for this caller."""
        told = rights.without_paths(await self.admin.describe(), ask.caller)
        rows = [rights.without_reason(row, ask.caller) for row in told["servers"]]
        return told | {"servers": rows}

    def order_scrub(self, text: str) -> None:
        """Raises Invalid, ReadOnly."""
        self._options.require_writable()
        self.scrub.order(text)

    def back_up(self, text: str) -> None:
        """Begin a backup; setxattr(2) does not wait for it, because the kernel locks the directory.
        Raises Invalid."""
        token, _, directory = text.partition(":")
        if directory and not os.path.isabs(directory):
            raise Invalid(f"backup: {directory!r} is not an absolute path")
        self._backup.request(token, directory)


_SET = b"config "
"""Before a key that was set: the key of a note."""

Setter = Callable[[Any], None]
"""Has a part use another value from now on."""


def set_log_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


class Settings:
    """Used from one trio thread."""

    def __init__(
        self,
        config: Config,
        servers: Servers,
        setters: Mapping[str, Setter],
        kept: KeptState,
    ) -> None:
        """``setters``: of the keys that can change."""
        self._kept = kept
        self._config = config
        self._servers = servers
        self._setters = setters

    def tell(self) -> dict[str, Any]:
        """By key: ``value`` as written, ``from``, and whether it ``can_change`` now."""
        return {
            key: {"value": value, "from": origin, "can_change": key in self._setters}
            for key, value, origin in self._config.with_servers(self._servers.rows()).settings()
        }

    HINTS = (
        Hint(
            "config",
            ROOT,
            "the configuration; set KEY=VALUE, until the next mount",
            rights.overseer,
            rights.mounter,
            get=lambda settings, ask: settings.tell(),
            set=lambda settings, ask: settings.put(ask.text, ask.caller),
        ),
    )

    def put(self, text: str, caller: CallerLike) -> None:
        """KEY=VALUE. Raises Invalid."""
        key, equals, value = text.partition("=")
        if not equals:
            raise Invalid("it takes KEY=VALUE")
        known = self.tell()
        if key not in known:
            raise Invalid(f"{key} is no key of the configuration")
        if key not in self._setters:
            raise Invalid(
                f"{key} is read when the store is mounted: mount again with -o {key}={value}, or "
                f"with that in {self._config.file}"
            )
        try:
            changed, parsed = self._config.changed(key, value, "aifs config set")
        except ValueError as error:
            raise Invalid(f"{key}: {error}") from None
        self._setters[key](parsed)
        self._config = changed
        self._kept.note(_SET + key.encode(), os.fsencode(value))
        was, now = known[key]["value"], self.tell()[key]["value"]
        _log.info("%s is %s from now on, and was %s (user %d)", key, now, was, caller.uid)

    def set_again(self) -> None:
        """What was set while another daemon served the mount. Does not block."""
        for key, value in list(self._kept.notes.items()):
            if key.startswith(_SET):
                text = f"{key.removeprefix(_SET).decode()}={os.fsdecode(value)}"
                try:
                    self.put(text, Caller())
                except Invalid as error:  # of another version
                    _log.warning("%s is not set any more: %s", text, error)
