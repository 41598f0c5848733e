"""``aifs image``: container images that are unpacked once, and mounted by all hosts."""

import os
import stat
from typing import TYPE_CHECKING

import click

from aifs.cli.command import PATH, SIZE, Column, Report, Table, group
from aifs.cli.output import print_error, size, when

if TYPE_CHECKING:
    from aifs.client.startup import MadeRecord

IMAGE = click.argument("image", type=PATH, metavar="IMAGE")


@group("image", short_help="Container images that are unpacked once for all hosts.")
def image_command() -> None:
    """Container images: unpacked once into a directory, from which all hosts mount them."""


@image_command.command(
    "import",
    examples="""
docker save train:3 -o train.tar
image=$(aifs image import train.tar /mnt/store)
skopeo copy docker://python:3.12-slim oci:python
aifs image import python /mnt/store
""",
    short_help="Unpack an image unless it is there, and print its path.",
)
@click.argument("source", type=PATH, metavar="ARCHIVE.tar|OCI-DIR")
@click.argument("directory", type=PATH, metavar="DIR")
@click.option("--name", metavar="NAME", help="Which image, where there are several.")
@click.option(
    "--bytes-max",
    type=SIZE,
    default="64GiB",
    show_default=True,
    help="An image that unpacks to more is refused.",
)
def import_command(source: str, directory: str, name: str | None, bytes_max: int) -> Report:
    """Unpack the image of an archive of `docker save`, or of an OCI layout (a directory, or an
    archive of it), to DIR/images/DIGEST/rootfs, and print DIR/images/DIGEST. DIGEST is the ID
    of the image in Docker.

    Of many that import it at the same time, on any host, one does the work, and the others wait. It
    is there whole, or not at all: an image that is damaged, does not have its digests, or reaches
    out of its directory is refused. Only root can do this.
    """
    from aifs.client.startup.images import import_image

    with import_image(source, directory, name=name, bytes_max=bytes_max) as made:
        return Report({"path": made.path}, made.path)


@image_command.command(
    "mount",
    examples="""
aifs image mount $image /run/train --upper /scratch/train
chroot /run/train python train.py
umount /run/train
""",
    short_help="Mount an image.",
)
@IMAGE
@click.argument("mountpoint", type=PATH, metavar="MNT")
@click.option(
    "--upper",
    type=PATH,
    metavar="DIR",
    help="Keep what is changed in DIR/upper, on a local disk; without it the mount is read-only.",
)
def mount_command(image: str, mountpoint: str, upper: str | None) -> None:
    """Mount IMAGE, a path that `aifs image import` has printed, at the directory MNT. With --upper
    it can be written to: the kernel's overlayfs keeps the changes (DIR/work is its own). `umount
    MNT` ends it. Only root can do this.
    """
    from aifs.client import startup
    from aifs.client.startup.images import OWNER
    from aifs.core import beneath, trees

    with startup.made_at(image, OWNER) as made:
        lower = os.path.join(made.path, "rootfs")
        if not os.path.isdir(lower):
            raise click.BadParameter(f"{image}: is no image", param_hint="IMAGE")
        if upper is None:
            _mount("--bind", "-o", "ro,nodev", lower, mountpoint)
            return
        directories = {"lowerdir": lower}
        for option, name in (("upperdir", "upper"), ("workdir", "work")):
            directories[option] = os.path.join(os.path.realpath(upper), name)
            trees.make_dir(directories[option])
            found = os.lstat(directories[option])
            if stat.S_ISLNK(found.st_mode) or beneath.is_foreign(found, os.stat(upper)):
                raise click.BadParameter(
                    f"{directories[option]}: was made by user {found.st_uid}", param_hint="--upper"
                )
        for path in directories.values():
            if set(path) & set(',:\\"'):
                raise click.BadParameter(f'{path}: overlayfs takes no path with , : \\ or "')
        options = ",".join(f"{option}={path}" for option, path in directories.items())
        _mount("-t", "overlay", "-o", f"nodev,{options}", "overlay", mountpoint)


def _mount(*arguments: str) -> None:
    import subprocess

    done = subprocess.run(("mount", *arguments), capture_output=True, text=True)
    if done.returncode:
        print_error(" ".join(done.stderr.split()))
        raise click.exceptions.Exit(6)


_IMAGES = (
    Column("digest"),
    Column("names", show=" ".join),
    Column("bytes", show=size),
    Column("imported", "made_s", when),
)


@image_command.command(
    "ls",
    sizes=True,
    examples="""
aifs image ls /mnt/store
aifs image ls /mnt/store --json
""",
    short_help="List the images of a directory.",
)
@click.argument("directory", type=PATH, metavar="DIR")
def ls_command(directory: str) -> Report:
    """List the images below DIR: digest, names, size, when they were imported."""
    from aifs.client import startup

    told = [
        {
            "digest": digest,
            "names": _names_of(record),
            "bytes": record.bytes,
            "made_s": record.made_s,
            "took_s": record.took_s,
        }
        for digest, (record, _) in startup.list_made(os.path.join(directory, "images")).items()
    ]
    return Report(told, Table(_IMAGES, told))


def _names_of(record: "MadeRecord") -> list[str]:
    """Others may have written the record."""
    names = (record.key or {}).get("names")
    return [*map(str, names)] if isinstance(names, list) else []


@image_command.command(
    "rm",
    examples="""
aifs image rm $image
""",
    short_help="Remove an image.",
)
@IMAGE
def rm_command(image: str) -> None:
    """Remove IMAGE, which is not mounted on this host. That it is mounted on another one is not
    seen: programs there would lose their files.
    """
    from aifs.client import startup
    from aifs.client.startup.images import OWNER

    digest = os.path.basename(os.path.realpath(image))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        mounted = [line.split()[4] for line in mounts if f"{digest}/rootfs" in line]
    if mounted:
        raise click.UsageError(f"{image}: is mounted at {mounted[0]}; umount it first")
    startup.remove(image, OWNER)
