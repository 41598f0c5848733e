"""Which checkpoints are kept: parsing of policies, and what is decided."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aifs.core.retention import (
    Keep,
    ListedCheckpoint,
    decide,
    find_disorder,
    format_keep,
    newest_last,
    parse_keep,
    step_of,
)

DAY_NS = 86400 * 10**9
NOW = 1000 * DAY_NS

keeps = st.builds(
    Keep,
    st.integers(0, 5),
    st.integers(0, 1000),
    st.sampled_from([0.0, 1.5, 3600.0, 86400.0 * 7]),
    st.integers(0, 10**6),
)
checkpoints = st.lists(
    st.builds(
        ListedCheckpoint,
        st.binary(min_size=1, max_size=3),
        st.none() | st.integers(0, 5000),
        st.integers(NOW - 20 * DAY_NS, NOW),
        st.integers(0, 10**5),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)


def at(day: int, step: int | None = None, size: int = 1, **how: bool) -> ListedCheckpoint:
    step = day if step is None else step
    return ListedCheckpoint(b"%d" % step, step, NOW - (100 - day) * DAY_NS, size, **how)


def steps(going: list[ListedCheckpoint]) -> list[int | None]:
    return [one.step for one in going]


@given(keeps)
def test_a_policy_is_read_back(keep: Keep) -> None:
    if keep == Keep():
        assert format_keep(keep) == ""
    else:
        assert parse_keep(format_keep(keep)) == keep


def test_the_documented_example() -> None:
    assert parse_keep("last=3,every=1000, age = 7d ,bytes=2TiB") == Keep(
        3, 1000, 7 * 86400.0, 2 << 40
    )


@pytest.mark.parametrize(
    "text",
    ["", "last=9" * 9, "last=" + "9" * 19]
    + "last last= last=0 last=-1 last=1.5 last=1,last=2 most=3 age=soon bytes=0 every=²".split(),
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        parse_keep(text)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        (b"step-100", 100),
        (b"global_step7", 7),
        (b"0000100", 100),
        (b"100", 100),
        (b"a1b2", 2),
        (b"step-", None),
        (b"", None),
        (b"1.tmp", None),
        (b"x\n5", 5),
        (b"9" * 18, 10**18 - 1),
        (b"9" * 19, 10**18 - 1),
    ],
)
def test_the_step_is_the_number_at_the_end(name: bytes, step: int | None) -> None:
    if len(name) == 19:
        assert step_of(name) in (None, step)
    else:
        assert step_of(name) == step


def test_each_rule_keeps_what_it_says() -> None:
    days = [at(day) for day in range(1, 11)]
    assert steps(decide(days, Keep(last=3), NOW)) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(decide(days, Keep(every=4), NOW)) == [1, 2, 3, 5, 6, 7, 9]
    assert steps(decide(days, Keep(age_s=93 * 86400.0), NOW)) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(decide(days, Keep(last=2, every=4, age_s=91.5 * 86400), NOW)) == [1, 2, 3, 5, 6, 7]
    assert steps(decide(days, Keep(bytes=4), NOW)) == [1, 2, 3, 4, 5, 6]
    assert steps(decide(days, Keep(last=8, bytes=4), NOW)) == [1, 2, 3, 4, 5, 6]
    assert decide(days, Keep(bytes=10), NOW) == decide([], Keep(last=1), NOW) == []


def test_nothing_goes_where_steps_and_times_disagree() -> None:
    taken_back = [at(1, 500), at(2, 1000), at(3, 600)]
    assert decide(taken_back, Keep(last=1), NOW) == []
    assert find_disorder(taken_back) == "600 was published after 1000"
    taken_back[1] = taken_back[1]._replace(complete=False)
    assert steps(decide(taken_back, Keep(last=1), NOW)) == [500] and not find_disorder(taken_back)
    together = [at(1, 500)._replace(time_ns=5), at(1, 90)._replace(time_ns=5)]
    assert steps(decide(together, Keep(last=1), NOW)) == [90]


def test_runs_of_one_directory_have_nothing_to_do_with_each_other() -> None:
    ones = [at(1, 500), at(2, 90)._replace(name=b"other-90"), at(3, 600)]
    assert steps(decide(ones, Keep(last=2), NOW)) == [500]


@pytest.mark.sweep
@given(checkpoints, keeps)
def test_what_never_goes(ones: list[ListedCheckpoint], keep: Keep) -> None:
    going = decide(ones, keep, NOW)
    assert len(set(going)) == len(going) and set(going) <= set(ones)
    assert all(one.complete and not one.in_use for one in going)
    assert not set(newest_last(ones)[-1:]) & set(going)
    left = [one for one in ones if one not in going]
    assert decide(left, keep, NOW) == []
    assert decide(list(reversed(ones)), keep, NOW) == going


@pytest.mark.sweep
@given(checkpoints, keeps)
def test_what_must_go_goes(ones: list[ListedCheckpoint], keep: Keep) -> None:
    assume(not find_disorder(ones))
    left = [one for one in ones if one not in decide(ones, keep, NOW) and one.complete]
    spare = [one for one in left[:] if not one.in_use]
    if keep.bytes and sum(one.bytes for one in left) > keep.bytes:
        assert len(spare) <= 1  # nothing but the newest
