"""Types of command-line arguments that several commands share."""

from collections.abc import Callable
from typing import Any

import click

from aifs.core.units import parse_duration, parse_size


class _PathType(click.ParamType):
    """A path that is not empty: an empty one, from a shell variable that is not set, would mean the directory
    one happens to be in."""

    name = "path"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty; was a variable not set?", param, ctx)
        return value


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
SIZE = _Quantity("size", parse_size)  # bytes
DURATION = _Quantity("duration", parse_duration)  # seconds
