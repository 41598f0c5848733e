"""``aifs quota``: limits of what may lie below directories."""

import os
import time
from typing import Any

import click

from aifs.cli import door
from aifs.cli.command import COUNT, PATH, SIZE, Column, Report, Table, group, number
from aifs.cli.door import mount_of, require_inside
from aifs.cli.output import size as size_in_words
from aifs.core.errors import UserError

_QUOTAS = (
    Column("directory", "path"),
    Column("size", "bytes", size_in_words, "-"),
    Column("used", "used_bytes", size_in_words),
    Column("", lambda quota: _share(quota["used_bytes"], quota["bytes"]), number),
    Column("files", "files", number, "-"),
    Column("used", "used_files", number),
    Column("", lambda quota: _share(quota["used_files"], quota["files"]), number),
    Column("state"),
)
_PAUSE_S = 0.1


@group("quota", short_help="Limit how much may lie below a directory.")
def quota_command() -> None:
    """Limit how many bytes and files may lie below directories, and see how much does.

    A quota counts the sizes of all files below its directory, holes included and copies on several
    servers not, and all files, directories and symlinks, the directory itself included. A removed
    file counts until it is erased, in the background or when it is closed. A program that would
    exceed one, root too, gets "Disk quota exceeded" (EDQUOT). Quotas may lie within each other;
    then all of them count. mv(1) copies the files that it moves into a quota or out of one, and
    such hard links are refused.
    """


@quota_command.command(
    "set",
    short_help="Limit what lies below a directory (root).",
    sizes=True,
    examples="aifs quota set /mnt/store/team --size 1TiB --files 1M\n"
    "aifs quota set /mnt/store/team --files none",
)
@click.argument("directory", type=PATH)
@click.option("--size", metavar="SIZE", help="Bytes, such as 500GiB; none: unlimited.")
@click.option("--files", metavar="COUNT", help="Files, such as 1M; none: unlimited.")
@click.option("--no-wait", is_flag=True, help="Do not wait until all that is there is counted.")
def set_command(directory: str, size: str | None, files: str | None, no_wait: bool) -> Report:
    """Limit how much may lie below DIRECTORY, for root. A limit that is not named stays.

    The limits hold at once for files that are made from now on; those that are there are counted in
    the background, which takes about a second for 50,000 files. More than the limits may be there:
    then nothing is lost, and nothing grows.
    """
    if size is None and files is None:
        raise click.UsageError("say --size, --files or both")
    require_inside(directory)
    limits = [
        f"{name}={value if value == 'none' else kind.convert(value, None, None)}"
        for name, value, kind in (("size", size, SIZE), ("files", files, COUNT))
        if value is not None
    ]
    door.put(directory, "quota", ",".join(limits))
    while not no_wait and door.read(directory, "quota")["state"] == "counting":
        time.sleep(_PAUSE_S)
    found = [{"path": directory, **door.read(directory, "quota")}]
    return Report(found, Table(_QUOTAS, found))


@quota_command.command(
    "ls",
    short_help="List quotas.",
    sizes=True,
    examples="aifs quota ls /mnt/store\n  aifs quota ls /mnt/store --json",
)
@click.argument("mountpoint", type=PATH)
def ls_command(mountpoint: str) -> Report:
    """List the quotas of the store that is mounted at MOUNTPOINT: for root all, for others those of
    directories that they may read."""
    path, found, after = mount_of(mountpoint), list[dict[str, Any]](), 0
    while True:
        page = door.read(path, f"quotas.{after}")
        found += page["quotas"]
        after = page["next"]
        if not after:
            break
    for quota in found:
        quota["path"] = f"{path}{quota['path']}".rstrip("/")
    if not found:
        return Report(found, "there are no quotas")
    return Report(found, Table(_QUOTAS, sorted(found, key=lambda quota: quota["path"])))


@quota_command.command(
    "show",
    short_help="Show the quotas that count a file or directory.",
    sizes=True,
    examples="aifs quota show /mnt/store/team/run-7\naifs quota show /mnt/store/team --json",
)
@click.argument("path", type=PATH)
def show_command(path: str) -> Report:
    """Show all quotas that count PATH, the innermost first, and how much of them is used. The exit
    code is 1 if one of them is used up, or if there is none.

    A daemon counts in the transaction that changes something; aifs fsck counts again.
    """
    require_inside(path)
    found = _read(path)
    quotas = [{name: value for name, value in found.items() if name != "within"}, *found["within"]]
    for quota in quotas:
        quota["path"] = _path_above(path, quota["directory"])
    code = 1 if any(_is_full(quota) for quota in quotas) else 0
    return Report(quotas, Table(_QUOTAS, quotas), code=code)


@quota_command.command(
    "rm",
    short_help="Remove the quota of a directory (root).",
    examples="aifs quota rm /mnt/store/team",
)
@click.argument("directory", type=PATH)
def rm_command(directory: str) -> None:
    """Remove the quota of DIRECTORY, for root: nothing is refused by it any more. Quotas above it
    and below it stay."""
    require_inside(directory)
    if _read(directory)["directory"] != os.stat(directory).st_ino:
        raise UserError(f"{directory}: it has no quota of its own")
    door.remove(directory, "quota")


def _read(path: str) -> dict[str, Any]:
    try:
        return door.read(path, "quota")
    except OSError as error:
        if door.is_missing(error):
            raise UserError(f"{path}: no quota counts it") from None
        raise


def _path_above(path: str, ino: int) -> str:
    """The directory of this number that ``path`` is, or lies in."""
    above = os.path.realpath(path)
    while os.stat(above).st_ino != ino and above != "/":
        above = os.path.dirname(above)
    return above


def _is_full(quota: dict[str, Any]) -> bool:
    return any(
        quota[limit] is not None and quota[used] >= quota[limit]
        for limit, used in (("bytes", "used_bytes"), ("files", "used_files"))
    )


def _share(used: int, limit: int | None) -> str:
    return "" if limit is None else f"{100 * used // limit if limit else 100}%"
