"""``aifs manual`` and ``aifs completion``: man pages and shell completion, from the commands'
help."""

import os
from collections.abc import Iterator

import click

from aifs.cli.command import PATH, Report, command


@command(
    "manual",
    short_help="Write man pages of all commands.",
    examples="aifs manual /usr/local/share/man/man1 && man aifs-mount",
)
@click.argument("directory", type=PATH)
@click.pass_context
def manual_command(context: click.Context, directory: str) -> Report:
    """Write a man page of each command into DIRECTORY, made from what --help prints: aifs.1,
    aifs-mount.1, and so on. Those that are there are replaced."""
    from aifs.core import trees

    trees.make_dir(directory)
    pages = 0
    for name, text in _pages(context.find_root().command, None):
        trees.replace_file(os.path.join(directory, f"{name}.1"), text.encode(), durable=False)
        pages += 1
    return Report({"pages": pages, "directory": directory}, f"{pages} pages in {directory}")


def _pages(command: click.Command, above: click.Context | None) -> Iterator[tuple[str, str]]:
    """Name and text of the command's page, and of all below."""
    name = command.name if above else "aifs"
    context = click.Context(command, info_name=name, parent=above, **command.context_settings)
    yield context.command_path.replace(" ", "-"), _page(context)
    for below in _below(context):
        yield from _pages(below, context)


def _below(context: click.Context) -> list[click.Command]:
    group = context.command
    if not isinstance(group, click.Group):
        return []
    found = [group.get_command(context, name) for name in group.list_commands(context)]
    return [command for command in found if command is not None]


def _page(context: click.Context) -> str:
    """In the language of man(7)."""
    command, path = context.command, context.command_path
    name = path.replace(" ", "-")
    usage = " ".join(command.collect_usage_pieces(context))
    options = [
        record
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        if (record := parameter.get_help_record(context)) is not None
    ]
    parts = [
        f'.TH {_word(name.upper())} 1 "" AIFS',
        f".SH NAME\n{_text(name)} \\- {_text(command.get_short_help_str(limit=200))}",
        f".SH SYNOPSIS\n.B {_text(path)}\n{_text(usage)}",
        ".SH DESCRIPTION",
        *(f".PP\n{_paragraph(one)}" for one in (command.help or "").split("\n\n")),
        ".SH OPTIONS",
        *(f".TP\n.B {_text(option)}\n{_text(meaning)}" for option, meaning in options),
    ]
    if below := _below(context):
        parts.append(".SH COMMANDS")
        for one in below:
            short = one.get_short_help_str(limit=200)
            parts.append(f".TP\n.BR {_word(f'{name}-{one.name}')} (1)\n{_text(short)}")
    if command.epilog:
        parts += [".SH NOTES"] + [
            f".PP\n{_paragraph(one)}" for one in command.epilog.strip("\n").split("\n\n")
        ]
    return "\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    """One that click would print as it is (it begins with \\b) keeps its lines."""
    if text.startswith("\b\n"):
        return f".nf\n{_text(text[2:])}\n.fi"
    return _text(" ".join(text.split()))


def _text(text: str) -> str:
    """Escaped: a point or apostrophe at a line's start would be a request, a hyphen a dash."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(
        f"\\&{line}" if line[:1] in (".", "'") else line for line in escaped.split("\n")
    )


def _word(text: str) -> str:
    return f'"{_text(text)}"'


@command(
    "completion",
    short_help="Print what a shell needs to complete commands.",
    prints=False,
    examples="source <(aifs completion bash)                                  in ~/.bashrc\n"
    "aifs completion fish > ~/.config/fish/completions/aifs.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options and paths of aifs."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "click knows the shells that it names"
    print(found(context.find_root().command, {}, "aifs", "_AIFS_COMPLETE").source())
