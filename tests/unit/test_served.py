"""How many requests were answered, and how long that took."""

import errno

from hypothesis import given
from hypothesis import strategies as st

from aifs.core.served import BUCKETS, UNIT_NS, AllServed, Served


@given(st.lists(st.integers(0, 1 << 50), min_size=1))
def test_each_request_is_in_the_bucket_of_its_time(durations_ns: list[int]) -> None:
    served = Served()
    for duration_ns in durations_ns:
        served.add(duration_ns)
    for bucket in range(BUCKETS - 1):
        below = sum(duration_ns < UNIT_NS << bucket for duration_ns in durations_ns)
        assert sum(served.buckets[: bucket + 1]) == below
    told = served.status()
    assert told["count"] == len(durations_ns) and told["buckets"][-1] > 0
    assert told["seconds"] == round(sum(durations_ns) / 1e9, 6)


def test_errors_are_counted_by_their_names() -> None:
    everything = AllServed()
    everything["open"].add(1, errno.EACCES)
    everything["open"].add(1, 4711)
    everything["open"].add(1, errno.EACCES)
    everything["read"].add(1, 0, 4096)
    told = everything.status()
    assert told["open"]["errors"] == {"EACCES": 2, "4711": 1}
    assert told["read"]["errors"] == {} and told["read"]["bytes"] == 4096


def test_what_a_program_asks_to_find_out_is_no_error() -> None:
    """`ls -l` asks for security.selinux of each file."""
    everything = AllServed()
    for number in (errno.ENODATA, errno.ENOTSUP, errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
        everything["getxattr"].add(1, number)
    told = everything.status()["getxattr"]
    assert told["count"] == 5 and told["errors"] == {}
