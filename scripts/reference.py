"""Write what is made from other files: docs/reference, aifs/fuse/aifs_ioctl.h and the manifests
for Kubernetes.

commands.md  the commands, of the tree of click
config.md, config.schema.json    the configuration keys, of config/default.yaml
hints.md     the hints and calls, of their rows
metrics.md   the metrics, of the table of figures
aifs.yaml    the manifests, of the chart
"""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from aifs.cli.main import cli
from aifs.core import config
from aifs.watch.figures import FIGURES
from scripts import chart, hint_text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100


def documents() -> dict[str, str]:
    """The text of each file, by its path in the repository."""
    return {
        "aifs/fuse/aifs_ioctl.h": hint_text.c_header(),
        "deploy/kubernetes/aifs.yaml": chart.render(),
        "docs/reference/commands.md": "\n".join(_commands()) + "\n",
        "docs/reference/config.md": "\n".join(_config()) + "\n",
        "docs/reference/config.schema.json": json.dumps(_schema(), indent=1) + "\n",
        "docs/reference/hints.md": hint_text.reference(),
        "docs/reference/metrics.md": "\n".join(_metrics()) + "\n",
    }


def _head(title: str, text: str) -> list[str]:
    made = f"Made by `scripts/reference`. {text}"
    return [f"# {title}", "", *textwrap.wrap(made, COLUMNS, break_on_hyphens=False), ""]


def _commands() -> Iterator[str]:
    yield from _head("Commands", "The help of each command, as `--help` prints it.")
    yield from _command(cli, None)


def _command(command: click.Command, above: click.Context | None) -> Iterator[str]:
    context = click.Context(
        command,
        info_name=command.name if above else "aifs",
        parent=above,
        terminal_width=COLUMNS - 2,
        max_content_width=COLUMNS - 2,
        **{k: v for k, v in command.context_settings.items() if k == "help_option_names"},
    )
    yield from (f"## {context.command_path}", "", "```text", command.get_help(context), "```", "")
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command(below, context)


def _config() -> Iterator[str]:
    yield from _head(
        "Configuration keys",
        "Each key by its dotted path, with its default, as the YAML file of a store has it, or"
        " `aifs mount -o KEY=VALUE`. Editors check such a file by [a schema](config.schema.json).",
    )
    for path, value, comment in _keys():
        yield from (f"## {path}", "", f"Default: `{value}`", "")
        yield from (*_wrapped(comment), "") if comment else ()


def _schema() -> dict[str, Any]:
    """JSON schema of the YAML file, with sections and with dotted keys."""
    properties: dict[str, Any] = {}
    allowed = dict(_allowed(config.Config))
    for path, default, comment in _keys():
        kind = allowed[path]
        text = "\n".join([*comment, "", f"{kind}. Default: {default}"])
        one: dict[str, Any] = {"description": text}
        if kind.startswith("one of "):
            choices = kind.removeprefix("one of ").split(", ")
            # YAML 1.1 takes the word off for false.
            one["enum"] = [*choices, *[False] * ("off" in choices), None]
        elif kind.startswith("a whole number"):
            one["type"] = ["integer", "string", "null"]
        elif not kind.startswith("a list"):
            one["type"] = ["string", "number", "boolean", "null"]
        section, _, name = path.rpartition(".")
        if not section:
            properties[path] = one
            continue
        empty = {"type": ["object", "null"], "additionalProperties": False, "properties": {}}
        properties.setdefault(section, empty)["properties"][name] = one
        properties[path] = {"$ref": f"#/properties/{section}/properties/{name}"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The configuration of a store of AIFS",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }


def _allowed(model: type[BaseModel], section: str = "") -> Iterator[tuple[str, str]]:
    """The values that each dotted key can have, in words."""
    for name, field in model.model_fields.items():
        if field.metadata:
            yield f"{section}{field.alias or name}", field.metadata[0].allowed
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _allowed(field.annotation, f"{name}.")


def _keys() -> Iterator[tuple[str, str, list[str]]]:
    """Each dotted key with its default and the lines of its comment."""
    section, comment = "", list[str]()
    for line in (ROOT / "config/default.yaml").read_text().splitlines():
        if found := re.fullmatch(r"( *)(\w+):(?: (.*))?", line):
            indent, key, value = found.groups()
            if not indent and value is None:
                section = f"{key}."
            else:
                yield section + key if indent else key, value, comment
            comment = []
        elif line.strip():
            comment.append(line.strip().removeprefix("#").removeprefix(" "))
        else:
            comment = []


def _wrapped(comment: list[str]) -> Iterator[str]:
    """Lines that are indented stay: they are YAML."""
    text = [line for line in comment if not line.startswith(" ")]
    yield from textwrap.wrap(
        " ".join(text), COLUMNS, break_long_words=False, break_on_hyphens=False
    )
    if code := [line for line in comment if line.startswith(" ")]:
        yield from ("", "```yaml", *(line.removeprefix("  ") for line in code), "```")


def _metrics() -> Iterator[str]:
    yield from _head("Metrics", "What `/metrics` of a mount serves (docs/operate/metrics.md).")
    yield from ("| metric | kind | label | meaning |", "|---|---|---|---|")
    for figure in sorted(FIGURES):
        cells = (f"`{figure.name}`", figure.kind, figure.label, figure.help)
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for path, text in documents().items():
        (ROOT / path).write_text(text)
