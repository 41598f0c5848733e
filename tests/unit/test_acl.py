"""POSIX ACLs: their bytes, what becomes of them and of modes, and whom they let in."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from aifs.core.errors import Invalid
from aifs.meta import acl
from aifs.meta.acl import GROUP, GROUP_OBJ, MASK, OTHER, USER, USER_OBJ, AclEntry

NOBODY = 0xFFFFFFFF
ANN, BEN, STAFF, GUESTS = 1, 2, 10, 20

PERMISSIONS = some.integers(0, 7)
MODES = some.integers(0, 0o7777)
NAMED = some.lists(
    some.builds(AclEntry, some.sampled_from((USER, GROUP)), PERMISSIONS, some.integers(0, 99)),
    max_size=6,
)


def an_acl(owner: int, group: int, other: int, *named: AclEntry, mask: int | None = None) -> bytes:
    entries = [AclEntry(USER_OBJ, owner, NOBODY), AclEntry(GROUP_OBJ, group, NOBODY), *named]
    entries.append(AclEntry(OTHER, other, NOBODY))
    if mask is not None:
        entries.append(AclEntry(MASK, mask, NOBODY))
    return acl.encode(sorted(entries))


ACLS = some.builds(
    lambda owner, group, other, named, mask: an_acl(owner, group, other, *named, mask=mask),
    PERMISSIONS,
    PERMISSIONS,
    PERMISSIONS,
    NAMED,
    PERMISSIONS,
)


def test_golden_bytes() -> None:
    golden = "0200000001000600ffffffff02000700e803000004000400ffffffff"
    golden += "10000500ffffffff20000000ffffffff"
    value = an_acl(6, 4, 0, AclEntry(USER, 7, 1000), mask=5)
    assert value.hex() == golden
    assert acl.encode(acl.decode(value)) == value
    assert acl.mode_of(acl.decode(value)) == 0o650


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\2\0\0\0",
        an_acl(6, 4, 0)[:-1],
        b"\1" + an_acl(6, 4, 0)[1:],
        an_acl(6, 4, 0) + b"\0" * 8,
        an_acl(6, 4, 0, AclEntry(USER, 7, 1000)),  # it needs a mask
        an_acl(6, 4, 8),
        acl.encode([AclEntry(USER_OBJ, 6, NOBODY), AclEntry(OTHER, 6, NOBODY)]),
        acl.encode([AclEntry(tag, 6, NOBODY) for tag in (GROUP_OBJ, USER_OBJ, OTHER)]),
        acl.encode([AclEntry(tag, 6, NOBODY) for tag in (USER_OBJ, USER_OBJ, GROUP_OBJ, OTHER)]),
        an_acl(6, 4, 0, *[AclEntry(USER, 7, uid) for uid in range(600)], mask=7),
    ],
)
def test_what_is_no_acl_is_refused(value: bytes) -> None:
    with pytest.raises(Invalid):
        acl.decode(value)


@given(some.binary(max_size=80))
def test_any_bytes_are_an_acl_or_refused(value: bytes) -> None:
    try:
        assert acl.encode(acl.decode(value)) == value
    except Invalid:
        pass


@given(ACLS, MODES)
def test_a_mode_shows_what_its_acl_says(value: bytes, mode: int) -> None:
    changed, kept = acl.applied(value, mode)
    assert changed & 0o777 == acl.mode_of(acl.decode(value)) and changed & ~0o777 == mode & ~0o777
    assert kept == value
    again = acl.after_chmod(value, mode)
    assert acl.mode_of(acl.decode(again)) == mode & 0o777


def test_an_acl_that_a_mode_can_say_is_not_kept() -> None:
    assert acl.applied(an_acl(7, 5, 1), 0o104644) == (0o104751, b"")
    assert acl.inherited(an_acl(7, 5, 1), 0o100666) == (0o100640, b"")


@given(ACLS, MODES)
def test_what_is_inherited_gives_no_more_than_was_asked_for(default: bytes, mode: int) -> None:
    made, kept = acl.inherited(default, mode)
    assert made & ~mode == 0 and made & ~0o777 == mode & ~0o777
    assert [entry.id for entry in acl.decode(kept)] == [entry.id for entry in acl.decode(default)]


@pytest.mark.parametrize(
    ("uid", "groups", "wanted", "may"),
    [
        (0xABC, (), 6, True),  # the owner, whatever the mask
        (ANN, (), 4, True),
        (ANN, (), 2, False),  # masked
        (BEN, (STAFF,), 4, True),
        (BEN, (GUESTS,), 4, False),
        (BEN, (GUESTS, STAFF), 4, True),
        (BEN, (GUESTS,), 1, False),  # a member is not one of the others
        (BEN, (), 1, True),
        (BEN, (), 4, False),
    ],
)
def test_whom_an_acl_lets_in(uid: int, groups: tuple[int, ...], wanted: int, may: bool) -> None:
    named = AclEntry(USER, 6, ANN), AclEntry(GROUP, 0, GUESTS)
    mode, value = acl.applied(an_acl(6, 6, 1, *named, mask=4), 0)
    assert acl.granted(value, mode, 0xABC, STAFF, uid, groups, wanted) == may


@given(MODES, some.booleans(), some.booleans(), PERMISSIONS)
def test_without_an_acl_the_mode_decides(
    mode: int, owns: bool, is_member: bool, wanted: int
) -> None:
    groups = (STAFF,) if is_member else ()
    bits = mode >> (6 if owns else 3 if is_member else 0) & 7
    may = acl.granted(b"", mode, ANN, STAFF, ANN if owns else BEN, groups, wanted)
    assert may == (bits & wanted == wanted)
