"""One mount, from opening the store to leaving it in order. Touches the kernel's mount and this
process's limits.

Nothing is mounted before the store is open; "ready" follows the first answered request; the store
is closed when the kernel can send no more.
"""

import errno
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyfuse3
import trio

from aifs.core import files, loop_share, mountinfo
from aifs.core.config import Config, KernelConfig
from aifs.core.errors import AccessDenied, MountError
from aifs.core.log import dump_stacks, dump_threads_at
from aifs.core.tasks import first_error
from aifs.data.marker import NAME as MARKER_NAME
from aifs.files.rights import sees_all
from aifs.files.services import ServeOptions
from aifs.files.types import Caller
from aifs.fuse import requests
from aifs.fuse.bridge import ALL_COST, SPEED_COST, Bridge, MissingPart, reply
from aifs.fuse.guard import Guard, KeeperOrders
from aifs.fuse.handed_over import HandedOver
from aifs.fuse.keeper import SILENT_S
from aifs.fuse.kept import Head, KeptMount
from aifs.fuse.kernel_cache import KernelCache
from aifs.fuse.operations import Operations
from aifs.fuse.options import MountOptions
from aifs.store.ownership import StoreRight
from aifs.vfs import operation_log
from aifs.vfs.filesystem import Filesystem
from aifs.vfs.going_on import set_again
from aifs.vfs.lifecycle import open_filesystem
from aifs.vfs.why import tell_if_stuck, watch_slow
from aifs.watch.server import WatchServer

log = logging.getLogger(__name__)

READER_TASKS = 1
"""Idle tasks that pyfuse3 keeps besides the one that reads; the lock makes more of them useless."""

MAX_TASKS = 99
"""Requests waiting at once: the kernel's own kernel.max_background, and any of processes."""

SWITCH_INTERVAL_S = 0.0005
"""A worker thread's wait for the interpreter; Python's 5 ms is ten requests."""


KEPT_S = 4.5
"""Longest time names and attributes are kept with several hosts: half a second less than a host
goes on without renewing its session."""

_NOBODY_WAITS = os.strerror(errno.ENOENT)

_FEW_DESCRIPTORS = 4096


def is_error(record: logging.LogRecord) -> bool:
    """pyfuse3 logs each refused reply; one that nobody waits for is no error."""
    return not record.getMessage().endswith(f"failed with {_NOBODY_WAITS}")


def serve(
    config: Config,
    mountpoint: str,
    options: MountOptions,
    on_ready: Callable[[], None],
    force: bool = False,
    has_locks: bool = False,
    kept: KeptMount | None = None,
    again: Sequence[str] = (),
) -> None:
    """Mount the store on ``mountpoint`` and serve until unmounted, or SIGTERM or SIGINT.

    Blocks. ``on_ready`` is called once, when the mount answers. On return nothing is mounted, and
    everything acknowledged is on stable storage. Raises StoreError, StoreBusy, MountError; then
    nothing was mounted, or another host has taken the store over. ``force``: the store's owner is
    dead. ``has_locks``: see ``open_filesystem``. ``kept``: a dead daemon's mount. ``again``: see
    ``KeeperOrders``.
    """
    logging.getLogger("pyfuse3").addFilter(is_error)
    _raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        keeping = _keeping(config, has_locks, kept, again)
        trio.run(_serve, config, mountpoint, options, on_ready, force, has_locks, keeping)
    except BaseException as error:  # noqa: BLE001 (raised again, out of its group)
        raise first_error(error) from error.__cause__


def _keeping(
    config: Config, has_locks: bool, kept: KeptMount | None, again: Sequence[str]
) -> KeeperOrders | None:
    """How the mount is kept; None: it ends with this process."""
    tries = config.kernel.restarts and (
        config.host.restarts if config.is_cluster else config.kernel.restarts
    )
    if kept is None:
        if not again or config.kernel.bridge == "off" or has_locks or not tries:
            return None
        kept = KeptMount()
    log_file = "" if "--foreground" in again else config.log.file
    return KeeperOrders(kept, again, tries, config.kernel.replace_stuck_s, log_file)


