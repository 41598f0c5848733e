"""Configuration: defaults, a SOURCE and overrides become one frozen ``Config`` that knows its origins.

``config/default.yaml`` documents every key. Reads files, changes nothing. All mistakes are ``ConfigError``:
one line with the file and line (or ``-o``), the dotted key, and what is allowed.
"""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import core_schema

from aifs.core.errors import ConfigError
from aifs.core.units import format_duration, format_size, parse_duration, parse_size

# A link to config/default.yaml, so that a checkout and an installed package find it at the same place.
DEFAULTS_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "default.yaml")

DIRECTORY_FILE = "aifs.yaml"  # the optional configuration inside a SOURCE directory

DIRECTORY_LAYOUT = {
    "meta.directory": "meta",
    "servers": ["data/0", "data/1", "data/2", "data/3"],
    "burst.directories": ["burst"],
    "log.file": "log/aifs.log",
}


class Setting(NamedTuple):
    """A raw value, where it was given, and the directory that its relative paths start from."""

    value: Any
    origin: str
    base: str


@dataclass(frozen=True)
class Kind:
    """A kind of value: ``parse`` takes the raw value and its base; ValueError unless it is ``allowed``."""

    allowed: str
    parse: Callable[[Any, str], Any]
    format: Callable[[Any], str] = str

    def check(self, setting: Setting) -> Any:
        try:
            return self.parse(setting.value, setting.base)
        except (ValueError, TypeError):
            raise ValueError(f"{setting.value!r} is not {self.allowed}") from None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))


