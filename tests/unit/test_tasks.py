"""core/tasks.py: several things at once."""

import pytest
import trio

from aifs.core.tasks import run_all


def test_only_some_of_many_run_at_a_time():
    # A rename of a directory with more unsynced files than the daemon may open failed for ever with
    # EMFILE.
    running = most = finished = 0

    async def one() -> None:
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        await trio.lowlevel.checkpoint()
        running -= 1
        finished += 1

    trio.run(lambda: run_all(*[one] * 1000))
    assert finished == 1000
    assert most <= 128


def test_the_rest_finish_when_one_fails():
    finished = []

    async def one(number: int) -> None:
        await trio.lowlevel.checkpoint()
        if number == 3:
            raise ValueError("three")
        finished.append(number)

    with pytest.raises(ValueError, match="three"):
        trio.run(lambda: run_all(*(lambda number=number: one(number) for number in range(300))))
    assert sorted(finished) == [number for number in range(300) if number != 3]
