"""Patterns in YAML files, for ``aifs group plan``: read and checked. Errors are ConfigError: file,
line, key, what is allowed.

    replicas: 1                                       # default: 1
    sources:                                          # memory: default no limit
      - {name: "host[0-7]", bandwidth: 25GB, memory: 64GiB}   # eight of them
    destinations:
      - {name: "server[0-3]", bandwidth: 2GB, space: 10TB}    # space: default no limit
    links:                                            # default: none has a limit of its own
      - {from: "host[0-3]", to: server0, bandwidth: 1GB}      # each of the pairs; later entries win
    chunks:
      - {size: 4MiB, count: 1000, sources: "host[0-7]", sharers: 2}

Bandwidths are sizes per second. ``name[A-B]`` stands for a row of names, ``name[A-B:STEP]`` for
every STEPth of it; where names are asked for, a list of such is allowed too. ``sharers``: every so
many sources, in the order given, hold the same chunks, ``count`` of them; default: all hold the
same.
"""

import re
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aifs.core.config import nearest
from aifs.core.errors import ConfigError, Invalid
from aifs.core.kinds import Kind, Setting, integer, size
from aifs.group.pattern import ChunkClass, Destination, Pattern, Source

NODES_MAX = 1 << 16

_RANGE = re.compile(r"(.*)\[(\d+)-(\d+)(?::(\d+))?\](.*)", re.ASCII)


