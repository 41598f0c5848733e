"""All epochs that are read here, and the work for them. Readers say again and again what they
read, by ``order``, as a call or an attribute (datasets/ahead.py has the words); a reader that says
nothing for EXPIRES_S reads no more.

A file is brought by staging it, with the rules of staging and by its code: a clean copy, which
counts if nothing has changed meanwhile. What is decided here is which file, and when. Nobody is
ever worse off for it than if the reader had opened the files by himself:

- he may read each of them, by its mode and those of the directories above, at that time;
- room is taken only below the mark at which eviction begins, and while nobody waits for room; what
  is above is for writers. Clean copies give way as they do to any staging, the least recently used
  first, but before these what an epoch has used up;
- what is kept for readers that have not come to it is bounded: all epochs together have what is
  below the low mark (``BurstTier.kept_ahead``), each an equal part of it, and no more than it asks
  for.
"""

from typing import Any

import trio

from aifs.burst.tier import BurstTier
from aifs.core.errors import Busy, FsError, Invalid, NotADirectory, NotFound, NotSupported
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, Work
from aifs.datasets.ahead import FileNeed, parse
from aifs.datasets.index import INDEX_NAME
from aifs.datasets.sequence import EpochOrder
from aifs.files import rights
from aifs.files.asks import DIRECTORY, Hint, HintCall
from aifs.files.file_io import FileIO
from aifs.files.permissions import asker_of
from aifs.files.services import Services
from aifs.files.types import CallerLike
from aifs.layout.hint import DEFAULT_POLICY
from aifs.meta import namespace
from aifs.meta.kv import ReadTransaction
from aifs.reads.followed import FollowedEpoch
from aifs.upkeep.evict import Evictor

_log = logger(__name__)

EXPIRES_S = 60.0

WORKERS = 4
"""Files that are brought at a time."""

_EPOCHS_MAX, _OF_USER_MAX = 16, 4
"""How many are followed; and of one user who is not root. Each may keep an index in memory."""

_Key = tuple[int, int, EpochOrder, int]
"""Directory, user, order, world."""


