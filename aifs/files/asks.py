"""Hints: requests of programs about an inode besides those of the kernel, a row for each.

A hint is an extended attribute ``user.aifs.NAME``, a call of the ioctl (core/ioctl.py), or both.
The class that serves hints lists their rows in its attribute ``HINTS``; vfs/hints.py collects them
all. The attribute, the ioctl, the rights, ``aifs hint ls``, the C header and the tables of the
documents are made from the rows.
"""

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from aifs.core.errors import Invalid, NoAttribute, NotADirectory, NotPermitted
from aifs.files.rights import Rule, unchangeable, unreadable
from aifs.files.types import CallerLike
from aifs.meta.keys import ROOT_INO
from aifs.meta.records import Inode

ANY, BOTH, FILE, DIRECTORY, ROOT = "any", "directory or file", "file", "directory", "root"
"""Where a hint applies; ``root``: on the root directory of the mount alone."""

_NAME = re.compile(r"([a-z][a-z_.-]*?)(\[?\.([A-Z]+)\]?)?")


class Ask(NamedTuple):
    """One request of a program."""

    ino: int
    caller: CallerLike
    value: bytes = b""
    """Of the extended attribute."""
    number: int | None = None
    """The number at the end of its name."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """The JSON object of a call."""

    @property
    def text(self) -> str:
        return os.fsdecode(self.value).strip()

    def need(self, field: str) -> Any:
        """A field of a call. Raises Invalid if it is missing."""
        if field not in self.fields:
            raise Invalid(f"{field} is missing")
        return self.fields[field]

    def path(self, field: str) -> bytes:
        """The name or path in a field of a call; b"" if it is missing."""
        return os.fsencode(self.fields.get(field, ""))

    def timeout_s(self) -> float | None:
        """``timeout_ms`` of a call in seconds; None if it is 0 or missing. Raises Invalid."""
        timeout_ms = self.fields.get("timeout_ms", 0)
        if not 0 <= timeout_ms < 1 << 64:
            raise Invalid(f"timeout_ms={timeout_ms} is not a time")
        return timeout_ms / 1000 or None


Function = Callable[[Any, Ask], Awaitable[Any] | Any]
"""Serves a request: of the part that lists the row, and the request. Its answer may be awaited."""


def bare(serve: Function) -> Function:
    """*serve* for a hint that is set to '' alone. Raises Invalid."""

    def checked(part: Any, ask: Ask) -> Any:
        if ask.value:
            raise Invalid("it takes no value")
        return serve(part, ask)

    return checked


@dataclass(frozen=True)
class HintCall:
    """The ioctl with the name of a hint. It leaves the directory unlocked, and may wait."""

    by: Rule
    """The callers that may use it."""
    do: Function
    """Returns the JSON object of the answer; None for {}."""
    takes: Mapping[str, type]
    """The fields of the argument, and their types."""
    help: str
    """Its effect, its answer, and its errors."""
    where: str = DIRECTORY
    """Where it may be called."""
    changes: bool = True
    """Whether it raises ReadOnly in a mount that changes nothing."""

    def require_may(self, inode: Inode, caller: CallerLike) -> None:
        """Raises NotADirectory, AccessDenied, NotPermitted."""
        if self.where == DIRECTORY and not inode.is_dir:
            raise NotADirectory()
        self.by(inode, caller)


@dataclass(frozen=True)
class Hint:
    """A row."""

    name: str
    """Without ``user.aifs.``. A number follows for ``.N`` at the end, and may for ``[.N]``."""
    where: str
    """Where it applies: ANY, ..."""
    help: str
    """One line for people."""
    read: Rule = unreadable
    """The callers that may get it."""
    change: Rule = unchangeable
    """The callers that may set and remove it."""
    get: Function | None = None
    """Its value: bytes, text, or an object that is told as JSON. Empty: it is not there."""
    set: Function | None = None
    """Takes ``Ask.value``."""
    remove: Function | str | None = None
    """Takes the hint back; a text: as setting this, if the hint is there."""
    call: HintCall | None = None
    """The ioctl of this name."""
    is_costly: bool = False
    """Of a directory ``get`` walks through all files below."""
    stem: str = field(init=False)
    """The name without its number."""
    number: str = field(init=False)
    """The placeholder of the number, as N; ''."""

    def __post_init__(self) -> None:
        found = _NAME.fullmatch(self.name)
        assert found, self.name
        object.__setattr__(self, "stem", found[1])
        object.__setattr__(self, "number", found[3] or "")

    @property
    def needs_number(self) -> bool:
        return bool(self.number) and "[" not in self.name

    def require_may_read(self, inode: Inode, caller: CallerLike) -> None:
        """Raises NoAttribute where it does not apply, AccessDenied."""
        if self.get is None or not self._applies(inode):
            raise NoAttribute()
        self.read(inode, caller)

    def require_may_change(self, inode: Inode, caller: CallerLike) -> None:
        """Raises AccessDenied, NotPermitted."""
        self.change(inode, caller)
        if self.where == ROOT and inode.ino != ROOT_INO:
            raise NotPermitted("it is set on the root directory of the mount")

    def _applies(self, inode: Inode) -> bool:
        if self.where == ROOT:
            return inode.ino == ROOT_INO
        if self.where == DIRECTORY:
            return inode.is_dir
        if self.where == FILE:
            return inode.is_file
        return self.where == ANY or inode.is_dir or inode.is_file
