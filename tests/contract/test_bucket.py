"""Buckets (aifs/data/bucket.py), in memory and of moto's S3, and what errors of a store mean."""

import errno
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest

from aifs.core.errors import StoreError
from aifs.data import bucket as module
from aifs.data import bucket_check, bucket_storage
from aifs.data.bucket import ANY, PART, Bucket, Upload
from aifs.data.bucket_check import check_bucket
from aifs.data.bucket_storage import BucketStorage
from aifs.data.marker import FORMAT, Identity, Marker
from tests.support.object_stores import KEYS, Scripted, make_bucket, minio, moto, s3_error

MS = timedelta(milliseconds=1)

pytest.importorskip("obstore", reason="needs obstore: pip install '.[objects]'")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as found:
        yield found


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    name = tmp_path.name.replace("_", "-").replace("[", "-").replace("]", "-").lower()
    if request.param == "memory":
        return Bucket(f"memory://{name}")
    endpoint = request.getfixturevalue("endpoint")
    make_bucket(endpoint, name)
    return Bucket(f"s3://{name}/some/prefix?endpoint={endpoint}")


def test_objects_are_put_read_listed_and_deleted(bucket: Bucket) -> None:
    assert bucket.get("a/b") is None and bucket.head("a/b") is None
    etag = bucket.put("a/b", b"content")
    assert bucket.get("a/b") == (b"content", etag)
    assert bucket.head("a/b")[:3] == ("a/b", 7, etag)
    buffer = bytearray(5)
    assert bucket.read_into("a/b", memoryview(buffer), 1, etag) == 5 and buffer == b"onten"
    assert bucket.read_into("a/b", memoryview(buffer), 5) == 2 and buffer[:2] == b"nt"
    for number in range(5):
        bucket.put(f"a/{number}", b"")
    bucket.put("ab", b"")
    pages = list(bucket.pages("a", after="a/1", size=2))
    assert [[found.key for found in page] for page in pages] == [["a/2", "a/3"], ["a/4", "a/b"]]
    bucket.delete(["a/missing", "a/1", "a/b"])
    bucket.delete(["a/1"])
    bucket.delete([])
    assert [found.key for page in bucket.pages("a") for found in page] == [
        "a/0", "a/2", "a/3", "a/4",
    ]  # fmt: skip


def test_an_object_is_put_only_over_what_was_expected(bucket: Bucket) -> None:
    assert bucket.put("key", b"1", "no such etag") is None
    first = bucket.put("key", b"1", None)
    assert first and bucket.put("key", b"2", None) is None
    second = bucket.put("key", b"2", first)
    assert second and bucket.put("key", b"3", first) is None
    assert bucket.get("key") == (b"2", second)
    with pytest.raises(OSError, match="was replaced meanwhile") as raised:
        bucket.read_into("key", memoryview(bytearray(1)), 0, first)
    assert raised.value.errno == errno.ESTALE


def test_large_objects_are_uploaded_whole_or_not_at_all(bucket: Bucket) -> None:
    content = os.urandom(PART + 100)
    with bucket.upload("large") as upload:
        upload.write(content[:PART])
        assert bucket.head("large") is None
        upload.write(memoryview(content)[PART:])
    assert bucket.get("large")[0] == content
    with pytest.raises(ZeroDivisionError), bucket.upload("other") as upload:
        upload.write(content)
        1 / 0  # noqa: B018
    assert bucket.head("other") is None


# --- errors ---


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scripted, Bucket]]:
    few = {"max_retries": 2, "backoff": {"init_backoff": MS, "max_backoff": MS}}
    monkeypatch.setattr(module, "REPEAT", few)
    monkeypatch.setattr(module, "_PAUSES_S", ())
    server = Scripted()
    yield server, Bucket(f"s3://name?endpoint={server.endpoint}")
    server.close()


ERRORS = [
    (403, "AccessDenied", errno.EACCES, "access is denied; allow to list"),
    (403, "InvalidAccessKeyId", errno.EACCES, "does not accept the key"),
    (403, "RequestTimeTooSkewed", errno.EACCES, "the clocks of host and store differ"),
    (403, "QuotaExceeded", errno.EDQUOT, "a quota of the store"),
    (403, "InvalidObjectState", errno.EIO, "has to be restored first"),
    (404, "NoSuchBucket", errno.ENOENT, "there is no such bucket; create it"),
    (400, "AuthorizationHeaderMalformed", errno.EINVAL, "set its region"),
    (429, "TooManyRequests", errno.EBUSY, "asked for fewer requests"),
    (503, "SlowDown", errno.EBUSY, "asked for fewer requests"),
    (500, "InternalError", errno.EIO, "the store failed"),
    (507, "XMinioStorageFull", errno.ENOSPC, "the store is full"),
]


