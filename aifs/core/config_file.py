"""The YAML file of a SOURCE, changed by commands: one value, while its comments and all else stay.
Durable on return. Raises ConfigError, OSError."""

import os
from collections.abc import Callable, Mapping, Sequence

import yaml

from aifs.core import files
from aifs.core.errors import ConfigError

_HEAD = """\
# The configuration of this store, as far as it is not the default. Change it here, or by
# aifs config set PLACE KEY VALUE --save; aifs config show PLACE lists all keys. The store itself
# knows its servers, their domains and classes: aifs server ls PLACE.
"""


def save(path: str, values: Mapping[str, str | Sequence[str]]) -> None:
    """Let the file say these values, by dotted key, and make it if it is missing."""
    text = _read(path) or _HEAD
    for key, value in values.items():
        found = _find(path, text, key.split("."))
        if found is None:
            text = f"{text.rstrip()}\n{key}: {_yaml(value)}\n"
        else:
            end = text[_end(found) :]
            text = f"{text[: found.start_mark.index]}{_yaml(value)}{end}"
    _replace(path, text)


def add(path: str, key: str, item: str | Mapping[str, str]) -> bool:
    """Put an item at the end of the list ``key``; False if the file has no such list, or an empty
    one."""
    text = _read(path)
    found = _find(path, text, key.split("."))
    if not isinstance(found, yaml.SequenceNode) or not found.value:
        return False
    last, new = found.value[-1], _yaml(item)
    end = _end(last)
    if found.flow_style:
        text = f"{text[:end]}, {new}{text[end:]}"
    else:
        end = text.find("\n", end) + 1 or len(text)
        begin = last.start_mark.index
        dash = text[text.rfind("\n", 0, begin) + 1 : begin]
        text = f"{text[:end]}{'' if text[end - 1] == chr(10) else chr(10)}{dash}{new}\n{text[end:]}"
    _replace(path, text)
    return True


def leave_out(path: str, key: str, is_meant: Callable[[str], bool]) -> bool:
    """Take items out of the list ``key``, by their text or ``path``; whether one was there."""
    new = _read(path)
    was = new
    while (found := _find(path, new, key.split("."))) and isinstance(found, yaml.SequenceNode):
        items = found.value
        meant = [number for number, item in enumerate(items) if is_meant(_path_of(item))]
        if not meant:
            break
        at = meant[0]
        if len(items) == 1:
            new = f"{new[: found.start_mark.index]}[]{new[_end(found) :]}"
            break
        if found.flow_style:
            begin = items[at - 1].end_mark.index if at else items[0].start_mark.index
            end = items[at].end_mark.index if at else items[1].start_mark.index
        else:
            begin = new.rfind("\n", 0, items[at].start_mark.index) + 1
            end = new.find("\n", _end(items[at])) + 1 or len(new)
        new = new[:begin] + new[end:]
    if new != was:
        _replace(path, new)
    return new != was


def _read(path: str) -> str:
    return (files.read_file(path) or b"").decode()


def _replace(path: str, text: str) -> None:
    """The file keeps its owner and mode, and a symlink to it stays."""
    path = os.path.realpath(path)
    had = os.stat(path) if os.path.exists(path) else None
    files.replace_file(path, text.encode())
    fd = files.open_file(path)
    try:
        files.set_mode(fd, 0o644 if had is None else had.st_mode & 0o7777)
        if had is not None:
            files.set_owner(fd, had.st_uid, had.st_gid)
    finally:
        files.close_file(fd)


def _find(path: str, text: str, names: list[str]) -> yaml.Node | None:
    """The value of a key, also where sections are written as a dotted name."""
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return _below(node, names)


def _below(node: yaml.Node | None, names: list[str]) -> yaml.Node | None:
    if not names or not isinstance(node, yaml.MappingNode):
        return None if names else node
    for key, value in node.value:
        length = len(key.value.split("."))
        if key.value.split(".") == names[:length]:
            if (found := _below(value, names[length:])) is not None:
                return found
    return None


def _path_of(item: yaml.Node) -> str:
    if isinstance(item, yaml.MappingNode):
        return next((value.value for key, value in item.value if key.value == "path"), "")
    return str(item.value)


def _end(node: yaml.Node) -> int:
    """Where its text ends, without the comments behind it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    return int(node.end_mark.index)


def _yaml(value: str | Sequence[str] | Mapping[str, str]) -> str:
    """A text, in which a number stays one, a list, or a mapping."""
    if not isinstance(value, str):
        plain = dict(value) if isinstance(value, Mapping) else [*value]
        return yaml.safe_dump(plain, default_flow_style=True, width=1 << 20).strip()
    text = value
    if text.replace(".", "").isalnum() and isinstance(yaml.safe_load(text), str | int | float):
        return text
    return yaml.safe_dump([text], default_flow_style=True, width=1 << 20).strip()[1:-1]
