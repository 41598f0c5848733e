"""The right to use a store of one host: one process claims all of its directories (data/claim.py),
and renews that while it has the store.

Claims against the next process:

* One made with these metadata and given back (``held`` is False), or of an earlier epoch, does not
  count.
* Metadata without a claim of the latest epoch are overtaken: others have changed the servers.
  Refused.
* The same metadata directory under the same kernel: its lock is ours, so the owner is dead. The
  claim counts no more.
* The same metadata directory after a restart, or a machine's clone: it is watched for ``WATCH_S``
  for renewals, and taken over without.
* Any other metadata directory is a copy, whose owner may live. Refused, unless the user says that
  it is dead (``force``).

At each renewal, every ``INTERVAL_S``, an owner looks for claims that ended its own. A process that
takes over a possibly used right waits for ``WATCH_S``, so that the old owner has noticed. A silent
directory ends no right: one readable owner suffices to refuse, and to notice.
"""

import os
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from aifs.core import files
from aifs.core.errors import FsError, StoreBusy, StoreError
from aifs.core.log import logger
from aifs.data.claim import Claim, put_claim, read_claim
from aifs.data.marker import NAME as MARKER_NAME
from aifs.data.patience import Patience, ask_all, giving_up
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.storage import Storage
from aifs.data.storages import storage_at
from aifs.data.workers import outcomes
from aifs.meta.kv import Engine
from aifs.store.owner import OwnerLock

_log = logger(__name__)


if TYPE_CHECKING:
    from aifs.store.hosts import Hosts


class StoreRight(ABC):
    """A process's right to a store. Used from one trio thread; ``run`` keeps it."""

    def __init__(self, servers: Servers) -> None:
        self.ended = ""
        """Why there is no right any more."""
        self.over = trio.Event()
        """Set when there is none."""
        self.doubt = ""
        """Why nobody can tell whether there is one, so that requests wait; "": it is sure."""
        self._servers = servers

    @abstractmethod
    async def take(self, force: bool = False) -> None:
        """Get the right; durable on return. ``force``: the user says that its owner is dead. Raises
        StoreBusy or StoreError, which name its owner."""

    @abstractmethod
    async def run(self) -> None:
        """Keep it up until cancelled. When it has ended no directory is used any more."""

    @abstractmethod
    def give_back(self) -> None:
        """Let the next owner have the store, once the servers' threads have ended. Blocks for a
        moment."""

    def require(self) -> None:
        """Raises StoreBusy if there is no right any more."""
        if self.ended:
            raise StoreBusy(self.ended)

    def _end(self, why: str) -> None:
        """The right has ended; nothing is written."""
        if not self.ended:
            self.ended = why
            _log.error("%s", why)
            self._servers.give_up(why)
            self.over.set()


class Metadata(Protocol):
    """The metadata of a store, which have been found, and how they are opened."""

    store: str
    """The store's uuid, as it was found beside the metadata."""
    where: str
    """For messages."""
    remedy: str
    """What to do if they are damaged."""
    hosts: "Hosts | None"
    """All that have the store mounted, once it is open; None: it has one host."""

    async def open(self) -> Engine:
        """Blocks the thread. Raises StoreError, StoreBusy, BrokenDatabase."""

    def give_up(self, engine: Engine) -> None:
        """Let go of what ``open`` has returned: the store cannot be used. Blocks."""

    def right(self, owner: OwnerLock, servers: Servers) -> StoreRight:
        """``owner``: of the metadata directory."""


INTERVAL_S = 2.0
"""Between two renewals."""

WATCH_S = 2.5 * INTERVAL_S
"""An owner that lives has renewed its claim, and looked for others, in any such time."""

_ANSWER_S = 30.0
"""How long a directory of a store that is not open is waited for."""


