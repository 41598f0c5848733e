"""Mount options: what ``-o`` may hold besides configuration keys. Pure; imports no FUSE binding.

Each option is one of four things: passed on to the kernel, answered here, meant for mount(8) and fstab alone
(understood and ignored), or a configuration key by its dotted path. Anything else is refused by name.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from aifs.core.config import nearest
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
    "noatime": "atime",
}

# What is in force anyway: relatime, and permission checks in the kernel.
_ALWAYS = {"defaults", "default_permissions", "relatime", "diratime", "nodiratime"}

# For mount(8), fstab and systemd.
_FSTAB = {"auto", "noauto", "user", "users", "nouser", "owner", "group", "nofail", "_netdev"}
_FSTAB_PREFIXES = ("x-", "X-", "comment=", "user=", "group=", "owner=")

_REFUSED = {
    "strictatime": "access times follow relatime, or are not kept (noatime)",
    "remount": "unmount, then mount with the other options",
}

_ANSWERED = {"ro", "rw", "allow_other", "noallow_other", "atime"}


@dataclass(frozen=True)
class MountOptions:
    """What the mount needs to know. ``fuse_options`` go to libfuse as they are (``nodev``, ``noatime``)."""

    read_only: bool = False
    allow_other: bool = False
    fuse_options: list[str] = field(default_factory=list)


def parse(
    items: Iterable[str], config_keys: Collection[str], privileged: bool, sloppy: bool = False
) -> tuple[MountOptions, dict[str, str]]:
    """Mount options and configuration overrides from the ``-o`` arguments; the last one wins.

    A ``privileged`` (root's) mount starts from ``allow_other``, and from ``dev`` and ``suid``, as mount(8)
    does for every filesystem. Unknown options raise ConfigError, or are ignored when ``sloppy``; wrong dotted
    keys are left to the configuration, which refuses them.
    """
    read_only, allow_other = False, privileged
    kernel = dict.fromkeys(["dev", "suid"] if privileged else [])
    overrides: dict[str, str] = {}
    for option in (option for item in items for option in item.split(",") if option):
        name, is_setting, value = option.partition("=")
        if is_setting and (
            name in config_keys or "." in name and not option.startswith(_FSTAB_PREFIXES)
        ):
            overrides[name] = value
        elif option in _KERNEL:
            kernel.pop(_KERNEL[option], None)
            kernel[option] = None
        elif option == "atime":
            kernel.pop("noatime", None)
        elif option in ("ro", "rw"):
            read_only = option == "ro"
        elif option in ("allow_other", "noallow_other"):
            allow_other = option == "allow_other"
        elif option in _ALWAYS or option in _FSTAB or option.startswith(_FSTAB_PREFIXES):
            continue
        elif option in _REFUSED:
            raise ConfigError(f"mount option {option} is not supported: {_REFUSED[option]}")
        elif not sloppy:
            valid = [*_KERNEL, *_ANSWERED, *_ALWAYS, *_FSTAB, *config_keys]
            raise ConfigError(
                f"unknown option {option!r}; the nearest valid one is {nearest(name, valid)}"
            )
    return MountOptions(read_only, allow_other, list(kernel)), overrides
