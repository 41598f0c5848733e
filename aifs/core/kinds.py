"""The kinds of configuration values: how each is read, checked and written. Pure."""

import ipaddress
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import core_schema

from aifs.core.aging import parse_class
from aifs.core.names import is_path
from aifs.core.units import (
    format_compress,
    format_duration,
    format_size,
    parse_compress,
    parse_duration,
    parse_size,
)

DOMAIN_MAX = 255

LAYOUT_KINDS = ("striped", "interleaved")
"""How files may be laid out. The numbers of these are recorded: new ones go to the end."""


class ServerPlace(NamedTuple):
    """A data server's directory, failure domain (host, rack; "": itself), bytes per second (0:
    measured), and class ("": new files; None: not given)."""

    path: str
    domain: str = ""
    bandwidth: int = 0
    storage_class: str | None = None


class Setting(NamedTuple):
    """A raw value, where it was given, and the directory that its relative paths start from."""

    value: Any
    origin: str
    base: str


@dataclass(frozen=True)
class Kind:
    """A kind of value: ``parse`` takes the raw value and its base; ValueError unless
    ``allowed``."""

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


def size(minimum: int, maximum: int, multiple: int = 1) -> Kind:
    def parse(value: Any, base: str) -> int:
        size = _within(_number(value, parse_size), minimum, maximum)
        if size % multiple:
            raise ValueError
        return size

    step = f", a multiple of {multiple}" if multiple > 1 else ""
    return Kind(
        f"a size from {format_size(minimum)} to {format_size(maximum)}{step}", parse, format_size
    )


def duration(minimum_s: float, maximum_s: float) -> Kind:
    def parse(value: Any, base: str) -> float:
        return _within(_number(value, parse_duration), minimum_s, maximum_s)

    allowed = (
        f"a duration from {format_duration(minimum_s)} to {format_duration(maximum_s)}, such as 1s"
    )
    return Kind(allowed, parse, format_duration)


def integer(minimum: int, maximum: int) -> Kind:
    def parse(value: Any, base: str) -> int:
        return _within(_number(value, int), minimum, maximum)

    return Kind(f"a whole number from {minimum} to {maximum}", parse)


def fraction(minimum: float, maximum: float) -> Kind:
    def parse(value: Any, base: str) -> float:
        return _within(_number(value, float), minimum, maximum)

    return Kind(f"a fraction from {minimum} to {maximum}", parse)


def choice(*choices: str) -> Kind:
    def parse(value: Any, base: str) -> str:
        if value is False:
            value = "off"  # which is what YAML 1.1 takes the word for
        if value not in choices:
            raise ValueError
        return value

    return Kind(f"one of {', '.join(choices)}", parse)


def _parse_boolean(value: Any, base: str) -> bool:
    text = str(value).lower() if isinstance(value, bool | str) else ""
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _parse_compress(value: Any, base: str) -> int:
    return parse_compress(str(value))


def _parse_pack_below(value: Any, base: str) -> int | None:
    return None if value == "unit" else _within(_number(value, parse_size), 0, 1 << 30)


def _format_pack_below(size: int | None) -> str:
    return "unit" if size is None else format_size(size)


def _parse_coded(value: Any, base: str) -> tuple[int, int]:
    if value == "none":
        return 0, 0
    data, parity = map(int, value.split("+")) if isinstance(value, str) else (0, 0)
    return _within(data, 2, 16), _within(parity, 1, 8)


def _parse_hedge(value: Any, base: str) -> float:
    if value is False or value == "off":
        return math.inf
    return 0.0 if value == "auto" else _within(_number(value, parse_duration), 1e-4, 60)


def _format_hedge(delay_s: float) -> str:
    return "off" if delay_s == math.inf else format_duration(delay_s) if delay_s else "auto"


def _parse_address(value: Any, base: str) -> str:
    is_other = isinstance(value, str) and "\0" not in value and not is_path(value)
    return value if is_other else _parse_path(value, base)


