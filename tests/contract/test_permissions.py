"""Who may do what, on the filesystem in process: requests whose callers the kernel does not check,
or not enough.
"""

import errno
import json
import os
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest

from aifs.core.errors import Busy, FsError, Invalid, NoAttribute, NoSuchIoctl, NotPermitted
from aifs.core.files import KEEP_SIZE, PUNCH_HOLE
from aifs.files import rights
from aifs.files.asks import BOTH, Ask, Hint, HintCall
from aifs.files.refusals import Refusals
from aifs.saves.retention import Retention
from aifs.vfs import Caller, Filesystem, SetAttr, hints
from scripts import hint_text
from tests.contract.test_group_hints import in_state
from tests.support import modes, stores
from tests.support.stores import OWNER, call, put
from tests.support.stores import fs as fs

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)
USERS = {"root": Caller(), "owner": OWNER, "other": OTHER}
SIZE = 40 << 10
SHAPE = modes.WAITING | {"layout.unit": "4KiB"}

opened = partial(stores.opened, base=SHAPE)
pytestmark = pytest.mark.store(base=SHAPE)


# --- the table of rights --------------------------------------------------------------------------

DENIED = {errno.EPERM, errno.EACCES}
ANYBODY = "anybody"
READER = "reader"
WRITER = "writer"
OWNERS = "owner"
ADMIN = "root"
NOBODY = "nobody"
SUPERUSER = "root, on whatever"

MAY_SET = {
    "layout": OWNERS,
    "tier": OWNERS,
    "expected_size": OWNERS,
    "publish": OWNERS,
    "mirror": OWNERS,
    "drain": WRITER,
    "stage": OWNERS,
    "evict": OWNERS,
    "remove": WRITER,
    "pending": OWNERS,
    "commit": WRITER,
    "publish-as": ANYBODY,  # where the final name is decides: test_publish.py
    "keep": OWNERS,
    "age": OWNERS,
    "trash": OWNERS,
    "quota": SUPERUSER,
    "group": WRITER,
    "group.commit": WRITER,
    "start": WRITER,
    "order": READER,
    "fence": ADMIN,
    "config": ADMIN,  # and the user that has mounted
    "scrub": ADMIN,
    "atime": ADMIN,
    "backup": ADMIN,
    "server-add": ADMIN,
    "burst-add": ADMIN,
    "server-drain": ADMIN,
    "server-replace": ADMIN,
    "server-remove": ADMIN,
}
"""All other hints can be set by nobody."""

MAY_CALL = {
    "version": ANYBODY,
    "drain": WRITER,
    "stage": ANYBODY,  # as evict
    "evict": ANYBODY,  # of others' files it evicts none: test_hints.py
    "remove": OWNERS,
    "publish-as": WRITER,
    "commit": WRITER,
    "group": WRITER,
    "group.join": WRITER,
    "group.commit": WRITER,
    "group.wait": ANYBODY,
    "group.cancel": WRITER,
    "group.state": ANYBODY,
    "order": READER,
    "import": SUPERUSER,
    "clone": ANYBODY,  # who may read all of it, and make the name: test_clones.py
    "restore": ANYBODY,  # whose it is decides: test_trash.py
    "trash.empty": ANYBODY,
}


def may(rule: str, user: str, mode: int) -> bool:
    """What the rule says of a directory of OWNER's."""
    everybody, owners = set(USERS), {"root", "owner"}  # others may read it, whatever the mode
    who = {ANYBODY: everybody, READER: everybody, WRITER: owners, OWNERS: owners}
    who |= {ADMIN: {"root"}, SUPERUSER: {"root"}}
    if rule == WRITER and user == "other":
        return mode == 0o777
    return user in who.get(rule, set())


async def is_let(attempt: Awaitable[object]) -> bool:
    """Whether a request gets further than to its rights; nonsense may fail there."""
    try:
        await attempt
    except FsError as error:
        return error.errno not in DENIED
    return True


def test_every_hint_and_call_is_in_the_table() -> None:
    assert set(MAY_SET) == {hint.stem for hint in hints.rows() if hint.set}
    assert set(MAY_CALL) == {hint.stem for hint in hints.rows() if hint.call}


