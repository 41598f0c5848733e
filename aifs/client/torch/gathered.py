"""All ranks of a process group read one file, or several as one: bytes come once from storage, and
from rank to rank across hosts.

On one host all read from the mount, which fetches bytes once. Of several hosts, one rank each takes
part in an exchange (``gather_files.plan``): it passes a piece on while it reads the next. Others
map its memory.
"""

import mmap
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import PathLike, name_ranks, plain
from aifs.client.startup.stages import stage
from aifs.client.torch.gather_files import (
    CHAIN,
    PIECE,
    READ,
    Files,
    FoundFiles,
    Range,
    SharedRead,
    Speeds,
    known_speeds,
    measure,
    parts_of,
    pieces,
    plan,
)
from aifs.core import files

Arrived = Callable[[int, int], None]
_Message = tuple[int, torch.Tensor, Range]
"""The other rank, whether what it gets is right (one byte), and which part of the file that is."""

_LOOKS, PAUSE_S = 20, 0.1
"""How often ranks look again that have found different files, and the pause before."""


class _Statement(NamedTuple):
    """The first message of each rank."""

    host: str
    """Which host it runs on: ranks of one host share memory."""
    names: Sequence[str]
    """Of the files that it has found."""
    identity: str
    """A digest that differs for other bytes in files of these names and sizes."""
    size: int
    """Bytes of these files together."""
    speeds: Speeds
    """How fast it has read before."""
    problem: str
    """Why it cannot go on; '' if it can."""


class _Offer(NamedTuple):
    """Memory of a process that others of its host may map."""

    pid: int
    fd: int
    device: int
    inode: int


@stage("gathered.read")
def read(
    path: PathLike,
    group: Any = None,
    into: Any = None,
    order: Sequence[Range] = (),
    *,
    arrived: Arrived = lambda begin, end: None,
    speeds: Speeds | None = None,
) -> memoryview:
    """The bytes of the file ``path`` in every rank of ``group`` (None: the default one), which all
    call this with the same arguments. Without torch.distributed it is just read.

    ``into``: a writable buffer of the file's size to read into; else the memory is private to this
    rank. ``order``: ranges, as (begin, end), that are wanted first. ``arrived``: called with each
    range that is there (in ``into``), in this order, by another thread; in a rank that shares
    another one's memory, when all is there. ``speeds``: of this host; as measured, if not given.
    Raises in all ranks if one fails or ends: GatherError, which names it; then the process group
    cannot be used any more. Without a group: CheckpointError, OSError."""
    found = FoundFiles([plain(path)])
    return read_files(
        lambda: found, found.paths[0], group, into, order, arrived=arrived, speeds=speeds
    )


def read_files(
    find: Callable[[], FoundFiles],
    what: str,
    group: Any = None,
    into: Any = None,
    order: Sequence[Range] = (),
    *,
    arrived: Arrived = lambda begin, end: None,
    speeds: Speeds | None = None,
) -> memoryview:
    """``read`` for the files that ``find`` tells, in order; it may raise CheckpointError, OSError.
    All ranks must find equal names, sizes and identity. ``what``: for messages."""
    if not dist.is_initialized():
        return read_alone(find, into, order, arrived)
    return _Reading(find, what, group, into, order, arrived).run(speeds or known_speeds())


def read_alone(
    find: Callable[[], FoundFiles],
    into: Any = None,
    order: Sequence[Range] = (),
    arrived: Arrived = lambda begin, end: None,
) -> memoryview:
    """The same for this process alone."""
    with Files(find().paths) as source:
        _check(into, source.size)
        content = _memory(into, source.size)
        _read(source, content, order, arrived)
        return content


