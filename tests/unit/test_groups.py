"""Groups without a filesystem: their texts, records and the state machine, on a clock that the
tests turn.
"""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core import ioctl
from aifs.core.errors import GroupCancelled, GroupTimeout, Invalid, MemberDied, Unavailable
from aifs.layout.interleaved import CHUNK_MAX
from aifs.meta import groups, keys
from aifs.meta.askers import Asker
from aifs.meta.groups import GroupMember, GroupOptions, GroupRecord, Pending
from aifs.saves.group import DirectoryGroup, FileState, describe_ranks
from aifs.saves.group_text import Wanted, format_group, parse_group, parse_pending

KIB, MIB = 1 << 10, 1 << 20
SECOND_NS = 10**9

NAMES = st.text(
    st.characters(codec="ascii", exclude_characters=",\0", categories=("L", "N", "P")),
    min_size=1,
    max_size=63,
)
OPTIONS = st.builds(
    GroupOptions,
    name=NAMES.map(str.encode),
    ranks=st.integers(1, 8192),
    chunk=st.integers(16, 1024).map(lambda pages: pages * 4096),
    explicit=st.booleans(),
    timeout_ms=st.integers(1, 1 << 40),
    grace_ms=st.integers(0, 1 << 40),
    publish=NAMES.filter(lambda name: "/" not in name and name not in (".", "..")).map(str.encode)
    | st.just(b""),
    same_size=st.booleans(),
    job=NAMES.map(str.encode) | st.just(b""),
)
TIMES = st.integers(0, 1 << 62)
NUMBERS = st.integers(0, (1 << 32) - 1)
ASKERS = st.builds(
    Asker, NUMBERS, st.lists(NUMBERS, min_size=1, max_size=5).map(tuple), st.just(0), st.just(0)
)
NOBODY = Asker(0, (0,))
MEMBERS = st.builds(
    GroupMember,
    TIMES,
    TIMES,
    TIMES,
    st.lists(
        st.tuples(st.binary(min_size=1, max_size=300), TIMES | st.just(groups.ANY_SIZE)), max_size=5
    ).map(tuple),
)


@st.composite
def records(draw: st.DrawFn) -> GroupRecord:
    options = draw(OPTIONS)
    return GroupRecord(
        draw(TIMES),
        options,
        draw(ASKERS),
        draw(TIMES),
        draw(st.sampled_from([state for state in groups.STATES if state != "draining"])),
        draw(TIMES),
        draw(TIMES),
        draw(TIMES),
        draw(st.booleans()),
        draw(st.integers(-1, options.ranks - 1)),
        draw(st.text(max_size=50)),
        draw(st.text(max_size=50)),
        draw(st.binary(max_size=100)),
        draw(st.booleans()),
        draw(
            st.none()
            | st.builds(Pending, st.none() | TIMES, TIMES, st.binary(max_size=255), ASKERS)
        ),
    )


# --- texts ----------------------------------------------------------------------------------------


def test_what_is_left_out_is_the_usual() -> None:
    assert parse_group("name=step,ranks=8").options == GroupOptions(
        b"step", 8, CHUNK_MAX, False, 600_000, 0, b""
    )


def test_everything_can_be_said() -> None:
    text = (
        "name=s, ranks=2, dedup=64KiB, commit=explicit, timeout=90s, grace=500ms, publish=step-1, "
    )
    text += "same_size=yes, job=17.1"
    expected = GroupOptions(b"s", 2, 64 * KIB, True, 90_000, 500, b"step-1", True, b"17.1")
    assert parse_group(text) == Wanted(expected)


@pytest.mark.parametrize("size", ["file", "64MiB", "1TiB"])
def test_a_chunk_is_not_larger_than_the_largest(size: str) -> None:
    assert parse_group(f"name=a,ranks=1,dedup={size}").options.chunk == CHUNK_MAX == 4 * MIB


def test_a_pending_directory_is_short_for_a_group() -> None:
    for short in ("", ",step=100,job=a job", ",anew=yes"):
        long = "ranks=8,commit=explicit,dedup=no,pending=yes"
        assert parse_pending(f"ranks=8{short}") == parse_group(f"{long}{short}")
    assert parse_pending("ranks=8,step=100").mark == (100, b"")


