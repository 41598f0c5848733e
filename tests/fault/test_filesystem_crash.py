"""The whole filesystem after power cuts and kill -9 at every fault point, and with failing and full
disks.

``churn`` works at random; ``ledger`` says what may be found afterwards. Every store that is
recovered must please fsck, and hold exactly the objects that its files call for.
"""

import errno
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.core import faults, files
from aifs.core.errors import FsError
from aifs.data.naming import list_all
from aifs.data.storage import StoredObject
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys
from aifs.meta.degraded import find_unread
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import decode_inode
from aifs.store import backup
from aifs.store.store import open_store
from aifs.vfs import open_filesystem
from tests.support import lives
from tests.support.churn import MODES, SETTINGS, WEIGHTS, Churn, read_tree
from tests.support.kernel import Kernel
from tests.support.ledger import Found, Ledger
from tests.support.modes import config_of, make_store
from tests.support.powercut import PowerCut, is_crash, make_sizes_small

ELSEWHERE = (
    "vfs.server.",
    "vfs.group.",
    "vfs.containers.",
    "vfs.quota.",
    "vfs.trash.",
    "vfs.repair.",
    "hosts.",
    "meta.copy.",
    "store.format.",
    "burst.blocks.",
    "burst.source.",
)
"""Points that ``churn`` has no way to: those of adding and removing servers are in
test_server_life, those of groups in test_groups_crash and test_group_drain_crash, those of long
lists in test_containers_crash, those of quotas in test_quotas, those of the trash in
test_trash_crash, those of clean blocks in test_blocks, those of repairs in
contract/test_hosts_blocks, those of many hosts in contract/test_replicated_*, those of stores that
are copied or made in test_meta_copy and test_database_store."""
POINTS = sorted(
    name
    for name in faults.POINTS
    if name.startswith(("vfs.", "burst.", "data.", "meta.")) and not name.startswith(ELSEWHERE)
)
STEPS_PER_MOUNT = 60
MOUNTS = 60  # at most: nearly every point is reached in the first three


_BURST = ("vfs.burst.", "vfs.drain.", "vfs.stage.", "vfs.evict.", "burst.")
_STRIPED = ("vfs.drain.copied", "burst.drain.written")
_IN_PLACE = ("vfs.write.",)  # of files that the burst tier does not admit
_WITHOUT_TIER = ("vfs.spill.", "vfs.truncate.", "vfs.fsync.")
_CONTAINERS = ("vfs.compact.", "data.append.", "vfs.collect.dropped")


def reaches(mode: str, point: str) -> bool:
    """Whether there is a way to ``point`` in ``mode``."""
    if point.startswith(_CONTAINERS):
        return mode == "interleaved"
    if point.startswith("vfs.backup."):
        return mode == "on"
    if point.startswith("vfs.move."):
        return mode in ("replicas", "coded")
    if point.startswith("vfs.compress."):
        return mode != "interleaved"
    if point.startswith("vfs.relayout."):
        return mode not in ("interleaved", "replicas", "coded")
    if point.startswith(_WITHOUT_TIER):
        return mode == "off"
    if point.startswith(_IN_PLACE):
        return mode in ("off", "tiny")
    if mode == "interleaved" and point in _STRIPED:
        return False
    return mode != "off" or not point.startswith(_BURST)


def cases_of(points: list[str]) -> list[tuple[str, str]]:
    """Each point without a burst tier, where there is a way to it then, and in one other mode in
    turn."""
    chosen = []
    for number, point in enumerate(points):
        modes = [mode for mode in MODES if reaches(mode, point)]
        others = [mode for mode in modes if mode != "off"]
        chosen += [(point, mode) for mode in modes if mode == "off"]
        chosen += [(point, others[number % len(others)])] if others else []
    return chosen


CASES = pytest.mark.parametrize(("point", "mode"), cases_of(POINTS))
ALL_CASES = pytest.mark.parametrize(
    ("point", "mode"), [(point, mode) for point in POINTS for mode in MODES if reaches(mode, point)]
)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sizes_small(monkeypatch)
    monkeypatch.setattr(backup, "PART_BYTES", 2000)
    monkeypatch.setattr(backup, "_MIN_BASE_BYTES", 2000)