class _Reading:
    """One rank's part."""

    def __init__(
        self,
        find: Callable[[], FoundFiles],
        what: str,
        group: Any,
        into: Any,
        order: Sequence[Range],
        arrived: Arrived,
    ) -> None:
        self._find = find
        self._what = what
        self._group = group
        self._into = into
        self._order = order
        self._arrived = arrived
        self._watch = Watch(group, what)
        self._device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        self._problem = ""

    def run(self, speeds: Speeds) -> memoryview:
        with ExitStack() as stack:
            source, stated = self._open(stack, speeds)
            size = source.size
            hosts = [one.host for one in stated]
            shared = plan(size, hosts, [one.speeds for one in stated])
            leader = hosts.index(host_name())
            if shared.way == READ:
                content = self._read_all(source, size)
            elif leader == self._watch.rank:
                exchange = partial(
                    self._chain if shared.way == CHAIN else self._ring, shared, source
                )
                content = self._lead(exchange, size, is_alone=hosts.count(host_name()) == 1)
            else:
                mapped = map_offer(self._tell(None)[leader], size)
                # None: it does not see that process.
                content = self._read_all(source, size) if mapped is None else mapped
                self._agree(self._tell(self._problem))
                if mapped is not None:
                    content = _placed(content, self._into)
                    for part in pieces(size, self._order, PIECE):
                        self._arrived(*part)
                return content
            self._agree(self._tell(self._problem))
            return content

    def _open(self, stack: ExitStack, speeds: Speeds) -> tuple[Files, Sequence[_Statement]]:
        """The files that all ranks find alike, and first messages. They look again if a name, as
        the latest checkpoint's, just changed."""
        for is_last in (False,) * _LOOKS + (True,):
            found, source = FoundFiles([]), Files([])
            with self._noting():
                found = self._find()
                source = stack.enter_context(Files(found.paths))
                _check(self._into, source.size)
            stated = self._tell(
                _Statement(
                    host_name(), found.names, found.identity, source.size, speeds, self._problem
                )
            )
            self._agree([one.problem for one in stated])
            differences = [_difference(one, stated[0]) for one in stated]
            if not any(differences):
                break
            if is_last:
                rank, problem = next(
                    (rank, problem) for rank, problem in enumerate(differences) if problem
                )
                raise GatherError(f"{self._what}: rank {rank} {problem}", rank)
            source.close()
            time.sleep(PAUSE_S)
        return source, stated

    # --- with the others ---

    def _tell(self, mine: Any) -> list[Any]:
        """Send an object to all ranks; returns all."""

        def gather() -> list[Any]:
            everyone: list[Any] = [None] * self._watch.size
            dist.all_gather_object(everyone, mine, self._group)
            return everyone

        return self._watch.run(gather)

    def _agree(self, problems: Sequence[str]) -> None:
        for rank, problem in enumerate(problems):
            if problem:
                raise GatherError(f"{self._what}: rank {rank}: {problem}", rank)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note errors inside for the other ranks, which fail, too."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            self._problem = self._problem or getattr(error, "strerror", None) or str(error)

    # --- the bytes ---

    def _read_all(self, source: Files, size: int) -> memoryview:
        content = _memory(self._into, size)

        def work() -> None:
            with self._noting():
                _read(source, content, self._order, self._arrived)

        self._watch.run(work)
        return content

    def _lead(
        self, exchange: Callable[[memoryview], None], size: int, is_alone: bool
    ) -> memoryview:
        """``exchange`` with other hosts, into memory that ranks here map."""
        if is_alone:
            self._tell(None)
            content = _memory(self._into, size)
            self._watch.run(partial(exchange, content))
            return content
        fd = os.memfd_create("aifs-gather")
        try:
            files.truncate(fd, size)
            status = os.fstat(fd)
            self._tell(_Offer(os.getpid(), fd, status.st_dev, status.st_ino))
            self._watch.run(partial(exchange, memoryview(mmap.mmap(fd, size))))
            if self._into is not None:  # there as each piece arrived
                return _memory(self._into, size)
            return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
        finally:
            files.close_file(fd)

    def _ring(self, shared: SharedRead, source: Files, content: memoryview) -> None:
        """A ring all-gather: each reads a part of each piece, and passes on its last."""
        ring, count, me = shared.ring, len(shared.ring), shared.ring.index(self._watch.rank)
        todo = list(pieces(len(content), self._order, PIECE))
        with self._reading(source, content, shared.reads_of(self._watch.rank, todo)) as states:
            for (begin, end), mine in zip(todo, states, strict=True):
                parts = parts_of((begin, end), count)
                good = [mine.clone() for _ in ring]  # those of others are overwritten
                for step in range(count - 1):
                    sent, got = (me - step) % count, (me - step - 1) % count
                    outgoing = (ring[(me + 1) % count], good[sent], parts[sent])
                    self._swap(content, outgoing, (ring[me - 1], good[got], parts[got]))
                if not all(good):
                    return  # all know that
                self._arrive(content, begin, end)

    def _chain(self, shared: SharedRead, source: Files, content: memoryview) -> None:
        """The first reads all; each passes a piece on while it gets the next."""
        ring, me = shared.ring, shared.ring.index(self._watch.rank)
        before = ring[me - 1] if me else None
        behind = ring[me + 1] if me + 1 < len(ring) else None
        todo = list(pieces(len(content), self._order, PIECE))
        with self._reading(source, content, shared.reads_of(self._watch.rank, todo)) as states:
            outgoing, good = None, torch.ones(1, dtype=torch.uint8)
            for part in (*todo, None):
                incoming = None
                if part is None or not good:
                    part = None
                elif before is None:
                    good = next(states)
                else:
                    good = torch.ones(1, dtype=torch.uint8)
                    incoming = (before, good, part)
                self._swap(content, outgoing, incoming)
                outgoing = None if part is None or behind is None else (behind, good, part)
                if part is None:
                    return
                if good:
                    self._arrive(content, *part)

    def _arrive(self, content: memoryview, begin: int, end: int) -> None:
        if self._into is not None:
            target = _memory(self._into, len(content))
            if target.obj is not content.obj:  # it is in the memory that others map
                target[begin:end] = content[begin:end]
        self._arrived(begin, end)

    @contextmanager
    def _reading(
        self, source: Files, content: memoryview, parts: Sequence[Range]
    ) -> Iterator[Iterator[torch.Tensor]]:
        """Yields for each part whether it was read; the next is read meanwhile."""

        def fill(begin: int, end: int) -> torch.Tensor:
            with self._noting():
                if not self._problem:
                    source.fill(content, begin, end)
            return torch.tensor([not self._problem], dtype=torch.uint8)

        def states() -> Iterator[torch.Tensor]:
            ahead = deque(pool.submit(fill, *part) for part in parts[:1])
            for part in (*parts[1:], None):
                if not ahead:
                    return
                done = ahead.popleft().result()
                if part is not None:
                    ahead.append(pool.submit(fill, *part))
                yield done

        with ThreadPoolExecutor(1, "aifs-gather-read") as pool:
            yield states()

    def _swap(
        self, content: memoryview, outgoing: _Message | None, incoming: _Message | None
    ) -> None:
        """Pass one part on, and get another."""
        begin_s, operations, got = time.monotonic(), [], []
        for message, function in ((outgoing, dist.isend), (incoming, dist.irecv)):
            if message is None:
                continue
            rank, state, (begin, end) = message
            data = [torch.frombuffer(content[begin:end], dtype=torch.uint8)] if begin < end else []
            for tensor in (state, *data):
                held = tensor if self._device == "cpu" else tensor.to(self._device)
                peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
                operations.append(dist.P2POp(function, held, peer, self._group))
                if message is incoming and held is not tensor:
                    got.append((tensor, held))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for tensor, held in got:
            tensor.copy_(held)
        if incoming is not None:
            measure("network", incoming[2], begin_s)


