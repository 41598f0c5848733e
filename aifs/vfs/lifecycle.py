"""The life of an open filesystem: recovery, background tasks, orderly close."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from aifs.core import faults, loop_share
from aifs.core.config import Config
from aifs.core.errors import FsError, StoreBusy
from aifs.core.log import logger
from aifs.core.loop_share import LoopShare
from aifs.core.tasks import first_error
from aifs.data.patience import FOR_EVER, giving_up
from aifs.files.kernel import Kernel
from aifs.files.services import ServeOptions
from aifs.store.store import Store, open_store, set_clean
from aifs.vfs.filesystem import Filesystem
from aifs.vfs.going_on import go_on
from aifs.vfs.recovery import load_copies, recover, take_over

_log = logger(__name__)

_RESTART_S = 10
_TELL_S = 1.0


@asynccontextmanager
async def open_filesystem(
    config: Config,
    options: ServeOptions | None = None,
    adding: str = "",
    force: bool = False,
    kernel: Kernel | None = None,
    share: LoopShare | None = None,
    has_locks: bool = False,
) -> AsyncIterator[Filesystem]:
    """Own the store, recover it, and serve until the block ends; then make everything durable.

    Raises StoreError, StoreBusy; StoreBusy also at the end, if another process has taken the store
    over: then nothing is written any more (store/ownership.py). ``force``: see ``open_store``.
    ``share``: between background work and requests. ``has_locks``: flock(2) and fcntl(2) locks are
    ours also with one host, for tests. A read-only store is recovered, too, as in ext4.
    """
    options = options or ServeOptions()
    store = await open_store(
        config,
        mountpoint=options.mountpoint,
        read_only=options.read_only,
        adding=adding,
        force=force,
        goes_on=kernel is not None and kernel.kept.is_taken,
    )
    closed = False
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep_running, store.engine.run)
            nursery.start_soon(_keep_running, store.ownership.run)
            fs = Filesystem(store, kernel or Kernel(), options, share or LoopShare(), has_locks)
            nursery.start_soon(_keep_running, fs.following.run)
            nursery.start_soon(_keep_running, partial(fs.pool.run, store.ownership.over))
            await fs.pool.ready.wait()
            with giving_up():
                await _load(fs)
            if not store.clean:
                _log.info("the store was not closed in order: %s", fs.recovered)
            store.ownership.require()
            await set_clean(store, False)
            error = None
            async with trio.open_nursery() as background:
                if not options.read_only:
                    background.start_soon(
                        _keep_running, partial(fs.group_life.run, fs.group_publishing.publish)
                    )
                jobs = fs.jobs()
                if fs.role.is_shared:
                    background.start_soon(_keep_running, fs.home.run)
                    if not options.read_only:
                        background.start_soon(_keep_running, fs.mirror_host.run)
                    background.start_soon(_keep_running, partial(_serve_role, fs))
                else:
                    jobs |= fs.jobs_of_role()
                background.start_soon(_keep_running, partial(fs.upkeep.run, jobs))
                if fs.has_locks:
                    background.start_soon(_keep_running, fs.locks.run)
                try:
                    yield fs
                except BaseException as raised:  # noqa: BLE001 (raised again, outside the nurseries that would wrap it)
                    error = raised
                if not (store.ownership.ended or isinstance(error, faults.SimulatedCrash)):
                    nursery.start_soon(_keep_telling, store)
                background.cancel_scope.cancel()
            fs.tier.stop()
            if store.ownership.ended and not isinstance(error, faults.SimulatedCrash):
                error = StoreBusy(store.ownership.ended)
            elif not isinstance(error, faults.SimulatedCrash):
                with trio.CancelScope(shield=True), giving_up():
                    await _close(fs)
                closed = True
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
    except BaseException as raised:  # noqa: BLE001 (raised again, out of its group)
        cause = first_error(raised)
        if isinstance(cause, faults.SimulatedCrash):
            store.abandon()
        else:
            store.close(orderly=closed)
        raise cause from None
    store.close()


async def _load(fs: Filesystem) -> None:
    """Tell the parts what they have to know before requests, in this order."""
    if not fs.role.is_shared:
        # What backups there are: tasks that give something up ask from now on what they may refer
        # to.
        await fs.backup.load(fs.options.read_only)
    # The records themselves, before anybody reads them: files that were changed when the daemon
    # died get their sizes, and what nobody refers to is queued for deletion.
    kept = fs.kernel.kept
    if kept.is_on:
        kept.settle(fs.store.engine.has_found)
        fs.store.engine.tell_commits(kept.commits)
    still = await recover(fs.store, fs.tier, fs.collector, fs.recovered, kept.is_taken)
    await fs.containers.recover()
    await fs.trash_rules.load(fs.options.read_only)
    await _load_work(fs)
    await fs.quotas.look()
    await fs.blocks.load({oid for _, oid in kept.backings.values()})
    undrained = await load_copies(fs.store, fs.tier, fs.collector, fs.needs, fs.recovered)
    # All that is undrained is the drain's, then groups take out what is theirs.
    fs.drain.load(undrained)
    await fs.group_life.load(undrained)
    if kept.is_taken:
        await go_on(fs, still)


async def _load_work(fs: Filesystem, again: bool = False) -> None:
    """Find work that earlier mounts, or another host, have left; in any order."""
    await fs.doomed.load()
    await fs.rebuild.strays.load()
    await fs.retention.load()
    # What is known to be wrong on the data servers, because that decides which copies are kept.
    await fs.scrub.load(again)


async def _serve_role(fs: Filesystem) -> None:
    """With the role, do the whole store's work, and deal with the rest of ended sessions."""
    while not fs.role.held:
        await fs.role.change()
    _log.info("this host does the background work of the store from now on")
    live = fs.role.live
    await fs.backup.load(fs.options.read_only)
    await take_over(fs.store, fs.role, fs.collector)
    await _load_work(fs, again=True)
    fs.upkeep.add(fs.jobs_of_role())
    while True:
        while fs.role.live == live:
            await fs.role.change()
        live = fs.role.live
        await take_over(fs.store, fs.role, fs.collector)
        await fs.doomed.load()