@pytest.fixture
def store(scratch: Path, request: pytest.FixtureRequest) -> Path:
    """The directory of an empty store of the test's ``mode``."""
    make_store(scratch / "0", SETTINGS | MODES[request.getfixturevalue("mode")])
    return scratch / "0"


# --- a crash, and what is found after it ---


class Lives:
    """Mounts of one store, one after the other, until a fault point stops the work."""

    def __init__(self, directory: Path, ledger: Ledger, rng: random.Random) -> None:
        self.directory = directory
        self.ledger = ledger
        self.rng = rng
        self.steps = 0
        self.churn: Churn | None = None

    async def run(self, mounts: int, before_note: Callable[[], None] = lambda: None) -> None:
        for _ in range(mounts):
            async with open_filesystem(config_of(self.directory)) as fs, Kernel(fs) as kernel:
                self.churn = Churn(kernel, self.ledger, self.rng, before_note)
                for _ in range(STEPS_PER_MOUNT):
                    await self.churn.step()
                    self.steps += 1
            before_note()
            self.ledger.all_durable()


def find(directory: Path) -> dict[bytes, Found]:
    """Recover the store; it must be sound. Returns its tree."""

    async def look() -> dict[bytes, Found]:
        async with open_filesystem(config_of(directory)) as fs, Kernel(fs) as kernel:
            return await read_tree(kernel)

    tree = trio.run(look)
    trio.run(require_no_leak, directory)
    require_sound(directory)
    return tree


async def require_no_leak(directory: Path) -> None:
    """Each stored object of a closed store belongs to a file, and each file has all of its objects.

    So with burst copies and containers. A file that grew in vain may keep objects beyond its size;
    they are cut when it grows again, and go with it.
    """
    store = await open_store(config_of(directory))
    try:
        needed, allowed = await store.engine.view(_objects)
        found = [
            (server.id, thing)
            for server in store.servers.values()
            for thing in list_all(server.address)
        ]
    finally:
        store.close()
    assert all(isinstance(thing, StoredObject) for _, thing in found), found
    stored = {(server, thing.ino, thing.oid) for server, thing in found}
    assert needed <= stored <= allowed, f"lost: {needed - stored}, leaked: {stored - allowed}"


def _objects(tx: ReadTransaction) -> tuple[set[tuple], set[tuple]]:
    """What must be stored, and what may be, as (server, ino, oid)."""
    needed, allowed = set(), set()
    for key, value in tx.range(*keys.all_of(b"t")):
        container, lost = chunks.decode_container(value), find_unread(tx, keys.number(key))
        for column, server in enumerate(container.layout.servers):
            allowed.add((server, 0, keys.number(key)))
            if container.layout.object_length(column, container.length) and not lost >> column & 1:
                needed.add((server, 0, keys.number(key)))
    for key, value in tx.range(*keys.all_of(b"i")):
        inode = decode_inode(keys.number(key), value)
        if inode.copy is not None:
            needed.add((inode.copy.server, 0, inode.copy.id))
        if isinstance(inode.layout, Striped):
            lost = find_unread(tx, inode.oid)
            for index, server in enumerate(inode.layout.servers):
                allowed.add((server, inode.named_by, inode.oid))
                if inode.layout.object_length(index, inode.size) and not lost >> index & 1:
                    needed.add((server, inode.named_by, inode.oid))
    return needed, needed | allowed


def require_sound(directory: Path) -> None:
    findings = check(config_of(directory), repair=False).findings
    assert not findings, findings


def cut_power(directory: Path, copy: Path, point: str, ledger: Ledger, rng: random.Random) -> Lives:
    """Work until the power fails at ``point``; what may be left of the store is in ``copy``
    then."""
    with PowerCut(directory) as cut:
        work = Lives(directory, ledger, rng)
        try:
            cut.crash_at(point, rng.choice((1, rng.randint(1, 8), rng.randint(1, 60))))
            trio.run(work.run, 3, cut.stop_if_crashed)
            cut.crash_at(point)
            trio.run(work.run, MOUNTS, cut.stop_if_crashed)
        except BaseException as error:
            if not (cut.crashed and is_crash(error)):
                raise
        assert cut.crashed, f"{point} was not reached in {work.steps} steps"
        cut.materialise(copy, rng)
    return work


