"""Calls that may never end."""

import os
import time

import pytest

from aifs.core.errors import StoreError
from aifs.core.limits import within


@pytest.mark.sweep
def test_what_a_call_returns_or_raises() -> None:
    assert within(60, os.path.basename, "/a/b") == "b"
    with pytest.raises(FileNotFoundError):
        within(60, os.stat, "/nowhere")
    with pytest.raises(StoreError, match="^as it was$"):
        within(60, _fail)
    assert within(60, bytes, 1 << 20) == bytes(1 << 20)  # more than a pipe holds


def _fail() -> None:
    raise StoreError("as it was")


def test_a_call_that_does_not_end() -> None:
    with pytest.raises(TimeoutError, match="no answer within 0.05 s"):
        within(0.05, time.sleep, 3600)
