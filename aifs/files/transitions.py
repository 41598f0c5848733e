"""The state machine of a file's bytes: no other module changes where they are.

A *form* says where the bytes of a file are: in its record, in objects or chunks on the capacity
tier, in a burst copy alone, or on the capacity tier with a clean copy. Each change
(``change_form``) has these steps:

1. the new objects are on record as garbage, under an id that was never used;
2. they are made, and durable, from a plain value with all that is needed (burst/making);
3. with the file's gate held alone, one transaction *flips* the file, if it has not been changed
   meanwhile, and core takes the new form over before the gate is left;
4. replaced objects, and those made in vain, are garbage for the collector.

A transaction may let other tasks run before and after its commit. So a task that changes the form
or the dirty mark, or needs them to stay, holds the gate; a task that writes a file's record holds
``recording`` until core says what the record says. Several gates are entered in the order of inode
numbers; a task that waits for a gate holds no other one.
"""

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.making import Made, Making, NewObjects, Target, carry_out
from aifs.burst.pool import Movers
from aifs.burst.remote import Homes
from aifs.burst.tier import BurstTier
from aifs.core import clock
from aifs.core.errors import Unavailable
from aifs.data.objects.object_set import Bytes
from aifs.files.collector import Collector
from aifs.files.containers import LISTED_AT_ONCE, Containers
from aifs.files.damage import Damage
from aifs.files.open_inode import Gate, OpenInode
from aifs.files.places import Places
from aifs.layout.interleaved import Extent
from aifs.layout.striped import Striped
from aifs.meta import forms, moves, namespace
from aifs.meta.chunks import NOTHING_LOST
from aifs.meta.forms import FormChange
from aifs.meta.kv import Engine, Result, Transaction
from aifs.meta.moves import SetRecord
from aifs.meta.records import Copy, Inode


@dataclass(slots=True)
class Flip:
    """One file, and what becomes of it."""

    file: OpenInode
    form: dict[str, Any]
    """The changed fields of its inode: of its form, ``size`` and ``blocks``. Others stay as they
    are."""
    record: dict[str, Any] = field(default_factory=dict)
    """What else is recorded: fields of FormChange."""
    objects: Bytes | None = None
    """What new objects are read and written through; None: it is made from the layout."""
    copy: BurstCopy | None = None
    """The copy that the file did not have."""

    def becomes(self) -> Inode:
        """The inode as it will be. New objects are its own, even if the old ones are shared."""
        before = self.file.inode
        after = before.but(**self.form)
        if after.layout is None or after.oid != before.oid:
            after.named = 0
        return after