def _expand(value: Any, base: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    names: list[str] = []
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError
        match = _RANGE.fullmatch(text)
        if match is None:
            names.append(text)
            continue
        before, first, last, step, after = match.groups()
        numbers = range(int(first), int(last) + 1, int(step or 1))
        if not 1 <= len(numbers) <= NODES_MAX:
            raise ValueError
        names += [f"{before}{number}{after}" for number in numbers]
    if not names:
        raise ValueError
    return tuple(names)


_NAMES = Kind(
    "a name, a row of names such as host[0-7] or host[0-56:8], or a list of these", _expand
)
_BANDWIDTH = size(1, 1 << 60)
_CAP = size(0, 1 << 60)


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _SourceEntry(_Entry):
    name: Annotated[tuple[str, ...], _NAMES]
    bandwidth: Annotated[int, _BANDWIDTH]
    memory: Annotated[int, _CAP] | None = None


class _DestinationEntry(_Entry):
    name: Annotated[tuple[str, ...], _NAMES]
    bandwidth: Annotated[int, _BANDWIDTH]
    space: Annotated[int, _CAP] | None = None


class _LinkEntry(_Entry):
    senders: Annotated[tuple[str, ...], _NAMES] = Field(alias="from")
    takers: Annotated[tuple[str, ...], _NAMES] = Field(alias="to")
    bandwidth: Annotated[int, _BANDWIDTH]


class _ChunksEntry(_Entry):
    size: Annotated[int, size(1, 1 << 60)]
    count: Annotated[int, integer(1, 1 << 40)]
    sources: Annotated[tuple[str, ...], _NAMES]
    sharers: Annotated[int, integer(1, NODES_MAX)] | None = None


class _File(_Entry):
    replicas: Annotated[int, integer(1, 1 << 10)] = 1
    sources: Annotated[list[_SourceEntry], Field(strict=True)]
    destinations: Annotated[list[_DestinationEntry], Field(strict=True)]
    links: Annotated[list[_LinkEntry], Field(strict=True)] = []
    chunks: Annotated[list[_ChunksEntry], Field(strict=True)]


_LEAVES = {"name", "sources", "from", "to"}  # keys whose list, inside an entry, is one value


class _Lines:
    """The YAML of a file as Settings in dicts and lists; remembers where everything stands."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.line_of: dict[tuple[str | int, ...], int] = {}
        self._loader = yaml.SafeLoader(text)
        root = self._loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}: the file must hold keys and values, such as sources and destinations"
            )
        self.tree = self._walk(root, ())

    def _walk(self, node: yaml.Node, place: tuple[str | int, ...]) -> Any:
        self.line_of.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(self._loader.construct_object(key_node, deep=True))
                below = (*place, key)
                self.line_of[below] = key_node.start_mark.line + 1
                if key in found:
                    raise self.error(below, "given twice")
                found[key] = self._walk(value_node, below)
            return found
        if isinstance(node, yaml.SequenceNode) and not (len(place) == 3 and place[-1] in _LEAVES):
            return [self._walk(child, (*place, number)) for number, child in enumerate(node.value)]
        value = self._loader.construct_object(node, deep=True)
        return Setting(value, f"{self.path}:{node.start_mark.line + 1}", "")

    def error(self, place: tuple[str | int, ...], message: str) -> ConfigError:
        """The error of what stands at ``place``, or of the nearest thing around it that is
        there.
        """
        known = place
        while known not in self.line_of:
            known = known[:-1]
        key = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in place
        ).lstrip(".")
        return ConfigError(f"{self.path}:{self.line_of[known]}: {key}: {message}")


def read(path: str) -> Pattern:
    """The pattern in a file. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse(path, file.read())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: it is not a text file") from None


def parse(path: str, text: str) -> Pattern:
    """The pattern in ``text``, which stands in ``path``. Raises ConfigError."""
    try:
        lines = _Lines(path, text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        found = _File.model_validate(lines.tree)
    except ValidationError as error:
        raise _told(lines, error) from None
    try:
        return _pattern(found, lines)
    except Invalid as error:
        raise ConfigError(f"{path}: {error}") from None


_MESSAGES = {
    "missing": "is missing",
    "list_type": "must be a list of entries",
    "model_type": "must be an entry of keys and values, such as {name: a, bandwidth: 1GB}",
}


def _told(lines: _Lines, error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    place = first["loc"]
    if first["type"] == "extra_forbidden":
        models: dict[str, type[BaseModel]] = {
            "sources": _SourceEntry,
            "destinations": _DestinationEntry,
            "links": _LinkEntry,
            "chunks": _ChunksEntry,
        }
        model = _File if len(place) == 1 else models[str(place[0])]
        valid = [field.alias or name for name, field in model.model_fields.items()]
        return lines.error(
            place, f"unknown key; the nearest valid key is {nearest(str(place[-1]), valid)}"
        )
    message = (
        first["ctx"]["error"]
        if first["type"] == "value_error"
        else _MESSAGES.get(first["type"], first["msg"])
    )
    return lines.error(place, str(message))


def _pattern(found: _File, lines: _Lines) -> Pattern:
    sources = tuple(
        Source(name, entry.bandwidth, entry.memory)
        for entry in found.sources
        for name in entry.name
    )
    destinations = tuple(
        Destination(name, entry.bandwidth, entry.space)
        for entry in found.destinations
        for name in entry.name
    )
    source_of = {source.name: number for number, source in enumerate(sources)}
    destination_of = {destination.name: number for number, destination in enumerate(destinations)}

    def numbers(names: tuple[str, ...], of: dict[str, int], *place: str | int) -> list[int]:
        unknown = next((name for name in names if name not in of), None)
        if unknown is not None:
            close = f"; the nearest name is {nearest(unknown, list(of))}" if of else ""
            raise lines.error(place, f"there is no {unknown}{close}")
        return [of[name] for name in names]

    links = {
        (sender, taker): entry.bandwidth
        for number, entry in enumerate(found.links)
        for sender in numbers(entry.senders, source_of, "links", number, "from")
        for taker in numbers(entry.takers, destination_of, "links", number, "to")
    }
    classes = []
    for number, entry in enumerate(found.chunks):
        holders = numbers(entry.sources, source_of, "chunks", number, "sources")
        sharers = entry.sharers or len(holders)
        if len(holders) % sharers:
            raise lines.error(
                ("chunks", number, "sharers"), f"{sharers} does not divide {len(holders)} sources"
            )
        for first in range(0, len(holders), sharers):
            classes.append(
                ChunkClass(entry.size, entry.count, tuple(sorted(holders[first : first + sharers])))
            )
    return Pattern(sources, destinations, tuple(classes), links, found.replicas)
