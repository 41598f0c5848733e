"""The check of what directories are marked with: groups, their members, policies of retention."""

from collections.abc import Callable, Set
from functools import partial

from aifs.check import repair
from aifs.check.findings import RECORDS, Fix, Subject, View, read_record
from aifs.check.table import NONE, InodeTable
from aifs.core.aging import parse_age_rule
from aifs.core.errors import FsError
from aifs.core.retention import parse_keep
from aifs.meta import groups, keys, publishing


class MarkCheck:
    """Handlers for the records ``n`` and ``r``. A mark that cannot be trusted goes; the
    directory and its files stay."""

    def __init__(
        self,
        view: View,
        table: InodeTable,
        problem: Callable[[str, Subject, str, Fix | None, int], None],
        hosts: Set[int],
        host: int,
    ) -> None:
        """``hosts``: all that the store has; it is complete when groups are looked at. ``host``:
        this one."""
        self._hosts = hosts
        self._host = host
        self._view = view
        self._table = table
        self._report = problem

    async def group(self, key: bytes, value: bytes) -> None:
        """The group of a directory, a member of it, or what a host has of it."""
        ino = int.from_bytes(key[1:9], "big")
        if len(key) not in (9, 17) or not self._is_directory(ino):
            self._problem("stray-record", ino, "group of a directory, on what is none", key)
            return
        number = None if keys.is_group(key) else keys.member_number(key)
        if number is not None and await self._view(read_record, keys.group(ino)) is None:
            self._problem(
                "stray-record", ino, f"member {number} of a group, but the directory has none", key
            )
            return
        host = keys.part_host(key) if number is not None else None
        fix: Fix = partial(repair.delete, key=key)
        try:
            if number is None:
                group = groups.decode_group(value)
                host = group.host
                kept = group._replace(host=self._host).encode()
                fix = partial(repair.put, key=key, value=kept)
            elif host is None:
                groups.decode_member(value)
            else:
                groups.decode_part(value)
        except FsError as error:
            self._problem("unreadable-record", ino, str(error), key)
            return
        if host is not None and host not in self._hosts:
            self._problem("unknown-host", ino, f"group of host {host}, which is none", key, fix)

    async def policy(self, key: bytes, value: bytes) -> None:
        """Which checkpoints a directory keeps."""
        ino = keys.number(key)
        if not self._is_directory(ino):
            self._problem("stray-record", ino, "policy of retention, on what is no directory", key)
            return
        try:
            parse_keep(publishing.decode_kept(value).policy)
        except (ValueError, FsError) as error:
            self._problem("unreadable-record", ino, f"policy of retention: {error}", key)

    async def age_rule(self, key: bytes, value: bytes) -> None:
        """Where old files below a directory go."""
        ino = keys.number(key)
        if not self._is_directory(ino):
            self._problem("stray-record", ino, "rule of age, on what is no directory", key)
            return
        try:
            parse_age_rule(value.decode())
        except ValueError as error:
            self._problem("unreadable-record", ino, f"rule of age: {error}", key)

    def _is_directory(self, ino: int) -> bool:
        row = self._table.find(ino)
        return row != NONE and self._table.may_hold_names(row)

    def _problem(
        self, kind: str, ino: int, detail: str, key: bytes, fix: Fix | None = None
    ) -> None:
        subject = ino if self._table.find(ino) != NONE else f"inode {ino}"
        fix = fix or partial(repair.delete, key=key)
        self._report(kind, subject, f"inode {ino}: {detail}", fix, RECORDS)
