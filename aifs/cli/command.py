"""The factory of commands: types of arguments, common options, and reports.

A command returns a ``Report``: the value for ``--json``, and what people see, in tables declared by
columns. ``--json`` belongs to all commands that print something of their own, ``--bytes`` to those
that print sizes.
"""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from aifs.cli import output
from aifs.core.mountinfo import first_aifs
from aifs.core.names import is_path
from aifs.core.units import parse_count, parse_duration, parse_size

_AS_JSON = "aifs.as_json"
JSON = click.Option(
    ["--json", "as_json"], is_flag=True, help="Print JSON; its keys keep their meaning."
)
BYTES = click.Option(["--bytes", "in_bytes"], is_flag=True, help="Print sizes in bytes, exactly.")


class Column(NamedTuple):
    """One column of a table, of rows that are dictionaries or records."""

    title: str
    of: str | Callable[[Any], Any] = ""
    """The key or attribute of a row, or a function of the row; the title by default."""
    show: Callable[[Any], str] = str
    """How a value is printed: ``output.size``, ``output.duration``, ``output.when``, ..."""
    none: str = ""
    """The text for None."""

    def cell(self, row: Any) -> str:
        of = self.of or self.title
        if not isinstance(of, str):
            value = of(row)
        else:
            value = row[of] if isinstance(row, Mapping) else getattr(row, of)
        return self.none if value is None else self.show(value)


def number(value: Any) -> str:
    """A number, or a text that stands for one; its column is aligned to the right."""
    return str(value)


_RIGHT = (number, output.size, output.rate, output.duration)


class Table(NamedTuple):
    """Rows below the titles of their columns."""

    columns: Sequence[Column]
    rows: Iterable[Any]

    def print(self) -> None:
        right = [column.title for column in self.columns if column.show in _RIGHT]
        cells = [[column.cell(row) for column in self.columns] for row in self.rows]
        output.print_table([column.title for column in self.columns], cells, right)


class Pairs(NamedTuple):
    """Lines of a name and a value."""

    facts: Iterable[tuple[str, object]]

    def print(self) -> None:
        output.print_facts(self.facts)


class Report:
    """The answer of a command: ``value`` for programs, ``parts`` for people, and the exit code."""

    def __init__(self, value: Any, *parts: Table | Pairs | str, code: int = 0) -> None:
        self._value, self._parts, self._code = value, parts, code

    def print(self, as_json: bool) -> int:
        """Print it, and return the exit code. An empty line stands between two tables."""
        if as_json:
            output.print_json(self._value)
            return self._code
        before: Table | Pairs | str = ""
        for part in self._parts:
            if isinstance(part, str):
                print(part)
            else:
                print(end="" if isinstance(before, str) else "\n")
                part.print()
            before = part
        return self._code


class Command(click.Command):
    """A command with its examples, ``--json`` and ``--bytes``."""

    def __init__(
        self,
        name: str | None,
        *,
        examples: str = "",
        sizes: bool = False,
        prints: bool = True,
        epilog: str = "",
        **attributes: Any,
    ) -> None:
        """``examples``: one a line. ``sizes``: it prints some. ``prints``: it prints something of
        its own. A command with its own ``--json`` prints by itself."""
        lines = "".join(f"\n  {line}" for line in examples.strip().splitlines())
        many = "s" * ("\n  aifs" in lines[1:])
        parts = [epilog.strip("\n"), f"\b\nExample{many}:{lines}" if lines else ""]
        super().__init__(name, epilog="\n\n".join(filter(None, parts)), **attributes)
        if sizes:
            self.params.append(BYTES)
        self._returns = prints and not any(one.name == "as_json" for one in self.params)
        if self._returns:
            self.params.append(JSON)

    def invoke(self, ctx: click.Context) -> Any:
        output.set_exact(ctx.params.pop("in_bytes", False))
        ctx.meta[_AS_JSON] = as_json = ctx.params.pop("as_json") if self._returns else False
        result = super().invoke(ctx)
        if result is None and self._returns:
            result = Report({})
        return result.print(as_json) if isinstance(result, Report) else result


class CommandGroup(click.Group):
    """Commands of one noun."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises click's UsageError, which names the commands that look like it."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = output.near(name, self.list_commands(ctx))
            hint = (
                f"; did you mean {' or '.join(near)}?" if near else f"; see {ctx.command_path} -h"
            )
            ctx.fail(f"there is no command {ctx.command_path} {name}{hint}")
        return super().resolve_command(ctx, args)


def is_json() -> bool:
    """Whether the command that runs was given ``--json``."""
    return bool(click.get_current_context().meta[_AS_JSON])


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """A command of its own, with the attributes of ``Command``."""
    return click.command(name, cls=Command, **attributes)


def group(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], CommandGroup]:
    """The commands of one noun."""
    return click.group(name, cls=CommandGroup, **attributes)


class _PathType(click.ParamType):
    """A path that is not empty (as from an unset variable: it would mean the current directory),
    and not in a mount with a stuck daemon, for which commands would wait, unkillably."""

    name = "path"

    def __init__(self, may_be_stuck: bool = False, may_be_bucket: bool = False) -> None:
        self._may_be_stuck = may_be_stuck
        self._may_be_bucket = may_be_bucket

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty; was a variable not set?", param, ctx)
        if not is_path(value):
            if self._may_be_bucket:
                return value
            self.fail(f"{value} is not the path of a file or directory", param, ctx)
        inside: set[str] = set() if ctx is None else ctx.meta.setdefault("aifs.inside", set())
        parent = os.path.dirname(value)
        if parent in inside:
            return value
        mount, ends = first_aifs(value)
        if mount is not None and not (ends and self._may_be_stuck):
            _require_answer(mount.mountpoint)
            if not ends and parent:
                inside.add(parent)  # the parent of thousands of names, perhaps
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


@functools.cache
def _require_answer(mountpoint: str) -> None:
    from aifs.cli.door import require_answer

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
SERVER = _PathType(may_be_bucket=True)  # the directory of a server, or s3://BUCKET/PREFIX
SIZE = _Quantity("size", parse_size)  # bytes
COUNT = _Quantity("count", parse_count)
DURATION = _Quantity("duration", parse_duration)  # seconds