def _number(value: Any, parse_text: Callable[[str], Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    return parse_text(str(value))


def _within(value: Any, minimum: Any, maximum: Any) -> Any:
    if not minimum <= value <= maximum:
        raise ValueError
    return value


def _size(minimum: int, maximum: int, multiple: int = 1) -> Kind:
    def parse(value: Any, base: str) -> int:
        size = _within(_number(value, parse_size), minimum, maximum)
        if size % multiple:
            raise ValueError
        return size

    step = f", a multiple of {multiple}" if multiple > 1 else ""
    return Kind(f"a size from {format_size(minimum)} to {format_size(maximum)}{step}", parse, format_size)


def _duration(minimum_s: float, maximum_s: float) -> Kind:
    def parse(value: Any, base: str) -> float:
        return _within(_number(value, parse_duration), minimum_s, maximum_s)

    allowed = f"a duration from {format_duration(minimum_s)} to {format_duration(maximum_s)}, such as 1s"
    return Kind(allowed, parse, format_duration)


def _integer(minimum: int, maximum: int) -> Kind:
    def parse(value: Any, base: str) -> int:
        return _within(_number(value, int), minimum, maximum)

    return Kind(f"a whole number from {minimum} to {maximum}", parse)


def _choice(*choices: str) -> Kind:
    def parse(value: Any, base: str) -> str:
        if value not in choices:
            raise ValueError
        return value

    return Kind(f"one of {', '.join(choices)}", parse)


def _parse_path(value: Any, base: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError
    return os.path.normpath(os.path.join(base, os.path.expanduser(value)))


def _parse_paths(value: Any, base: str) -> tuple[str, ...]:
    paths = value.split(":") if isinstance(value, str) else value
    if not isinstance(paths, list):
        raise TypeError
    return tuple(_parse_path(path, base) for path in paths)


def _parse_some_paths(value: Any, base: str) -> tuple[str, ...]:
    paths = _parse_paths(value, base)
    if not paths:
        raise ValueError
    return paths


_TIMEOUT = _duration(0, 365 * 86400)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MetaConfig(_Section):
    directory: Annotated[str, Kind("a path", _parse_path)]
    commit_interval_s: Annotated[float, _duration(0.01, 3600)] = Field(alias="commit_interval")


class BurstConfig(_Section):
    directories: Annotated[tuple[str, ...], Kind("a list of directories", _parse_paths, ":".join)]
    capacity: Annotated[int, _size(0, 1 << 60)]


class LayoutConfig(_Section):
    unit: Annotated[int, _size(4096, 1 << 30, 4096)]
    count: Annotated[int, _integer(0, 4096)]
    inline_limit: Annotated[int, _size(0, 64 << 10)]


class DataConfig(_Section):
    threads: Annotated[int, _integer(1, 256)]
    writeback_interval_s: Annotated[float, _duration(0.1, 3600)] = Field(alias="writeback_interval")


class KernelConfig(_Section):
    entry_timeout_s: Annotated[float, _TIMEOUT] = Field(alias="entry_timeout")
    attr_timeout_s: Annotated[float, _TIMEOUT] = Field(alias="attr_timeout")
    negative_timeout_s: Annotated[float, _TIMEOUT] = Field(alias="negative_timeout")
    read_ahead: Annotated[int, _size(0, 256 << 20)]


class LogConfig(_Section):
    file: Annotated[str, Kind("a path", _parse_path)]
    level: Annotated[str, _choice("debug", "info", "warning", "error")]


class Config(_Section):
    """The effective configuration. Paths are absolute; sizes are bytes; ``_s`` are seconds."""

    source: str
    meta: MetaConfig
    servers: Annotated[tuple[str, ...], Kind("a list of directories, not empty", _parse_some_paths, ":".join)]
    burst: BurstConfig
    layout: LayoutConfig
    data: DataConfig
    kernel: KernelConfig
    log: LogConfig
    origins: Mapping[str, str]
    """Where each dotted key's value came from: ``default``, ``SOURCE directory``, ``FILE:LINE`` or ``-o``."""

    def settings(self) -> Iterator[tuple[str, str, str]]:
        """Every key as (dotted key, its value as one would write it, origin)."""
        for key, kind, value in _leaves(self):
            yield key, kind.format(value), self.origins[key]


def _leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Kind, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        elif field.metadata:
            yield f"{prefix}{field.alias or name}", field.metadata[0], value


def nearest(word: str, valid: list[str]) -> str:
    """The member of ``valid`` that looks most like ``word``."""
    return difflib.get_close_matches(word, valid, n=1, cutoff=0)[0]


def known_keys() -> list[str]:
    """Every dotted key, in the order of the documentation."""
    return list(_read_file(DEFAULTS_FILE, known=None))


def is_directory_source(source: str) -> bool:
    """Whether SOURCE means a directory (which may not exist yet) and not a YAML file."""
    return os.path.isdir(source) or not (source.endswith((".yaml", ".yml")) or os.path.isfile(source))


def load(source: str, overrides: Mapping[str, str]) -> Config:
    """The configuration of SOURCE, with ``overrides`` (dotted key to text) on top. Raises ConfigError."""
    source = os.path.abspath(source)
    defaults = _read_file(DEFAULTS_FILE, known=None)
    known = list(defaults)
    settings = {key: Setting(item.value, "default", item.base) for key, item in defaults.items()}
    if is_directory_source(source):
        for key, value in DIRECTORY_LAYOUT.items():
            settings[key] = Setting(value, "SOURCE directory", source)
        file = os.path.join(source, DIRECTORY_FILE)
        given = _read_file(file, known) if os.path.exists(file) else {}
    else:
        file = source
        given = _read_file(source, known)
    settings |= {key: item for key, item in given.items() if item.value is not None}
    for key, text in overrides.items():
        if key not in known:
            raise ConfigError(f"-o {key}: unknown key; the nearest valid key is {nearest(key, known)}")
        settings[key] = Setting(text, "-o", os.getcwd())
    settings = {key: item for key, item in settings.items() if item.value is not None}
    if "log.file" not in settings and "meta.directory" in settings:
        meta = settings["meta.directory"]
        file_name = f"{str(meta.value).rstrip('/')}.log"
        settings["log.file"] = Setting(file_name, "beside meta.directory", meta.base)
    config = _validate(source, file, settings)
    _refuse_double_use(config)
    return config


def _validate(source: str, file: str, settings: dict[str, Setting]) -> Config:
    tree: dict[str, Any] = {"source": source, "origins": {key: item.origin for key, item in settings.items()}}
    for key, item in settings.items():
        *sections, leaf = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[leaf] = item
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if key not in settings:
            raise ConfigError(f"{file}: {key} is missing: a YAML source must set it") from None
        raise ConfigError(f"{settings[key].origin}: {key}: {first['ctx']['error']}") from None


def _refuse_double_use(config: Config) -> None:
    """No directory may be, or lie inside, one that has another use: each holds files of its own alone."""
    used: dict[str, str] = {}
    places = [("meta.directory", (config.meta.directory,)), ("servers", config.servers)]
    for key, paths in [*places, ("burst.directories", config.burst.directories)]:
        for path in paths:
            for other, use in used.items():
                if path == other:
                    raise ConfigError(f"{config.origins[key]}: {key}: {path} is already used by {use}")
                inner, outer = (path, other) if len(path) > len(other) else (other, path)
                if os.path.commonpath([inner, outer]) == outer:
                    raise ConfigError(f"{config.origins[key]}: {key}: {inner} lies inside {outer}, which is used too")
            used[path] = key


def _read_file(path: str, known: list[str] | None) -> dict[str, Setting]:
    """The leaves of a YAML file by dotted key; refuses keys that are not ``known`` (None: all are new)."""
    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file.read())
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:{root.start_mark.line + 1}: the file must hold keys and values")
        return dict(_walk(loader, root, "", path, known))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that does not exist
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _walk(
    loader: yaml.SafeLoader, node: yaml.MappingNode, prefix: str, path: str, known: list[str] | None
) -> Iterator[tuple[str, Setting]]:
    seen = set()
    for key_node, value_node in node.value:
        origin = f"{path}:{key_node.start_mark.line + 1}"
        key = f"{prefix}{loader.construct_object(key_node, deep=True)}"
        if key in seen:
            raise ConfigError(f"{origin}: {key}: given twice")
        seen.add(key)
        is_section = known is not None and any(name.startswith(f"{key}.") for name in known)
        if isinstance(value_node, yaml.MappingNode) and (is_section or known is None):
            yield from _walk(loader, value_node, f"{key}.", path, known)
            continue
        value = loader.construct_object(value_node, deep=True)
        if is_section:
            if value is not None:
                inside = ", ".join(name for name in known or () if name.startswith(f"{key}."))
                raise ConfigError(f"{origin}: {key}: is a section that holds {inside}")
            continue
        if known is not None and key not in known:
            names = [*known, *{name.split(".")[0] for name in known}]
            raise ConfigError(f"{origin}: {key}: unknown key; the nearest valid key is {nearest(key, names)}")
        yield key, Setting(value, origin, os.path.dirname(path))
