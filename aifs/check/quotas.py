"""The check of quotas: their records, and what is counted for them, which is counted again."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from aifs.check import repair
from aifs.check.findings import RECORDS, Fix, Subject, View
from aifs.core.errors import FsError
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction
from aifs.meta.quotas import COMPLETE, FIRST_PROJECT, REMOVED, Quota, decode_quota, inherited
from aifs.meta.records import charge_of


class QuotaCheck:
    """Handlers for the records ``Q`` and ``P``. A quota that cannot be trusted goes; what lies in
    it stays, and can be given another one."""

    def __init__(
        self, view: View, problem: Callable[[str, Subject, str, Fix | None, int], None]
    ) -> None:
        self._view = view
        self._report = problem
        self._used = Counter[bytes]()
        """By the keys of counters, what the inodes say."""
        self._counted: dict[bytes, int] = {}
        """What the counters say."""
        self._is_unfinished = False
        """Some are still being given to what lies below."""
        self._moved: list[tuple[bytes, Quota, int]] = []
        """Those that do not say what they lie in, with their keys and what that is."""
        self._last = FIRST_PROJECT - 1
        """The largest project of a quota."""

    def inode(self, record: bytes) -> None:
        """Count an inode."""
        project, size = charge_of(record)
        if project >= FIRST_PROJECT:
            self._used[keys.used_inodes(project)] += 1
            self._used[keys.used_bytes(project)] += size
            self._last = max(self._last, project)

    async def quota(self, key: bytes, value: bytes) -> None:
        """A directory, and how much may lie below. All inodes have been seen."""
        project = keys.number(key)
        forget = partial(repair.delete, key=key)
        try:
            quota = decode_quota(value)
        except FsError as error:
            self._report("unreadable-record", f"quota {project}", str(error), forget, RECORDS)
            return
        self._is_unfinished |= quota.state != COMPLETE
        above = await self._view(_find_above, quota, project)
        if quota.state != REMOVED and above is None:
            detail = f"directory {quota.directory}, whose quota it would be, has another project"
            self._report("stray-record", f"quota {project}", detail, forget, RECORDS)
        elif above != quota.above:
            self._moved.append((key, quota, above or 0))
        if FIRST_PROJECT <= project < 1 << 32:
            self._last = max(self._last, project)

    async def use(self, key: bytes, value: bytes) -> None:
        """A counter."""
        if key in (keys.used_bytes(keys.use_project(key)), keys.used_inodes(keys.use_project(key))):
            self._counted[key] = int.from_bytes(value, "little", signed=True)
        else:
            forget = partial(repair.delete, key=key)
            self._report(
                "stray-record", f"record {key.hex()}", "it counts nothing", forget, RECORDS
            )

    async def conclude(self) -> None:
        """All records have been seen."""
        for key in sorted(self._used.keys() | self._counted.keys()):
            used, counted = self._used[key], self._counted.get(key, 0)
            if used != counted:
                project = keys.use_project(key)
                what = "bytes" if key == keys.used_bytes(project) else "files"
                fix = partial(repair.shift_counter, key=key, delta=used - counted)
                detail = f"{counted} {what}, but there are {used}"
                self._report("wrong-counter", f"quota {project}", detail, fix, RECORDS)
        for key, quota, above in [] if self._is_unfinished else self._moved:
            detail = f"it lies in that of project {quota.above}, it says, but in that of {above}"
            fix = partial(repair.put, key=key, value=quota._replace(above=above).encode())
            self._report("wrong-parent", f"quota {keys.number(key)}", detail, fix, RECORDS)
        made = await self._view(ReadTransaction.counter, keys.COUNTER_QUOTAS)
        least = self._last + 1 - FIRST_PROJECT
        if made < least:
            fix = partial(repair.shift_counter, key=keys.COUNTER_QUOTAS, delta=least - made)
            detail = f"{made}, but {least} have been made"
            self._report("wrong-counter", "counter quotas", detail, fix, RECORDS)


def _find_above(tx: ReadTransaction, quota: Quota, project: int) -> int | None:
    """The project of the quota that the directory of a quota lies in; 0: none; None: it is not the
    directory of this one. What cannot be read is reported for itself; where nobody can find the
    directory any more, nobody has to tell it either."""
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
