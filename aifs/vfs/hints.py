"""All hints: extended attributes ``user.aifs.*`` and calls of the ioctl, on plain files and
directories. Each is a row (files/asks.py) of the class that serves it. listxattr(2) does not list
hints, so copying tools leave them alone."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from inspect import isawaitable
from typing import Any

from aifs.core import ioctl
from aifs.core.errors import Invalid, NoAttribute, NoSuchIoctl, NotPermitted
from aifs.core.texts import parse_object
from aifs.files import permissions, rights, views
from aifs.files.asks import ANY, Ask, Hint, HintCall
from aifs.files.refusals import Refusals
from aifs.files.services import ServeOptions
from aifs.files.types import CallerLike
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.reads.epochs import Epochs
from aifs.reads.starts import Starts
from aifs.saves.publish import Publishing
from aifs.saves.retention import Retention
from aifs.upkeep.aging import Aging
from aifs.upkeep.trash_rules import TrashRules
from aifs.vfs.attributes import Attributes
from aifs.vfs.burst_hints import BurstHints
from aifs.vfs.clones import Clones
from aifs.vfs.cluster import Cluster
from aifs.vfs.group_hints import GroupHints
from aifs.vfs.importing import Imports
from aifs.vfs.names import Names
from aifs.vfs.open_files import OpenFiles
from aifs.vfs.policy_hints import PolicyHints
from aifs.vfs.quotas import QuotaTrees
from aifs.vfs.reports import MountStatus
from aifs.vfs.server_hints import ServerOrders, Settings
from aifs.vfs.trash_requests import TrashRequests
from aifs.vfs.why import Why

PREFIX = b"user.aifs."


class Hints:
    """Answers requests by the rows of all parts."""

    HINTS = (
        Hint(
            "hints",
            ANY,
            "all hints: name, where it applies, who may get, set and call it",
            rights.anybody,
            get=lambda hints, ask: {"hints": [described(hint) for hint in hints.rows()]},
        ),
        Hint(
            "version",
            ANY,
            "the version of the ioctl",
            call=HintCall(
                rights.anybody,
                lambda hints, ask: {"version": ioctl.VERSION},
                {},
                "Answers {version}; for each version of the argument.",
                where=ANY,
                changes=False,
            ),
        ),
    )

    def __init__(
        self,
        engine: Engine,
        attributes: Attributes,
        refusals: Refusals,
        options: ServeOptions,
        parts: Iterable[Any],
    ) -> None:
        """``parts``: one of each class of SUBJECTS."""
        self._engine = engine
        self._attributes = attributes
        self._refusals = refusals
        self._options = options
        self._views = views.Views(options.mountpoint)
        self._served = {hint.stem: (hint, part) for part in (self, *parts) for hint in part.HINTS}
        """By name without its number: the row, and the part that serves it."""

    def rows(self) -> list[Hint]:
        return [hint for hint, _ in self._served.values()]

    def _find(self, name: bytes) -> tuple[Hint, Any, int | None] | None:
        """The row of an attribute, its part, and the number in the name."""
        text = name.removeprefix(PREFIX).decode("utf-8", "replace")
        hint, part = self._served.get(text, (None, None))
        if hint is not None:
            return None if hint.needs_number else (hint, part, None)
        stem, _, number = text.rpartition(".")
        hint, part = self._served.get(stem, (None, None))
        if hint is None or not hint.number or not (number.isascii() and number.isdigit()):
            return None
        return hint, part, int(number)

    async def get(self, ino: int, name: bytes, caller: CallerLike) -> bytes:
        """Raises NoAttribute for a hint that is unknown or unreadable here, AccessDenied."""
        inode = await self._attributes.getattr(ino)
        found = self._find(name)
        if found is None:
            raise NoAttribute()
        hint, part, number = found
        caller = await self._confined(caller)
        hint.require_may_read(inode, caller)
        assert hint.get is not None  # that was looked at
        value = await _done(hint.get(part, Ask(ino, caller, number=number)))
        if not value:
            raise NoAttribute()
        if isinstance(value, str):
            return os.fsencode(value)
        return value if isinstance(value, bytes) else _json(value)

    async def put(self, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
        """Raises Invalid for a wrong value, NotPermitted and AccessDenied if ``caller`` cannot set
        it, and errors of the hint; ``user.aifs.refused`` says why."""
        with self._refusals.noted(ino, caller, name.decode("utf-8", "replace")):
            caller = await self._confined(caller)
            hint, part = await self._changeable(ino, name, caller)
            if hint.set is None:
                raise NotPermitted("this hint cannot be set")
            await _done(hint.set(part, Ask(ino, caller, value)))

    async def remove(self, ino: int, name: bytes, caller: CallerLike) -> None:
        """Raises NotPermitted for hints that cannot be removed, NoAttribute for a missing one."""
        with self._refusals.noted(ino, caller, name.decode("utf-8", "replace")):
            caller = await self._confined(caller)
            hint, part = await self._changeable(ino, name, caller)
            if hint.remove is None:
                raise NotPermitted("this hint cannot be removed")
            if not isinstance(hint.remove, str):
                await _done(hint.remove(part, Ask(ino, caller)))
                return
            assert hint.get is not None and hint.set is not None
            if not await _done(hint.get(part, Ask(ino, caller))):
                raise NoAttribute()
            await _done(hint.set(part, Ask(ino, caller, hint.remove.encode())))

    async def _confined(self, caller: CallerLike) -> CallerLike:
        """The caller, as one that has a part of the mount if it does."""
        found = self._views.of(caller)
        return caller if found is None else await self._engine.view(views.confine, caller, found)

    async def _changeable(self, ino: int, name: bytes, caller: CallerLike) -> tuple[Hint, Any]:
        inode = await self._attributes.getattr(ino)
        found = self._find(name)
        if found is None or found[2] is not None:
            raise NotPermitted("this hint cannot be set")
        hint, part, _ = found
        hint.require_may_change(inode, caller)
        return hint, part

    async def call(self, ino: int, name: str, argument: bytes, caller: CallerLike) -> bytes:
        """Answer the ioctl ``name`` with a JSON object or nothing by a JSON object. Raises
        NoSuchIoctl, Invalid for wrong fields, NotADirectory, AccessDenied, NotPermitted, ReadOnly,
        and errors of the hint; ``user.aifs.refused`` says why."""
        hint, part = self._served.get(name, (None, None))
        if hint is None or hint.call is None:
            raise NoSuchIoctl()
        call = hint.call
        refuses = call.changes or call.by is not rights.anybody
        # Else an error reports the state of a group, and nothing has been refused.
        with self._refusals.noted(ino, caller, f"user.aifs.{name}") if refuses else nullcontext():
            fields = _fields(name, argument, call.takes)
            caller = await self._confined(caller)
            if call.changes:
                self._options.require_writable()
                await self._engine.view(permissions.require_writable, ino, caller)
            if call.where != ANY or call.by is not rights.anybody:
                call.require_may(await self._engine.view(namespace.get_inode, ino), caller)
            answer = await _done(call.do(part, Ask(ino, caller, fields=fields)))
        return json.dumps(answer).encode() if answer else b"{}"


SUBJECTS: tuple[type, ...] = (
    PolicyHints,
    BurstHints,
    Publishing,
    GroupHints,
    Retention,
    Attributes,
    Aging,
    TrashRules,
    TrashRequests,
    QuotaTrees,
    Refusals,
    MountStatus,
    Starts,
    Epochs,
    Names,
    Clones,
    Imports,
    Hints,
    Why,
    Settings,
    OpenFiles,
    Cluster,
    ServerOrders,
)
"""The classes that serve hints."""


def rows() -> list[Hint]:
    """All hints."""
    return [hint for subject in SUBJECTS for hint in subject.HINTS]  # type: ignore[attr-defined]


def described(hint: Hint) -> dict[str, Any]:
    """A row as JSON; the callers that may get, set and call it by the names of the rules."""
    return {
        "name": hint.name,
        "where": hint.where,
        "get": hint.read.__name__ if hint.get else "",
        "set": hint.change.__name__ if hint.set else "",
        "call": hint.call.by.__name__ if hint.call else "",
        "is_costly": hint.is_costly,
        "help": hint.help,
    }


async def _done(answer: Any) -> Any:
    return await answer if isawaitable(answer) else answer


def _fields(name: str, argument: bytes, takes: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a call: 64-bit numbers, text without a zero byte. Raises Invalid."""
    fields = parse_object(name, os.fsdecode(argument), takes) if argument else {}
    for key, value in fields.items():
        for one in value if isinstance(value, list) else (value,):
            if isinstance(value, list) and type(one) is not int:
                raise Invalid(f"{name}: {key}: {one!r} is not a whole number")
            if isinstance(one, int) and not 0 <= one < 1 << 64:
                raise Invalid(f"{name}: {key} is not a whole number of 64 bits")
            if isinstance(one, str) and "\0" in one:
                raise Invalid(f"{name}: {key} holds a zero byte")
    return fields


def _json(answer: Mapping[str, Any]) -> bytes:
    """Padded: getfattr(1) asks twice, first for the length, and numbers may grow meanwhile."""
    text = json.dumps(answer).encode()
    return text.ljust(-(-(len(text) + 8) // 64) * 64)