class Epochs:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        tier: BurstTier,
        evictor: Evictor,
    ) -> None:
        self._engine = services.engine
        self._io = io
        self._tier = tier
        self._evictor = evictor
        self._upkeep = services.upkeep
        self._options = services.options
        self._epochs: dict[_Key, FollowedEpoch] = {}
        """The user that has had a file brought last is the last."""
        self._choosing = trio.Lock()
        """Held by who looks what is next."""
        self._files = 0
        """How many have been brought since the mount."""

    # --- what is said ---

    async def order(self, ino: int, text: str, caller: CallerLike) -> None:
        """Readers of the dataset in a directory say what they read; '': all of this user's have
        ended. Raises Invalid, NotADirectory, NotSupported, ReadOnly; Busy if too many epochs are
        read."""
        self._options.require_writable()
        inode = await self._engine.view(namespace.get_inode, ino)
        if not inode.is_dir:
            raise NotADirectory()
        if not text:
            for key in [key for key in self._epochs if key[:2] == (ino, caller.uid)]:
                del self._epochs[key]
            return
        said = parse(text)
        if not self._tier.has_devices:
            raise NotSupported("the store has no burst tier")
        await self._engine.view(_require_index, ino)
        key = (ino, caller.uid, said.order, said.world)
        epoch = self._epochs.get(key)  # after all waiting: others begin the same one
        if epoch is None:
            if said.row is None:
                return
            self._require_few(caller.uid)
            epoch = self._epochs[key] = FollowedEpoch(ino, asker_of(caller), said)
        epoch.hear(said, trio.current_time())
        self._upkeep.at(Work.AHEAD, epoch.ready_s)

    HINTS = (
        Hint(
            "order",
            DIRECTORY,
            "epochs of the dataset in it that are read, and what is there ahead of the readers",
            rights.lister,
            rights.lister,  # the kernel asks for write permission before setxattr(2) besides
            get=lambda epochs, ask: epochs.tell(ask.ino, ask.caller),
            set=lambda epochs, ask: epochs.order(ask.ino, ask.text, ask.caller),
            call=HintCall(
                rights.lister,
                lambda epochs, ask: epochs.order(ask.ino, ask.fields.get("order", ""), ask.caller),
                {"order": str},
                "An epoch of the dataset in the directory is read in this order, and what comes "
                "next is brought into the burst tier. order: as the attribute is set, "
                "'seed=7,epoch=1,world=8,rank=3,done=1000'. To be said again within a minute, with "
                "how far it is. EINVAL: no order, or no index of a dataset there; EBUSY: too many "
                "epochs are read; EOPNOTSUPP: there is no burst tier.",
            ),
        ),
    )

    def _require_few(self, uid: int) -> None:
        theirs = sum(key[1] == uid for key in self._epochs)
        if len(self._epochs) >= _EPOCHS_MAX or (uid and theirs >= _OF_USER_MAX):
            raise Busy("too many epochs are read already; those that nobody reads end in a minute")

    def tell(self, ino: int, caller: CallerLike) -> dict[str, Any]:
        """The epochs of the dataset in a directory; names of files to their users alone. {}: there
        are none."""
        limit = self._limit()
        found = []
        for (directory, uid, *_), epoch in self._epochs.items():
            if directory == ino:
                told = epoch.tell(limit)
                if caller.uid in (0, uid):
                    told["error"] = epoch.error
                found.append(told)
        return {"epochs": found} if found else {}

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows. ``waiting``: how many epochs have readers who have come to
        files that are not there yet."""
        epochs = self._epochs.values()
        return {
            "epochs": len(epochs),
            "kept_files": sum(len(epoch.copies) for epoch in epochs),
            "kept_bytes": sum(epoch.kept_bytes for epoch in epochs),
            "brought_files": self._files,
            "waiting": sum(epoch.is_late for epoch in epochs),
        }

    def _limit(self) -> int:
        """Bytes for each."""
        return self._tier.kept_ahead // max(1, len(self._epochs))

    # --- in the background ---

    async def work(self) -> float:
        """Bring files as long as there are any; see Upkeep."""
        while (found := await self._next()) is not None:
            if not await self._bring(*found):
                return NEVER_S  # until there is room
        now_s = trio.current_time()
        due_s = [epoch.due_s(now_s, EXPIRES_S) for epoch in self._epochs.values()]
        return max(0.0, min(due_s, default=NEVER_S) - now_s)

    async def _next(self) -> tuple[FollowedEpoch, FileNeed] | None:
        async with self._choosing:
            for key, epoch in list(self._epochs.items()):
                now_s = trio.current_time()
                epoch.forget_readers(before_s=now_s - EXPIRES_S)
                if self._epochs.get(key) is not epoch:
                    continue  # it has ended meanwhile
                if not epoch.is_read:
                    del self._epochs[key]
                    continue
                if now_s < epoch.ready_s:
                    continue
                if not epoch.is_loaded:
                    await self._load(epoch)
                self._let_go(epoch)
                need = await epoch.take(self._limit())
                if need is not None:
                    if self._epochs.pop(key, None) is not None:
                        self._epochs[key] = epoch
                    return epoch, need
        return None

    async def _load(self, epoch: FollowedEpoch) -> None:
        try:
            for copy_id in await epoch.load(self._engine, self._io):
                self._tier.touch(copy_id)  # what is needed last is evicted first
        except FsError as error:
            epoch.error = str(error)
            _log.info("an epoch is not read ahead: %s", error)

    def _let_go(self, epoch: FollowedEpoch) -> None:
        used = epoch.pop_used()
        if used:
            self._io.inodes.hear_of_uses()  # these were before
            for copy_id in used:
                if not any(copy_id in each.copies for each in self._epochs.values()):
                    self._tier.used_up(copy_id)

    async def _bring(self, epoch: FollowedEpoch, need: FileNeed) -> bool:
        """Have a file in the burst tier; False: there is no room for it as yet."""
        try:
            inode = await epoch.find(self._engine, self._io, need)
        except FsError as error:
            epoch.leave_out(need, str(error))
            return True
        if inode.copy is not None:
            self._tier.touch(inode.copy.id)
            epoch.settle(need, inode.copy.id)
            return True
        policy = inode.policy or DEFAULT_POLICY
        if inode.layout is None or policy.tier == "capacity":
            epoch.settle(need)
            return True
        if self._tier.admit_ahead(policy.tier, inode.space) is None:
            epoch.put_back(need)
            kept = set[int]().union(*(each.copies for each in self._epochs.values()))
            await self._evictor.make_room_ahead(inode.space, kept)
            return False
        self._upkeep.wake(Work.AHEAD)  # others may bring what comes after it
        await self._io.stager.stage(inode.ino, ahead=True)
        try:
            copy = (await self._engine.view(namespace.get_inode, inode.ino)).copy
        except NotFound:
            copy = None
        if copy is None:
            epoch.settle(need)  # the stager says why
        else:
            self._files += 1
            if not epoch.settle(need, copy.id, is_ours=True):
                self._tier.used_up(copy.id)
        return True


def _require_index(tx: ReadTransaction, directory: int) -> None:
    try:
        namespace.get_dentry(tx, directory, INDEX_NAME.encode())
    except NotFound:
        raise Invalid(
            "the directory has no index of a dataset; `aifs dataset index DIR` makes one"
        ) from None