@given(OPTIONS)
def test_a_group_is_read_as_it_was_written(options: GroupOptions) -> None:
    assert parse_group(format_group(options)) == Wanted(options)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "key=value"),
        ("ranks=8", "name must be given"),
        ("name=a", "ranks must be given"),
        ("name=a,ranks=0", "1 to 8192"),
        ("name=a,ranks=8193", "1 to 8192"),
        ("name=a,ranks=-1", "whole number"),
        ("name=a,ranks=8,ranks=8", "given twice"),
        ("name=a,rank=8", "did you mean 'ranks'"),
        ("name=a,ranks=8,dedup=4", "dedup="),
        ("name=a,ranks=8,dedup=65537", "dedup="),
        ("name=a,ranks=8,dedup=0", "dedup="),
        ("name=a,ranks=8,dedup=big", "dedup"),
        ("name=a,ranks=8,commit=never", "close, explicit"),
        ("name=a,ranks=8,reuse=yes", "reuse"),
        ("name=a,ranks=8,timeout=soon", "timeout"),
        ("name=,ranks=8", "name"),
        ("name=" + 64 * "a" + ",ranks=8", "63"),
        ("name=a\nb,ranks=8", "printable"),
        ("name=a\0,ranks=8", "printable"),
        ("name=a,ranks=8,publish=../b", "publish"),
        ("name=a,ranks=8,publish=..", "publish"),
        ("name=a,ranks=8,same_size=maybe", "yes, no"),
        ("name=a,ranks=8,job=" + 64 * "7", "job"),
        ("name=a,ranks=8,dedup=no", "pending=yes"),
        ("name=a,ranks=8,step=5", "pending=yes"),
        ("name=a,ranks=8,anew=yes", "pending=yes"),
        ("name=a,ranks=8,pending=yes", "commit=explicit"),
        ("ranks=8,commit=explicit,dedup=no,pending=yes,publish=a", "publish needs more"),
        ("ranks=8,commit=explicit,pending=yes", "name must be given"),
    ],
)
def test_a_wrong_text_is_refused_and_named(text: str, named: str) -> None:
    with pytest.raises(Invalid, match=re.escape(named)):
        parse_group(text)


# --- records --------------------------------------------------------------------------------------


@pytest.mark.sweep
@given(records())
def test_a_record_is_read_as_it_was_written(record: GroupRecord) -> None:
    assert groups.decode_group(record.encode()) == record


@given(MEMBERS)
def test_a_member_is_read_as_it_was_written(member: GroupMember) -> None:
    assert groups.decode_member(member.encode()) == member


def test_the_format_of_records_stays() -> None:
    options = GroupOptions(b"step", 8, 4 * MIB, True, 600_000, 1000, b"final")
    asker = Asker(1000, (100,))
    record = GroupRecord(77, options, asker, 5, "failed", 6, 7, 8, True, 3, "why", "", b"{}")
    assert record.encode().hex() == (
        "01"
        "05"
        "0300"
        "08000000"
        "03000000"
        "4d00000000000000"
        "0000400000000000"
        "c027090000000000"
        "e803000000000000"
        "0500000000000000"
        "0600000000000000"
        "0700000000000000"
        "0800000000000000"
        "0000"
        "e8030000010064000000"
        "0400"
        "73746570"
        "0500"
        "66696e616c"
        "0300"
        "776879"
        "0000"
        "0200"
        "7b7d"
        "0000"
        "0000"
    )
    sized = options._replace(same_size=True, job=b"17")
    assert record._replace(options=sized, unequal=True).encode().hex() == (
        record.encode().hex().replace("01050300", "01050f00")[:-8] + "02003137" + "0000"
    )
    pending = Pending(100, 9, b"job 7", Asker(1000, (100, 7)))
    assert record._replace(pending=pending).encode().hex() == (
        record.encode().hex()[:-4]
        + "2300"
        + "64000000000000000900000000000000"
        + "e8030000020064000000070000006a6f622037"
    )
    assert (
        GroupMember(1, 2, 3).encode().hex() == "01010000000000000002000000000000000300000000000000"
    )
    assert GroupMember(1, 2, 3, ((b"ab", 3),)).encode().hex() == (
        GroupMember(1, 2, 3).encode().hex() + "030000000000000002006162"
    )
    assert keys.group(5).hex() == "6e0000000000000005"
    assert keys.group_member(5, 3).hex() == "6e00000000000000050000000000000003"


