"""The keeper of a mount: what it shares with the daemon's side, and scarcity of processes."""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aifs.fuse import keeper, kept
from aifs.fuse.keeper import Keeper
from aifs.fuse.kept import Head, KeptMount


def test_both_sides_have_one_file() -> None:
    assert keeper.HEAD_AT == kept.LENT_AT + kept.LENT_COUNT * kept.LENT_SLOT.size
    for word in ("SERVED", "ENDED", "RESTARTS", "DEATH", "ORDER", "READY", "FINISHED", "ALIVE"):
        assert getattr(keeper, word) == Head[word]


def test_notes_outlive_a_daemon() -> None:
    one = KeptMount()
    one.note(b"a", b"1")
    one.note(b"b", b"2")
    one.note(b"a", b"3")
    one.note(b"b", b"")
    one.note(b"c", bytes(1000))  # too long
    one.note(b"d", b"4")
    used = one.head(Head.NOTES)
    for _ in range(1000):
        one.note(b"d", b"5")
    assert one.head(Head.NOTES) == used
    for _ in range(2):
        one = KeptMount(os.dup(one.table), 0)
        assert one.notes == {b"a": b"3", b"d": b"5"}
    one.note(b"d", b"6")
    assert KeptMount(os.dup(one.table), 0).notes == {b"a": b"3", b"d": b"6"}
    assert one.head(Head.NOTES) == used


def test_of_two_notes_of_a_key_the_newer_counts() -> None:
    """The daemon dies between the new one and the end of the old one."""
    one = KeptMount()
    one.note(b"a", b"1")
    old = os.pread(one.table, kept.NOTE_BYTES, kept.NOTES_AT)
    one.note(b"a", b"2")
    os.pwrite(one.table, old, kept.NOTES_AT)
    for _ in range(2):
        one = KeptMount(os.dup(one.table), 0)
        assert one.notes == {b"a": b"2"}


class Failing:
    """A function that fails so often before it works."""

    def __init__(self, function: Callable[..., Any], number: int, times: int = 2) -> None:
        self.function = function
        self.number = number
        self.times = times

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))
        return self.function(*args, **options)


@pytest.fixture
def kept_mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptMount]:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    found = KeptMount()
    yield found
    os.close(found.table)


def of(
    mount: KeptMount, command: list[str], pid: int = 0, stuck_s: float = 0, tries: int = 2
) -> Keeper:
    told = json.dumps(
        {
            "descriptors": [0, mount.table, -1, -1],
            "pid": pid,
            "number": "0:0",
            "tries": tries,
            "stuck_s": stuck_s,
            "command": command,
            "log": "",
        }
    )
    return Keeper(**json.loads(told))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("name", ["pipe", "fork"])
def test_it_waits_for_room(
    name: str, number: int, kept_mount: KeptMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = of(kept_mount, ["/bin/true"])
    failing = Failing(getattr(os, name), number)
    monkeypatch.setattr(os, name, failing)
    one.stand_by()
    assert not failing.times and one.waiting
    assert os.waitpid(one.waiting, 0) == (one.waiting, 0)
    os.close(one.turn)


@pytest.mark.parametrize("name", ["os.pidfd_open", "builtins.open"])
def test_scarcity_is_no_death_of_the_daemon(
    name: str, kept_mount: KeptMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the second look."""
    pid = os.fork()
    if not pid:
        os.execv("/bin/sleep", ["sleep", "1000"])
    one = of(kept_mount, ["/bin/true"], pid)
    looks = []

    def look(_: float) -> float:
        looks.append(pid)
        os.kill(pid, 9)
        return 1000.0

    monkeypatch.setattr(one, "look", look)
    one.is_child = True
    module, _, function = name.rpartition(".")
    original = os.pidfd_open if module == "os" else open
    monkeypatch.setattr(name, Failing(original, errno.EMFILE))
    assert one.wait() == 9 and looks == [pid]


def test_other_errors_end_it(kept_mount: KeptMount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", Failing(os.fork, errno.EPERM))
    one = of(kept_mount, ["/bin/true"])
    with pytest.raises(PermissionError):
        one.stand_by()
    os.close(one.turn)


def test_the_first_one_waits_until_the_daemon_is_idle(
    kept_mount: KeptMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    one, started = of(kept_mount, ["/bin/true"]), []
    monkeypatch.setattr(one, "stand_by", lambda: started.append(now_s))
    kept_mount.serves()
    used_s = 0.0
    while not started and now_s < 1000:
        now_s += 1
        used_s += 0.9 if now_s < 120 else 0.1
        one.look(used_s)
    assert started == [120.0]


def test_it_does_not_wait_for_ever(kept_mount: KeptMount, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    one, started = of(kept_mount, ["/bin/true"]), []
    monkeypatch.setattr(one, "stand_by", lambda: started.append(now_s))
    kept_mount.serves()
    while not started and now_s < 1000:
        now_s += 1
        one.look(now_s)
    assert started == [100 + keeper.FIRST_S + keeper.PATIENCE_S + 1]


@pytest.mark.parametrize(
    ("lives_s", "tries"), [([0, 3, 3], 3), ([3, 6, 3, 3, 3], 3), ([9, 9, 0], 1)]
)
def test_daemons_that_die_at_once_are_followed_so_often(
    lives_s: list[float],
    tries: int,
    kept_mount: KeptMount,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """``lives_s``: how long each serves; 0: it does not."""
    now_s, daemons, pauses = 100.0, list(lives_s), list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(keeper, "is_over", lambda *_: False)
    one = of(kept_mount, ["/bin/true"], tries=tries)
    kept_mount.serves()

    def wait() -> int:
        nonlocal now_s
        if life_s := daemons.pop(0):
            kept_mount.serves()
            one.look(0.0)
            now_s += life_s
        return 9

    monkeypatch.setattr(one, "wait", wait)
    monkeypatch.setattr(one, "stand_by", lambda: None)
    monkeypatch.setattr(os, "write", lambda *_: 0)
    monkeypatch.setattr(os, "close", lambda _: None)
    one.run()
    assert not daemons and kept_mount.head(Head.RESTARTS) == len(lives_s) - 1
    last = pauses[1 - tries :] if tries > 1 else []
    assert last == sorted(last) and all(last)


@pytest.mark.parametrize(
    ("stuck_s", "waiting", "signals"),
    [(0, 0, []), (0, 3, [12]), (100, 0, []), (100, 3, [12, 9]), (2, 3, [12, 9])],
)
def test_a_daemon_that_does_nothing(
    stuck_s: float,
    waiting: int,
    signals: list[int],
    kept_mount: KeptMount,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, sent = 100.0, list[tuple[int, int]]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    one = of(kept_mount, ["/bin/true"], stuck_s=stuck_s)
    monkeypatch.setattr(one, "kill", lambda number=9: sent.append((now_s, number)))
    monkeypatch.setattr(one, "requests", lambda: waiting)
    monkeypatch.setattr(one, "stand_by", lambda: None)
    kept_mount.serves()
    for _ in range(50):
        now_s += 1
        kept_mount.show_alive()
        one.look(0)
    assert not sent
    while now_s < 1000 and [number for _, number in sent][-1:] != [9]:
        now_s += 1
        one.look(0)
    assert [number for _, number in sent] == signals
    if signals[1:]:
        assert sent[1][0] == 150 + stuck_s + 1
