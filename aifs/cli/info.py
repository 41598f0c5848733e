"""``aifs info``, ``aifs layout`` and ``aifs group``: where bytes lie, the layout of new files, and
files written together."""

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from aifs.cli import door
from aifs.cli.command import PATH, Column, Pairs, Report, Table, command, group, number
from aifs.cli.door import require_inside
from aifs.cli.output import count, duration, size
from aifs.core.errors import UserError

if TYPE_CHECKING:
    from aifs.layout.hint import Policy

_TYPES = {
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


_PARTS = (
    Column("server", show=number),
    Column("domain"),
    Column("state"),
    Column("bytes", show=size),
    Column("path"),
)


@command(
    "info",
    short_help="Show where the bytes of a file lie.",
    examples="aifs info /mnt/store/model.pt\n"
    "aifs info --tree /mnt/store/run/.snapshots/before-merge",
    sizes=True,
)
@click.argument("path", type=PATH)
@click.option("--tree", is_flag=True, help="Of a directory, add up the bytes of all files below.")
def info_command(path: str, tree: bool) -> Report:
    """Show the inode of PATH, its form and layout, and where each part of it lies. A symlink is not
    followed.

    Of files in containers, stored_bytes are those that they take there, before redundancy. If that
    is fewer than their size, compression says how many times.

    unique_bytes are those that would come back if it were removed, shared_bytes those that clones
    and snapshots elsewhere have, too. Those of a directory are added up with --tree, with the
    number of files below and their bytes as ls shows them.
    """
    info = _read_info(path, tree)
    apart = ("parts", "layout", "copy", "compression", "source")
    shown = {key: value for key, value in info.items() if key not in apart}
    if copy := info.get("copy"):
        where = f"host {copy['host']}" if "host" in copy else copy["path"]
        shown["copy"] = f"{copy['state']}, burst directory {copy['device']}, {where}"
        if "drain_in_s" in copy:
            shown["drain"] = f"in {duration(copy['drain_in_s'])}: it changes again and again"
    if layout := info.get("layout"):
        shown["layout"] = describe_layout(layout)
    if source := info.get("source"):
        shown["source"] = f"{source['url']}, ETag {source['etag']}"
    if info.get("compression", 0) > 1:
        shown["compression"] = f"{info['compression']:.2f}x"
    parts: list[Pairs | Table] = [Pairs(shown.items())]
    if info.get("parts"):
        last = Column("container" if "chunk" in info["layout"] else "path", "path")
        parts.append(Table((*_PARTS[:-1], last), info["parts"]))
    return Report(info, *parts)


def describe_layout(layout: dict[str, Any]) -> str:
    from aifs.core.units import format_size

    name = "chunk" if "chunk" in layout else "unit"
    servers = ":".join(map(str, layout["servers"]))
    protection = ""
    if layout.get("replicas", 1) > 1:
        protection = f", {layout['replicas']} replicas"
    elif layout.get("parity"):
        protection = f", {layout['width']}+{layout['parity']} coded"
    return f"{layout['kind']}, {name} {format_size(layout[name])}, servers {servers}{protection}"


def _read_info(path: str, tree: bool) -> dict[str, Any]:
    found = require_inside(path, follow=False)
    kind = _TYPES.get(stat.S_IFMT(found.st_mode))
    if kind:  # the kernel lets nobody ask user.* attributes of these
        return {"inode": found.st_ino, "type": kind, "size": found.st_size, "links": found.st_nlink}
    info = door.read(path, "info", follow=False)
    if info["form"] == "burst":
        with suppress(OSError):
            again_in_s = door.read(path, "drain", follow=False)["again_in_s"]
            info["copy"] |= {} if again_in_s is None else {"drain_in_s": again_in_s}
    if tree or not stat.S_ISDIR(found.st_mode):
        info |= door.read(path, "sharing", follow=False)
    return info


# --- layout ---------------------------------------------------------------------------------------

_EXAMPLES = """
aifs layout show /mnt/store/models
aifs layout set /mnt/store/models unit=4MiB,count=2
aifs layout rm /mnt/store/models
aifs layout explain /mnt/store/models
aifs layout explain kind=interleaved,compress=zstd:3
"""

_LAYOUTS = """
\b
A layout is KEY=VALUE,...; keys that are left out are as the store has them:
  kind      striped: large files have objects of their own; interleaved: all share containers
  unit      bytes that go to one server before the next one's turn, such as 4MiB
  count     servers of a file; 0: all
  servers   those to choose from, as 0:2:3
  replicas  copies of each byte, on different servers
  ec        DATA+PARITY columns, such as 4+2; none
  compress  of interleaved files: zstd:LEVEL, none
"""


@group("layout", epilog=_LAYOUTS, short_help="Show, set and explain how files lie on servers.")
def layout_command() -> None:
    """How new files of a directory are laid out on the data servers."""


@layout_command.command("show", epilog=_LAYOUTS, examples=_EXAMPLES)
@click.argument("path", type=PATH)
def show_layout_command(path: str) -> Report:
    """Print the layout that new files below the directory PATH get, or that the file PATH has."""
    text = _read(path)
    return Report({"layout": text}, text)


@layout_command.command("set", epilog=_LAYOUTS, examples=_EXAMPLES)
@click.argument("path", type=PATH)
@click.argument("layout")
def set_layout_command(path: str, layout: str) -> Report:
    """Have files that are made below the directory PATH from now on laid out by LAYOUT, or the
    empty file PATH. Files that are there stay as they are.

    For its owner, and for root.
    """
    before = _read(path)
    door.put(path, "layout", layout)
    return _changed(path, before)


@layout_command.command("rm", epilog=_LAYOUTS, examples=_EXAMPLES)
@click.argument("path", type=PATH)
def rm_layout_command(path: str) -> Report:
    """Take the layout of PATH back, for its owner and for root. Files that are there stay as they
    are."""
    before = _read(path)
    if before != _DEFAULT:
        door.remove(path, "layout")
    return _changed(path, before)


def _changed(path: str, before: str) -> Report:
    now = _read(path)
    return Report({"layout": now, "before": before}, f"{path}: {now}, and was {before}")


@layout_command.command("explain", epilog=_LAYOUTS, examples=_EXAMPLES)
@click.argument("what", metavar="PATH|LAYOUT")
def explain_command(what: str) -> Report:
    """Say in words what LAYOUT means, or the layout of PATH: where bytes go, how many servers may
    be lost, and what it takes.
    """
    from aifs.layout.hint import parse_layout_hint

    is_path = "=" not in what or os.path.lexists(what)
    text = _read(PATH.convert(what, None, click.get_current_context())) if is_path else what
    words = in_words(parse_layout_hint(text))
    sentences = [f"  {sentence}" for sentence in words]
    return Report({"layout": text, "words": words}, text, *sentences)


_DEFAULT = "count=0"


def _read(path: str) -> str:
    require_inside(path)
    try:
        return os.fsdecode(os.getxattr(path, "user.aifs.layout"))
    except OSError as error:
        if door.is_missing(error):
            return _DEFAULT
        raise


def in_words(policy: "Policy") -> list[str]:
    """The meaning of a layout, a sentence for each of its keys."""
    from aifs.core.units import format_size
    from aifs.layout.redundancy import Redundancy

    unit = format_size(policy.unit) if policy.unit else "the store's stripe unit"
    if policy.kind == "interleaved":
        words = ["All files share containers: those that are drained together lie together."]
        if policy.compress:
            words.append(f"Their chunks are compressed with zstd, level {policy.compress}.")
    else:
        words = [
            f"Files of {unit} or more, or of 1 MiB if that is less, have objects of their own; "
            "smaller ones share containers.",
            f"Of a large file {unit} go to one server before the next one's turn.",
        ]
        if policy.compress:
            words.append("Nothing of that is compressed: compress counts for interleaved files.")
    which = f" of {', '.join(map(str, policy.servers))}" if policy.servers else ""
    protection = policy.redundancy(Redundancy())
    if policy.parity:
        width = policy.data + policy.parity
        words.append(
            f"A file lies on {width} servers{which}: {policy.data} columns of data, "
            f"{policy.parity} of parity."
        )
    elif policy.count:
        servers = policy.count * protection.replicas
        words.append(f"A file lies on {servers} server{'s' * (servers != 1)}{which}.")
    else:
        words.append(f"A file is spread over all servers{which}.")
    if protection.is_protected:
        columns = (policy.data + policy.parity) / policy.data if policy.parity else policy.replicas
        words.append(
            f"Any {protection.tolerates} of its servers may be lost; it takes {columns:.3g} times "
            "the space."
        )
    elif policy.replicas:
        words.append("It is not protected: what lies on a server that is lost is lost.")
    else:
        words.append("It is protected as the store says (layout.replicas, layout.ec).")
    return words


# --- group ----------------------------------------------------------------------------------------


@group("group", short_help="Grouped writes: show one.")
def group_command() -> None:
    """Grouped I/O: the reads or writes of many ranks are planned as one."""


_MEMBERS = (Column("file", "name"), Column("bytes", show=size), Column("state"))


@group_command.command(
    "show",
    examples="aifs group show /mnt/store/step-100\naifs group show /mnt/store/step-100 --json",
    sizes=True,
)
@click.argument("path", type=PATH)
def show_group_command(path: str) -> Report:
    """Show the group that PATH belongs to: the ranks that are missing, the bytes that are stored
    once, the time that it took.

    PATH is a directory that has a group, or had one, or anything below it.
    """
    require_inside(path)
    try:
        told = door.read(path, "group")
    except OSError as error:
        if not door.is_missing(error):
            raise
        raise UserError(
            f"{path} has no group, and lies below none; setfattr -n user.aifs.group begins one"
        ) from None
    parts: list[Pairs | Table | str] = [Pairs(_told(told))]
    if told["files"]:
        parts.append(Table(_MEMBERS, told["files"]))
        if more := told["file_count"] - len(told["files"]):
            parts.append(f"and {count(more, 'file')} more")
    return Report(told, *parts)


def _host(told: dict[str, Any]) -> str:
    has = [f"ranks {', '.join(map(str, told['ranks']))}"] if told["ranks"] else []
    has += ["files"] if told["has_files"] else []
    has += ["sees to it"] if told["sees_to_it"] else []
    return f"{told['name']} ({'; '.join(has)})" if has else told["name"]


def _told(told: dict[str, Any]) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("group", f"{told['name']}, {count(told['ranks'], 'rank')}, committed by {told['commit']}"),
        ("state", told["state"] + (f": {told['error']}" if told["error"] else "")),
    ]
    if told["hosts"]:
        facts.append(("hosts", ", ".join(map(_host, told["hosts"]))))
    if told["missing"]:
        facts.append(("missing", "ranks " + ", ".join(map(str, told["missing"]))))
    elif told["missing_files"]:
        facts.append(("missing", count(told["missing_files"], "file")))
    shares = [
        ("distinct", "distinct_bytes"),
        ("duplicates", "duplicate_bytes"),
        ("zeros", "zero_bytes"),
        ("found", "found_bytes"),
    ]
    facts.append(("bytes", size(told["bytes"])))
    facts += [(name, size(told[key])) for name, key in shares]
    begun, times = told["times"]["open"], told["times"]
    facts += [
        (name, f"{duration(times[name] - begun)} after the beginning")
        for name in ("committed", "buffered", "durable")
        if times[name]
    ]
    if told["publish"]:
        facts.append(
            (
                "publish",
                (
                    f"{told['publish']}: "
                    f"{'done' if told['published'] else told['publish_error'] or 'not yet'}"
                ),
            )
        )
    if told["drain_error"]:
        facts.append(("waits", told["drain_error"]))
    return facts