async def _keep_running(task: Callable[[], Awaitable[None]]) -> None:
    """Log a fault in background work, which does not end the mount."""
    while True:
        try:
            with giving_up(), loop_share.background():
                return await task()
        except Exception as error:  # noqa: BLE001 (logged; with its stack, unless it says that a disk is full or fails)
            if isinstance(cause := first_error(error), FsError):
                _log.warning("background work has to wait for %d s: %s", _RESTART_S, cause)
            else:
                _log.exception("background work failed; it starts again in %d s", _RESTART_S)
            await trio.sleep(_RESTART_S)


async def _keep_telling(store: Store) -> None:
    """Report what the end waits for, also requests of background work."""
    while True:
        await trio.sleep(_TELL_S)
        if not store.ownership.ended:
            store.tell()


async def _close(fs: Filesystem) -> None:
    """Close open files, remove deleted ones, sync all, and mark the store clean. Parts that give
    work to others come first."""
    fs.handles.end()
    await fs.io.inodes.record_accesses()
    for file in list(fs.io.table.open.values()):
        file.handles = 1
        await fs.io.inodes.release(file)
    fs.names.forget_all()
    await fs.locks.close()
    await fs.server_admin.clean_up()
    await fs.group_life.close()
    fs.containers.close()
    await fs.blocks.close()
    await fs.tier.close()
    with trio.move_on_after(fs.store.config.data.timeout_s or FOR_EVER):
        await fs.store.servers.cache.settle()
    await fs.sync()
    await set_clean(fs.store, True)
    if fs.role.held:
        await fs.backup.finish()
