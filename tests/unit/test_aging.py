"""The rule by which old files move (core/aging.py)."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aifs.core.aging import AgeRule, format_age_rule, parse_age_rule, parse_class

CLASSES = st.from_regex("[a-z0-9][a-z0-9-]{0,31}", fullmatch=True)


@pytest.mark.sweep
@given(st.integers(0, 10**9), CLASSES | st.just(""), st.integers(0, 19))
def test_a_rule_is_what_it_says(age_s: int, storage_class: str, level: int) -> None:
    assume(storage_class or level)
    rule = AgeRule(age_s, storage_class, level)
    assert parse_age_rule(format_age_rule(rule)) == rule


def test_one_of_class_and_compression_is_enough() -> None:
    assert parse_age_rule("30d:cold") == AgeRule(30 * 86_400, "cold")
    assert parse_age_rule("1h:compress=zstd:9") == AgeRule(3600, "", 9)
    assert format_age_rule(parse_age_rule("30d: compress=zstd, cold")) == (
        "30d:cold,compress=zstd:3"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "30d", "30d:", ":cold", "x:cold", "30d:a:b", "30d:" + "a" * 33),
        *("30d:a,b", "30d:a,", "30d:compress=none", "30d:a,compress=", "30d:a,compress=zstd:20"),
        *("30d:compress=zstd,compress=zstd", "30d:a,compress=lz4", "30d:a,zstd:3"),
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_age_rule(text)


@pytest.mark.parametrize("value", [None, 3, "-a", "ä", "a b", ["a"]])
def test_what_is_no_class_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is no class"):
        parse_class(value)
    assert parse_class("") == ""