@pytest.mark.parametrize(("status", "code", "number", "text"), ERRORS)
def test_errors_say_what_to_do(
    scripted: tuple[Scripted, Bucket], status: int, code: str, number: int, text: str
) -> None:
    server, bucket = scripted
    server.script = [(status, s3_error(code))]
    for call in (
        lambda: bucket.get("a/key"),
        lambda: bucket.put("a/key", b"x"),
        lambda: bucket.delete(["a/key"]),
        lambda: list(bucket.pages("a/key")),
    ):
        with pytest.raises(OSError, match=text) as raised:
            call()
        assert raised.value.errno == number
        assert raised.value.filename == "s3://name/a/key"
        assert code in str(raised.value)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(scripted: tuple[Scripted, Bucket], status: int) -> None:
    server, bucket = scripted
    server.script = [(status, s3_error("SlowDown"))] * 2 + [(200, b"content")]
    assert bucket.get("key") == (b"content", '"1"')
    server.script = [(status, s3_error("SlowDown"))] * 2 + [(200, b"")]
    assert bucket.put("key", b"x", None)


def test_a_store_that_cannot_be_reached_is_named(scripted: tuple[Scripted, Bucket]) -> None:
    bucket = Bucket("s3://name/prefix?endpoint=http://127.0.0.1:1")
    with pytest.raises(OSError, match="the store cannot be reached; see endpoint") as raised:
        bucket.get("key")
    assert raised.value.filename == "s3://name/prefix/key"


# --- stores that are not good enough ---

MARKER = Marker(FORMAT, "store", "data", 0, "2025-01-01T00:00:00+00:00")


@pytest.mark.long
def test_an_old_gateway_that_ignores_conditions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testtest")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testtest")
    with minio(tmp_path) as endpoint:
        address = f"s3://jfs/prefix?endpoint={endpoint}&disable_bulk_delete=true"
        bucket = Bucket(address)
        bucket.put("a/1", b"content")
        assert bucket.get("a/1")[0] == b"content"
        assert [found.key for page in bucket.pages("a") for found in page] == ["a/1"]
        bucket.delete(["a/1", "a/2"])
        with pytest.raises(StoreError, match="ignores conditions of a PUT"):
            BucketStorage(address).mark(MARKER)
        assert list(bucket.pages("")) == []