async def a_directory(fs: Filesystem, name: str, mode: int) -> int:
    ino = (await fs.mkdir(ROOT, name.encode(), mode, OWNER)).ino
    await fs.mkdir(ino, b"below", 0o755, OWNER)
    return ino


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
async def test_who_may_set_and_remove_each_hint(directory: Path, mode: int) -> None:
    expected, found = {}, {}
    async with opened(directory) as fs:
        await fs.setattr(ROOT, SetAttr(uid=OWNER.uid, gid=OWNER.gid, mode=mode), Caller())
        for name in (row.stem for row in hints.rows()):
            rule = MAY_SET.get(name, NOBODY)
            hint = f"user.aifs.{name}".encode()
            for user, caller in USERS.items():
                ino = ROOT if rule == ADMIN else await a_directory(fs, f"{name} {user}", mode)
                expected[name, user] = may(rule, user, mode)
                found[name, user] = await is_let(fs.setxattr(ino, hint, b"?!", caller=caller))
                if found[name, user] and rule not in (WRITER, ADMIN, SUPERUSER):
                    continue  # it may have gone
                removes = await is_let(fs.removexattr(ino, hint, caller))
                assert removes <= may(rule, user, mode), (name, user)
    assert found == expected


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
async def test_who_may_call_each_hint(directory: Path, mode: int) -> None:
    expected, found = {}, {}
    async with opened(directory) as fs:
        for name, rule in MAY_CALL.items():
            for user, caller in USERS.items():
                top = await a_directory(fs, f"{name} {user}", mode)
                below = (await fs.lookup(top, b"below")).ino
                ino, fields = arguments(name, top, below)
                expected[name, user] = may(rule, user, mode)
                found[name, user] = await is_let(call(fs, ino, name, caller, **fields))
    assert found == expected


def arguments(name: str, top: int, below: int) -> tuple[int, dict]:
    """The inode to call it on, and fields that are valid as far as it matters."""
    if name == "remove":
        return top, {"name": "below"}
    if name == "publish-as":
        return below, {"parent": top, "final": "final"}
    if name == "group":
        return top, {"name": "step", "ranks": 1, "commit": "explicit"}
    return top, {}


async def test_hints_are_read_by_who_may_read(fs: Filesystem) -> None:
    await fs.setattr(ROOT, SetAttr(uid=OWNER.uid, gid=OWNER.gid, mode=0o711), Caller())
    top = await a_directory(fs, "top", 0o711)
    for row in hints.rows():
        hint = f"user.aifs.{row.stem}{'.7' if row.needs_number else ''}".encode()
        for ino in (ROOT, top):
            applies = row.get and (row.where != "root" or ino == ROOT)
            for user, caller in USERS.items():
                let = {"root"} if row.read is rights.overseer else {"root", "owner"}
                is_let_in = not applies or row.read is rights.anybody or user in let
                assert await is_let(fs.getxattr(ino, hint, caller)) == is_let_in, row.name


async def test_orders_of_root_are_given_at_the_root(fs: Filesystem) -> None:
    top = await a_directory(fs, "top", 0o777)
    for name in (name for name, rule in MAY_SET.items() if rule == ADMIN):
        with pytest.raises(NotPermitted):
            await fs.setxattr(top, f"user.aifs.{name}".encode(), b"start", caller=Caller())


# --- why something was refused --------------------------------------------------------------------


async def test_each_user_is_told_why_he_was_refused(fs: Filesystem) -> None:
    top, else_ = await a_directory(fs, "top", 0o777), await a_directory(fs, "else", 0o777)
    for ino, name, value, caller in (
        (top, "layout", "unit=1", OWNER),
        (top, "tier", "burst", OTHER),
        (else_, "pending", "ranks=0", OWNER),
    ):
        with pytest.raises(FsError):
            await put(fs, ino, name, value, caller)
    told = await ask(fs, top, "refused", OWNER)
    assert told["request"] == "user.aifs.layout" and told["errno"] == errno.EINVAL
    assert "unit" in told["reason"] and told["at_s"] > 0
    told = await ask(fs, top, "refused", OTHER)
    assert (told["request"], told["errno"]) == ("user.aifs.tier", errno.EPERM)
    assert told["reason"] == "only its owner and root may do this"
    assert "1 to 8192 ranks" in (await ask(fs, else_, "refused", OWNER))["reason"]
    for ino, caller in ((else_, OTHER), (top, Caller())):
        with pytest.raises(NoAttribute):
            await fs.getxattr(ino, b"user.aifs.refused", caller)
    with pytest.raises(FsError):
        await fs.removexattr(top, b"user.aifs.keep", OWNER)
    assert (await ask(fs, top, "refused", OWNER))["request"] == "user.aifs.keep"
    await put(fs, top, "pending", "ranks=2")
    with pytest.raises(Busy):
        await fs.rename(ROOT, b"top", ROOT, b"final", 0, OWNER)
    told = await ask(fs, top, "refused", OWNER)
    assert told["request"] == "rename" and "2 of 2 ranks have not committed" in told["reason"]


