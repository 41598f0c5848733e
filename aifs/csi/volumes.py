"""Volumes and snapshots as directories of a mount; their names and attributes are all that is on
record.

    DIR/ID/data              a volume; a pod sees data alone
    DIR/.snapshots/NAME@ID   a snapshot, which outlives its volume
    DIR/.ephemeral/ID/data   a volume that lives as long as its pod
    DIR/.new/ID@RANDOM/data  a volume that is being made

DIR/ID has the quota, and an attribute with the words that the volume was made by. It gets its name
when all below is there, by a rename, so a call that is cut off leaves nothing or all.
"""

import errno
import hashlib
import json
import os
import re
import secrets
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple

from grpc import StatusCode

from aifs.core import beneath, ioctl
from aifs.core.ioctl import explained
from aifs.core.mountinfo import Mount, first_aifs
from aifs.core.units import parse_count
from aifs.csi.calls import CallRefused

ANSWER_S = 10.0
"""Limit for the daemon to answer; else calls are refused (UNAVAILABLE)."""

DATA = "data"
EPHEMERAL = ".ephemeral"
_NEW, _SNAPSHOTS = ".new", ".snapshots"
_RECORD = "user.aifs-csi"
_FILES_OF_OURS = 2  # DIR/ID and DIR/ID/data, which the quota counts

HINTS = ("layout", "tier", "mirror", "trash", "age", "publish", "expected_size")
"""Parameters that are hints of the volume's directory."""
PARAMETERS = ("files", "mode", "uid", "gid", *HINTS)
_MODE = "0777"  # of new volumes: only pods that mount one reach it

_MADE_BY_ANOTHER = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PLAIN = re.compile(r"(?!name-)[A-Za-z0-9][A-Za-z0-9._-]{0,61}")


class VolumeWanted(NamedTuple):
    """Size, parameters and source that a volume is asked for with."""

    size: int
    """Bytes; 0: no limit."""
    parameters: dict[str, str]
    source: tuple[str, str] = ("", "")
    """"volume" or "snapshot", and its id."""


class Volume(NamedTuple):
    id: str
    size: int
    """Bytes; 0: no limit."""
    made_by: dict[str, Any]
    """``parameters`` and ``source`` of ``VolumeWanted``."""


class Snapshot(NamedTuple):
    id: str
    volume: str
    made_ns: int
    """Since the epoch."""


def identifier(name: str) -> str:
    """The id of the volume or snapshot with a name: the name itself, if a file may be called so."""
    if _PLAIN.fullmatch(name):
        return name
    return f"name-{hashlib.sha256(name.encode()).hexdigest()[:40]}"