@pytest.mark.parametrize("answers", ["all", "etags"])
def test_a_store_that_ignores_conditions_is_refused(
    monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    bucket = Bucket("memory://ignores")
    put = Bucket.put

    def careless(self: Bucket, key: str, data: bytes, expected: object = ANY) -> str | None:
        is_ignored = answers == "all" or expected is not None
        return put(self, key, data, ANY if is_ignored else expected)

    monkeypatch.setattr(Bucket, "put", careless)
    with pytest.raises(StoreError, match="memory://ignores: ignores conditions of a PUT"):
        BucketStorage("memory://ignores").mark(MARKER)
    assert list(bucket.pages("")) == []


# --- what aifs doctor says ---


def test_the_doctor_finds_nothing_wrong_with_a_good_bucket(bucket: Bucket) -> None:
    checks = list(check_bucket(_address(bucket)))
    assert [name for name, *_ in checks] == [
        f"{what}bucket {bucket.url}" for what in ("", "clock of ", "speed of ")
    ]
    assert "read and deleted" in checks[0][1] and checks[0][2] == checks[1][2] == ""
    assert list(bucket.pages("")) == []


@pytest.mark.parametrize(("status", "code", "number", "text"), ERRORS)
def test_the_doctor_says_what_is_wrong(
    scripted: tuple[Scripted, Bucket], status: int, code: str, number: int, text: str
) -> None:
    server, bucket = scripted
    server.script = [(status, s3_error(code))]
    [(name, why, fix)] = check_bucket(f"s3://name?endpoint={server.endpoint}")
    assert name == "bucket s3://name" and text in why and fix == "see there"


def test_the_doctor_notices_clocks_and_lines(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_check, "_SLOW", 1 << 30)
    real_s = bucket_check.time.time
    monkeypatch.setattr(bucket_check.time, "time", lambda: real_s() + 1000)
    checks = list(check_bucket(_address(bucket)))
    assert "s ahead of that of the bucket" in checks[1][1] and "NTP" in checks[1][2]
    assert "MiB/s" in checks[2][1] and "far away" in checks[2][2]


def _address(bucket: Bucket) -> str:
    url, endpoint = bucket.place
    return f"{url}?endpoint={endpoint}" if endpoint else url


# --- objects that are written out of order ---


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BucketStorage:
    monkeypatch.setattr(module, "PART", 1 << 20)
    monkeypatch.setattr(bucket_storage, "PIECE", 1 << 20)
    made = BucketStorage(f"memory:/{tmp_path}")
    made.mark(MARKER)
    made.identify(Identity("store", "data", 0), read_only=False)
    return made


def content_of(storage: BucketStorage, length: int) -> bytes:
    handle, buffer = storage.open((7, 1), write=False), bytearray(length)
    assert storage.stat(handle).length == length
    assert storage.read(handle, memoryview(buffer), 0) == length
    storage.close(handle)
    return bytes(buffer)


def test_parts_that_come_early_wait_and_missing_ones_are_holes(storage: BucketStorage) -> None:
    content = bytearray(os.urandom(60 << 20))
    content[5 << 20 : 30 << 20] = bytes(25 << 20)
    order = [*range(3, 5), *range(3), *range(30, 60)]
    handle = storage.create((7, 1), exclusive=False)
    for number in order:
        storage.write(handle, content[number << 20 : (number + 1) << 20], number << 20)
    with pytest.raises(OSError, match="bytes from 6291456 on have been sent already"):
        storage.write(handle, b"late", 6 << 20)
    storage.sync(handle)
    storage.close(handle)
    assert content_of(storage, 60 << 20) == content


def test_an_upload_that_fails_stays_failed(
    storage: BucketStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Upload, data: bytes) -> None:
        raise OSError(errno.EIO, "the store failed for a minute", "key")

    handle = storage.create((7, 1), exclusive=False)
    with monkeypatch.context() as patch:
        patch.setattr(Upload, "write", failing)
        with pytest.raises(OSError, match="the store failed"):
            storage.write(handle, bytes(2 << 20), 0)
    for call in (lambda: storage.write(handle, b"x", 0), lambda: storage.sync(handle)):
        with pytest.raises(OSError, match="its upload has failed"):
            call()
    storage.close(handle)
    assert storage.open((7, 1), write=False) is None


def test_a_bucket_with_a_limit_says_how_full_it_is_and_takes_no_more(
    storage: BucketStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtOnce(Thread):
        def start(self) -> None:
            self.run()

    monkeypatch.setattr(bucket_storage.threading, "Thread", AtOnce)
    address = storage.address
    Bucket(address).put("objects/0000000000000009.7", bytes(1000))  # another host's
    storage = BucketStorage(f"{address}?limit=3000")
    storage.identify(Identity("store", "data", 0), read_only=False)
    handle = storage.create((7, 1), exclusive=False)
    storage.write(handle, bytes(1500), 0)
    with pytest.raises(OSError, match="its limit of 3000 is reached; raise it") as raised:
        storage.write(handle, bytes(1000), 1500)
    assert raised.value.errno == errno.ENOSPC
    storage.sync(handle)
    assert storage.space().total == 3000 and 0 < storage.space().free < 500
    storage.close(handle)
    storage = BucketStorage(f"{address}?limit=5kB")
    storage.identify(Identity("store", "data", 0), read_only=False)
    handle = storage.create((7, 2), exclusive=False)
    storage.write(handle, bytes(1000), 0)
    storage.close(handle)
    with pytest.raises(StoreError, match="limit: 'much' is not a size in bytes"):
        BucketStorage(f"{address}?limit=much")


def test_objects_that_are_moved_aside_are_not_listed(storage: BucketStorage) -> None:
    handle = storage.create((7, 1), exclusive=False)
    storage.write(handle, b"stray", 0)
    storage.sync(handle)
    storage.close(handle)
    storage.set_aside([(7, 1)])
    assert list(storage.list_all()) == [] and storage.open((7, 1), write=False) is None
    assert Bucket(storage.address).get("lost+found/0000000000000001.7")[0] == b"stray"


# --- settings ---


def test_settings_come_from_files_and_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    with pytest.raises(StoreError, match="the secret of a bucket cannot be read: No such file"):
        Bucket(f"s3://name?secret={secret}")
    secret.write_text("aws_access_key_id = a\naws_secret_access_key = b\n[other]\nregion = x\n")
    secret.chmod(0o644)
    with pytest.raises(StoreError, match="others may read the secret"):
        Bucket(f"s3://name?secret={secret}")
    secret.chmod(0o600)
    assert module.settings_of("s3://name", f"secret={secret}&region=y") == {
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
        "region": "y",
    }
    assert module.settings_of("s3://name", f"secret={secret}&profile=other") == {"region": "x"}
    with pytest.raises(StoreError, match=r"no section \[third\]"):
        Bucket(f"s3://name?secret={secret}&profile=third")
    with pytest.raises(StoreError, match="must not stand in a URL"):
        Bucket("s3://name?aws_secret_access_key=b")
    with pytest.raises(StoreError, match="'endpoinnt' is not valid for store 'S3'"):
        Bucket("s3://name?endpoinnt=http://h")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secret))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert module.settings_of("s3://name", "") == {}, "keys of the environment come first"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert module.settings_of("s3://name", "")["aws_access_key_id"] == "a"