def _parse_path(value: Any, base: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value or not is_path(value):
        raise ValueError
    return os.path.normpath(os.path.join(base, os.path.expanduser(value)))


def _parse_optional_path(value: Any, base: str) -> str:
    return "" if value == "" else _parse_path(value, base)


_HOST = r"(\[[0-9a-fA-F:.]+\]|[^\s:@/,\[\]]*)(:[0-9]+)?"
_DATABASE = re.compile(rf"postgres(ql)?://([^\s:@/]+@)?{_HOST}(,{_HOST})*/[^\s?]+(\?\S*)?")


def _parse_database(value: Any, base: str) -> str:
    if value != "" and not _DATABASE.fullmatch(value) or "password=" in value:
        raise ValueError
    return value


def split_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ADDRESS:PORT, or of [ADDRESS]:PORT for IPv6. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 0xFFFF:
        raise ValueError(f"{text!r} is not an address and a port, such as 10.0.0.1:7947")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _parse_endpoint(value: Any, base: str) -> str:
    split_endpoint(value)
    return value


def _parse_endpoint_or_socket(value: Any, base: str) -> str:
    if value == "":
        return ""
    if not isinstance(value, str) or not value.startswith("/"):
        return _parse_endpoint(value, base)
    path = _parse_path(value, base)
    if len(os.fsencode(path)) > _SOCKET_PATH_MAX:
        raise ValueError
    return path


def is_of_this_machine(place: str) -> bool:
    """Whether only this machine reaches the ADDRESS:PORT, or the path of a socket."""
    if place.startswith("/"):
        return True
    host, _ = split_endpoint(place)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_SOCKET_PATH_MAX = 107  # of unix(7)

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _parse_host_name(value: Any, base: str) -> str:
    if not isinstance(value, str) or not _HOST_NAME.fullmatch(value):
        raise ValueError
    return value


def _parse_paths(value: Any, base: str) -> tuple[str, ...]:
    paths = value.split(":") if isinstance(value, str) else value
    if paths == [""]:
        return ()
    if not isinstance(paths, list):
        raise TypeError
    return tuple(_parse_path(path, base) for path in paths)


def _parse_servers(value: Any, base: str) -> tuple[ServerPlace, ...]:
    servers = re.split(r":(?!//)", value) if isinstance(value, str) else value
    if not isinstance(servers, list) or not servers or servers == [""]:
        raise ValueError
    return tuple(_parse_server(server, base) for server in servers)


def _parse_server(value: Any, base: str) -> ServerPlace:
    if not isinstance(value, dict):
        return ServerPlace(_parse_address(value, base))
    if not {"path"} <= set(value) <= {"path", "domain", "bandwidth", "class"}:
        raise ValueError
    bandwidth = size(0, 1 << 60).parse(value.get("bandwidth", 0), base)
    storage_class = parse_class(value["class"]) if "class" in value else None
    domain = parse_domain(value.get("domain", ""))
    return ServerPlace(_parse_address(value["path"], base), domain, bandwidth, storage_class)


def parse_domain(value: Any) -> str:
    """The name of a failure domain. Raises ValueError."""
    if not isinstance(value, str) or len(value) > DOMAIN_MAX or not value.isprintable():
        raise ValueError(f"a failure domain is a name of up to {DOMAIN_MAX} characters")
    return value


def _format_servers(servers: tuple[ServerPlace, ...]) -> str:
    return ":".join(_format_server(*server) for server in servers)


def _format_server(path: str, domain: str, bandwidth: int, storage_class: str | None) -> str:
    said = [domain] if domain else []
    if storage_class:
        said.append(f"class {storage_class}")
    if bandwidth:
        said.append(f"{format_size(bandwidth)}/s")
    return f"{path} ({', '.join(said)})" if said else path


BOOLEAN = Kind("true or false", _parse_boolean, lambda value: str(value).lower())
CODED = Kind(
    "none or DATA+PARITY, such as 4+2, with 2 to 16 and 1 to 8 columns",
    _parse_coded,
    lambda columns: f"{columns[0]}+{columns[1]}" if columns[1] else "none",
)
HEDGE = Kind("auto, off, or a duration from 100us to 1min", _parse_hedge, _format_hedge)
COMPRESS = Kind("none or zstd:LEVEL with a level from 1 to 19", _parse_compress, format_compress)
PACK_BELOW = Kind("unit, or a size from 0 to 1GiB", _parse_pack_below, _format_pack_below)
DATABASE = Kind(
    "postgresql://USER@HOST:PORT/DATABASE (the password is in the file that meta.secret names)",
    _parse_database,
)
ENDPOINT = Kind("ADDRESS:PORT, such as 10.0.0.1:7947", _parse_endpoint)
ENDPOINT_OR_NONE = Kind(
    ENDPOINT.allowed, lambda value, base: "" if value == "" else _parse_endpoint(value, base)
)
ENDPOINT_OR_SOCKET = Kind(
    f"{ENDPOINT.allowed}, or an absolute path of up to {_SOCKET_PATH_MAX} bytes",
    _parse_endpoint_or_socket,
)
HOST_NAME = Kind("a name of up to 64 letters, digits, dots, - and _", _parse_host_name)
OPTIONAL_PATH = Kind("a path", _parse_optional_path)
PATH = Kind("a path", _parse_path)
PATHS = Kind("a list of directories", _parse_paths, ":".join)
SERVERS = Kind(
    "a list of directories, not empty; each a path, or {path: PATH, domain: NAME, bandwidth: SIZE, "
    "class: NAME}",
    _parse_servers,
    _format_servers,
)