class Transitions:
    """Used from one trio thread. Callers hold the gate alone, unless a method says otherwise."""

    def __init__(
        self,
        engine: Engine,
        tier: BurstTier,
        collector: Collector,
        damage: Damage,
        containers: Containers,
        objects_of: Callable[[Inode, int], Bytes | None],
        homes: Homes,
        places: Places,
    ) -> None:
        """``objects_of``: the bytes on the capacity tier, without the columns of a mask."""
        self._homes = homes
        self._places = places
        self._engine = engine
        self._tier = tier
        self._collector = collector
        self._damage = damage
        self._containers = containers
        self._objects_of = objects_of
        self._being_made: set[int] = set()

    # --- changes of form ---

    async def change_form(
        self,
        file: OpenInode,
        describe: Callable[[], Awaitable[Making]],
        movers: Movers,
        becomes: Callable[[Made], Flip],
        holds: Callable[[], bool],
        is_alone: bool = False,
    ) -> bool:
        """Make what ``describe`` says, and flip the file to what it ``becomes``; whether it was
        done.

        ``holds``: whether the file is what it was before; asked meanwhile, and when nobody can
        change it. ``is_alone``: the caller holds the gate. ``describe`` says the same target each
        time, and where the bytes lie then: chunks may have moved. Raises errors of ``describe`` and
        ``carry_out``, NoSpace and Unavailable; then the file is what it was.
        """
        if not holds():
            return False
        making = await describe()
        async with self.making(making.target):
            made = await self._carry_out(making, describe, movers, holds)
            if made is None:
                return False
            async with nullcontext() if is_alone else alone([file]):
                if holds():
                    await self.flip([becomes(made)])
                    return True
        return False

    async def _carry_out(
        self,
        making: Making,
        describe: Callable[[], Awaitable[Making]],
        movers: Movers,
        holds: Callable[[], bool],
    ) -> Made | None:
        """None if the file is not what it was when it was described."""
        while holds():
            try:
                return await movers.carry_out(carry_out, making, lambda: not holds())
            except Unavailable:
                if not holds():
                    break
                before, making = making, await describe()
                if making == before:
                    raise
        return None

    @asynccontextmanager
    async def making(self, target: Target) -> AsyncIterator[None]:
        """Let ``target`` be made within the block. It is garbage afterwards, unless flipped.
        Callers need not hold the gate."""
        await self.begin_making([target])
        try:
            yield
        finally:
            self.end_making(_objects_of(target).oid)

    async def begin_making(self, targets: Sequence[Target]) -> None:
        """These may be made until ``end_making``: they are on record as garbage."""
        garbage = [_objects_of(target) for target in targets]
        await self._engine.transact(forms.put_garbage, garbage)
        self._being_made.update(oid for _, oid, _ in garbage)

    async def list_extents(
        self,
        oid: int,
        extents: Sequence[Extent],
        new: Collection[bytes],
        lost: Mapping[int, int],
    ) -> Sequence[Extent]:
        """Record a long chunk list ``oid`` beforehand, made until ``end_making``, so that the flip
        is short. Returns what the flip has to record. ``new``, ``lost``, errors:
        Containers.list_extents."""
        if len(extents) <= LISTED_AT_ONCE:
            return extents
        self._being_made.add(oid)
        await self._containers.list_extents(oid, extents, new, lost)
        return ()

    def end_making(self, oid: int) -> None:
        """Make garbage of what no flip has used, also if never begun. Does not block."""
        if oid in self._being_made:
            self._being_made.discard(oid)
            self._collector.add_garbage(oid)

    async def flip(
        self,
        flips: Sequence[Flip],
        lost: Mapping[int, int] = NOTHING_LOST,
        new: Collection[bytes] = (),
    ) -> None:
        """Flip files in one transaction, on record and in core.

        Their new objects are durable; the old ones are garbage on return. ``lost`` and ``new``: see
        forms.change_forms. Raises NoSpace, Unavailable, Stale as that does; then nothing has
        changed.
        """
        await self._flip(forms.grow_forms, flips, lost, new)

    async def reduce(self, flip: Flip) -> None:
        """As ``flip``, of a file that only gives something up: works without space for metadata."""
        await self._flip(forms.change_forms, [flip], NOTHING_LOST, ())

    async def _flip(
        self,
        function: Callable[..., list[int]],
        flips: Sequence[Flip],
        lost: Mapping[int, int],
        new: Collection[bytes],
    ) -> None:
        files = [flip.file for flip in flips]
        if self._engine.host:
            function = _unless_overtaken(files, function)
        async with _recording(files):
            unsaved = [file for file in files if file.unsaved]
            for file in unsaved:
                file.unsaved = False  # what changes while we wait is not saved yet
            changes = [FormChange(flip.becomes(), **flip.record) for flip in flips]
            if self._engine.host:
                befores = [flip.file.inode.but() for flip in flips]
                changes = [c._replace(before=b) for c, b in zip(changes, befores, strict=True)]
            try:
                garbage = await self._engine.transact(
                    function, changes, lost, new, clock.kernel_ns()
                )
            except BaseException:
                for file in unsaved:
                    file.unsaved = True
                raise
            for flip, change in zip(flips, changes, strict=True):
                self._adopt(flip, change)
        for oid in garbage:
            self._collector.add_garbage(oid)
        if any(change.unread or change.due for change in changes):
            self._damage.due()

    def _adopt(self, flip: Flip, change: FormChange) -> None:
        """The record says it; now core does."""
        file, after = flip.file, change.inode
        self._take_places(file)
        inode, before, was_in_burst = file.inode, file.objects, file.inode.in_burst
        if flip.objects is not None:
            file.objects, file.trimmed = flip.objects, True
        elif (after.layout, after.oid) != (inode.layout, inode.oid):
            file.objects, file.trimmed = self._objects_of(after, change.unread), False
        if before is not None and file.objects is not before:
            before.close()
        inode.layout, inode.oid, inode.data = after.layout, after.oid, after.data
        inode.named = after.named
        inode.copy, inode.size, inode.blocks = after.copy, after.size, after.blocks
        file.cached_at = 0
        if flip.copy is not None:
            self.attach(file, flip.copy)
            file.copy_is_durable = False
        self._adopt_mark(file, change.marked)
        self._being_made.discard(after.oid)
        copy = file.copy
        if copy is None:
            return
        self._being_made.discard(copy.id)
        if after.copy is None:
            self.detach(file)
            self._tier.evicted(copy.id)
        elif after.in_burst:
            self._tier.dirty(copy.id, copy.server, inode.space)
        elif was_in_burst or flip.copy is not None:
            self._tier.clean(copy.id, copy.server, inode.space)

    async def share(
        self, file: OpenInode, function: Callable[..., Inode | None], *args: Any
    ) -> Inode | None:
        """Clone a settled file by ``function`` (see clones.clone_file), which now shares its bytes.
        Returns the result."""
        if file.unsaved:
            await self.save(file)
        async with _recording([file]):
            clone = await self._engine.transact(function, *args)
            if clone is not None and file.inode.layout is not None:
                file.inode.named = file.inode.named_by
        return clone

    def follow(self, file: OpenInode, stored: Inode) -> bool:
        """Take over another host's record of a file that is not changed here. Whether the bytes lie
        elsewhere, or are others: then ``look_again`` is due. Neither blocks nor suspends.

        Bytes in the record are left: the holder of the gate may be using the old ones (B11).
        """
        inode = file.inode
        if (inode.size, inode.mtime_ns) != (stored.size, stored.mtime_ns):
            file.shown = None
        inode.size, inode.blocks, inode.mtime_ns = stored.size, stored.blocks, stored.mtime_ns
        # It may have been set back there. What is not on record may be an access of our programs.
        atime_ns = inode.atime_ns if file.unsaved else 0
        inode.atime_ns = max(atime_ns, stored.atime_ns)
        return not namespace.has_form_of(stored, inode)

    async def look_again(self, file: OpenInode) -> None:
        """Take over another host's form of the bytes, which nobody changes here, and the
        columns."""
        async with _recording([file]):
            stored, changer, unread = await self._engine.view(forms.load, file.inode.ino)
            if file.marked:
                return
            self._take_places(file)
            inode, before, copy = file.inode, file.objects, file.copy
            stays = copy is not None and stored.copy == copy.place
            stays = stays and (stored.in_burst or not file.home)
            if not stays:
                self.detach(file)
            namespace.take_bytes(inode, stored)
            file.objects, file.trimmed = self._objects_of(inode, unread), False
            if before is not None:
                before.close()
            if not stays:
                self.find_copy(file, changer)
            file.adopt(stored)
        file.shown = None

    # --- copies ---

    def find_copy(self, file: OpenInode, changer: int | None) -> None:
        """``file.inode`` is on record, with the dirty mark of ``changer`` (forms.load): find its
        home, and its copy that counts here. Does not suspend.

        A clean copy on another host is ignored: the file is read from the data servers. Before the
        first change here, ``ByHome`` asks that host to drop it.
        """
        inode = file.inode
        home = 0 if inode.copy is None else self._homes.of(inode.copy.server)
        file.cached_at = 0 if inode.in_burst else home
        file.marked = changer == 0
        if home and not inode.in_burst:
            home, inode.copy = 0, None
        file.home = home or changer or 0
        if inode.copy is None:
            return
        if home:
            file.copy = self._homes.open(inode.copy, inode.ino)
        else:
            self.attach(file, self._tier.open(inode.copy))

    def attach(self, file: OpenInode, copy: BurstCopy) -> None:
        """Give an open file this copy. Callers need not hold the gate if the record says so."""
        file.copy = copy
        self._tier.opened(copy)
        self._pin(file, copy)

    def adopt_new(self, file: OpenInode, copy: BurstCopy) -> None:
        """The file has just been created with its copy."""
        file.copy, file.marked = copy, True
        # That we ask makes the kernel give the next change another time, however soon it comes.
        file.copy_mtime_ns = copy.stat().st_mtime_ns
        self._tier.begun(copy)
        self._pin(file, copy)

    def _pin(self, file: OpenInode, copy: BurstCopy) -> None:
        policy = file.inode.policy
        if policy is not None and policy.tier == "pinned":
            self._tier.pinned(copy.id, True)

    def detach(self, file: OpenInode) -> None:
        """The file is not open any more, or has given up its copy. Does not block."""
        copy, file.copy = file.copy, None
        if copy is not None:
            if not file.home:
                self._tier.closed(copy)
            copy.close()

    # --- objects ---

    async def move_column(
        self, file: OpenInode, before: SetRecord, column: int, server: int, unread: int
    ) -> bool:
        """Read a column, which is whole on ``server``, there from now on (see moves.flip). Whether
        the record agrees."""
        async with _recording([file]):
            after = await self._engine.transact(moves.flip, before, column, server, unread)
            if after is not None:
                self._replace_objects(file, after.layout, unread & ~(1 << column))
        return after is not None

    async def lose_columns(self, file: OpenInode, oid: int, mask: int) -> bool:
        """Read the wrong columns of these objects no more. Whether that is on record (see
        moves.put_damaged).

        The gate is not needed, and must not be waited for: a rebuild could begin meanwhile. So
        readers that hold the gate ask after each read whether the objects were replaced.
        """
        async with _recording([file]):
            unread = await self._engine.transact(moves.put_damaged, oid, file.inode.ino, mask)
            if unread:
                layout = file.inode.objects
                assert layout is not None  # they are on record, and core says what that says
                self._replace_objects(file, layout, unread)
        return unread != 0

    async def view(self, file: OpenInode, function: Callable[..., Any], *args: Any) -> Any:
        """A view of the file's record, when core says the same. The gate is not needed."""
        async with _recording([file]):
            return await self._engine.view(function, *args)

    def _replace_objects(self, file: OpenInode, layout: Striped, unread: int) -> None:
        """Take over new places of objects, and the mask ``unread`` of columns. Does not suspend."""
        self._take_places(file)
        self._places.take_objects(file.inode.oid)  # clones of it have the same
        before, file.inode.layout = file.objects, layout
        file.objects, file.trimmed = self._objects_of(file.inode, unread), False
        if before is not None:
            before.close()

    # --- marks ---

    async def mark(self, file: OpenInode) -> None:
        """Mark the file: its bytes may change without notice on return. Lost checksums are lost
        durably."""
        had_checksums = await self._record(file, forms.put_mark, file.inode)
        self._adopt_mark(file, True)
        if had_checksums:
            with trio.CancelScope(shield=True):  # or a power cut brings them back, beside new bytes
                await self._engine.barrier()

    async def shrink(self, file: OpenInode, size: int) -> None:
        """Record durably, with a mark, that a file in objects has ``size`` bytes (I6)."""

        def put(tx: Transaction, inode: Inode) -> None:
            # Not in core before: another host's record of the file may come in until the commit.
            forms.put_mark(tx, inode.but(size=size))

        await self._record(file, put, file.inode)
        self._adopt_mark(file, True)
        file.inode.size, file.trimmed = size, False
        await self._engine.barrier()

    async def unmark(self, file: OpenInode) -> None:
        """All bytes are on stable storage, and nobody can change them without the gate."""
        await self._engine.transact(forms.remove_marks, (file.inode.ino,))
        file.marked = False

    def _adopt_mark(self, file: OpenInode, marked: bool) -> None:
        if marked:
            self._take_places(file)
            file.marked_seq = self._engine.seq  # of this mark's transaction, or of a later one
            if file.inode.objects is not None:  # else a clone may have them still
                self._tier.blocks.end(file.inode.oid)
        file.marked = marked

    def _take_places(self, file: OpenInode) -> None:
        file.placed = None
        self._places.take(file.inode.ino)

    # --- what the record holds of the bytes (the gate is held, shared or alone) ---

    async def put_inline(self, file: OpenInode, change: Callable[[bytes], bytes]) -> None:
        """Replace the bytes in the record by those of ``change``; they count when on record."""
        inode = file.inode
        file.changed(clock.kernel_ns())
        data, blocks = await self._record(file, forms.put_inline, inode, change)
        inode.data, inode.size, inode.blocks = data or None, len(data), blocks

    async def grow(self, file: OpenInode, size: int) -> None:
        """Make the file at least ``size`` bytes long, on record: a write below a size that is being
        recorded waits for that."""
        await self._record(file, forms.put_size, file.inode, size)
        file.inode.size = max(file.inode.size, size)

    # --- records ---

    async def save(self, file: OpenInode) -> None:
        """Record the in-core attributes. The gate is not needed."""
        if file.home:
            file.unsaved = False  # only when it was read, if at all
            return
        stripped, file.inode.stripped = file.inode.stripped, False
        try:
            await self._record(file, forms.put_attributes, file.inode, stripped)
        except BaseException:
            file.inode.stripped |= stripped
            raise

    async def change_attributes(
        self, file: OpenInode, change: Callable[[Inode, Any], None], argument: Any
    ) -> None:
        """Apply ``change(inode, argument)`` to the attributes on record and in core, or to neither.
        The gate is not needed."""
        inode = file.inode
        if file.home:  # the record knows its bytes better than we do
            args = forms.change_attributes, inode.ino, change, argument
            file.adopt(await self._record(file, *args))
            return
        after = inode.but()
        change(after, argument)
        if after.but(ctime_ns=inode.ctime_ns) == inode:
            # As fchmod(2) to the mode that it has, of which programs that unpack are fond: the
            # ctime is recorded with the other times of an open file.
            inode.ctime_ns, file.unsaved = after.ctime_ns, True
            return
        # The times of the bytes are core's: they change here first, so that no save in between puts
        # the old ones back on record.
        before, times = (inode.atime_ns, inode.mtime_ns), (after.atime_ns, after.mtime_ns)
        inode.atime_ns, inode.mtime_ns = times
        try:
            stored = await self._record(
                file, forms.change_attributes, inode.ino, change, argument, inode
            )
        except BaseException:
            if (inode.atime_ns, inode.mtime_ns) == times:
                inode.atime_ns, inode.mtime_ns = before
            raise
        file.adopt(stored)

    async def _record(self, file: OpenInode, function: Callable[..., Any], *args: Any) -> Any:
        """Run a transaction function that writes the file's record from core. Callers put its
        result into core before they suspend: tasks that wait to record run only then."""
        await file.recording.enter_alone()
        unsaved, file.unsaved = file.unsaved, False  # what changes while we wait is not saved yet
        try:
            return await self._engine.transact(function, *args)
        except BaseException:
            file.unsaved |= unsaved
            raise
        finally:
            file.recording.leave_alone()


