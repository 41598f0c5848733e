"""What the kernel says of processes."""

import os
import subprocess

import pytest

from aifs.core.processes import is_dying, says_dying

STAT = b"4211 (a) b) S 1 4211 4211 0 -1 %d 120 0 0 0 1 2 0 0 20 0 9 0 77 9 9\n"
STATUS = b"Name:\ta\nUmask:\t0022\nSigQ:\t0/9\nSigPnd:\t%016x\nShdPnd:\t%016x\nSigBlk:\t%016x\n"
FORKED, EXITING = 0x40, 0x4
KILL, TERM = 1 << 8, 1 << 14


@pytest.mark.parametrize(
    ("flags", "own", "shared", "is_so"),
    [
        (FORKED, 0, 0, False),
        (FORKED, TERM, TERM, False),
        (FORKED, KILL, 0, True),
        (FORKED, 0, KILL | TERM, True),
        (FORKED | EXITING, 0, 0, True),
    ],
)
def test_a_process_is_dying_when_it_exits_or_has_a_kill_pending(
    flags: int, own: int, shared: int, is_so: bool
) -> None:
    assert says_dying(STAT % flags, STATUS % (own, shared, KILL)) is is_so


def test_a_process_is_dying_from_its_end_on_before_it_is_reaped_and_after() -> None:
    assert not is_dying(os.getpid())
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_dying(process.pid)
    assert is_dying(process.pid)
