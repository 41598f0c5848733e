"""Connections of strangers: who gives way when all places are taken (core/secret)."""

from contextlib import ExitStack

import pytest

from aifs.core.secret import Strangers, source_of


async def test_the_oldest_silent_one_of_the_address_with_most_gives_way() -> None:
    strangers = Strangers(4)
    with ExitStack() as stack:
        a = [stack.enter_context(strangers.place("a")) for _ in range(3)]
        b = stack.enter_context(strangers.place("b"))
        a[0].has_spoken = True
        c = []
        for leaving in (a[1], a[2]):
            assert not leaving.scope.cancel_called
            c.append(stack.enter_context(strangers.place("c")))
            assert leaving.scope.cancel_called
        stack.enter_context(strangers.place("d"))
        assert c[0].scope.cancel_called
        stack.enter_context(strangers.place("e"))  # one of each: the oldest silent one
        assert b.scope.cancel_called
        assert not a[0].scope.cancel_called and not c[1].scope.cancel_called


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("gpu1", "gpu2", False),
    ],
)
def test_addresses_that_a_host_may_choose_from_count_as_one(
    one: str, other: str, same: bool
) -> None:
    assert (source_of(one) == source_of(other)) is same
