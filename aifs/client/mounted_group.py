"""How the ranks of a grouped write agree on a mount: the daemon knows. See docs/grouped.md.

By ioctl; where the mount has none (no bridge), by extended attributes, and then nobody notices a death before
the time is over.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from aifs.client import attributes
from aifs.client.coordination import GroupError, GroupExpired, InvalidGroup, Options, RankDied, name_missing
from aifs.core import files, ioctl

_REASON_MAX = 127  # bytes
_SLICE_S = 0.5  # of waiting: a process that ends waits until its calls have been answered
_DELAY_MIN_S, _DELAY_MAX_S = 0.001, 0.1
_NO_IOCTL = (errno.ENOTTY, errno.ENOSYS)
_GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ENXIO)
_OPEN, _DURABLE = ioctl.GROUP_STATES[0], ioctl.GROUP_STATES[3]


_joined: set[tuple[int, int, int]] = set()  # device, group, rank: those of this process
os.register_at_fork(after_in_child=_joined.clear)


class MountedGroup:
    """A ``Coordinator``. ``expected``: the identity of the group that this rank belongs to, None for the
    directory's present one, '' for one in which no rank can have committed yet."""

    def __init__(self, options: Options, expected: str | None = None) -> None:
        self._options = options
        self._begins = expected == ""
        self._end = time.monotonic() + options.timeout_s
        self._fd = files.open_file(options.directory, write=False)
        try:
            self._has_ioctl = self._asks_by_ioctl()
            self._id = self._enter(int(expected or 0))
            self._key = os.fstat(self._fd).st_dev, self._id, options.rank
            if self._key in _joined:  # the daemon knows processes only
                raise InvalidGroup(
                    f"{options}: rank {options.rank} has been joined by this process", options.rank
                )
        except BaseException:
            files.close_file(self._fd)
            raise
        _joined.add(self._key)
        self.identity = str(self._id)

    def _asks_by_ioctl(self) -> bool:
        command = ioctl.AIFS_IOC_VERSION
        try:
            fcntl.ioctl(self._fd, command.request, bytes(command.argument.size))
        except OSError as error:
            if error.errno not in _NO_IOCTL:
                raise
            return False
        return True

    def _call(self, command: ioctl.Command, *fields: Any) -> tuple[Any, ...]:
        """Raises OSError."""
        argument = command.argument.pack(*fields)
        while True:
            with suppress(InterruptedError):
                return command.argument.unpack(fcntl.ioctl(self._fd, command.request, argument))

    def _told(self) -> dict[str, Any]:
        """What the daemon says of the directory's group; {} if there is none."""
        try:
            return json.loads(os.getxattr(self._fd, attributes.GROUP))
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
            return {}

    # --- joining -------------------------------------------------------------------------------------

    def _enter(self, expected: int) -> int:
        """Create or find the group, and be its rank; returns its id. Raises InvalidGroup, OSError."""
        while True:
            try:
                found = expected or self._create()
                if self._begins and self._is_left_over(self._told()):
                    self._cancel(found, "rank 0 begins anew")
                    continue
                if self._has_ioctl:
                    self._call(ioctl.AIFS_IOC_GROUP_JOIN, self._options.rank, 0, found)
                elif self._has_crashed(self._told()):
                    raise OSError(errno.EINVAL, "this rank has committed already")
                return found
            except OSError as error:
                told = self._told()
                if time.monotonic() > self._end or expected:
                    raise self._explained(error, told) from None
                if error.errno == errno.EBUSY:  # the group before is not durable yet
                    self._wait_until(lambda told: told.get("state") in (None, *ioctl.GROUP_STATES[3:]))
                elif error.errno == errno.EINVAL and self._has_crashed(told):
                    if self._options.rank == 0:
                        self._cancel(told["id"], "rank 0 begins anew")
                    else:  # rank 0 will begin anew
                        self._wait_until(
                            lambda now, old=told["id"]: (now.get("id"), now.get("state")) != (old, _OPEN)
                        )
                else:
                    raise self._explained(error, told) from None

    def _create(self) -> int:
        options = self._options
        if not self._has_ioctl:
            publish = f",publish={options.publish}" if options.publish else ""
            text = (
                f"name={options.name},ranks={options.world},dedup={options.chunk},commit=explicit,"
                f"timeout={options.timeout_s:g}s,grace={options.grace_s:g}s,"
                f"reuse={'yes' if options.reuse else 'no'}{publish}"
            )
            attributes.put(options.directory, attributes.GROUP, text)
            return self._told()["id"]
        flags = ioctl.GROUP_EXPLICIT | (ioctl.GROUP_REUSE if options.reuse else 0)
        times = int(options.timeout_s * 1000), int(options.grace_s * 1000)
        names = os.fsencode(options.name), os.fsencode(options.publish)
        fields = self._call(
            ioctl.AIFS_IOC_GROUP_CREATE, options.world, flags, options.chunk, *times, 0, *names
        )
        return fields[5]

    def _is_left_over(self, told: dict[str, Any]) -> bool:
        """Whether ranks have committed to it that are no more."""
        members = told.get("members", [])
        return any(member["state"] == "committed" and member["pid"] is None for member in members)

    def _has_crashed(self, told: dict[str, Any]) -> bool:
        """Whether the group is of a job of which this rank had committed, and which is no more."""
        members = {member["rank"]: member for member in told.get("members", [])}
        mine = members.get(self._options.rank)
        if mine is None or told["state"] != _OPEN or told["ranks"] != self._options.world:
            return False
        return mine["state"] == "committed" and mine["pid"] is None

    def _wait_until(self, is_so: Callable[[dict[str, Any]], bool]) -> None:
        """Or until the time is over."""
        for _ in _delays():
            if time.monotonic() > self._end or is_so(self._told()):
                return

    # --- what the rank does --------------------------------------------------------------------------

    def commit(self) -> None:
        try:
            if self._has_ioctl:
                self._call(ioctl.AIFS_IOC_GROUP_COMMIT, self._options.rank, 0, self._id)
            else:
                attributes.put(self._options.directory, attributes.GROUP_COMMIT, str(self._options.rank))
        except OSError as error:
            told = self._told_safely()
            if told.get("state") == _OPEN and error.errno != errno.EINVAL:  # it will not get any further
                self.fail(str(error))
            raise self._publish_error(told) or self._explained(error, told) from None

    def fail(self, reason: str) -> None:
        with suppress(OSError):  # it has ended, or the mount has
            self._cancel(self._id, f"rank {self._options.rank}: {reason}")

    def _cancel(self, number: int, reason: str) -> None:
        if self._has_ioctl:
            text = os.fsencode(reason)[:_REASON_MAX].decode(errors="ignore").encode()
            self._call(ioctl.AIFS_IOC_GROUP_CANCEL, 0, 0, number, text)
        elif self._told().get("id") == number:
            attributes.remove(self._options.directory, attributes.GROUP)

    def watch(self) -> None:
        if self._has_ioctl:
            self._wait_by_ioctl()
        else:
            self._wait_by_asking()
        problem = self._publish_error(self._told()) if self._options.publish else None
        if problem is not None:
            raise problem

    def close(self) -> None:
        _joined.discard(self._key)
        files.close_file(self._fd)

    def _wait_by_ioctl(self) -> None:
        while True:
            try:
                self._call(
                    ioctl.AIFS_IOC_GROUP_WAIT, ioctl.GROUP_WAIT_DURABLE, 0, self._id, int(_SLICE_S * 1000)
                )
                return
            except OSError as error:
                if error.errno != errno.ETIMEDOUT:
                    raise self._explained(error, self._told_safely()) from None

    def _wait_by_asking(self) -> None:
        for _ in _delays():
            try:
                told = self._told()
            except OSError as error:
                raise self._explained(error, {}) from None
            if told.get("id") != self._id:
                raise GroupError(
                    f"{self._options}: another group has begun here; of this one nothing is known"
                )
            state = told["state"]
            if state == _DURABLE:
                return
            if state in ioctl.GROUP_STATES[4:]:
                numbers = {"failed": errno.EOWNERDEAD, "cancelled": errno.ECANCELED, "expired": errno.ETIME}
                raise self._explained(OSError(numbers[state], state), told)

    # --- errors --------------------------------------------------------------------------------------

    def _told_safely(self) -> dict[str, Any]:
        """What the daemon says of this group; {} if it says nothing."""
        try:
            told = self._told()
        except OSError:
            return {}
        return told if told.get("id") == self._id else {}

    def _publish_error(self, told: dict[str, Any]) -> Exception | None:
        why = told.get("publish_error")
        if not why:
            return None
        target = os.path.join(os.path.dirname(self._options.directory), self._options.publish)
        if os.path.lexists(target):
            return FileExistsError(f"{target}: is there already, so {self._options.directory} stays as it is")
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
                f"{self._options}: the group before it is not durable yet: {told.get('drain_error') or why}"
            )
        if number == errno.ECANCELED:
            return GroupError(f"{self._options}: {why}")
        if number in (errno.EINVAL, errno.ESTALE, errno.ENODATA):
            return InvalidGroup(f"{self._options}: {told.get('refused') or why}", self._options.rank)
        if number in _GONE:
            return GroupError(
                f"{self._options}: the mount has ended ({error.strerror}); save once more when it is back"
            )
        return error


def _delays() -> Iterator[None]:
    """At once, then ever more slowly."""
    delay = _DELAY_MIN_S
    while True:
        yield
        time.sleep(delay)
        delay = min(delay * 1.5, _DELAY_MAX_S)