class Ownership(StoreRight):
    """The right of who has claimed all directories."""

    def __init__(self, meta: str, mountpoint: str, lock: OwnerLock, servers: Servers) -> None:
        """``lock``: of the metadata directory ``meta``. Blocks for a moment."""
        super().__init__(servers)
        self._lock = lock
        self._mine = _claim_of(meta, mountpoint)
        self._renewing: set[int] = set()

    async def take(self, force: bool = False) -> None:
        """Claim all directories. After an error no claim is changed; or two asked at once, and
        losers, perhaps both, may ask again."""
        rival, epoch = await _require_right(self._read, self._mine, self._lock, force)
        self._mine = replace(self._mine, epoch=epoch, time_s=time.time())
        if not self._servers.read_only:
            # Else nothing is claimed, and an epoch without a claim would let a copy take over.
            self._lock.advance(epoch, self._mine.token)
        if theirs := await self._put(self._mine):
            await self._put(replace(self._mine, held=False, renewals=1))
            raise StoreBusy(_describe(theirs, self._mine))
        if rival is not None:
            _log.warning("the store is taken over from %s", _owner(rival))
            await trio.sleep(WATCH_S)

    async def _read(self) -> list[Claim]:
        found = await self._ask(DataServer.read_claim)
        return [claim for claim in found if isinstance(claim, Claim)]

    async def _put(self, claim: Claim) -> Claim | None:
        """Returns a claim that has ended it."""
        found = await self._ask(lambda server: server.put_claim(claim, True))
        return next((theirs for theirs in found if isinstance(theirs, Claim)), None)

    async def _ask(self, call: Callable[[DataServer], Claim | None]) -> list[object]:
        """Each present directory's answer; hung ones are not waited for longer than usual."""
        servers = [server for server in self._servers.values() if not server.absent]
        if not servers:
            return []
        with giving_up():
            results = await outcomes([(server.workers, call, (server,)) for server in servers])
        for error in results:
            if isinstance(error, FsError):
                _log.info("who has the store is not known there: %s", error)
            elif isinstance(error, BaseException):
                raise error
        return results

    async def run(self) -> None:
        """Renew the claims, and look whether somebody has taken the right over."""
        while not self.ended:
            await trio.sleep(INTERVAL_S)
            self._renew()

    def _renew(self) -> None:
        """A thread each; a directory that did not answer last time is left alone."""
        renewals = self._mine.renewals + 1
        self._mine = replace(self._mine, renewals=renewals, time_s=time.time())
        for server in self._servers.values():
            if not (server.absent or server.hangs or server.id in self._renewing):
                self._renewing.add(server.id)
                server.workers.start(
                    partial(self._renewed, server.id), server.put_claim, self._mine, False
                )

    def _renewed(self, server_id: int, result: Claim | BaseException | None) -> None:
        self._renewing.discard(server_id)
        if isinstance(result, Claim):
            self._end(f"the store was taken over by {_owner(result)}; nothing is written any more")
        elif isinstance(result, BaseException) and not isinstance(result, FsError):
            _log.error("a claim is not renewed", exc_info=result)

    def give_back(self) -> None:
        """By a last claim, of a new epoch: copies of the metadata made in use are overtaken."""
        epoch, renewals = self._mine.epoch, self._mine.renewals + 1
        if not self._servers.read_only:
            try:
                self._lock.advance(epoch + 1, self._mine.token)
                epoch, renewals = epoch + 1, 0
            except FsError as error:
                _log.info("copies of the metadata cannot be told from these: %s", error)
        mine = replace(self._mine, epoch=epoch, held=False, renewals=renewals, time_s=time.time())
        for server in self._servers.values():
            if not (server.absent or server.hangs):
                server.workers.post(_give_back, server, mine)


def _give_back(server: DataServer, claim: Claim) -> None:
    try:
        server.put_claim(claim, True)
    except FsError as error:
        _log.info("the claim stays: %s", error)


# --- without an open store ---


def require_unused(directories: Iterable[str]) -> None:
    """Check that nobody renews a claim there. Blocks, ``WATCH_S`` for a held one. Raises
    StoreBusy."""
    paths = list(directories)

    async def read() -> list[Claim]:
        return _ask_each(read_claim, paths)

    if (owner := trio.run(_seen_alive, read)) is not None:
        raise StoreBusy(
            f"{owner.metadata}: the store is in use by {_owner(owner)}. Unmount it there"
        )


def follow(meta: str, directories: Iterable[str]) -> None:
    """Let new metadata in ``meta`` be used after the owner has given the store back; nobody loses a
    right. Durable. Blocks. Raises StoreBusy, NoSpace, Unavailable."""
    lock = OwnerLock(meta, "")
    try:
        newest = max(_ask_each(read_claim, directories), key=lambda claim: claim.age, default=None)
        if newest is not None:
            lock.advance(newest.epoch, newest.token)
    finally:
        lock.release(orderly=True)