async def _serve(
    config: Config,
    mountpoint: str,
    options: MountOptions,
    on_ready: Callable[[], None],
    force: bool,
    has_locks: bool,
    keeping: KeeperOrders | None,
) -> None:
    scheduler = requests.install()
    kernel = KernelCache(None if keeping is None else keeping.kept)
    async with open_filesystem(
        config,
        ServeOptions(mountpoint, options.read_only, options.atime),
        force=force,
        kernel=kernel,
        share=scheduler.share,
        has_locks=has_locks,
    ) as fs:
        kept = kept_for(config.kernel, fs.store.peers.is_shared)
        handed_over = HandedOver(fs, scheduler, reply, kept)
        bridge = Bridge(kept, handed_over.take, scheduler.busy_polls, fs.has_locks)
        if keeping is not None:
            bridge.keep(keeping.kept)
        fs.store.engine.listen(bridge.note_records)
        fs.store.engine.tell_sure(bridge.be_sure_until)
        synchronous = "sync" in options.fuse_options
        operations = Operations(
            fs,
            kept,
            scheduler,
            bridge.kill_privileges,
            bridge.note_acl,
            bridge.last_request,
            bridge.appends,
            synchronous,
        )
        arguments = mount_arguments(config, options)
        with _mounted(operations, bridge, mountpoint, arguments, keeping):
            if keeping is not None and keeping.kept.is_taken:
                if bridge.passes_through:
                    kernel.pass_through(bridge)
                set_again(fs)
            async with trio.open_nursery() as nursery:
                handed_over.serve_in(nursery)
                nursery.start_soon(_end_with_right, fs.store.ownership)
                nursery.start_soon(_handle_signals, mountpoint)
                nursery.start_soon(watch_slow, fs.store.engine, lambda: fs.slow_request_s)
                if config.metrics.listen:
                    nursery.start_soon(_show, fs)
                nursery.start_soon(
                    _announce,
                    fs,
                    kernel,
                    bridge,
                    config.kernel.read_ahead,
                    config.burst.passthrough,
                    on_ready,
                    keeping,
                )
                gc.freeze()
                fs.store.ownership.require()
                if keeping is not None and keeping.kept.is_taken:
                    keeping.kept.ask_again()
                with kernel.serving(nursery):
                    await _read_requests()
                nursery.cancel_scope.cancel()
        log.info("unmounted %s", mountpoint)


def kept_for(kernel: KernelConfig, is_shared: bool) -> KernelConfig:
    """The configuration; with other hosts, kept names and attributes expire before an unrenewed
    session."""
    if not is_shared:
        return kernel
    times = ("entry_timeout_s", "attr_timeout_s", "negative_timeout_s")
    return kernel.model_copy(update={name: min(getattr(kernel, name), KEPT_S) for name in times})


async def _end_with_right(ownership: StoreRight) -> None:
    """End the mount when another process has the store."""
    await ownership.over.wait()
    pyfuse3.terminate()


async def _show(fs: Filesystem) -> None:
    async def tell(uid: int) -> dict[str, Any]:
        return await fs.status.tell(Caller(uid))

    async def follow(uid: int, start: int | None) -> tuple[int, list[dict[str, Any]]]:
        if not sees_all(Caller(uid)):
            raise AccessDenied(
                "only root and the user that has mounted see who uses the mount: through a socket "
                "at metrics.listen, or with metrics.secret"
            )
        return await operation_log.follow(fs.operation_log, fs.store.engine, start)

    metrics = fs.store.config.metrics
    with loop_share.background():
        await WatchServer(metrics.listen, metrics.secret, tell, follow).run()


async def _read_requests() -> None:
    """Serve until the connection ends; a read at that moment gets ECONNABORTED."""
    try:
        await pyfuse3.main(READER_TASKS, MAX_TASKS)
    except BaseException as error:
        found = first_error(error)
        if not isinstance(found, OSError) or found.errno != errno.ECONNABORTED:
            raise


def mount_arguments(config: Config, options: MountOptions) -> set[str]:
    """The names by which mount(8), df and umount know the mount, and the user's choices."""
    chosen = {
        f"fsname={_escaped(config.source)}",
        "subtype=aifs",
        "default_permissions",
        *options.fuse_options,
    }
    if options.read_only:
        chosen.add("ro")
    if options.allow_other:
        chosen.add("allow_other")
    return chosen


def _escaped(value: str) -> str:
    """For libfuse's option parser."""
    return value.replace("\\", "\\\\").replace(",", "\\,")


@contextmanager
def _mounted(
    operations: Operations,
    bridge: Bridge,
    mountpoint: str,
    fuse_options: set[str],
    keeping: KeeperOrders | None,
) -> Iterator[None]:
    try:
        pyfuse3.init(operations, mountpoint, fuse_options)
    except RuntimeError as error:  # libfuse tells the reason on stderr alone
        raise MountError(f"cannot mount on {mountpoint}: {error}") from None
    kept = None if keeping is None or not bridge.in_use else keeping.kept
    if kept is not None and not kept.is_taken:
        kept.mounted(bridge.device)
    with Guard(mountpoint, keeping if kept is not None else None):
        try:
            bridge.check()
            yield
        except BaseException:
            if kept is not None and kept.head(Head.SERVED):
                log.critical("the daemon ends, and the mount waits for the next one", exc_info=True)
                logging.shutdown()
                os._exit(1)  # in order it would close what programs have open
            raise
        finally:
            if kept is not None:
                kept.end()
            bridge.disconnect()
            if kept is not None and kept.is_taken:
                _unmount(mountpoint)
            pyfuse3.close(unmount=True)


