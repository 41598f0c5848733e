"""Buckets behind a network that fails: no wrong bytes, and errors that name bucket and key."""

import errno
import os
import random
from collections.abc import Iterator
from datetime import timedelta

import pytest

from aifs.data import bucket as module
from aifs.data.bucket import PART, Bucket
from tests.support.object_stores import KEYS, Proxy, make_bucket, moto

pytest.importorskip("obstore", reason="needs obstore: pip install '.[objects]'")

SPOILS = ["busy", "reset", "lost", "cut", "short"]
MS = timedelta(milliseconds=1)
SIZES = [0, 1, 10_000, PART - 1, 2 * PART + 5]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as found:
        make_bucket(found, "bucket")
        yield found


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(module.REPEAT, "backoff", {"init_backoff": MS, "max_backoff": MS})
    made = Proxy(endpoint, lambda asked: "")
    yield made
    made.close()


@pytest.mark.parametrize("word", SPOILS)
def test_bytes_are_right_whatever_the_network_does(proxy: Proxy, word: str) -> None:
    """Of three requests, one is spoilt."""
    draw, bucket = random.Random(word), Bucket(f"s3://bucket/{word}?endpoint={proxy.endpoint}")

    def spoil(asked: str) -> str:
        is_meant = word != "short" or (asked.startswith("GET") and "?" not in asked)
        return word if is_meant and draw.random() < 1 / 3 else ""

    proxy.spoil = spoil
    for number, size in enumerate(SIZES * 2):
        content = os.urandom(size)
        if size < PART:
            bucket.put(f"{number}", content)
        else:
            with bucket.upload(f"{number}") as upload:
                upload.write(content)
        for _ in range(3):
            buffer = bytearray(size)
            if size:
                assert bucket.read_into(f"{number}", memoryview(buffer), 0) == size
            assert buffer == content
            if word != "short":  # without a range nothing shows it
                assert bucket.get(f"{number}")[0] == content
            found = bucket.head(f"{number}")
            assert found is not None and found.size == size
    assert sorted(found.key for page in bucket.pages("") for found in page) == sorted(
        str(number) for number in range(len(SIZES * 2))
    )
    bucket.delete([str(number) for number in range(len(SIZES * 2))])
    assert list(bucket.pages("")) == []
    assert len(proxy.spoilt) > 5


@pytest.mark.parametrize("word", SPOILS)
def test_errors_that_stay_name_bucket_and_key(
    proxy: Proxy, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.REPEAT, "max_retries", 2)
    bucket = Bucket(f"s3://bucket/stays?endpoint={proxy.endpoint}")
    bucket.put("key", b"content")
    proxy.spoil = lambda asked: word
    with pytest.raises(OSError, match="s3://bucket/stays/key") as raised:
        bucket.read_into("key", memoryview(bytearray(7)), 0)
    assert raised.value.errno in (errno.EBUSY, errno.EHOSTUNREACH, errno.EIO)
    if word in ("busy", "reset"):
        with pytest.raises(OSError, match="s3://bucket/stays/key"):
            bucket.put("key", b"other")
    proxy.spoil = lambda asked: ""
    bucket.delete(["key"])