async def test_nobody_pushes_out_what_others_were_refused(directory: Path) -> None:
    refusals = Refusals()

    def refuse(ino: int, caller: Caller) -> None:
        with pytest.raises(NotPermitted), refusals.noted(ino, caller, "request"):
            raise NotPermitted("x" * 10_000)

    refuse(7, OWNER)
    for ino in range(1000):
        refuse(ino, OTHER)
    assert len(refusals.find(7, OWNER)["reason"]) == 1024
    assert refusals.find(7, OTHER) is None and refusals.find(999, OTHER)
    for uid in range(5000, 6000):
        refuse(7, Caller(uid=uid))
    assert refusals.find(7, OWNER) is None and refusals.find(7, Caller(uid=5999))


async def test_calls_that_are_refused_say_why(fs: Filesystem) -> None:
    top = await a_directory(fs, "top", 0o777)
    assert not await is_let(call(fs, top, "remove", OTHER, name="below"))
    told = await ask(fs, top, "refused", OTHER)
    assert told["request"] == "user.aifs.remove" and "owner" in told["reason"]
    with pytest.raises(Invalid):
        await call(fs, top, "remove", OTHER, flags=1)
    assert "no key is called 'flags'" in (await ask(fs, top, "refused", OTHER))["reason"]


HOSTILE = [
    b"[]",
    b"{",
    b"\xff",
    b"[" * 16_000,
    b'{"a": ' * 2_000,
    b'{"id": -1}',
    b'{"id": 18446744073709551616}',
    b'{"id": 1e3}',
    b'{"id": true}',
    b'{"id": ' + b"9" * 10_000 + b"}",
    b'{"rank": "1"}',
    b'{"file": "a\\u0000b"}',
    b'{"file": "\\ud800"}',
    b'{"file": null}',
]


async def test_wrong_fields_of_a_call_are_refused(fs: Filesystem) -> None:
    top = await a_directory(fs, "top", 0o777)
    for argument in HOSTILE:
        with pytest.raises(Invalid):
            await fs.call(top, "group.commit", argument, OWNER)
        with pytest.raises(NoSuchIoctl):
            await fs.call(top, "none", argument, OWNER)
    for ids in (["1"], [1.5], [None], [[1]], [-1], [1 << 64]):
        with pytest.raises(Invalid):
            await call(fs, top, "trash.empty", ids=ids)


