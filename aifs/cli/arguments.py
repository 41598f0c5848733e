"""Types of command-line arguments that several commands share."""

import functools
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from aifs.core.mountinfo import first_aifs
from aifs.core.names import is_path
from aifs.core.units import parse_count, parse_duration, parse_size


class _PathType(click.ParamType):
    """A path that is not empty: an empty one, from a shell variable that is not set, would mean the
    directory one happens to be in. It does not lie in a mount whose daemon is stuck: commands would
    wait for it, unkillably."""

    name = "path"

    def __init__(self, may_be_stuck: bool = False) -> None:
        self._may_be_stuck = may_be_stuck

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty; was a variable not set?", param, ctx)
        if not is_path(value):
            self.fail(f"{value} is not the path of a file or directory", param, ctx)
        mount, ends = first_aifs(value)
        if mount is not None and not (ends and self._may_be_stuck):
            _require_answer(mount.mountpoint)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


@functools.cache
def _require_answer(mountpoint: str) -> None:
    from aifs.cli.answers import require_answer

    require_answer(mountpoint)


class _Quantity(click.ParamType):
    """A number with a unit, read by ``parse``, whose ValueError says what is allowed."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


PATH = _PathType()
MOUNTPOINT = _PathType(may_be_stuck=True)  # of commands that see to stuck mounts themselves
SIZE = _Quantity("size", parse_size)  # bytes
COUNT = _Quantity("count", parse_count)
DURATION = _Quantity("duration", parse_duration)  # seconds