def end_rights(meta: str, store: str, directories: Iterable[str], *, wait: bool) -> None:
    """Make new metadata in ``meta`` the store's; users of others lose their right. Durable. Blocks;
    with ``wait`` until a live owner has noticed. Raises StoreBusy, NoSpace, Unavailable."""
    places = list(directories)
    claims = _ask_each(read_claim, places)
    lock = OwnerLock(meta, "")
    try:
        epoch = 1 + max([lock.epoch, *(claim.epoch for claim in claims)])
        mine = replace(_claim_of(meta, ""), epoch=epoch, held=False, time_s=time.time())
        lock.advance(epoch, mine.token)
        _ask_each(_put_as_own, places, mine, store)
    finally:
        lock.release(orderly=True)
    if wait and any(claim.held for claim in claims):
        time.sleep(WATCH_S)


def _ask_each(
    function: Callable[..., Claim | None] | Callable[..., None],
    directories: Iterable[str],
    *args: object,
) -> list[Claim]:
    """The claims found in directories, at once, without failing or silent ones. Blocks."""
    paths = list(directories)
    answers = ask_all(
        [(Patience(), function, (storage_at(path), *args)) for path in paths], _ANSWER_S
    )
    for path, answer in zip(paths, answers, strict=True):
        if isinstance(answer, OSError | FsError | StoreError):
            _log.info("who has the store is not known at %s: %s", path, answer)
        elif isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Claim)]


def _put_as_own(storage: Storage, claim: Claim, store: str) -> None:
    if storage.read_marker().store == store:
        put_claim(storage, claim, durable=True)


# --- what claims mean ---

_Read = Callable[[], Awaitable[list[Claim]]]


async def _require_right(
    read: _Read, mine: Claim, lock: OwnerLock, force: bool
) -> tuple[Claim | None, int]:
    """The claim, maybe in use, to take over, or None, and the next epoch. ``lock`` knows the last
    claim of these metadata. Raises StoreBusy, StoreError."""
    claims = await read()
    if not claims:
        return None, lock.epoch + 1
    latest = max(claim.epoch for claim in claims)
    claims = [claim for claim in claims if claim.epoch == latest]
    newest = max(claims, key=lambda claim: (claim.held, claim.renewals))
    is_over = not newest.held or (newest.place, newest.boot) == (mine.place, mine.boot)
    if latest < lock.epoch:  # a process that was about to take the store over has died
        return None if is_over else newest, lock.epoch + 1
    if latest == lock.epoch:
        if newest.held and is_over or any(claim.token == lock.token for claim in claims):
            is_same_place = newest.place[1:] == mine.place[1:]
            if is_over or (is_same_place and await _seen_alive(read) is None):
                return None, latest + 1
    if force:
        return newest if newest.held else None, latest + 1
    if newest.held:
        raise StoreBusy(_describe(newest, mine))
    raise StoreError(
        f"{mine.metadata}: these metadata are older than those in {newest.metadata} on host "
        f"{newest.host}, with which the store was used until {_time(newest)}; use those. aifs "
        "mount --force (or fsck --force) uses these all the same: what was changed since is lost"
    )


async def _seen_alive(read: _Read) -> Claim | None:
    """A held claim that is renewed while watched, or None."""
    before = [claim for claim in await read() if claim.held]
    if not before:
        return None
    _log.info("looking for %g s whether %s lives", WATCH_S, _owner(before[0]))
    await trio.sleep(WATCH_S)
    seen: dict[str, int] = {}
    for claim in before:  # a server that has failed lags behind
        seen[claim.token] = max(claim.renewals, seen.get(claim.token, 0))
    later = [claim for claim in await read() if claim.held]
    return next((one for one in later if one.renewals > seen.get(one.token, -1)), None)


def place_of(meta: str) -> tuple[int, int, int]:
    """Tells a metadata directory from a copy; the first number changes at a restart."""
    status = os.stat(os.path.join(meta, MARKER_NAME))
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _claim_of(meta: str, mountpoint: str) -> Claim:
    return Claim(
        epoch=0,
        token=str(uuid.uuid4()),
        host=socket.gethostname(),
        pid=os.getpid(),
        mountpoint=mountpoint,
        metadata=meta,
        place=place_of(meta),
        boot=files.boot_id(),
    )


def _describe(owner: Claim, mine: Claim) -> str:
    return (
        f"{mine.metadata}: the store is in use by {_owner(owner)}. Unmount it there; only if that "
        "host is known to be dead: aifs mount --force, or aifs fsck --force"
    )


def _owner(claim: Claim) -> str:
    where = f", mounted at {claim.mountpoint}" if claim.mountpoint else ""
    return (
        f"pid {claim.pid} on host {claim.host}{where}, with the metadata in {claim.metadata} (its "
        f"right was renewed last at {_time(claim)}, by the clock of {claim.host})"
    )


def _time(claim: Claim) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(claim.time_s))