async def test_a_hint_is_one_row_and_one_function(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attribute, ioctl, rights, refusals and help fall out of the row."""

    def echo(retention: Retention, asked: Ask) -> dict:
        if asked.text == "wrong":
            raise Invalid("it is wrong")
        return {"said": asked.text or asked.fields.get("text", "nothing")}

    row = Hint(
        "echo[.N]",
        BOTH,
        "says it again",
        rights.reader,
        rights.owner,
        get=echo,
        set=echo,
        remove=echo,
        call=HintCall(rights.writer, echo, {"text": str}, "Says it again."),
    )
    monkeypatch.setattr(Retention, "HINTS", (*Retention.HINTS, row))
    async with opened(directory) as fs:
        top = await a_directory(fs, "top", 0o700)
        for name in ("echo", "echo.7"):
            assert await ask(fs, top, name, OWNER) == {"said": "nothing"}
            assert not await is_let(ask(fs, top, name, OTHER))
        assert await call(fs, top, "echo", OWNER, text="a") == {"said": "a"}
        for refused in (
            put(fs, top, "echo", "a", OTHER),
            call(fs, top, "echo", OTHER, text="a"),
            fs.removexattr(top, b"user.aifs.echo", OTHER),
        ):
            assert not await is_let(refused)
        await put(fs, top, "echo", "a")
        await fs.removexattr(top, b"user.aifs.echo", OWNER)
        with pytest.raises(Invalid):
            await put(fs, top, "echo", "wrong")
        assert (await ask(fs, top, "refused", OWNER))["reason"] == "it is wrong"
        told = (await ask(fs, top, "hints", OWNER))["hints"]
        (told,) = [one for one in told if "echo" in one["name"]]
        assert (told["get"], told["set"], told["call"]) == ("reader", "owner", "writer")
        assert told["help"] == "says it again"
    assert ' * echo {"text": string}' in hint_text.c_header()


# --- names that are nobody's business -------------------------------------------------------------


async def ask(fs: Filesystem, ino: int, name: str, caller: Caller) -> dict:
    return json.loads(await fs.getxattr(ino, f"user.aifs.{name}".encode(), caller))


async def test_a_group_names_no_file_that_one_could_not_find(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
    await put(fs, top, "group", "name=step,ranks=8")
    modes_of = {b"open": 0o755, b"unsearchable": 0o744, b"unlistable": 0o711, b"closed": 0o700}
    files = {}
    for name, mode in modes_of.items():
        below = (await fs.mkdir(top, name, mode, OWNER)).ino
        files[name] = await stores.write_file(fs, b"file", b"x" * SIZE, below, OWNER)
    told = {file["ino"]: file["name"] for file in (await ask(fs, top, "group", OTHER))["files"]}
    assert told == {
        ino: f"/top/{name.decode()}/file" if name == b"open" else f"inode {ino}"
        for name, ino in files.items()
    }
    for caller in (OWNER, Caller()):
        names = {file["name"] for file in (await ask(fs, top, "group", caller))["files"]}
        assert names == {f"/top/{name.decode()}/file" for name in modes_of}
    await fs.setattr(ROOT, SetAttr(mode=0o711), Caller())
    assert "/top/open/file" in {
        file["name"] for file in (await ask(fs, top, "group", OTHER))["files"]
    }
    await fs.setattr(ROOT, SetAttr(mode=0o700), Caller())
    names = {file["name"] for file in (await ask(fs, top, "group", OTHER))["files"]}
    assert names == {f"inode {ino}" for ino in files.values()}
    await put(fs, top, "group", "")


async def test_what_went_wrong_below_is_for_the_owner(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"top", 0o777, OWNER)).ino
    await fs.setattr(top, SetAttr(mode=0o777), OWNER)
    secret = (await fs.mkdir(top, b"secret", 0o700, OWNER)).ino
    for name, size in ((b"a", SIZE), (b"b", 2 * SIZE)):
        await stores.write_file(fs, name, b"x" * size, secret, OWNER)
    await put(fs, top, "pending", "ranks=1")
    await put(fs, top, "commit", {"rank": 0, "files": {"secret/a": SIZE}})
    await fs.unlink(secret, b"a")
    with pytest.raises(Busy):
        await fs.rename(ROOT, b"top", ROOT, b"final")
    assert "secret/a" in (await ask(fs, top, "pending", OWNER))["refused"]
    assert (await ask(fs, top, "pending", OTHER))["refused"] == ""
    await put(fs, top, "pending", "")
    await put(fs, top, "group", "name=step,ranks=2,same_size=yes")
    for name, size in ((b"c", SIZE), (b"d", 2 * SIZE)):
        await stores.write_file(fs, name, b"x" * size, secret, OWNER)
    await in_state(fs, top, "failed")
    assert "/top/secret/" in (await ask(fs, top, "group", OWNER))["error"]
    assert (await ask(fs, top, "group", OTHER))["error"] == "not all files have one size"


def test_others_than_root_are_told_no_paths_of_what_is_wrong() -> None:
    state = {"wrong": [{"paths": ["/secret/a"], "inode": 7}]}
    assert rights.without_paths(state, Caller()) == {
        "wrong": [{"paths": ["/secret/a"], "inode": 7}]
    }
    assert rights.without_paths(state, OTHER) == {"wrong": [{"paths": ["inode 7"], "inode": 7}]}
    reason = "write /srv/disk/objects/7: Input/output error"
    failed = {
        "failed": [
            {"ino": 7, "path": "/secret/a", "reason": reason},
            {"ino": 0, "path": "container 9", "reason": reason},
        ]
    }
    told = rights.without_paths(failed, OTHER)["failed"]
    assert [one["path"] for one in told] == ["inode 7", "container 9"]
    assert {one["reason"] for one in told} == {"only root may see why"}


# --- set-id bits ----------------------------------------------------------------------------------


async def _punch(fs: Filesystem, handle: int, caller: Caller) -> None:
    await fs.fallocate(handle, PUNCH_HOLE | KEEP_SIZE, 0, 4096, caller)


async def _allocate(fs: Filesystem, handle: int, caller: Caller) -> None:
    await fs.fallocate(handle, 0, 0, 2 * SIZE, caller)


async def _copy(fs: Filesystem, handle: int, caller: Caller) -> None:
    await fs.copy_file_range(handle, 0, handle, SIZE // 2, 4096, caller)


@pytest.mark.parametrize("change", [_punch, _allocate, _copy])
@pytest.mark.parametrize("drained", [False, True])
async def test_set_id_bits_go_with_what_another_changes(fs, change, drained):
    for caller, left in ((OTHER, 0o777), (OWNER, 0o777), (Caller(), 0o6777)):
        ino = await stores.write_file(fs, b"%d" % caller.uid, b"x" * SIZE, ROOT, OWNER)
        if drained:
            await stores.moved_out(fs, ino)
        await fs.setattr(ino, SetAttr(mode=0o6777), OWNER)
        handle, *_ = await fs.open(ino, os.O_RDWR)
        await change(fs, handle, caller)
        assert (await fs.getattr(ino)).mode & 0o7777 == left
        await fs.release(handle)
        assert (await fs.getattr(ino)).mode & 0o7777 == left
