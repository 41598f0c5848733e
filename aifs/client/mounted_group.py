"""How the ranks of a grouped write agree on a mount, by the daemon (docs/design/commit.md): by
ioctl, or, without the bridge, by extended attributes, which notice no death before the time-out."""

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aifs.client import coordination
from aifs.client.checkpoints import attributes
from aifs.client.checkpoints.attributes import delays
from aifs.client.coordination import (
    GroupError,
    GroupExpired,
    InvalidGroup,
    RankDied,
    RankOptions,
    name_missing,
)
from aifs.core import files, ioctl

_REASON_MAX = 127
_SLICE_S = 0.5  # of waiting: a process that ends waits until its calls have been answered
_NO_IOCTL = (errno.ENOTTY, errno.ENOSYS)
_GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ENXIO)
_YES_NO = ("no", "yes")
_OPEN, _DURABLE = ioctl.GROUP_STATES[0], ioctl.GROUP_STATES[3]


_joined: set[tuple[int, int, int]] = set()  # device, group, rank: those of this process
os.register_at_fork(after_in_child=_joined.clear)


def duration(seconds: float) -> str:
    """A time as the mount reads it, which knows no exponents: whole milliseconds."""
    return f"{int(seconds * 1000)}ms"


class MountedGroup:
    """A ``Coordinator``."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self._end = time.monotonic() + options.timeout_s
        self._failure: Exception | None = None  # of this rank
        self._fd = files.open_file(options.directory, write=False)
        try:
            self._has_ioctl = self._asks_by_ioctl()
            self._id = self._enter()
            self._key = os.fstat(self._fd).st_dev, self._id, options.rank
            if self._key in _joined:  # the daemon knows processes only
                raise InvalidGroup(
                    f"{options}: rank {options.rank} has been joined by this process, "
                    f"in a group that is not complete yet; wait for that one, or cancel it",
                    options.rank,
                )
        except BaseException:
            files.close_file(self._fd)
            raise
        _joined.add(self._key)

    def _asks_by_ioctl(self) -> bool:
        try:
            version = self._call("version")["version"]
        except OSError as error:
            if error.errno not in _NO_IOCTL:
                raise
            return False
        if version != ioctl.VERSION:
            raise GroupError(
                f"{self._options}: mounted by another version of AIFS (its calls are {version}, "
                f"not {ioctl.VERSION}); unmount, and mount anew"
            )
        return True

    def _call(self, call: str, **fields: Any) -> dict[str, Any]:
        """Raises OSError."""
        while True:
            with suppress(InterruptedError):
                return ioctl.call(self._fd, call, self._options.directory, **fields)

    def _told(self, number: int = 0) -> dict[str, Any]:
        """The daemon's report on the directory's group, or that with this id; or {}."""
        try:
            return json.loads(
                os.getxattr(
                    self._fd, f"{attributes.GROUP}.{number}" if number else attributes.GROUP
                )
            )
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            return {}

    # --- joining ----------------------------------------------------------------------------------

    def _enter(self) -> int:
        """Create or find the group, and be its rank; returns its id. Raises InvalidGroup,
        OSError."""
        while True:
            try:
                found = self._create()
                if self.is_deserted(found) and self._give_up_left_over(self._told(found)):
                    continue
                if self._has_ioctl:
                    self._call("group.join", rank=self._options.rank, id=found)
                return found
            except OSError as error:
                told = self._told()
                if (
                    error.errno not in (errno.EBUSY, errno.ECANCELED)
                    or time.monotonic() > self._end
                ):
                    raise self._explained(error, told) from None
                if error.errno == errno.EBUSY:  # else another rank begins anew
                    ended = (None, *ioctl.GROUP_STATES[3:])
                    self._wait_until(lambda told: told.get("state") in ended, self._end)

    def _create(self) -> int:
        options = self._options
        words = {
            "name": options.name,
            "dedup": str(options.chunk),
            "commit": "explicit",
            "timeout": duration(options.timeout_s),
            "grace": duration(options.grace_s),
            "same_size": _YES_NO[options.same_size],
            "publish": options.publish,
            "job": options.job,
        }
        if self._has_ioctl:
            return self._call("group", ranks=options.world, **words)["id"]
        text = ",".join(f"{key}={value}" for key, value in words.items() if value)
        attributes.put(options.directory, attributes.GROUP, f"ranks={options.world},{text}")
        return self._told()["id"]

    def is_deserted(self, number: int) -> bool:
        """Whether ranks have committed and none that has joined lives; True where nobody knows."""
        if not self._has_ioctl:
            return True
        state = self._call("group.state", id=number)
        return state["committed"] > 0 and state["joined"] == 0

    def _give_up_left_over(self, told: dict[str, Any]) -> bool:
        """Whether to look again: ranks of the group had committed, and none lives. Raises
        InvalidGroup if it may be of this job, or of a killed one, and no rank comes that knows."""
        ranks, rank = told.get("members", []), self._options.rank
        if told.get("state") != _OPEN:  # another rank has seen to it
            return True
        if (
            any(one["pid"] or one.get("host") for one in ranks)
            or told["missing_ranks"] == told["ranks"]
        ):
            return False
        # Of many those that have not committed, or some of them.
        shown = {one["rank"]: one["state"] for one in ranks}
        if (
            shown.get(rank, "committed" if told["missing_ranks"] <= len(shown) else "")
            == "committed"
        ):
            self._cancel(told["id"], f"rank {rank} begins anew")
            return True
        if not self._has_ioctl or self._options.is_said:
            return False
        until = min(self._end, time.monotonic() + coordination.REFUSED_AFTER_S)
        if "away" in shown.values():  # it fails when their grace is over
            until = self._end
        if self._wait_until(
            lambda now: (now.get("id"), now.get("state")) != (told["id"], _OPEN), until
        ):
            return True
        raise InvalidGroup(
            f"{self._options}: ranks have committed to it and ended; if a job was killed here, say "
            f"setfattr -x {attributes.GROUP} {self._options.directory}; if they are of this job, "
            f"give all ranks a name that no other run has, job=...",
            rank,
        )

    def _wait_until(self, is_so: Callable[[dict[str, Any]], bool], until: float) -> bool:
        """Whether it is, before the time is over."""
        for _ in delays():
            if is_so(self._told()):
                return True
            if time.monotonic() > until:
                return False
        raise AssertionError

    # --- actions of the rank ----------------------------------------------------------------------

    def commit(self, file: str, size: int) -> None:
        try:
            if self._has_ioctl:
                self._call("group.commit", rank=self._options.rank, id=self._id, file=file)
            else:
                text = f"{self._options.rank} {file}".rstrip()
                attributes.put(self._options.directory, attributes.GROUP_COMMIT, text)
        except OSError as error:
            told = self._told_safely()
            failure = self._publish_error(told) or self._explained(error, told)
            self._failure = failure
            if told.get("state") == _OPEN and (error.errno != errno.EINVAL or file):
                # It will not get any further.
                self._give_up(
                    error.strerror or ""
                    if error.errno == errno.EINVAL
                    else f"rank {self._options.rank}: {error}"
                )
            raise failure from None

    def fail(self, reason: str) -> None:
        reason = f"rank {self._options.rank}: {reason}"
        if self._failure is None:  # a daemon that is asked by attributes does not know why
            self._failure = GroupError(f"{self._options}: {reason}", self._options.rank)
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        with suppress(OSError):  # it has ended, or the mount has
            self._cancel(self._id, reason)

    def _cancel(self, number: int, reason: str) -> None:
        if self._has_ioctl:
            self._call("group.cancel", id=number, reason=reason[:_REASON_MAX].replace("\0", " "))
        elif self._told().get("id") == number:
            attributes.remove(self._options.directory, attributes.GROUP)

    def watch(self) -> None:
        if self._has_ioctl:
            self._wait_by_ioctl()
        else:
            self._wait_by_asking()
        problem = self._publish_error(self._told_safely()) if self._options.publish else None
        if problem is not None:
            raise problem

    def close(self) -> None:
        _joined.discard(self._key)
        files.close_file(self._fd)

    def _wait_by_ioctl(self) -> None:
        while True:
            try:
                self._call("group.wait", id=self._id, timeout_ms=int(_SLICE_S * 1000))
                return
            except OSError as error:
                if error.errno != errno.ETIMEDOUT:
                    raise self._failure or self._explained(error, self._told_safely()) from None

    def _wait_by_asking(self) -> None:
        for _ in delays():
            try:
                told = self._told(self._id)
            except OSError as error:
                raise self._explained(error, {}) from None
            state = told.get("state", "cancelled")
            if state == _DURABLE:
                return
            if state in ioctl.GROUP_STATES[4:]:
                failed = errno.EINVAL if told.get("unequal") else errno.EOWNERDEAD
                numbers = {"failed": failed, "cancelled": errno.ECANCELED, "expired": errno.ETIME}
                raise self._failure or self._explained(OSError(numbers[state], state), told)

    # --- errors -----------------------------------------------------------------------------------

    def _told_safely(self) -> dict[str, Any]:
        """The daemon's report on this group; or {}."""
        try:
            return self._told(self._id)
        except OSError:
            return {}

    def _publish_error(self, told: dict[str, Any]) -> Exception | None:
        why = told.get("publish_error")
        if not why:
            return None
        target = os.path.join(os.path.dirname(self._options.directory), self._options.publish)
        if os.path.lexists(target):
            return FileExistsError(
                f"{target}: is there already, so {self._options.directory} stays as it is"
            )
        return GroupError(f"{self._options}: cannot be published as {self._options.publish}: {why}")

    def _explained(self, error: OSError, told: dict[str, Any]) -> Exception:
        """In words, where the daemon has any."""
        number = error.errno
        why = told.get("error") or error.strerror or ""
        if number == errno.EOWNERDEAD:
            return RankDied(f"{self._options}: {why}", told.get("dead"))
        if number == errno.ETIME:
            missing = told.get("missing") or []
            lacking = f": {name_missing(missing)}" if missing and "rank" not in why else ""
            return GroupExpired(f"{self._options}: {why}{lacking}", missing[0] if missing else None)
        if number == errno.EBUSY:
            return GroupExpired(
                f"{self._options}: the group before it is not durable yet: "
                f"{told.get('drain_error') or why}"
            )
        if number == errno.ECANCELED:
            return GroupError(f"{self._options}: {why}")
        if number in (errno.EINVAL, errno.ESTALE, errno.ENODATA):
            why = told.get("error") or why
            return InvalidGroup(f"{self._options}: {why}", self._options.rank)
        if number in _GONE:
            return GroupError(
                f"{self._options}: the mount has ended ({error.strerror}); save once more when it "
                "is back"
            )
        return error