def test_what_seals_a_directory() -> None:
    options, mark = parse_group("name=a,ranks=1").options, Pending(None, 1, b"", NOBODY)
    record = GroupRecord(1, options, NOBODY, 0)
    assert not record.seals and record._replace(pending=mark, state="failed").seals
    record = record._replace(options=options._replace(publish=b"final"))
    assert not record.seals, "files may be closed in any order"
    record = record._replace(options=record.options._replace(explicit=True))
    assert record.seals and not record._replace(published=True).seals
    assert not record._replace(state="cancelled").seals


def test_a_group_that_is_drained_is_on_record_as_committed() -> None:
    record = GroupRecord(1, parse_group("name=a,ranks=1").options, NOBODY, 0, "draining")
    assert groups.decode_group(record.encode()).state == "committed"


@pytest.mark.sweep
@given(records(), st.data())
def test_a_damaged_record_is_no_group(record: GroupRecord, data: st.DataObject) -> None:
    encoded = record.encode()
    with pytest.raises(Unavailable):
        groups.decode_group(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(Unavailable):
        groups.decode_group(b"\x02" + encoded[1:])
    with pytest.raises(Unavailable):
        groups.decode_member(GroupMember(1).encode()[:-1])


# --- the state machine ----------------------------------------------------------------------------


def make(text: str = "", now: float = 1000.0, age_s: int = 0) -> DirectoryGroup:
    """A group that is ``age_s`` old."""
    options = parse_group(f"name=step,ranks=3,commit=explicit,timeout=60s{text}").options
    now_ns = 10**18
    return DirectoryGroup(
        7, GroupRecord(1, options, NOBODY, now_ns - age_s * SECOND_NS), None, now, now_ns
    )


def test_a_group_is_complete_when_all_ranks_have_committed() -> None:
    group = make()
    for rank in (2, 0, 1):
        assert not group.is_complete and rank in group.missing()
        group.require_rank(rank)
        group.commit(rank)
    assert group.is_complete and group.missing() == []


def test_a_group_is_complete_when_as_many_files_have_been_closed() -> None:
    group = make()
    group.record = group.record._replace(options=group.record.options._replace(explicit=False))
    group.closed(11, 5, 1000.0)
    group.closed(11, 6, 1000.0)
    group.closed(12, 5, 1000.0)
    assert not group.is_complete and group.lacking() == "1 of 3 files have not been closed"
    group.closed(13, 5, 1000.0)
    assert group.is_complete
    group.opened(12)
    assert not group.is_complete and group.files[12].state is FileState.WRITING
    group.closed(12, 9, 1001.0)
    assert group.is_complete and group.files[12].size == 9
    group.remove(13)
    assert not group.is_complete and group.counted == 2


@pytest.mark.parametrize("rank", [-1, 3])
def test_there_are_no_other_ranks(rank: int) -> None:
    with pytest.raises(Invalid, match=f"no rank {rank}: they are 0 to 2"):
        make().require_rank(rank)


def test_a_rank_commits_once_and_is_one_process() -> None:
    group = make()
    group.join(0, 100)
    with pytest.raises(Invalid, match="rank 0 has been joined by process 100, which is alive"):
        group.join(0, 101)
    group.commit(0)
    with pytest.raises(Invalid, match="rank 0 has committed already"):
        group.join(0, 101)
    with pytest.raises(Invalid, match="rank 0 has committed already"):
        group.require_rank(0)


def test_ranks_do_not_commit_a_group_that_is_committed_by_closing() -> None:
    group = make()
    group.record = group.record._replace(options=group.record.options._replace(explicit=False))
    with pytest.raises(Invalid, match="commit=explicit"):
        group.join(0, 100)


def end(group: DirectoryGroup, now: float) -> None:
    record = group.overdue(now)
    assert record is not None
    group.record = record


def test_a_rank_that_dies_ends_the_group_at_once() -> None:
    group = make()
    group.join(1, 100)
    assert group.overdue(1001.0) is None
    group.left(1, 99, 1001.0)  # another process, of an earlier try
    assert group.overdue(1001.0) is None
    group.left(1, 100, 1001.0)
    end(group, 1001.0)
    assert (group.state, group.record.dead, group.record.error) == (
        "failed",
        1,
        "rank 1 ended before it committed",
    )
    assert [rank["state"] for rank in describe_ranks(group, 9, {})] == [
        "missing",
        "dead",
        "missing",
    ]
    with pytest.raises(MemberDied, match="rank 1 ended before it committed"):
        group.require_success()
    with pytest.raises(MemberDied):
        group.require_rank(0)


def test_a_rank_may_come_back_within_its_grace() -> None:
    group = make(",grace=5s")
    group.join(1, 100)
    group.left(1, 100, 1001.0)
    assert group.overdue(1005.9) is None and group.deadline() == 1006.0
    assert describe_ranks(group, 9, {})[1] == {"rank": 1, "state": "away", "pid": None}
    group.join(1, 101)
    assert group.overdue(1010.0) is None and group.deadline() == 1060.0
    group.left(1, 101, 1010.0)
    end(group, 1015.0)
    assert group.record.dead == 1


def test_a_rank_that_has_committed_may_end() -> None:
    group = make()
    group.join(1, 100)
    group.commit(1)
    group.left(1, 100, 1001.0)
    assert group.overdue(1001.0) is None and describe_ranks(group, 9, {})[1]["state"] == "committed"


def test_a_rank_that_is_committing_is_not_dead() -> None:
    group = make()
    group.join(1, 100)
    group.committing.add(1)
    group.left(1, 100, 1001.0)
    assert group.overdue(1001.0) is None
    group.committing.discard(1)  # it was interrupted
    end(group, 1001.0)
    assert group.state == "failed"


def test_a_group_expires_and_names_who_is_missing() -> None:
    group = make()
    group.commit(1)
    assert group.overdue(1059.9) is None
    end(group, 1060.0)
    assert group.record.error == "after 60 s, 2 of 3 ranks have not committed: 0, 2"
    with pytest.raises(GroupTimeout):
        group.require_open()
    assert group.deadline() == math.inf


def test_the_time_of_a_group_counts_from_its_beginning_in_an_earlier_mount() -> None:
    group = make(age_s=50)
    assert group.deadline() == 1010.0


def test_a_group_that_is_complete_does_not_expire() -> None:
    group = make()
    group.settling = True
    assert group.overdue(9999.0) is None
    group.settling, group.record = False, group.record._replace(state="committed")
    assert group.overdue(9999.0) is None and group.is_live and not group.is_settled
    with pytest.raises(Invalid, match="all ranks of the group have committed already"):
        group.require_rank(1)


def test_a_cancelled_group_says_so() -> None:
    group = make()
    group.record = group.record._replace(state="cancelled", error="enough")
    with pytest.raises(GroupCancelled, match="enough"):
        group.require_success()


# --- ioctls ---------------------------------------------------------------------------------------


HEADER = Path(ioctl.__file__).parents[1] / "fuse" / "aifs_ioctl.h"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_c_computes_the_same_numbers(tmp_path: Path) -> None:
    pairs = (("AIFS_IOC_CALL", "aifs_call"), ("AIFS_IOC_LARGE_CALL", "aifs_large_call"))
    lines = [
        f'printf("%u %zu\\n", (unsigned){number}, sizeof(struct {kind}));' for number, kind in pairs
    ]
    source = tmp_path / "numbers.c"
    source.write_text(
        '#include <stdio.h>\n#include "aifs_ioctl.h"\nint main(void) {\n'
        + "\n".join(lines)
        + "\nreturn 0;\n}\n"
    )
    program = tmp_path / "numbers"
    command = ["cc", *"-std=c11 -Wall -Wextra -Werror".split(), f"-I{HEADER.parent}"]
    subprocess.run([*command, source, "-o", program], check=True, timeout=60)
    printed = subprocess.check_output([program], text=True, timeout=10)
    assert printed.split("\n")[:-1] == [f"{it} {size}" for it, size in ioctl.REQUESTS.items()]