def _unless_overtaken(
    files: Iterable[OpenInode], function: Callable[..., Result]
) -> Callable[..., Result]:
    """``function``, raising ChangedElsewhere at each run if another host has changed one of these
    files since now, whose gates are held alone: no record tells of changes in place."""
    changes = [(file, file.changes) for file in files]

    @wraps(function)
    def guarded(*args: Any) -> Result:
        for file, before in changes:
            if file.changes != before:
                raise forms.ChangedElsewhere(f"inode {file.inode.ino} has been changed elsewhere")
        return function(*args)

    return guarded


def _objects_of(target: Target) -> NewObjects:
    if isinstance(target, Copy):
        return NewObjects(0, target.id, Striped(1, (target.server,)))
    assert target is not None
    return target


class _Held:
    """Some gates, held alone within the block; entered in one order, so that no two tasks wait for
    each other."""

    __slots__ = ("_entered", "_gates")

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates
        self._entered = 0

    async def __aenter__(self) -> None:
        try:
            for gate in self._gates:
                await gate.enter_alone()
                self._entered += 1
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        for gate in self._gates[: self._entered]:
            gate.leave_alone()


def alone(files: Iterable[OpenInode]) -> _Held:
    """Hold the gates of all these alone."""
    return _Held([file.gate for file in in_order(files)])


def _recording(files: Iterable[OpenInode]) -> _Held:
    return _Held([file.recording for file in in_order(files)])


def in_order(files: Iterable[OpenInode]) -> list[OpenInode]:
    """As their gates are entered."""
    return sorted(files, key=lambda file: file.inode.ino)