def cut_power_again(directory: Path, copy: Path, rng: random.Random) -> bool:
    """The power fails while the store recovers, if it gets that far; then the outcome is in
    ``copy``."""

    async def recover() -> None:
        async with open_filesystem(config_of(directory)) as fs:
            await fs.collector.drain()

    with PowerCut(directory) as cut:
        cut.crash_at(rng.choice(POINTS), rng.randint(1, 3))
        try:
            trio.run(recover)
        except BaseException as error:
            if not (cut.crashed and is_crash(error)):
                raise
        if cut.crashed:
            cut.materialise(copy, rng)
        return cut.crashed


def sweep_power(scratch: Path, mode: str, point: str, seed: int, lives: int) -> None:
    """``lives``: how often the power fails, each time while what the one before has left is worked
    on."""
    rng = random.Random(f"{point} {seed}")
    directory, ledger = scratch / "0", Ledger()
    for life in range(1, lives + 1):
        copy = scratch / str(life)
        cut_power(directory, copy, point, ledger, rng)
        again = scratch / f"{life} again"
        if cut_power_again(copy, again, rng):
            copy = again
        tree = find(copy)
        ledger.check(tree, killed=False, any_size=mode != "off")
        directory, ledger = copy, Ledger.of(tree)


def test_the_sweep_knows_every_point() -> None:
    assert set(POINTS) == {name for name in faults.POINTS if not name.startswith(ELSEWHERE)}
    assert {name.split(".")[0] for name in POINTS} == {"vfs", "burst", "data", "meta"}


