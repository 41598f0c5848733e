"""Have the kernel ask again for names and attributes, by pyfuse3's notifications.

An invalidation may wait in the kernel, uninterruptibly: for a directory's lock, held by a program
until we answer, or an inode on its way out. So worker threads send them, with limited waits for
these. The connection stays open meanwhile, also if this process is killed; ``guard`` ends it then.
"""

import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyfuse3
import trio

from aifs.files.kept import KeptState
from aifs.files.kernel import Kernel
from aifs.fuse.bridge import UNKNOWN, Bridge, KeptName, MissingPart
from aifs.meta import keys

log = logging.getLogger(__name__)

FORGET_S = 1.0
"""How long an answer waits until the kernel has forgotten names."""

LOCKED_S = 0.005
"""How long attributes wait behind names: a directory's lock may be held by our request for another
host, which waits for us."""

_AT_ONCE = 16
"""Threads that may wait in the kernel, so that directories do not hold up one another."""


class KernelCache(Kernel):
    """Invalidations that may wait run in a nursery (``serving``); none is needed outside."""

    def __init__(self, kept: KeptState | None = None) -> None:
        super().__init__(kept)
        self._nursery: trio.Nursery | None = None
        """Of the tasks that send, while requests are read."""
        self._begun = trio.Event()
        """Set when the kernel can be told what to forget, or knows nothing."""
        if not self.kept.is_taken:
            self._begun.set()
        self._bridge: Bridge | None = None
        """Of the mount, when it is announced."""
        self._missing: list[MissingPart] = []
        """The parts that are not in use."""
        self._threads = trio.CapacityLimiter(_AT_ONCE)
        """Of notifications that may wait."""
        self._inodes = trio.CapacityLimiter(1)
        """Notifications that never wait for long have their own thread."""

    @contextmanager
    def serving(self, nursery: trio.Nursery) -> Iterator[None]:
        """Requests are read inside. Background work goes on afterwards until it is told."""
        self._nursery = nursery
        self._begun.set()
        try:
            yield
        finally:
            self._nursery = None

    def announce(self, bridge: Bridge, missing: list[MissingPart]) -> None:
        """Take note of the bridge of the mount, and of the parts that are not in use."""
        self._bridge, self._missing = bridge, missing

    def pass_through(self, bridge: Bridge) -> None:
        """Files that are opened from now on may be passed through."""
        self.passthrough = bridge

    def see_all(self, on: bool) -> None:
        if self._bridge is not None:
            self._bridge.see_all(on)

    def keep_no_names(self, ino: int) -> None:
        if self._bridge is not None:
            self._bridge.keep_no_names(ino)

    def begin_directory(self, ino: int) -> None:
        if self._bridge is not None:
            self._bridge.begin_directory(ino)

    def status(self) -> dict[str, Any]:
        """As the filesystem's ``Kernel``; {} before the mount is announced."""
        if self._bridge is None:
            return {}
        return {
            **self._bridge.status(),
            "missing": [each._asdict() for each in self._missing],
        }

    def drop_attributes(self, ino: int) -> None:
        """Have the kernel ask again for the attributes of ``ino``. Only while it waits for an
        answer about this inode: so that is not on its way out of its cache, for which this would
        wait."""
        self._send(pyfuse3.invalidate_inode, ino, True)

    def drop_attributes_soon(self, inos: Iterable[int]) -> None:
        """Have the kernel ask again for the attributes of these inodes, soon."""
        self._start([(pyfuse3.invalidate_inode, ino, True) for ino in inos])

    def drop_name_soon(self, parent: int, name: bytes) -> None:
        """Have the kernel look ``name`` up, and list its directory, anew, once requests that hold
        the directory's lock are answered."""
        self._start(_of_names([(parent, name)], pyfuse3.invalidate_entry))

    async def look_up_anew(self, names: Iterable[tuple[int, bytes]]) -> None:
        """``forget_names``, except that a used file, and a mount at it, stay until a lookup leads
        elsewhere."""
        await self._notify(list(names), self._expire)

    async def forget_names(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Have the kernel look these names (parent, name) up, and list their directories, anew.
        Waits for requests that hold a directory's lock, but not for long, because one may wait for
        the request that we are answering; then it happens after that."""
        await self._notify(list(names), pyfuse3.invalidate_entry)

    async def _notify(self, names: list[tuple[int, bytes]], notify: Callable[..., None]) -> None:
        if self._bridge is not None:  # it keeps nothing of a name that may come at any time
            self._bridge.note_records({keys.dentry(*name): b"?" for name in names}, 0)
        done = self._start(_of_names(names, notify))
        with trio.move_on_after(FORGET_S):
            await done.wait()

    async def forget(
        self, names: Mapping[tuple[int, bytes], int], inodes: Sequence[int], pages: Sequence[int]
    ) -> set[int]:
        await self._begun.wait()
        bridge, entries = self._bridge, []
        kept = self._kept(names)
        if bridge is not None:  # a thread costs more than most changes
            inodes = [ino for ino in inodes if self._was_told(ino)]
            pages = [ino for ino in pages if self._was_told(ino)]
        for name in kept if bridge is not None else names:
            entries.append((self._forget_name, *name, kept.get(name)))
        listings = set(pages)
        told: list[tuple[Any, ...]] = [(pyfuse3.invalidate_inode, ino) for ino in listings]
        told += [(pyfuse3.invalidate_inode, ino, True) for ino in {*inodes} - listings]
        known: set[int] = set()
        done = None
        if self._threads.available_tokens:
            done = self._start([*told, *entries], known)
            with trio.move_on_after(LOCKED_S):
                await done.wait()
            if done.is_set():
                for name, each in kept.items():
                    self._note_dropped(*name, each)
                return known
        # A name waits for long. Attributes and listings never wait for a program that waits for us.
        known = set()
        if self._nursery is not None and told:
            await trio.to_thread.run_sync(
                self._send_all, told, known, abandon_on_cancel=True, limiter=self._inodes
            )
        if done is None:
            done = self._start(entries)
        while not done.is_set() and kept:
            until_ns = max(each.until_ns for each in kept.values())
            with trio.move_on_after(max(until_ns - time.monotonic_ns(), 0) / 1e9):
                await done.wait()
            is_known = bridge is not None and bridge.keeps_account
            kept = self._kept(names) if is_known else {}  # a name may have been being made
        return known

    def _kept(self, names: Mapping[tuple[int, bytes], int]) -> dict[tuple[int, bytes], KeptName]:
        """Recorded names among these that may lead elsewhere for the kernel."""
        bridge = self._bridge
        if bridge is None:
            return {}
        told = {name: bridge.kept_name(*name) for name in names if self._was_told(name[0])}
        return {
            name: kept
            for name, kept in told.items()
            if kept.until_ns and (kept.ino == UNKNOWN or kept.ino != names[name])
        }

    def _was_told(self, ino: int) -> bool:
        """Whether the kernel may know an inode, also by a daemon before."""
        return self.kept.is_taken or self.may_know(ino)

    def _note_dropped(self, parent: int, name: bytes, kept: KeptName) -> None:
        if self._bridge is not None:
            self._bridge.drop_name(parent, name, kept)

    def _forget_name(self, parent: int, name: bytes, kept: KeptName | None) -> None:
        """Blocks. For an unknown name nothing else goes."""
        if kept is not None and kept.ino == 0:
            self._expire(parent, name)
        else:
            pyfuse3.invalidate_entry(parent, name)

    def _expire(self, parent: int, name: bytes) -> None:
        """Blocks."""
        if self._bridge is not None and self._bridge.in_use:
            self._bridge.expire_name(parent, name)
        else:
            pyfuse3.invalidate_entry(parent, name)

    async def drop_pages(self, inodes: Sequence[int]) -> None:
        await self._begun.wait()
        await self._start([(pyfuse3.invalidate_inode, ino) for ino in inodes]).wait()

    def drop_pages_soon(self, ino: int, then: Callable[[], None]) -> None:
        if self._nursery is None:
            then()
        else:
            self._nursery.start_soon(self._drop_pages, ino, then)

    async def _drop_pages(self, ino: int, then: Callable[[], None]) -> None:
        try:
            await self.drop_pages([ino])
        finally:
            then()

    def may_know(self, ino: int) -> bool:
        return self._bridge is None or self._bridge.was_told(ino)

    async def is_known(self, ino: int) -> bool:
        return self._nursery is not None and await trio.to_thread.run_sync(
            self._send,
            pyfuse3.invalidate_inode,
            ino,
            True,
            abandon_on_cancel=True,  # it may wait for the end of the mount, which waits for us
            limiter=self._inodes,
        )

    def _start(
        self, notifications: list[tuple[Any, ...]], known: set[int] | None = None
    ) -> trio.Event:
        """The event is set when the kernel has them. ``known``: gets inodes that it knows."""
        done = trio.Event()
        if self._nursery is None or not notifications:
            done.set()
        else:
            known = set() if known is None else known
            self._nursery.start_soon(self._run, notifications, known, done)
        return done

    async def _run(
        self, notifications: list[tuple[Any, ...]], known: set[int], done: trio.Event
    ) -> None:
        try:
            await trio.to_thread.run_sync(
                self._send_all, notifications, known, abandon_on_cancel=True, limiter=self._threads
            )
        finally:
            done.set()

    def _send_all(self, notifications: list[tuple[Any, ...]], known: set[int]) -> None:
        """Blocks. The thread may outlive the mount."""
        for notify, ino, *what in notifications:
            if self._nursery is None:
                return
            if self._send(notify, ino, *what):
                known.add(ino)

    def _send(self, notify: Callable[..., None], *what: object) -> bool:
        """Whether the kernel knows the inode or name."""
        try:
            notify(*what)
        except FileNotFoundError:
            return False  # there is nothing to drop
        except OSError as error:  # the request has been done all the same
            if error.errno == errno.ENOSYS:
                return False  # it has not asked for anything yet, as the mount has just begun
            if self._nursery is not None:  # else the mount has ended, and the kernel keeps nothing
                log.warning("the kernel may have kept %s: %s", what, error)
        return True


def _of_names(
    names: Sequence[tuple[int, bytes]], notify: Callable[..., None]
) -> list[tuple[Any, ...]]:
    """An unknown name leaves its directory alone: both are sent."""
    entries = [(notify, parent, name) for parent, name in names]
    return entries + [
        (pyfuse3.invalidate_inode, parent) for parent in {parent for parent, _ in names}
    ]