# --- memory ---


def _check(into: Any, size: int) -> None:
    """Raises CheckpointError if ``into`` does not fit."""
    if into is not None and memoryview(into).nbytes != size:
        raise CheckpointError(f"the buffer has {memoryview(into).nbytes} bytes, the file {size}")


def _memory(into: Any, size: int) -> memoryview:
    if into is not None:
        return memoryview(into).cast("B")
    return memoryview(mmap.mmap(-1, size) if size else bytearray())


def _placed(content: memoryview, into: Any) -> memoryview:
    if into is None:
        return content
    target = memoryview(into).cast("B")
    if content.obj is not target.obj:
        target[:] = content
    return target


def map_offer(offer: _Offer, size: int) -> memoryview | None:
    """The memory of another process, mapped; None if it cannot be mapped."""
    try:
        fd = files.open_file(f"/proc/{offer.pid}/fd/{offer.fd}", write=False)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size) == (offer.device, offer.inode, size):
            return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
    finally:
        files.close_file(fd)
    return None


# --- what is said and read ---


def _difference(one: _Statement, other: _Statement) -> str:
    """How a rank's files differ from rank 0's; or ""."""
    if one.size != other.size:
        return f"finds {one.size} bytes, rank 0 {other.size}"
    if (one.names, one.identity) != (other.names, other.identity):
        return "finds other files than rank 0"
    return ""


