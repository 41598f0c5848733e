"""What the bridge hands over, its ioctls, and what is said where something is missing; without a
kernel.
"""

import ctypes
import errno
import fcntl
import logging
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from aifs.core import ioctl
from aifs.core.errors import MountError, NotFound, TimedOut
from aifs.core.served import AllServed
from aifs.files.refusals import Refusals
from aifs.files.types import Caller
from aifs.fuse import bridge, handed_over, probe
from aifs.fuse.bridge import Bridge
from aifs.fuse.handed_over import HandedOver
from aifs.fuse.requests import Scheduler
from aifs.vfs.operation_log import OperationLog

CALLER = (1, 2, 3)


KERNEL = SimpleNamespace(entry_timeout_s=86400.0, attr_timeout_s=1.5)


NOT_KEPT = SimpleNamespace(kept=None)


class FakeFilesystem:
    """Answers each method with ``answer``, raises it, or waits (``answer`` None)."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.kernel = NOT_KEPT
        self.refusals = Refusals()
        self.operation_log = OperationLog(lambda _: None)
        self.served = AllServed()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any) -> Any:
            self.calls.append((name, args))
            if isinstance(self.answer, BaseException):
                raise self.answer
            if self.answer is None:
                await trio.sleep_forever()
            return self.answer

        return method


Reply = tuple[int, int, bytes]


def handing_over(fs: Any, scheduler: Scheduler | None = None) -> tuple[HandedOver, list[Reply]]:
    """And what is replied."""
    replies: list[Reply] = []
    requests = HandedOver(
        fs, scheduler or Scheduler(0.0), lambda *reply: replies.append(reply), KERNEL
    )
    return requests, replies


async def answer_to(fs: Any, opcode: int, body: bytes, nodeid: int = 7) -> tuple[int, bytes]:
    """The errno and data of the reply to one request."""
    requests, replies = handing_over(fs, scheduler := Scheduler(0.0))
    async with trio.open_nursery() as nursery:
        requests.serve_in(nursery)
        assert requests.take(opcode, 99, nodeid, CALLER, body)
    assert scheduler.waiting_requests == 0
    ((unique, number, data),) = replies
    assert unique == 99
    return number, data


def ioctl_body(request: int, data: bytes = b"", out_size: int = 0) -> bytes:
    return struct.pack("=QIIQII", 5, 0, request, 0, len(data), out_size) + data


# --- ioctl ---


SMALL, LARGE = ioctl.REQUESTS


def call_body(name: str, text: bytes = b"", version: int = ioctl.VERSION) -> bytes:
    argument = struct.pack("=II56s", version, len(text), name.encode()) + text
    return ioctl_body(SMALL, argument.ljust(1024, b"\0"), 1024)


@pytest.mark.parametrize("version", [ioctl.VERSION, 0, 99])
async def test_a_call_is_that_of_its_name(version: int) -> None:
    """The version alone may be asked for with another one."""
    fs = FakeFilesystem(b'{"a": 1}')
    body = call_body("version", b'{"x": 2}', version)
    header = struct.pack("=iIII", 0, 0, 0, 0)
    answer = struct.pack("=II56s", ioctl.VERSION, 8, b"version") + b'{"a": 1}'
    assert await answer_to(fs, handed_over.IOCTL, body) == (0, header + answer)
    assert fs.calls == [("call", (7, "version", b'{"x": 2}', Caller(*CALLER)))]


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (ioctl_body(SMALL + 1), errno.ENOTTY),
        (ioctl_body(SMALL ^ 1 << 16), errno.ENOTTY),
        (ioctl_body(SMALL, bytes(63)), errno.EINVAL),
        (ioctl_body(SMALL, bytes(1024), 1024), errno.EINVAL),
        (call_body("drain", version=ioctl.VERSION + 1), errno.EINVAL),
        (call_body("x" * 56), errno.EINVAL),
        (call_body("\xff"), errno.EINVAL),
        (ioctl_body(SMALL, struct.pack("=II56s", ioctl.VERSION, 1, b"drain"), 64), errno.EINVAL),
    ],
)
async def test_unknown_ioctls_and_wrong_arguments_are_refused(body: bytes, number: int) -> None:
    fs = FakeFilesystem(b"{}")
    assert await answer_to(fs, handed_over.IOCTL, body) == (number, b"")
    assert not fs.calls


async def test_an_answer_has_to_fit() -> None:
    argument = struct.pack("=II56s", ioctl.VERSION, 0, b"drain")
    for out_size, number in ((65, errno.EINVAL), (66, 0)):
        body = ioctl_body(SMALL, argument, out_size)
        assert (await answer_to(FakeFilesystem(b"{}"), handed_over.IOCTL, body))[0] == number


FLAG_REQUESTS = (0x80086601, 0x40086602, 0x801C581F, 0x401C5820)


@given(
    st.integers(0, (1 << 32) - 1) | st.sampled_from((*FLAG_REQUESTS, *ioctl.REQUESTS)),
    st.binary(max_size=64),
    st.integers(0, 64),
)
def test_any_ioctl_gets_an_answer(request: int, data: bytes, out_size: int) -> None:
    number, _ = trio.run(
        answer_to,
        FakeFilesystem(SimpleNamespace(flags=0, project=0)),  # what chattr(1) asks for
        handed_over.IOCTL,
        ioctl_body(request, data, out_size),
    )
    # EOPNOTSUPP: chattr(1) with flags that there are not, which few draws are.
    assert number in (0, errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP)


# --- the other requests ---


@pytest.mark.parametrize(
    ("opcode", "body", "answer", "call", "data"),
    [
        (
            handed_over.FALLOCATE,
            struct.pack("=QQQII", 5, 1 << 40, 3, 1, 0),
            0,
            ("fallocate", (5, 1, 1 << 40, 3, Caller(*CALLER))),
            b"",
        ),
        (
            handed_over.LSEEK,
            struct.pack("=QQII", 5, 10, 4, 0),
            1 << 50,
            ("lseek", (5, 10, 4)),
            struct.pack("=Q", 1 << 50),
        ),
        (
            handed_over.COPY_FILE_RANGE,
            struct.pack("=7Q", 5, 10, 8, 6, 20, 1 << 60, 0),
            77,
            ("copy_file_range", (5, 10, 6, 20, 1 << 30, Caller(*CALLER))),
            struct.pack("=II", 77, 0),
        ),
        (
            handed_over.COPY_FILE_RANGE_64,
            struct.pack("=7Q", 5, 10, 8, 6, 20, 30, 0),
            30,
            ("copy_file_range", (5, 10, 6, 20, 30, Caller(*CALLER))),
            struct.pack("=Q", 30),
        ),
        (handed_over.SYNCFS, bytes(8), 0, ("sync", ()), b""),
    ],
)
async def test_each_request_becomes_one_call(
    opcode: int, body: bytes, answer: Any, call: Any, data: bytes
) -> None:
    fs = FakeFilesystem(answer)
    assert await answer_to(fs, opcode, body) == (0, data)
    assert fs.calls == [call]


async def test_copies_with_flags_are_refused() -> None:
    body = struct.pack("=7Q", 5, 10, 8, 6, 20, 30, 1)
    assert await answer_to(FakeFilesystem(0), handed_over.COPY_FILE_RANGE, body) == (
        errno.EINVAL,
        b"",
    )


@pytest.mark.parametrize(
    ("error", "number", "logged"),
    [
        (NotFound(), errno.ENOENT, []),
        (TimedOut(), errno.ETIMEDOUT, []),
        (ZeroDivisionError(), errno.EIO, [logging.ERROR]),
    ],
)
async def test_errors_pass_the_choke_point(
    caplog: pytest.LogCaptureFixture, error: Exception, number: int, logged: list[int]
) -> None:
    body = struct.pack("=QQII", 5, 10, 4, 0)
    answer = await answer_to(FakeFilesystem(error), handed_over.LSEEK, body)
    assert answer == (number, b"")
    assert [record.levelno for record in caplog.records] == logged


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (handed_over.STATFS, b""),
        (handed_over.LSEEK, struct.pack("=QQII", 5, 10, 4, 0)),
        (handed_over.STATX, bytes(24)),
        (handed_over.COPY_FILE_RANGE, struct.pack("=7Q", 5, 10, 8, 6, 20, 30, 0)),
        (handed_over.IOCTL, struct.pack("=QIIQII", 5, 0, 0x80086601, 0, 0, 4)),  # FS_IOC_GETFLAGS
    ],
)
async def test_what_no_program_expects_to_be_interrupted_is_not(opcode: int, body: bytes) -> None:
    requests, replies = handing_over(FakeFilesystem())
    async with trio.open_nursery() as nursery:
        requests.serve_in(nursery)
        assert requests.take(opcode, 2, 7, CALLER, body)
        assert requests.take(handed_over.INTERRUPT, 0, 0, CALLER, struct.pack("=Q", 2))
        await trio.testing.wait_all_tasks_blocked()
        assert replies == []
        nursery.cancel_scope.cancel()


async def test_an_interrupt_cancels_its_request_alone() -> None:
    requests, replies = handing_over(FakeFilesystem())
    body = struct.pack("=QQQII", 5, 10, 4, 0, 0)
    async with trio.open_nursery() as nursery:
        requests.serve_in(nursery)
        for unique in (2, 4):
            assert requests.take(handed_over.FALLOCATE, unique, 7, CALLER, body)
        assert not requests.take(handed_over.INTERRUPT, 0, 0, CALLER, struct.pack("=Q", 6))
        # Before it has begun.
        assert requests.take(handed_over.INTERRUPT, 0, 0, CALLER, struct.pack("=Q", 4))
        await trio.testing.wait_all_tasks_blocked()
        assert replies == [(4, errno.EINTR, b"")]
        assert requests.take(handed_over.INTERRUPT, 0, 0, CALLER, struct.pack("=Q", 2))
    assert replies[1:] == [(2, errno.EINTR, b"")]
    assert not requests.take(handed_over.INTERRUPT, 0, 0, CALLER, struct.pack("=Q", 2))


async def test_who_gets_a_lock_at_once_sees_the_size_that_another_host_has_made() -> None:
    dropped: list[int] = []
    fs: Any = SimpleNamespace(
        operation_log=SimpleNamespace(is_on=False),
        served=AllServed(),
        locks=SimpleNamespace(owner=lambda number: (1, number), lock_at_once=lambda *_: True),
        is_joined=lambda ino: ino == 7,
        kernel=SimpleNamespace(drop_attributes=dropped.append, kept=None),
    )
    requests, replies = handing_over(fs)
    body = struct.pack("=QQQQIII4x", 5, 1, 0, 99, fcntl.F_WRLCK, 1, 0)
    async with trio.open_nursery() as nursery:
        requests.serve_in(nursery)
        for ino in (7, 8):
            assert requests.take(handed_over.SETLK, ino, ino, CALLER, body)
    assert dropped == [7] and replies == [(7, 0, b""), (8, 0, b"")]


@pytest.mark.parametrize(
    ("change", "is_answered"),
    [
        ({}, True),
        ({"keeps_name": lambda parent, name: False}, False),
        ({"lookup_at_once": lambda parent, name: None}, False),
        ({"operation_log": SimpleNamespace(is_on=True)}, False),
        ({"waiting": 1}, False),
        ({"lookup_at_once": lambda parent, name: (8, b"damaged")}, False),
    ],
)
async def test_a_lookup_is_answered_at_once_by_the_record_alone(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], is_answered: bool
) -> None:
    replies: list[tuple[int, int, bytes]] = []

    def reply_entry(unique: int, ino: int, record: bytes) -> bool:
        replies.append((unique, ino, record))
        return record == b"record"

    monkeypatch.setattr(handed_over, "reply_entry", reply_entry)
    fs = SimpleNamespace(
        kernel=NOT_KEPT,
        operation_log=SimpleNamespace(is_on=False),
        served=AllServed(),
        keeps_name=lambda parent, name: True,
        lookup_at_once=lambda parent, name: (8, b"record") if (parent, name) == (7, b"n") else None,
    )
    scheduler = Scheduler(0.0)
    scheduler.waiting_requests = change.get("waiting", 0)
    vars(fs).update(change)
    requests, _ = handing_over(fs, scheduler)
    assert requests.take(handed_over.LOOKUP, 99, 7, CALLER, b"n\0") == is_answered
    assert sum(fs.served["lookup"].buckets) == is_answered
    assert not is_answered or replies == [(99, 8, b"record")]


async def test_inodes_that_the_kernel_has_forgotten_come_together_and_get_no_answer() -> None:
    forgotten: list[int] = []
    requests, replies = handing_over(SimpleNamespace(kernel=NOT_KEPT, forget=forgotten.extend))
    body = struct.pack("=3Q", 7, 1 << 40, 9)
    assert not requests.take(handed_over.FORGET, 0, 0, CALLER, body)
    assert forgotten == [7, 1 << 40, 9] and not replies


async def test_requests_that_still_wait_when_the_mount_ends_are_answered() -> None:
    requests, replies = handing_over(FakeFilesystem())
    async with trio.open_nursery() as nursery:
        requests.serve_in(nursery)
        requests.take(handed_over.LSEEK, 2, 7, CALLER, struct.pack("=QQII", 5, 10, 4, 0))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert replies == [(2, errno.EINTR, b"")]


# --- what is missing ---


class FakeExtension:
    """Stands for aifs.fuse._bridge."""

    def __init__(self, connected: bool = True, granted: int = bridge.WANTED) -> None:
        self.state = bytearray(ctypes.sizeof(bridge.BridgeState))
        self._connected, self._granted = connected, granted
        self.on_request: Any = nothing

    def configure(self, on_request: Any) -> None:
        self.on_request = on_request
        state = bridge.BridgeState.from_buffer(self.state)
        state.device, state.granted = 9 if self._connected else -1, self._granted


def kernel(chosen: str) -> Any:
    return SimpleNamespace(bridge=chosen, max_background=64, negative_timeout_s=1.0, **vars(KERNEL))


def nothing(*args: Any) -> bool:
    return False


def missing(
    monkeypatch: pytest.MonkeyPatch, extension: Any, admin: bool = True, chosen: str = "auto"
) -> list[str]:
    monkeypatch.setattr(bridge, "extension", extension)
    monkeypatch.setattr(bridge, "extension_error", "" if extension else "no such module")
    monkeypatch.setattr(bridge, "may_pass_through", lambda: admin)
    found = Bridge(kernel(chosen), nothing, False).missing()
    assert all(one.why and one.cost and one.fix for one in found)
    return [one.what for one in found]


def test_what_it_knows_may_be_old_from_some_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = FakeExtension()
    monkeypatch.setattr(bridge, "extension", extension)
    told = Bridge(kernel("auto"), nothing, False)
    state = bridge.BridgeState.from_buffer(extension.state)
    assert state.sure_until_ns == 0  # never, where there is one host
    told.be_sure_until(2.5)
    assert state.sure_until_ns == 2_500_000_000
    told.be_sure_until(0.0)
    assert state.sure_until_ns == 1


def test_everything_in_use_is_not_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(monkeypatch, FakeExtension()) == []


def test_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(monkeypatch, FakeExtension(connected=False)) == ["the bridge"]
    assert missing(monkeypatch, FakeExtension(granted=bridge.WANTED & ~bridge.PASSTHROUGH)) == [
        "passthrough"
    ]
    assert missing(monkeypatch, FakeExtension(), admin=False) == ["passthrough"]


def test_what_was_switched_off_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    extension = FakeExtension(connected=False)
    assert missing(monkeypatch, extension, chosen="off") == []
    assert extension.on_request is None


@pytest.mark.parametrize("chosen", ["auto", "require"])
def test_without_the_bridge_nothing_is_mounted_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setattr(bridge, "extension", None)
    monkeypatch.setattr(bridge, "extension_error", "it has not been built")
    with pytest.raises(MountError, match="not been built; install gcc.*kernel.bridge=off"):
        Bridge(kernel(chosen), nothing, False)
    Bridge(kernel("off"), nothing, False).check()
    assert missing(monkeypatch, None, chosen="off") == []


def test_a_required_bridge_that_cannot_be_used_refuses_the_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge, "extension", FakeExtension(connected=False))
    with pytest.raises(MountError, match="libfuse"):
        Bridge(kernel("require"), nothing, False).check()


@pytest.mark.parametrize(
    ("mask", "may"),
    [("000001ffffffffff", True), ("0000000000200000", True), ("00000000a80425fb", False)],
)
def test_the_capability_is_read_from_the_effective_set(mask: str, may: bool) -> None:
    assert bridge.may_pass_through(f"Name:\tx\nCapPrm:\tffff\nCapEff:\t{mask}\n") is may


# --- the doctor's checks ---

WELL = probe.Facts(
    "6.18.44-x", "3.16.2", True, "", True, True, {"/nvme": "ext4"}, 4 << 20, 1 << 20, True, False
)
CONFIG: Any = SimpleNamespace(kernel=SimpleNamespace(bridge="auto", read_ahead=4 << 20))
IN_USE = {"in_use": True, "passthrough": True}


def failed(facts: probe.Facts, config: Any = CONFIG) -> list[str]:
    checks = probe.judge(facts, config, {})
    assert all(bool(check.fix) != check.ok for check in checks)
    return [check.name for check in checks if not check.ok]


def test_a_machine_that_has_everything_is_well() -> None:
    assert failed(WELL) == []
    assert {check.in_use for check in probe.judge(WELL, CONFIG, IN_USE)} == {True, None}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kernel": "6.8.0-31"}, "kernel"),
        ({"kernel": "5.15.0"}, "kernel"),
        ({"kernel": "strange"}, "kernel"),
        ({"custom_io": False, "libfuse": "3.10.5"}, "libfuse"),
        ({"extension_error": "no module"}, "bridge"),
        ({"admin": False}, "CAP_SYS_ADMIN"),
        ({"filesystems": {"/a": "xfs", "/b": "overlay"}}, "burst directory /b"),
        ({"filesystems": {"/b": "fuse.sshfs"}}, "burst directory /b"),
        ({"read_ahead": 128 << 10}, "read-ahead"),
        ({"open_files": 1024}, "open files"),
        ({"leases": False}, "file leases"),
        ({"root": False}, "allow_other"),
    ],
)
def test_each_fault_is_named_with_its_remedy(change: dict[str, Any], name: str) -> None:
    assert failed(replace(WELL, **change)) == [name]


def test_a_bridge_that_is_switched_off_is_said_to_be() -> None:
    config = SimpleNamespace(kernel=SimpleNamespace(bridge="off", read_ahead=4 << 20))
    assert failed(WELL, config) == ["bridge"]


def test_the_facts_of_this_machine_can_be_read(tmp_path: Any) -> None:
    facts = probe.look([str(tmp_path)], None)
    assert facts.kernel and facts.libfuse.startswith("3.") and facts.filesystems[str(tmp_path)]
    assert facts.open_files > 0 and facts.read_ahead is None
