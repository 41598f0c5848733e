"""The checks of ``aifs doctor``: what makes a mount fast, what is missing, and the remedy.

``look`` reads facts of machine and process, ``judge`` checks them (pure), ``probe`` does both, for
a mount by this user now; a running mount reports itself (``in_use``).
"""

import ctypes
import os
import platform
import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aifs.core.config import Config
from aifs.core.mountinfo import mount_of
from aifs.core.units import format_size
from aifs.fuse import bridge, extension, extension_error

PASSTHROUGH_KERNEL = (6, 9)
OPEN_FILES = 65536
"""Descriptors below which a busy mount may run out: one for each object of each open file."""

_STACKED = ("overlay", "ecryptfs", "aufs", "fuse")
"""Filesystems that may lie on another one; the kernel passes files through to one that does not."""


class DoctorLine(NamedTuple):
    """One line of the doctor. ``in_use``: the running mount's, or None."""

    name: str
    ok: bool
    in_use: bool | None
    why: str
    fix: str = ""
    """The remedy; empty if ``ok``."""


@dataclass(frozen=True)
class Facts:
    """The facts that the checks depend on."""

    kernel: str
    """Its version."""
    libfuse: str
    """Its version."""
    custom_io: bool
    """Whether libfuse has the function that the bridge needs."""
    extension_error: str
    """Why the bridge cannot be loaded; '' if it can."""
    admin: bool
    """Whether this process has CAP_SYS_ADMIN."""
    root: bool
    """Whether it is root's."""
    filesystems: Mapping[str, str]
    """The type below each burst directory, '' if it cannot be told."""
    read_ahead: int | None
    """Of the mount, in bytes; None without one."""
    open_files: int
    """Descriptors that a daemon may have."""
    leases: bool
    """Whether the kernel lets files be leased (fs.leases-enable)."""
    allow_other: bool
    """Whether users other than root may let others in."""


def probe(
    config: Config, mountpoint: str | None = None, in_use: Mapping[str, Any] | None = None
) -> list[DoctorLine]:
    """Checks for a mount of ``config``; ``in_use``: "bridge" of the running mount's status."""
    return judge(look(config.burst.directories, mountpoint), config, in_use or {})


def judge(facts: Facts, config: Config, in_use: Mapping[str, Any]) -> list[DoctorLine]:
    """Checks of ``facts``, the important ones first."""
    passthrough = in_use.get("passthrough")
    checks = [
        _bridge(facts, config.kernel.bridge, in_use.get("in_use")),
        _check(
            "libfuse",
            facts.custom_io,
            None,
            f"version {facts.libfuse}",
            bridge.OLD_LIBFUSE,
            "has no fuse_session_custom_io, which the bridge needs",
        ),
        _check(
            "kernel",
            _version(facts.kernel) >= PASSTHROUGH_KERNEL,
            passthrough,
            f"version {facts.kernel}",
            bridge.OLD_KERNEL,
            "has no FUSE passthrough",
        ),
        _check(
            "CAP_SYS_ADMIN",
            facts.admin,
            passthrough,
            f"this process {'has' if facts.admin else 'does not have'} it",
            bridge.NO_CAPABILITY,
            "which passthrough needs",
        ),
    ]
    checks += [
        _burst_directory(path, kind, passthrough) for path, kind in facts.filesystems.items()
    ]
    if facts.read_ahead is not None:
        right = facts.read_ahead == config.kernel.read_ahead
        fix = "mount as root, or write it to /sys/class/bdi/*/read_ahead_kb of the mount"
        why = f"{format_size(facts.read_ahead)} at a time"
        wanted = f"where kernel.read_ahead is {format_size(config.kernel.read_ahead)}"
        checks.append(_check("read-ahead", right, right, why, fix, wanted))
    checks += [
        _check(
            "open files",
            facts.open_files >= OPEN_FILES,
            None,
            f"at most {facts.open_files}",
            f"raise the hard limit to {OPEN_FILES} or more (ulimit -Hn; LimitNOFILE= of a systemd "
            "unit)",
            "where many open files are in use, they are closed and opened again",
        ),
        _check(
            "file leases",
            facts.leases,
            None,
            f"fs.leases-enable is {facts.leases:d}",
            "sysctl fs.leases-enable=1",
            "so files of the burst tier cannot be drained while the daemon has them open",
        ),
    ]
    if not facts.root:
        fix = "add the line user_allow_other to /etc/fuse.conf"
        why = f"user_allow_other is {'set' if facts.allow_other else 'not set'}"
        checks.append(
            _check(
                "allow_other",
                facts.allow_other,
                None,
                why,
                fix,
                "so other users cannot use the mount",
            )
        )
    return checks


def _check(
    name: str, ok: bool, in_use: bool | None, why: str, fix: str, problem: str
) -> DoctorLine:
    return DoctorLine(name, ok, in_use, why if ok else f"{why}: {problem}", "" if ok else fix)


def _bridge(facts: Facts, chosen: str, in_use: bool | None) -> DoctorLine:
    if chosen == "off":
        return DoctorLine("bridge", False, in_use, "switched off", "set kernel.bridge to auto")
    if facts.extension_error:
        return DoctorLine(
            "bridge", False, in_use, f"cannot be loaded: {facts.extension_error}", bridge.NOT_BUILT
        )
    return DoctorLine("bridge", True, in_use, "is built")


def _burst_directory(path: str, kind: str, in_use: bool | None) -> DoctorLine:
    stacked = kind.split(".")[0] in _STACKED
    fix = "put it on a local filesystem, such as ext4, xfs or tmpfs"
    why = f"lies on {kind or 'an unknown filesystem'}"
    return _check(
        f"burst directory {path}", not stacked, in_use, why, fix, "which cannot back passthrough"
    )


def _version(text: str) -> tuple[int, ...]:
    """The leading numbers: (6, 18) of "6.18.44-generic"; () for none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def look(burst_directories: Iterable[str], mountpoint: str | None) -> Facts:
    """The facts as they are now. Reads /proc, /sys and /etc/fuse.conf; changes nothing."""
    libfuse, custom_io = _libfuse()
    return Facts(
        kernel=platform.release(),
        libfuse=libfuse,
        custom_io=custom_io,
        extension_error="" if extension is not None else extension_error,
        admin=bridge.may_pass_through(),
        root=os.geteuid() == 0,
        filesystems={path: _filesystem_of(path) for path in burst_directories},
        read_ahead=None if mountpoint is None else _read_ahead(mountpoint),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 64),
        leases=_read("/proc/sys/fs/leases-enable").strip() == "1",
        allow_other=re.search(r"^\s*user_allow_other\s*$", _read("/etc/fuse.conf"), re.MULTILINE)
        is not None,
    )


def _filesystem_of(path: str) -> str:
    mount = mount_of(path)
    return "" if mount is None else mount.fstype


def _libfuse() -> tuple[str, bool]:
    """Version of pyfuse3's libfuse, and whether the bridge can step in."""
    import pyfuse3  # loads libfuse: only if asked

    library: Any = ctypes.CDLL(pyfuse3.__file__)
    library.fuse_pkgversion.restype = ctypes.c_char_p
    names = ("fuse_session_custom_io", "fuse_session_custom_io_317")
    return library.fuse_pkgversion().decode(), any(hasattr(library, name) for name in names)


def _read_ahead(mountpoint: str) -> int | None:
    device = os.stat(mountpoint).st_dev
    text = _read(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(text) << 10 if text else None


def _read(path: str) -> str:
    """The text of a file; '' if unreadable."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""
