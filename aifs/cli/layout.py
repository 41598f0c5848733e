"""``aifs layout``: how the bytes of files lie on the data servers, in words; the attribute
user.aifs.layout says the same to programs.
"""

import errno
import os
from typing import TYPE_CHECKING

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH
from aifs.cli.output import print_json

if TYPE_CHECKING:
    from aifs.layout.hint import Policy

EPILOG = """
\b
Examples:
  aifs layout get /mnt/store/models
  aifs layout set /mnt/store/models unit=4MiB,count=2
  aifs layout set /mnt/store/models none
  aifs layout explain /mnt/store/models
  aifs layout explain kind=interleaved,compress=zstd:3

\b
A layout is KEY=VALUE,...; what is left out is as the store has it:
  kind      striped: large files have objects of their own; interleaved: all share containers
  unit      bytes that go to one server before the next one's turn, such as 4MiB
  count     servers of a file; 0: all
  servers   those to choose from, as 0:2:3
  replicas  copies of each byte, on different servers
  ec        DATA+PARITY columns, such as 4+2; none
  compress  of interleaved files: zstd:LEVEL, none
"""


@click.group("layout", epilog=EPILOG, short_help="Show, set and explain how files lie on servers.")
def layout_group() -> None:
    """How new files of a directory are laid out on the data servers."""


@layout_group.command("get", epilog=EPILOG)
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def get_command(path: str, as_json: bool) -> None:
    """Print the layout that new files below the directory PATH get, or that the file PATH has."""
    text = _read(path)
    print_json({"layout": text}) if as_json else print(text)


@layout_group.command("set", epilog=EPILOG)
@click.argument("path", type=PATH)
@click.argument("layout")
def set_command(path: str, layout: str) -> None:
    """Have files that are made below the directory PATH from now on laid out by LAYOUT, or the
    empty file PATH; none takes it back. Files that are there stay as they are.

    For its owner, and for root.
    """
    before = _read(path)
    if layout == "none":
        if before != _DEFAULT:
            hints.remove(path, hints.LAYOUT)
    else:
        hints.put(path, hints.LAYOUT, layout)
    print(f"{path}: {_read(path)}, and was {before}")


@layout_group.command("explain", epilog=EPILOG)
@click.argument("what", metavar="PATH|LAYOUT")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the layout, and the words.")
def explain_command(what: str, as_json: bool) -> None:
    """Say in words what LAYOUT means, or the layout of PATH: where bytes go, how many servers may
    be lost, and what it takes.
    """
    from aifs.layout.hint import parse_layout_hint

    is_path = "=" not in what or os.path.lexists(what)
    text = _read(PATH.convert(what, None, click.get_current_context())) if is_path else what
    words = in_words(parse_layout_hint(text))
    if as_json:
        print_json({"layout": text, "words": words})
        return
    print(text)
    for sentence in words:
        print(f"  {sentence}")


_DEFAULT = "count=0"


def _read(path: str) -> str:
    from aifs.cli.mounts import require_inside

    require_inside(path)
    try:
        return os.fsdecode(os.getxattr(path, hints.LAYOUT))
    except OSError as error:
        if error.errno == errno.ENODATA:  # nothing has been said of it
            return _DEFAULT
        raise


def in_words(policy: "Policy") -> list[str]:
    """What a layout means, a sentence for each thing that it says."""
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
