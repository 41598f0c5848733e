import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.units import describe_size, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("4KiB", 4096),
        ("1 MiB", 1 << 20),
        ("2GB", 2 * 10**9),
        ("1kB", 1000),
        ("1.5GiB", 3 << 29),
        ("1EiB", 1 << 60),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1 apple", "1M", "0.5B", "1e3", "1MiBs", "٣", "nan"]
)
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes, such as 4096"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("100ms", 0.1),
        ("2h", 7200),
        ("5min", 300),
        ("1d", 86400),
        ("0", 0),
        ("0.25", 0.25),
        ("30us", 3e-5),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 apple", "1m", "inf"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration, such as 100ms"):
        parse_duration(text)


def test_a_duration_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than any duration"):
        parse_duration("9" * 400)


@given(st.one_of(st.integers(0, 1 << 62), st.integers(0, 60).map(lambda power: 3 << power)))
def test_a_formatted_size_is_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**12).map(lambda microseconds: microseconds / 10**6))
def test_a_formatted_duration_is_read_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


def test_formats_are_short() -> None:
    assert [format_size(size) for size in (0, 1500, 4096, 1 << 20)] == ["0", "1500", "4KiB", "1MiB"]
    assert [format_duration(s) for s in (0, 0.1, 1, 90, 86400)] == [
        "0s",
        "100ms",
        "1s",
        "90s",
        "1d",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (10 << 20, "10.0 MiB"),
        (500 << 30, "500 GiB"),
        (1 << 70, "1024 EiB"),
    ],
)
def test_a_description_has_three_digits(size: int, text: str) -> None:
    assert describe_size(size) == text
