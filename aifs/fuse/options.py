"""Mount options: the words of ``-o`` besides configuration keys. Pure; imports no FUSE binding.

An option goes to the kernel, is answered here, is for mount(8) and fstab alone (ignored), or is a
configuration key by its dotted path. Others are refused by name.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from aifs.core.config import suggestion
from aifs.core.errors import ConfigError

# Options of the kernel, with the one that each of them undoes.
_KERNEL = {
    "dev": "nodev",
    "nodev": "dev",
    "suid": "nosuid",
    "nosuid": "suid",
    "exec": "noexec",
    "noexec": "exec",
    "sync": "async",
    "async": "sync",
}

# When a file that is opened for reading gets a new access time; the daemon decides it, not the
# kernel.
_ATIME = {
    "noatime": "noatime",
    "relatime": "relatime",
    "atime": "relatime",
    "norelatime": "relatime",
    "strictatime": "strictatime",
    "nostrictatime": "relatime",
}

# In force anyway: permission checks in the kernel.
_ALWAYS = {"defaults", "default_permissions", "diratime", "nodiratime"}

# For mount(8), fstab and systemd.
_FSTAB = {"auto", "noauto", "user", "users", "nouser", "owner", "group", "nofail", "_netdev"}
_FSTAB_PREFIXES = ("x-", "X-", "comment=", "user=", "group=", "owner=")

_ANSWERED = {"ro", "rw", "allow_other", "noallow_other", "remount", "subdir"}

# A FUSE mount's own options, which mount(8) repeats when it remounts it.
_REPEATED_PREFIXES = ("user_id=", "group_id=", "max_read=", "blksize=", "uhelper=")


@dataclass(frozen=True)
class MountOptions:
    """The words of ``-o`` for one mount."""

    read_only: bool = False
    """ro."""
    allow_other: bool = False
    """Other users are let in."""
    fuse_options: list[str] = field(default_factory=list)
    """For libfuse: nodev, noatime, ..."""
    atime: str = "relatime"
    """noatime, relatime or strictatime."""
    remount: bool = False
    """Change a mount that is there."""
    subdir: str = ""
    """Show this directory of a mount that is there; '/' is all of it, '' to mount."""


def parse(
    items: Iterable[str], config_keys: Collection[str], privileged: bool, sloppy: bool = False
) -> tuple[MountOptions, dict[str, str]]:
    """Mount options and configuration overrides from ``-o`` arguments; the last wins.

    A ``privileged`` (root's) mount starts from ``allow_other``, ``dev`` and ``suid``, as with
    mount(8). Unknown options raise ConfigError, unless ``sloppy``; the configuration refuses wrong
    dotted keys.
    """
    given = [option for item in items for option in item.split(",") if option]
    remount = "remount" in given
    read_only, allow_other, atime, subdir = False, privileged, "relatime", ""
    kernel = dict.fromkeys(["dev", "suid"] if privileged else [])
    overrides: dict[str, str] = {}
    for option in given:
        name, is_setting, value = option.partition("=")
        if is_setting and (
            name in config_keys or "." in name and not option.startswith(_FSTAB_PREFIXES)
        ):
            overrides[name] = value
        elif option in _KERNEL:
            kernel.pop(_KERNEL[option], None)
            kernel[option] = None
        elif option in _ATIME:
            atime = _ATIME[option]
        elif option in ("ro", "rw"):
            read_only = option == "ro"
        elif option in ("allow_other", "noallow_other"):
            allow_other = option == "allow_other"
        elif is_setting and name == "subdir":
            subdir = value or "/"
        elif option == "remount" or remount and option.startswith(_REPEATED_PREFIXES):
            continue
        elif option in _ALWAYS or option in _FSTAB or option.startswith(_FSTAB_PREFIXES):
            continue
        elif not sloppy:
            valid = [*_KERNEL, *_ATIME, *_ANSWERED, *_ALWAYS, *_FSTAB, *config_keys]
            raise ConfigError(f"unknown option {option!r}{suggestion(name, valid, 'one')}")
    if atime == "noatime":
        kernel["noatime"] = None  # which mount(8) shows
    options = MountOptions(read_only, allow_other, list(kernel), atime, remount, subdir)
    return options, overrides