def host_name() -> str:
    return files.boot_id()


def _read(source: Files, content: memoryview, order: Sequence[Range], arrived: Arrived) -> None:
    for begin, end in pieces(len(content), order, PIECE):
        source.fill(content, begin, end)
        arrived(begin, end)


_LOOK_S = 0.1
ANSWER_S = 5.0

T = TypeVar("T")

_calls: Counter[tuple[int, ...]] = Counter()


class GatherError(CheckpointError):
    """A file was not read, in any rank. ``rank``: the first one at fault; None: not known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Watch:
    """One collective work, made by each rank of ``group``; ``what``: for messages.

    A missing rank fails ranks that were to hear from it, and blocks others until the process
    group's time-out. So a rank that sees a failure notes it in the group's store, which all read
    while they wait. Then each answers there; ranks that do not are named.
    """

    def __init__(self, group: Any, what: str) -> None:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        _calls[ranks] += 1
        self.rank, self.size = dist.get_rank(group), len(ranks)
        self._what = what
        store: Any = dist.distributed_c10d._get_default_store()  # there is no other way to it
        with suppress(AttributeError, RuntimeError):
            store = store.clone()  # the process group waits in it
        self._store = dist.PrefixStore(f"aifs/{'-'.join(map(str, ranks))}/{_calls[ranks]}", store)

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread, where it may wait for ranks; returns its result. Raises
        GatherError if a rank has failed or ended (``work`` may go on until the group's time-out),
        and errors of ``work`` except the process group's."""
        future: Future[T] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(
            target=_settle, args=(future, work, device), name="aifs-gather", daemon=True
        ).start()
        try:
            while not wait([future], timeout=_LOOK_S).done:
                if self._has_failed():
                    raise self._blame("")
            return future.result()
        except GatherError:
            raise
        except RuntimeError as error:  # as those of torch.distributed are
            raise self._blame(str(error).split("\n")[0]) from error
        except BaseException as error:
            with suppress(RuntimeError):
                self._say(f"rank {self.rank}: {error}")
            raise

    def _has_failed(self) -> bool:
        try:
            return self._store.check(["failed"])
        except RuntimeError:  # its process has ended
            return True

    def _say(self, text: str) -> None:
        """Note the failure, and that this rank is there."""
        if text or not self._store.check(["failed"]):
            self._store.set("failed", text)
        self._store.set(f"here/{self.rank}", "")

    def _blame(self, text: str) -> GatherError:
        try:
            self._say(text)
            missing = set(range(self.size)) - {self.rank}
            end = time.monotonic() + ANSWER_S
            while missing and time.monotonic() < end:
                missing = {rank for rank in missing if not self._store.check([f"here/{rank}"])}
                time.sleep(_LOOK_S / 10)
            text = self._store.get("failed").decode() or text
        except RuntimeError as error:
            return GatherError(
                f"{self._what}: the process that holds the group's store has ended: {error}".split(
                    "\n"
                )[0]
            )
        if not missing:
            return GatherError(f"{self._what}: the ranks do not hear each other: {text}")
        names = name_ranks(sorted(missing))
        return GatherError(
            f"{self._what}: {names} did not answer, and may have ended ({text})", min(missing)
        )


def _settle(future: Future[Any], work: Callable[[], Any], device: int | None) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
        future.set_exception(error)