class Volumes:
    """Those below one directory of a mount. Threads may use it at once, but for each volume one
    only. Methods raise CallRefused (UNAVAILABLE) if the daemon is dead or does not answer, and
    OSError."""

    def __init__(self, directory: str) -> None:
        self._directory = os.path.abspath(directory)
        self._asked: Future[None] | None = None
        """The question to the daemon, which all callers wait for: one thread at most is stuck."""

    def mount(self) -> Mount:
        """The mount that they lie on, whose daemon answers."""
        mount, asked = self._mount(), self._asked
        if asked is None or asked.done():
            asked = self._asked = Future()
            Thread(target=_ask, args=(mount.mountpoint, asked), daemon=True).start()
        try:
            asked.result(ANSWER_S)
        except TimeoutError:
            reason = f"{mount.mountpoint}: the daemon has not answered for {ANSWER_S:g} s"
            raise CallRefused(StatusCode.UNAVAILABLE, reason) from None
        return mount

    def _mount(self) -> Mount:
        mount, _ = first_aifs(self._directory)
        if mount is None:
            raise CallRefused(StatusCode.UNAVAILABLE, f"{self._directory}: lies in no AIFS mount")
        return mount

    # --- volumes ---

    def find(self, volume_id: str, place: str = "") -> Volume | None:
        """``place``: EPHEMERAL, or that of lasting ones."""
        directory = os.path.join(self._top(), place, volume_id)
        if not _ID.fullmatch(volume_id) or not os.path.isdir(os.path.join(directory, DATA)):
            return None
        with suppress(FileNotFoundError):  # removed just now
            record = json.loads(_get(directory, _RECORD) or "{}")
            return Volume(volume_id, _quota(directory), record)
        return None

    def names(self) -> list[str]:
        """The ids of lasting volumes."""
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self._top()) if _ID.fullmatch(name)]
        return []

    def make(self, volume_id: str, wanted: VolumeWanted, place: str = "") -> Volume:
        """Durable on return. Raises CallRefused: INVALID_ARGUMENT, NOT_FOUND (its source),
        OUT_OF_RANGE (its source has more bytes), ABORTED (another driver makes it at the same
        time)."""
        _require_known(wanted.parameters, PARAMETERS)
        source = self._source(*wanted.source)
        below = self._made(_NEW)
        for left in os.listdir(below):  # from calls that were cut off
            if left.startswith(f"{volume_id}@"):
                self._remove(os.path.join(below, left))
        new = os.path.join(below, f"{volume_id}@{secrets.token_hex(8)}")
        os.mkdir(new, 0o700)
        try:
            self._fill(new, wanted, source)
            os.rename(new, os.path.join(self._made(place), volume_id))
        except (OSError, CallRefused) as error:
            self._remove(new)
            if isinstance(error, OSError) and error.errno in _MADE_BY_ANOTHER:
                reason = f"{volume_id}: another driver makes it, or its source is gone"
                raise CallRefused(StatusCode.ABORTED, reason) from None
            raise
        return Volume(volume_id, wanted.size, _record(wanted))

    def _fill(self, new: str, wanted: VolumeWanted, source: tuple[str, str]) -> None:
        limits = [f"size={wanted.size}"] if wanted.size else []
        if files := wanted.parameters.get("files"):
            limits.append(f"files={_number('files', files, parse_count) + _FILES_OF_OURS}")
        if limits:
            _put(new, "user.aifs.quota", ",".join(limits))
        _put(new, _RECORD, json.dumps(_record(wanted)))
        data = os.path.join(new, DATA)
        if source[1]:
            try:
                _clone(*source, new, DATA)
            except OSError as error:
                if error.errno != errno.EDQUOT:
                    raise
                reason = f"what is in {wanted.source[1]} needs more than {wanted.size} bytes"
                raise CallRefused(StatusCode.OUT_OF_RANGE, reason) from None
        else:
            os.mkdir(data)
        owner = [_number(key, wanted.parameters.get(key, "-1"), int) for key in ("uid", "gid")]
        if owner != [-1, -1]:
            os.chown(data, *owner)
        mode = wanted.parameters.get("mode", "" if source[1] else _MODE)
        if mode:
            os.chmod(data, _number("mode", mode, lambda text: int(text, 8)) & 0o7777)
        for name in HINTS:
            if name in wanted.parameters:
                _put(data, f"user.aifs.{name}", wanted.parameters[name])

    def _source(self, kind: str, of: str) -> tuple[str, str]:
        """A directory, and the name in it that is cloned; '': nothing is."""
        if kind == "volume" and self.find(of) is not None:
            return os.path.join(self._top(), of), DATA
        if kind == "snapshot" and self.find_snapshot(of) is not None:
            return os.path.join(self._top(), _SNAPSHOTS), of
        if kind:
            raise CallRefused(StatusCode.NOT_FOUND, f"there is no {kind} {of}")
        return "", ""

    def remove(self, volume_id: str, place: str = "") -> None:
        """In one step, except for snapshots that programs have made in it; its bytes go in the
        background. Nothing happens if it is not there."""
        if not _ID.fullmatch(volume_id):
            return
        path = os.path.join(self._top(), place, volume_id)
        try:
            self._remove(path)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            for above, names, _, fd in os.fwalk(path):
                if os.path.basename(above) == _SNAPSHOTS:
                    for name in names:
                        ioctl.call(fd, "remove", above, name=name)
                    names.clear()
            self._remove(path)

    def grow(self, volume: Volume, size: int) -> int:
        """Let it have that many bytes; it never gets smaller. Returns how many it has. Durable on
        return."""
        if not volume.size or volume.size >= size:
            return volume.size
        directory = os.path.join(self._top(), volume.id)
        _put(directory, "user.aifs.quota", f"size={size}")
        fd = beneath.open_directory(directory)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return size

    def drain(self, volume_id: str) -> None:
        """Have what is in the burst tier alone drained ahead of all else. Does not wait."""
        if _ID.fullmatch(volume_id):
            with suppress(FileNotFoundError):
                _put(os.path.join(self._top(), volume_id, DATA), "user.aifs.drain", "")

    def free_bytes(self) -> int:
        """Of the store."""
        found = os.statvfs(self.mount().mountpoint)
        return found.f_bavail * found.f_frsize

    # --- where they are mounted from ---

    def root(self, volume_id: str, place: str = "") -> str:
        """A volume's path from the root of the mount's filesystem, as the kernel lists binds."""
        below = os.path.relpath(self._directory, self._mount().mountpoint)
        return self.root_of(os.path.join(below, place, volume_id, DATA))

    def root_of(self, path: str) -> str:
        """The same, of a path below the mountpoint."""
        return os.path.normpath(os.path.join(self._mount().root, path.strip("/")))

    def id_of(self, root: str) -> str:
        """The volume with this path from there; '': it is none of these. Needs no daemon."""
        *_, place, volume_id, name = ("", "", *root.split("/"))
        is_ours = name == DATA and place in (os.path.basename(self._directory), EPHEMERAL)
        return volume_id if is_ours else ""

    def open(self, root: str) -> int:
        """A descriptor of a directory by its path from there. No symlink is followed."""
        mount = self.mount()
        top = beneath.open_directory(mount.mountpoint)
        try:
            return beneath.reach(os.path.relpath(root, mount.root), top)
        except OSError as error:
            raise OSError(error.errno, error.strerror, root) from None
        finally:
            os.close(top)

    # --- snapshots ---

    def snapshots(self) -> list[str]:
        """Their ids."""
        with suppress(FileNotFoundError):
            return os.listdir(os.path.join(self._top(), _SNAPSHOTS))
        return []

    def find_snapshot(self, snapshot_id: str) -> Snapshot | None:
        name, _, volume_id = snapshot_id.partition("@")
        if not _ID.fullmatch(name) or not _ID.fullmatch(volume_id):
            return None
        with suppress(FileNotFoundError):
            found = os.stat(os.path.join(self._top(), _SNAPSHOTS, snapshot_id))
            return Snapshot(snapshot_id, volume_id, found.st_ctime_ns)
        return None

    def snapshot(self, volume_id: str, name: str) -> Snapshot:
        """Make the snapshot ``name``, or find it. Raises CallRefused: NOT_FOUND, ALREADY_EXISTS."""
        snapshot_id = f"{identifier(name)}@{volume_id}"
        of_others = [it for it in self.snapshots() if it.startswith(f"{identifier(name)}@")]
        if of_others not in ([], [snapshot_id]):
            raise CallRefused(StatusCode.ALREADY_EXISTS, f"{of_others[0]} has this name")
        if not of_others:
            if self.find(volume_id) is None:
                raise CallRefused(StatusCode.NOT_FOUND, f"there is no volume {volume_id}")
            volume = os.path.join(self._top(), volume_id)
            _clone(volume, DATA, self._made(_SNAPSHOTS), snapshot_id, snapshot=True)
        made = self.find_snapshot(snapshot_id)
        if made is None:
            raise CallRefused(StatusCode.ABORTED, f"{snapshot_id} was removed meanwhile")
        return made

    def remove_snapshot(self, snapshot_id: str) -> None:
        if self.find_snapshot(snapshot_id) is not None:
            self._remove(os.path.join(self._top(), _SNAPSHOTS, snapshot_id))

    # --- directories ---

    def _top(self) -> str:
        self.mount()
        return self._directory

    def _made(self, place: str) -> str:
        top = self._top()
        path = os.path.join(top, place)
        for directory in (top, path):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
        return path

    def _remove(self, path: str) -> None:
        parent, name = os.path.split(path)
        with suppress(FileNotFoundError):
            _call(parent, "remove", name=name)