@pytest.mark.sweep("mode")
@CASES
def test_a_power_cut_leaves_what_was_durable(
    scratch: Path, store: Path, point: str, mode: str
) -> None:
    sweep_power(scratch, mode, point, seed=0, lives=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@ALL_CASES
def test_many_power_cuts(scratch: Path, point: str, mode: str) -> None:
    for seed in range(1000, 1100):
        directory = scratch / str(seed)
        directory.mkdir()
        make_store(directory / "0", SETTINGS | MODES[mode])
        sweep_power(directory, mode, point, seed, lives=2)
        shutil.rmtree(directory)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_churn_does_everything(store: Path, mode: str) -> None:
    """No kind of work is left out, and what it says of a store that nothing happened to is true."""
    done: Counter[str] = Counter()
    ledger, rng = Ledger(), random.Random(1)
    for mount in range(MOUNTS):
        work = Lives(store, ledger, rng)
        trio.run(work.run, 1)
        done += work.churn.done
        if mount >= 7 and set(done) == set(WEIGHTS):
            break
    assert set(done) == set(WEIGHTS)
    ledger.check(find(store), killed=True)


@pytest.mark.parametrize("mode", ["tiny"])
def test_the_ledger_notices_what_is_lost(store: Path, mode: str) -> None:
    ledger = Ledger()
    trio.run(Lives(store, ledger, random.Random(2)).run, 1)
    tree = find(store)
    path = next(path for path, found in tree.items() if found.content)
    lost = dict(tree)
    del lost[path]
    with pytest.raises(AssertionError, match="names are none of"):
        ledger.check(lost, killed=False)
    changed = tree | {path: tree[path]._replace(content=bytes(len(tree[path].content)))}
    with pytest.raises(AssertionError, match="is durable but differs"):
        ledger.check(changed, killed=False)


# --- kill -9 ---


def _be_killed(writer: int, directory: Path, point: str, seed: int) -> None:
    """In a process of its own: work until ``point``, tell the ledger, and die there."""
    rng = random.Random(f"{point} {seed}")
    work = Lives(directory, Ledger(), rng)
    left = rng.choice((1, rng.randint(1, 8), rng.randint(1, 60)))

    def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if work.churn is not None:
                work.churn.lock.acquire()  # for good: nothing begins or is acknowledged any more
            lives.send(writer, (work.ledger, True))
            os.kill(os.getpid(), signal.SIGKILL)

    faults.arm(point, die)
    trio.run(work.run, 2)
    left = 1
    trio.run(work.run, MOUNTS)


def sweep_kill(directory: Path, point: str, seed: int) -> None:
    ledger, _ = lives.in_child(_be_killed, directory, point, seed)
    ledger.check(find(directory), killed=True)


@pytest.mark.sweep
@CASES
def test_a_kill_leaves_all_that_was_acknowledged(store: Path, point: str, mode: str) -> None:
    sweep_kill(store, point, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
@ALL_CASES
def test_many_kills(scratch: Path, point: str, mode: str) -> None:
    for seed in range(1000, 1100):
        directory = scratch / str(seed)
        make_store(directory, SETTINGS | MODES[mode])
        sweep_kill(directory, point, seed)
        shutil.rmtree(directory)


# --- failing and full disks ---

READS = ("read_at", "read_into", "read_file")


class OneFault:
    """A hook that fails one operation that changes something, the ``number``-th from ``arm`` on."""

    def __init__(self, number: int, error: int) -> None:
        self._left, self._error = number, error
        self._armed = False
        self.failed = ""

    def arm(self) -> None:
        self._armed = True

    def before(self, op: str, path: str) -> None:
        if self._armed and op not in READS:
            self._left -= 1
            if self._left == 0:
                self.failed = f"{op} {path}"
                raise OSError(self._error, os.strerror(self._error), path)

    def after(self, op: str, path: str, *args: object) -> None:
        """Nothing to record."""


def fs_error_in(error: BaseException) -> FsError:
    """The one FsError in what may be a group; anything else is raised again."""
    while len(parts := getattr(error, "exceptions", ())) == 1:
        error = parts[0]
    if not isinstance(error, FsError):
        raise error
    return error


async def work_through(
    directory: Path, hook: OneFault, rng: random.Random, scrubs_clean: bool
) -> tuple[Ledger, list[int]]:
    """Work, with one fault in between. Returns what must be there afterwards, and the errors that
    came."""
    ledger, errors = Ledger(), []
    try:
        async with open_filesystem(config_of(directory)) as fs, Kernel(fs) as kernel:
            hook.arm()
            churn = Churn(kernel, ledger, rng, lambda: None)
            churn.disks_fail = not scrubs_clean
            for _ in range(2 * STEPS_PER_MOUNT):
                try:
                    await churn.step()
                except Exception as error:  # noqa: BLE001 (raised again unless it is an FsError)
                    errors.append(fs_error_in(error).errno)
                    try:
                        await churn.close_all()
                        tree = await read_tree(kernel)
                        ledger.check(tree, killed=True)
                        ledger = Ledger.of(tree)
                        await fs.sync()
                    except (
                        FsError
                    ) as again:  # a journal that could not be synced takes nothing more
                        errors.append(again.errno)
                        break
                    churn = Churn(kernel, ledger, rng, lambda: None)
                    churn.disks_fail = not scrubs_clean
    except Exception as error:  # noqa: BLE001 (raised again unless it is an FsError)
        errors.append(fs_error_in(error).errno)
    return ledger, errors


def sweep_fault(directory: Path, error: int, seed: int, scrubs_clean: bool = False) -> str:
    """``scrubs_clean``: a scrub beside the failing disk may find nothing. Returns what has
    failed."""
    rng = random.Random(f"{error} {seed}")
    hook = OneFault(rng.randint(1, 400), error)
    files.set_hook(hook)
    try:
        ledger, errors = trio.run(work_through, directory, hook, rng, scrubs_clean)
    finally:
        files.set_hook(None)
    assert set(errors) <= {error, errno.EIO}, f"{hook.failed}: {errors}"
    ledger.check(find(directory), killed=True)
    return hook.failed


ERRORS = pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])


def sweep_faults(
    scratch: Path, mode: str, error: int, seeds: range, scrubs_clean: bool = False
) -> None:
    failed = set()
    for seed in seeds:
        directory = scratch / str(seed)
        make_store(directory, SETTINGS | MODES[mode])
        failed.add(sweep_fault(directory, error, seed, scrubs_clean).partition(" ")[0])
        shutil.rmtree(directory)
    assert failed - {""}, "nothing has failed"


@pytest.mark.sweep
@ERRORS
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_is_told_and_survived(scratch: Path, mode: str, error: int) -> None:
    sweep_faults(scratch, mode, error, range(4))


@pytest.mark.long
@pytest.mark.timeout(1800)
@ERRORS
@pytest.mark.parametrize("mode", MODES)
def test_many_faults(scratch: Path, mode: str, error: int) -> None:
    sweep_faults(scratch, mode, error, range(1000, 3000), scrubs_clean=True)
