"""The check of quotas: their records, and their counters, which are counted again."""

from collections import Counter
from functools import partial

from aifs.check import repair
from aifs.check.records import Records
from aifs.core.errors import FsError
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction
from aifs.meta.quotas import COMPLETE, FIRST_PROJECT, REMOVED, Quota, inherited
from aifs.meta.records import charge_of


class QuotaCheck:
    """Handlers for the records ``Q`` and ``P``. A quota that cannot be trusted goes; everything
    that lies in it stays, and can be given another one."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._used = Counter[bytes]()
        """By the keys of counters, the sums over all inodes."""
        self._counted: set[bytes] = set()
        """The keys of the counters that there are."""
        self._is_unfinished = False
        """Some are still being given to the files below."""
        self._moved: list[tuple[bytes, Quota, int]] = []
        """Those that name a wrong quota above them, with their keys and the right one."""
        self._last = FIRST_PROJECT - 1
        """The largest project of a quota."""

    def inode(self, record: bytes) -> None:
        """Count an inode."""
        project, size = charge_of(record)
        if project >= FIRST_PROJECT:
            self._used[keys.used_inodes(project)] += 1
            self._used[keys.used_bytes(project)] += size
            self._last = max(self._last, project)

    async def quota(self, key: bytes, quota: Quota) -> None:
        """A directory, and how much may lie below. All inodes have been seen."""
        project = keys.number(key)
        self._is_unfinished |= quota.state != COMPLETE
        above = await self._records.view(_find_above, quota, project)
        if quota.state != REMOVED and above is None:
            detail = f"directory {quota.directory}, whose quota it would be, has another project"
            self._records.drop("stray-record", f"quota {project}", detail, key)
        elif above != quota.above:
            self._moved.append((key, quota, above or 0))
        if FIRST_PROJECT <= project < 1 << 32:
            self._last = max(self._last, project)

    def use(self, key: bytes, value: bytes) -> None:
        """A counter."""
        if key in (keys.used_bytes(keys.use_project(key)), keys.used_inodes(keys.use_project(key))):
            self._counted.add(key)
        else:
            self._records.drop("stray-record", f"record {key.hex()}", "it counts nothing", key)

    async def conclude(self) -> None:
        """All records have been seen."""
        for key in sorted(self._used.keys() | self._counted):
            project = keys.use_project(key)
            kind = " bytes" if key == keys.used_bytes(project) else " files"
            await self._records.require_counter(key, self._used[key], f"quota {project}", kind)
        for key, quota, above in [] if self._is_unfinished else self._moved:
            detail = f"it lies in that of project {quota.above}, it says, but in that of {above}"
            fix = partial(repair.put, key=key, value=quota._replace(above=above).encode())
            self._records.problem("wrong-parent", f"quota {keys.number(key)}", detail, fix)
        made = await self._records.view(ReadTransaction.counter, keys.COUNTER_QUOTAS)
        least = self._last + 1 - FIRST_PROJECT
        if made < least:
            fix = partial(repair.shift_counter, key=keys.COUNTER_QUOTAS, delta=least - made)
            detail = f"{made}, but {least} have been made"
            self._records.problem("wrong-counter", "counter quotas", detail, fix)


def _find_above(tx: ReadTransaction, quota: Quota, project: int) -> int | None:
    """The project of the quota that the directory of a quota lies in.

    0: none; None: it is not the directory of this one. A record that cannot be read is reported
    by itself, and a directory that nobody can find any more needs no correction.
    """
    try:
        directory = namespace.find_inode(tx, quota.directory)
        if directory is None or not directory.is_dir or directory.project != project:
            return None
        found, passed = None, set[int]()  # there may be a loop
        while directory.links and directory.ino not in {keys.ROOT_INO, *passed}:
            passed.add(directory.ino)
            directory = namespace.get_inode(tx, directory.parent)
            found = inherited(directory) if found is None else found
        if found is None or not directory.links:
            return quota.above
        return found if found >= FIRST_PROJECT else 0
    except FsError:
        return quota.above