def _ask(mountpoint: str, answer: "Future[None]") -> None:
    """Whether the daemon answers: by an unknown attribute, as no cache has that."""
    try:
        os.getxattr(mountpoint, "user.aifs")
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            reason = f"{mountpoint}: {error.strerror}"
            answer.set_exception(CallRefused(StatusCode.UNAVAILABLE, reason))
            return
    answer.set_result(None)


def _record(wanted: VolumeWanted) -> dict[str, Any]:
    return {"parameters": wanted.parameters, "source": list(wanted.source)}


def _require_known(parameters: dict[str, str], known: tuple[str, ...]) -> None:
    for key in parameters:
        if key not in known:
            reason = f"there is no parameter {key}; there are: {' '.join(known)}"
            raise CallRefused(StatusCode.INVALID_ARGUMENT, reason)


def _number(name: str, text: str, parse: Any) -> int:
    try:
        return int(parse(text))
    except ValueError:
        raise CallRefused(StatusCode.INVALID_ARGUMENT, f"{name}: {text} is no number") from None


def _quota(directory: str) -> int:
    """The bytes that its own quota allows; 0: no limit."""
    try:
        quota = json.loads(os.getxattr(directory, "user.aifs.quota"))
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return 0
    is_own = quota["directory"] == os.stat(directory).st_ino
    return (quota["bytes"] or 0) if is_own else 0


def _get(path: str, name: str) -> str:
    try:
        return os.getxattr(path, name).decode()
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return ""


def _put(path: str, name: str, value: str) -> None:
    with explained(path, name):
        os.setxattr(path, name, value.encode())


def _clone(parent: str, name: str, place: str, new: str, snapshot: bool = False) -> None:
    inside = os.stat(place).st_ino
    _call(parent, "clone", name=name, parent=inside, clone=new, snapshot=snapshot)


def _call(directory: str, hint: str, /, **fields: Any) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ioctl.call(fd, hint, directory, **fields)
    finally:
        os.close(fd)
