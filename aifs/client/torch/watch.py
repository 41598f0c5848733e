"""Waiting for other ranks of torch.distributed, and knowing which of them is to blame when that is
in vain.

If a rank is missing in a collective, it fails in the ranks that were to hear from it, and lasts
until the time-out of the process group in all others. So a rank that sees a failure says so in the
store of the process group, which all read while they wait. Then each rank answers there; ranks that
do not are named."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.checkpoints.publishing import name_ranks

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
    """One collective undertaking, for which each rank of ``group`` makes one; ``what``: for
    messages.
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
        """Run ``work`` in another thread, where it may wait for other ranks; returns its result.
        Raises GatherError if one of them has failed or ended; then ``work`` may go on until the
        process group's time is over. Raises the errors of ``work``, except those of the process
        group."""
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
        """That it has failed, and that this rank is there."""
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
