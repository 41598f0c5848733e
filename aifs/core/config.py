"""Configuration: defaults, a SOURCE and overrides become a frozen ``Config`` that knows its
origins.

``config/default.yaml`` documents every key. Reads files, changes nothing. ``ConfigError`` is one
line with the file and line (or ``-o``), the dotted key, and allowed values.
"""

import difflib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aifs.core.errors import ConfigError
from aifs.core.kinds import (
    BOOLEAN,
    CODED,
    COMPRESS,
    DATABASE,
    ENDPOINT,
    ENDPOINT_OR_NONE,
    ENDPOINT_OR_SOCKET,
    HEDGE,
    HOST_NAME,
    LAYOUT_KINDS,
    OPTIONAL_PATH,
    PACK_BELOW,
    PATH,
    PATHS,
    SERVERS,
    Kind,
    ServerPlace,
    Setting,
    choice,
    duration,
    fraction,
    integer,
    is_of_this_machine,
    size,
)

# A link to config/default.yaml, so that a checkout and an installed package find it at the same
# place.
DEFAULTS_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "default.yaml")

_FastLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""In C, if available: 1 ms for the defaults, not 17. Not for foreign files: deep nesting kills
it."""

DIRECTORY_FILE = "aifs.yaml"  # the optional configuration inside a SOURCE directory

DIRECTORY_LAYOUT = {
    "meta.directory": "meta",
    "servers": ["data/0", "data/1", "data/2", "data/3"],
    "burst.directories": ["burst"],
    "log.file": "log/aifs.log",
}

_TIMEOUT = duration(0, 365 * 86400)
_ANY_SIZE = size(0, 1 << 60)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MetaConfig(_Section):
    directory: Annotated[str, PATH]
    engine: Annotated[str, choice("local", "postgresql")]
    url: Annotated[str, DATABASE]
    secret: Annotated[str, OPTIONAL_PATH]
    commit_interval_s: Annotated[float, duration(0.01, 3600)] = Field(alias="commit_interval")
    renames: Annotated[str, choice("ordered", "durable")]
    backup_interval_s: Annotated[float, duration(0, 30 * 86400)] = Field(alias="backup_interval")
    backup_copies: Annotated[int, integer(1, 8)]


class HostConfig(_Section):
    name: Annotated[str, HOST_NAME]
    listen: Annotated[str, ENDPOINT]
    address: Annotated[str, ENDPOINT_OR_NONE]
    home_wait_s: Annotated[float, duration(0, 3600)] = Field(alias="home_wait")
    restarts: Annotated[int, integer(0, 1000)]
    bandwidth: Annotated[int, _ANY_SIZE]


class BurstConfig(_Section):
    directories: Annotated[tuple[str, ...], PATHS]
    missing: Annotated[str, choice("refuse", "allow")]
    capacity: Annotated[int, _ANY_SIZE]
    high_water: Annotated[float, fraction(0.01, 1)]
    low_water: Annotated[float, fraction(0, 0.99)]
    reserve: Annotated[int, _ANY_SIZE]
    throttle_max_s: Annotated[float, duration(0, 60)] = Field(alias="throttle_max")
    drain_workers: Annotated[int, integer(1, 64)]
    drain_bandwidth: Annotated[int, _ANY_SIZE]
    drain_delay_s: Annotated[float, duration(0, 86400)] = Field(alias="drain_delay")
    drain_deadline_s: Annotated[float, duration(1, 30 * 86400)] = Field(alias="drain_deadline")
    drain_on_fsync: Annotated[bool, BOOLEAN]
    bandwidth: Annotated[int, _ANY_SIZE]
    ioprio: Annotated[str, choice("idle", "best-effort", "none")]
    stage_for_write: Annotated[int, _ANY_SIZE]
    blocks: Annotated[str, choice("auto", "always", "off")]
    passthrough: Annotated[bool, BOOLEAN]


class LayoutConfig(_Section):
    unit: Annotated[int, size(4096, 1 << 30, 4096)]
    count: Annotated[int, integer(0, 4096)]
    inline_limit: Annotated[int, size(0, 64 << 10)]
    kind: Annotated[str, choice(*LAYOUT_KINDS)]
    pack_below: Annotated[int | None, PACK_BELOW]
    """None: as the stripe unit says."""
    stripe_above: Annotated[int, size(0, 1 << 40)]
    container_size: Annotated[int, size(16 << 20, 1 << 40, 4 << 20)]
    compact_above: Annotated[float, fraction(0.05, 1)]
    compress: Annotated[int, COMPRESS]
    replicas: Annotated[int, integer(1, 8)]
    ec: Annotated[tuple[int, int], CODED]


class DataConfig(_Section):
    threads: Annotated[int, integer(1, 256)]
    movers: Annotated[int, integer(0, 64)]
    writeback_interval_s: Annotated[float, duration(0.1, 3600)] = Field(alias="writeback_interval")
    verify: Annotated[str, choice("off", "read")]
    missing: Annotated[str, choice("refuse", "allow")]
    min_spare: Annotated[int, integer(0, 8)]
    hedge_s: Annotated[float, HEDGE] = Field(alias="hedge")
    timeout_s: Annotated[float, duration(0, 86400)] = Field(alias="timeout")
    lost_after_s: Annotated[float, duration(0, 365 * 86400)] = Field(alias="lost_after")


class RebuildConfig(_Section):
    workers: Annotated[int, integer(1, 64)]
    bandwidth: Annotated[int, _ANY_SIZE]


class ScrubConfig(_Section):
    interval_s: Annotated[float, _TIMEOUT] = Field(alias="interval")
    bandwidth: Annotated[int, _ANY_SIZE]


class PublishConfig(_Section):
    abandoned_after_s: Annotated[float, duration(0, 3650 * 86400)] = Field(alias="abandoned_after")


class TrashConfig(_Section):
    keep_s: Annotated[float, duration(0, 3650 * 86400)] = Field(alias="keep")


class MemoryConfig(_Section):
    budget: Annotated[int, size(64 << 20, 1 << 44)]


class KernelConfig(_Section):
    entry_timeout_s: Annotated[float, _TIMEOUT] = Field(alias="entry_timeout")
    attr_timeout_s: Annotated[float, _TIMEOUT] = Field(alias="attr_timeout")
    negative_timeout_s: Annotated[float, _TIMEOUT] = Field(alias="negative_timeout")
    read_ahead: Annotated[int, size(0, 256 << 20)]
    max_background: Annotated[int, integer(1, 1024)]
    slow_request_s: Annotated[float, duration(0, 86400)] = Field(alias="slow_request")
    bridge: Annotated[str, choice("auto", "off", "require")]
    restarts: Annotated[int, integer(0, 1000)]
    replace_stuck_s: Annotated[float, duration(0, 86400)] = Field(alias="replace_stuck")


class MetricsConfig(_Section):
    listen: Annotated[str, ENDPOINT_OR_SOCKET]
    secret: Annotated[str, OPTIONAL_PATH]


class LogConfig(_Section):
    file: Annotated[str, PATH]
    level: Annotated[str, choice("debug", "info", "warning", "error")]


class Config(_Section):
    """The effective configuration. Paths are absolute; sizes are bytes; ``_s`` are seconds."""

    source: str
    meta: MetaConfig
    host: HostConfig
    places: Annotated[tuple[ServerPlace, ...], SERVERS] = Field(alias="servers")
    burst: BurstConfig
    layout: LayoutConfig
    data: DataConfig
    rebuild: RebuildConfig
    scrub: ScrubConfig
    publish: PublishConfig
    trash: TrashConfig
    memory: MemoryConfig
    kernel: KernelConfig
    metrics: MetricsConfig
    log: LogConfig
    origins: Mapping[str, str]
    """Origin of each dotted key's value: ``default``, ``SOURCE directory``, ``FILE:LINE`` or
    ``-o``."""

    @property
    def is_cluster(self) -> bool:
        """Whether the metadata are in a database, which several hosts may share."""
        return self.meta.engine == "postgresql"

    @property
    def servers(self) -> tuple[str, ...]:
        """The directories of the data servers."""
        return tuple(place.path for place in self.places)

    @property
    def file(self) -> str:
        """Where its user writes what is not to be as usual."""
        is_directory = is_directory_source(self.source)
        return os.path.join(self.source, DIRECTORY_FILE) if is_directory else self.source

    def settings(self) -> Iterator[tuple[str, str, str]]:
        """Every key as (dotted key, its value as one would write it, origin)."""
        for key, kind, value in _leaves(self):
            yield key, kind.format(value), self.origins[key]

    def changed(self, key: str, text: str, origin: str) -> tuple["Config", Any]:
        """With another value for a section's key, and that value. Raises ValueError with what is
        allowed."""
        section_name, _, leaf = key.partition(".")
        section: BaseModel = getattr(self, section_name)
        fields = type(section).model_fields.items()
        name, kind = next((n, f.metadata[0]) for n, f in fields if (f.alias or n) == leaf)
        value = kind.check(Setting(text, origin, os.sep))
        changes = {
            section_name: section.model_copy(update={name: value}),
            "origins": {**self.origins, key: origin},
        }
        return self.model_copy(update=changes), value

    def with_servers(self, rows: Iterable[Mapping[str, Any]]) -> "Config":
        """With the servers and burst directories that the store has, ``rows`` of ``aifs server
        ls``."""
        named = {place.path: place for place in self.places}
        found: dict[str, list[ServerPlace]] = {"data": [], "burst": []}
        for row in rows:
            place = ServerPlace(row["path"], row["domain"], 0, row["class"] or None)
            found[row["role"]].append(named.get(place.path, place))
        places = tuple(found["data"])
        burst = tuple(place.path for place in found["burst"])
        changed = {"servers": places != self.places}
        changed["burst.directories"] = burst != self.burst.directories
        changes = {
            "places": places,
            "burst": self.burst.model_copy(update={"directories": burst}),
            "origins": {**self.origins} | {key: "the store" for key in changed if changed[key]},
        }
        return self.model_copy(update=changes)


def _leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Kind, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        elif field.metadata:
            yield f"{prefix}{field.alias or name}", field.metadata[0], value


def default_movers() -> int:
    """As many mover processes as this machine has room for."""
    return max(1, min(16, len(os.sched_getaffinity(0)) // 4))


def _machine_name() -> str:
    name = socket.gethostname()
    try:
        return HOST_NAME.parse(name, "")
    except ValueError:
        return "host"


def suggestion(word: str, valid: list[str], what: str) -> str:
    """``; the nearest valid WHAT is ...``, or '' if no member of ``valid`` looks like ``word``."""
    found = difflib.get_close_matches(word, valid, n=1)
    return f"; the nearest valid {what} is {found[0]}" if found else ""


def known_keys() -> list[str]:
    """Every dotted key, in the order of the documentation."""
    return list(_defaults())


def is_directory_source(source: str) -> bool:
    """Whether SOURCE means a directory (which may not exist yet) and not a YAML file."""
    return os.path.isdir(source) or not (
        source.endswith((".yaml", ".yml")) or os.path.isfile(source)
    )


def load(source: str, overrides: Mapping[str, str]) -> Config:
    """The configuration of SOURCE, with ``overrides`` (dotted key to text). Raises ConfigError."""
    source = os.path.abspath(source)
    defaults = _defaults()
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
            raise ConfigError(f"-o {key}: unknown key{suggestion(key, known, 'key')}")
        settings[key] = Setting(text, "-o", os.getcwd())
    settings = {key: item for key, item in settings.items() if item.value is not None}
    if "data.movers" not in settings:
        settings["data.movers"] = Setting(default_movers(), "a quarter of the processors", source)
    if "host.name" not in settings:
        settings["host.name"] = Setting(_machine_name(), "this machine's name", source)
    if "log.file" not in settings and "meta.directory" in settings:
        meta = settings["meta.directory"]
        file_name = f"{str(meta.value).rstrip('/')}.log"
        settings["log.file"] = Setting(file_name, "beside meta.directory", meta.base)
    config = _validate(source, file, settings)
    _refuse_half_a_cluster(config)
    _refuse_double_use(config)
    _refuse_crossed_marks(config)
    _refuse_open_metrics(config)
    if config.layout.replicas > 1 and config.layout.ec[1]:
        key = min(
            ("layout.replicas", "layout.ec"), key=lambda key: config.origins[key] == "default"
        )
        raise ConfigError(
            f"{config.origins[key]}: {key}: files are either replicated or coded; set one of both"
        )
    return config


def _validate(source: str, file: str, settings: dict[str, Setting]) -> Config:
    tree: dict[str, Any] = {
        "source": source,
        "origins": {key: item.origin for key, item in settings.items()},
    }
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


def _refuse_half_a_cluster(config: Config) -> None:
    for key, value in (("meta.url", config.meta.url), ("meta.secret", config.meta.secret)):
        if config.is_cluster and not value:
            raise ConfigError(
                f"{config.origins['meta.engine']}: {key} is missing: meta.engine postgresql needs "
                "it; aifs meta serve prints what to write"
            )
        if value and not config.is_cluster:
            raise ConfigError(
                f"{config.origins[key]}: {key}: is for meta.engine postgresql, and the engine is "
                f"{config.meta.engine}"
            )
    if config.is_cluster and is_directory_source(config.source):
        raise ConfigError(
            f"{config.origins['meta.engine']}: meta.engine: hosts that share a store need a YAML "
            "file each as SOURCE, not a directory"
        )


def _refuse_double_use(config: Config) -> None:
    """No directory may be, or lie in, one of another use."""
    used: dict[str, str] = {}
    inner_of: dict[str, str] = {}  # each directory above one in use, with the one in use
    places = [("meta.directory", (config.meta.directory,)), ("servers", config.servers)]
    for key, paths in [*places, ("burst.directories", config.burst.directories)]:
        for path in paths:
            above = _directories_above(path)
            outer = next((each for each in above if each in used), None)
            if path in used:
                wrong = f"{path} is already used by {used[path]}"
            elif outer is not None:
                wrong = f"{path} lies inside {outer}, which is used too"
            elif path in inner_of:
                wrong = f"{inner_of[path]} lies inside {path}, which is used too"
            else:
                used[path] = key
                inner_of |= dict.fromkeys(above, path)
                continue
            raise ConfigError(f"{config.origins[key]}: {key}: {wrong}")


def _directories_above(path: str) -> list[str]:
    above = []
    while (parent := os.path.dirname(path)) != path:
        above.append(path := parent)
    return above


def _refuse_crossed_marks(config: Config) -> None:
    low, high = config.burst.low_water, config.burst.high_water
    if low >= high:
        key = min(
            ("burst.low_water", "burst.high_water"),
            key=lambda key: config.origins[key] == "default",
        )
        raise ConfigError(
            f"{config.origins[key]}: {key}: low_water {low} is not below high_water {high}"
        )


def _refuse_open_metrics(config: Config) -> None:
    listen, secret = config.metrics.listen, config.metrics.secret
    if listen and not secret and not is_of_this_machine(listen):
        raise ConfigError(
            f"{config.origins['metrics.listen']}: metrics.listen: {listen} can be reached from "
            "other machines, which needs metrics.secret; 127.0.0.1:PORT does not"
        )


@cache
def _defaults() -> Mapping[str, Setting]:
    return _read_file(DEFAULTS_FILE, known=None)


def _read_file(path: str, known: list[str] | None) -> dict[str, Setting]:
    """A YAML file's leaves by dotted key; refuses keys not ``known`` (None: all are new)."""
    try:
        with open(path, encoding="utf-8") as file:
            loader = (_FastLoader if known is None else yaml.SafeLoader)(file.read())
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}:{root.start_mark.line + 1}: the file must hold keys and values"
            )
        return dict(_walk(loader, root, "", path, known))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: not UTF-8, or a date that does not exist
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
            raise ConfigError(f"{origin}: {key}: unknown key{suggestion(key, names, 'key')}")
        yield key, Setting(value, origin, os.path.dirname(path))