def _unmount(mountpoint: str) -> None:
    """Like libfuse with its own mounts. Blocks for a moment."""
    mount = mountinfo.mounted_at(mountpoint)
    if mount is None or mount.fstype != mountinfo.FSTYPE:
        return
    command = ["umount", "--internal-only", "--lazy", "--no-canonicalize", mountpoint]
    if os.geteuid() != 0:
        command = ["fusermount3", "-u", "-z", "--", mountpoint]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        log.warning("%s stays mounted: %s", mountpoint, done.stderr.strip())


async def _announce(
    fs: Filesystem,
    kernel: KernelCache,
    bridge: Bridge,
    read_ahead: int,
    passthrough: bool,
    on_ready: Callable[[], None],
    keeping: KeeperOrders | None,
) -> None:
    """Wait for the mount's first answer, set read-ahead, use the kernel's features, and report
    ready."""
    await trio.to_thread.run_sync(
        _set_read_ahead, fs.options.mountpoint, read_ahead, abandon_on_cancel=True
    )
    missing = bridge.missing()
    if passthrough and bridge.passes_through:
        kernel.pass_through(bridge)
        missing += _refused(fs)
    for what, why, cost, _ in missing:
        log.warning(
            "%s is not in use: %s. The cost: %s. `aifs doctor` tells what to change",
            what,
            why,
            cost,
        )
    if fs.store.config.kernel.bridge == "off":
        missing.append(
            MissingPart("the bridge", "kernel.bridge is off", ALL_COST, "set it to auto")
        )
    elif not passthrough:
        missing.append(
            MissingPart("passthrough", "burst.passthrough is false", SPEED_COST, "set it to true")
        )
    kernel.announce(bridge, missing)
    if keeping is not None:
        _keep(keeping, bridge)
        await fs.names.forget_unknown()
    log.info("serving %s", fs.options.mountpoint)
    on_ready()
    while keeping is not None:
        keeping.kept.show_alive()
        await trio.sleep(1)


def _keep(keeping: KeeperOrders, bridge: Bridge) -> None:
    """From the first answer on it outlives this process, if it can."""
    if bridge.can_be_kept:
        dump_threads_at(signal.SIGUSR2)
        keeping.kept.serves()
        after_s = min(SILENT_S, keeping.stuck_s or SILENT_S)
        told = trio.lowlevel.current_root_task(), partial(keeping.kept.head, Head.ALIVE), after_s
        threading.Thread(target=tell_if_stuck, args=told, daemon=True).start()
    else:
        log.info("the mount ends with this process: a kernel before 6.9 repeats no requests")


def _refused(fs: Filesystem) -> list[MissingPart]:
    """Burst directories that the kernel does not pass through."""
    missing = []
    for server in fs.store.servers.burst():
        if server.absent:
            continue
        fd = files.open_file(os.path.join(server.address, MARKER_NAME), write=False)
        try:
            error = fs.handles.try_out(server.id, fd)
        finally:
            files.close_file(fd)
        if error is not None:
            fix = "put it on a local filesystem, such as ext4, xfs or tmpfs"
            missing.append(
                MissingPart(
                    f"passthrough to {server.address}", str(error.strerror), SPEED_COST, fix
                )
            )
    return missing


def _set_read_ahead(mountpoint: str, read_ahead: int) -> None:
    """Blocks until the mount answers: in a worker thread, or it waits for itself."""
    os.statvfs(mountpoint)  # the kernel always asks; of a mount that it knows it may know the rest
    device = os.stat(mountpoint).st_dev
    try:
        with open(
            f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb", "w"
        ) as file:
            file.write(str(read_ahead >> 10))
    except OSError as error:
        log.info("read-ahead stays at the kernel's default: %s", error)


async def _handle_signals(mountpoint: str) -> None:
    """SIGTERM and SIGINT end the mount; a second one, without waiting for dirty pages of mmap."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as received:
        async with trio.open_nursery() as nursery:
            ending = False
            async for number in received:
                if number == signal.SIGUSR1:
                    dump_stacks(log)
                elif ending:
                    pyfuse3.terminate()
                else:
                    log.info("%s: unmounting %s", signal.Signals(number).name, mountpoint)
                    ending = True
                    nursery.start_soon(_end, mountpoint)


async def _end(mountpoint: str) -> None:
    try:
        await trio.to_thread.run_sync(files.sync_filesystem, mountpoint, abandon_on_cancel=True)
    except OSError as error:
        log.warning("pages that programs have mapped may not have been written: %s", error)
    pyfuse3.terminate()


def _raise_file_limit() -> None:
    """Each object of each used file may need a descriptor."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < _FEW_DESCRIPTORS:
        log.warning(
            "descriptors are few: %d; objects of open files are closed and opened again all the "
            "time. Raise the hard limit (ulimit -Hn; LimitNOFILE= of a systemd unit)",
            hard,
        )
