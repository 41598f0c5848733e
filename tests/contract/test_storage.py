"""The contract of storages (aifs/data/storage.py), on each kind. Whoever writes another one adds it
to ``storage``.
"""

import random
import shutil
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from aifs.core.errors import NotSupported, StoreError
from aifs.data import bucket_storage
from aifs.data.bucket import Bucket
from aifs.data.bucket_storage import BucketStorage
from aifs.data.directory_storage import DirectoryStorage
from aifs.data.marker import FORMAT, NAME, Identity, Marker, encode_marker
from aifs.data.storage import BACKUP, CLAIM, NEAR, Storage, StoredObject
from tests.support.data_servers import STORE, make_server
from tests.support.memory_storage import BUCKETS, MemoryStorage
from tests.support.object_stores import KEYS, make_bucket, moto

KEY = (7, 5 * NEAR + 3)
IDENTITY = Identity(STORE, "data", 0)
NUMBERS = count()


class Kind:
    """A storage that can be opened again, as by another mount."""

    def __init__(self, kind: type[Storage], address: str) -> None:
        self.kind, self.address = kind, address
        self.storage = self.again()

    def again(self) -> Storage:
        storage = self.kind(self.address)
        storage.identify(IDENTITY, read_only=False)
        return storage

    def vanish(self) -> None:
        """As a filesystem that is no longer mounted, or a host that cannot be reached."""
        if self.kind is MemoryStorage:
            BUCKETS[self.address].is_there = False
        elif self.kind is BucketStorage:
            bucket = Bucket(self.address)
            bucket.delete([found.key for page in bucket.pages("") for found in page])
        else:
            shutil.move(self.address, f"{self.address}.away")

    def is_marked_as(self, number: int) -> None:
        marker = Marker(FORMAT, STORE, "data", number, "2025-01-01T00:00:00+00:00")
        if self.kind is MemoryStorage:
            BUCKETS[self.address].blobs[NAME] = encode_marker(marker)
        elif self.kind is BucketStorage:
            Bucket(self.address).put(NAME, encode_marker(marker))
        else:
            shutil.move(self.address, f"{self.address}.away")
            make_server(Path(self.address), number)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as found:
        yield found


@pytest.fixture(params=["directory", "memory", "bucket in memory", "bucket of moto"])
def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kind]:
    marker = Marker(FORMAT, STORE, "data", 0, "2025-01-01T00:00:00+00:00")
    if request.param == "directory":
        yield Kind(DirectoryStorage, make_server(tmp_path / "server", 0))
    elif request.param == "memory":
        address = f"memory:{tmp_path}"
        MemoryStorage(address)
        BUCKETS[address].blobs[NAME] = encode_marker(marker)
        yield Kind(MemoryStorage, address)
        del BUCKETS[address]
    else:
        pytest.importorskip("obstore", reason="needs obstore: pip install '.[objects]'")
        monkeypatch.setattr(bucket_storage, "FRESH_S", 0)
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        address = f"memory:/{tmp_path}"
        if request.param == "bucket of moto":
            endpoint, name = request.getfixturevalue("endpoint"), f"bucket-{next(NUMBERS)}"
            make_bucket(endpoint, name)
            address = f"s3://{name}/prefix?endpoint={endpoint}"
        BucketStorage(address).mark(marker)
        yield Kind(BucketStorage, address)


@pytest.fixture
def storage(made: Kind) -> Storage:
    return made.storage


def put(storage: Storage, key: tuple[int, int], data: bytes) -> None:
    """Make an object, durably."""
    handle = storage.create(key, exclusive=False)
    storage.write(handle, data, 0)
    storage.sync(handle)
    storage.sync_names(key[1])
    storage.close(handle)


def get(storage: Storage, key: tuple[int, int]) -> bytes | None:
    handle = storage.open(key, write=False)
    if handle is None:
        return None
    content = read(storage, handle, 0, storage.stat(handle).length + 10)
    storage.close(handle)
    return content


def read(storage: Storage, handle: int, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: storage.read(handle, memoryview(buffer), offset)])


def keys(storage: Storage) -> set[tuple[int, int]]:
    return {found[:2] for found in storage.list_all() if isinstance(found, StoredObject)}


# --- objects ---


def test_an_object_is_what_was_written_and_lasts(made: Kind) -> None:
    put(made.storage, KEY, b"content")
    for storage in (made.storage, made.again()):
        assert get(storage, KEY) == b"content"
        assert get(storage, (8, KEY[1])) is None
        assert get(storage, (7, KEY[1] + 1)) is None


def test_a_new_object_is_written_at_any_offset_in_any_order(storage: Storage) -> None:
    content, seed = bytearray(1 << 20), random.Random(5)
    handle = storage.create(KEY, exclusive=False)
    for _ in range(40):
        part, at = seed.randbytes(seed.randrange(1 << 16)), seed.randrange((1 << 20) - (1 << 16))
        content[at : at + len(part)] = part
        storage.write(handle, memoryview(part), at)
    storage.truncate(handle, 1 << 20)
    assert storage.stat(handle).length == 1 << 20
    storage.sync(handle)
    assert read(storage, handle, 0, 2 << 20) == content
    assert read(storage, handle, 1000, 5000) == content[1000:6000]
    assert read(storage, handle, 1 << 20, 10) == b""
    storage.close(handle)
    assert get(storage, KEY) == content


def test_a_new_object_can_be_cut_and_extended_with_zeros(storage: Storage) -> None:
    handle = storage.create(KEY, exclusive=False)
    storage.write(handle, b"x" * 100, 0)
    storage.truncate(handle, 10)
    storage.truncate(handle, 20)
    storage.write(handle, b"y", 25)
    storage.sync(handle)
    storage.close(handle)
    assert get(storage, KEY) == b"x" * 10 + bytes(15) + b"y"


def test_many_threads_may_write_parts_of_one_object(storage: Storage) -> None:
    handle = storage.create(KEY, exclusive=False)
    parts = [bytes([number]) * 4096 for number in range(32)]
    threads = [
        threading.Thread(target=storage.write, args=(handle, part, 4096 * number))
        for number, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storage.sync(handle)
    storage.close(handle)
    assert get(storage, KEY) == b"".join(parts)


def test_what_is_there_is_not_made_anew(storage: Storage) -> None:
    put(storage, KEY, b"content")
    with pytest.raises(FileExistsError):
        storage.create(KEY, exclusive=True)
    handle = storage.create(KEY, exclusive=False)
    assert read(storage, handle, 0, 10) == b"content"
    storage.close(handle)


def test_an_object_that_is_synced_changes_only_where_the_storage_says_so(storage: Storage) -> None:
    put(storage, KEY, b"content")
    handle = storage.open(KEY, write=True)
    changes = [
        (storage.in_place, storage.write, (handle, b"CON", 0), b"CONtent"),
        (storage.append, storage.write, (handle, b"!", 7), b"CONtent!"),
        (storage.in_place, storage.truncate, (handle, 3), b"CON"),
    ]
    expected = b"content"
    for allowed, change, args, after in changes:
        if allowed:
            change(*args)
            storage.sync(handle)
            expected = after
        else:
            with pytest.raises(NotSupported):
                change(*args)
        assert get(storage, KEY) == expected
    storage.close(handle)


def test_holes_are_known_and_made_only_where_the_storage_says_so(storage: Storage) -> None:
    handle = storage.create(KEY, exclusive=False)
    storage.write(handle, b"x" * (1 << 20), 0)
    if storage.holes:
        storage.punch(handle, 0, 1 << 19)
        assert storage.next_data(handle, 0, 1 << 20) == (1 << 19, 1 << 20)
        assert storage.next_data(handle, 0, 1 << 19) is None
    else:
        with pytest.raises(NotSupported):
            storage.punch(handle, 0, 1 << 19)
        assert storage.next_data(handle, 5, 2 << 20) == (5, 1 << 20)
    assert storage.next_data(handle, 1 << 20, 2 << 20) is None
    storage.close(handle)


def test_what_the_cache_answers_is_right(storage: Storage) -> None:
    put(storage, KEY, b"content")
    handle, buffer = storage.open(KEY, write=False), bytearray(4)
    answered = storage.read_cached(handle, memoryview(buffer), 1)
    assert not answered or (storage.can_read_cached and buffer == b"onte")
    assert not storage.read_cached(handle, memoryview(bytearray(20)), 0), "wholly or not at all"
    storage.close(handle)


def test_removed_objects_are_gone_for_who_opens_them(made: Kind) -> None:
    storage = made.storage
    for number in range(3):
        put(storage, (7, KEY[1] + number), b"content")
    storage.remove(KEY)
    storage.remove(KEY)
    storage.remove((7, KEY[1] + 50))
    storage.sync_names(KEY[1])
    for again in (storage, made.again()):
        assert get(again, KEY) is None
        assert keys(again) == {(7, KEY[1] + 1), (7, KEY[1] + 2)}


def test_an_object_that_is_removed_while_it_is_written_stays_away(storage: Storage) -> None:
    handle = storage.create(KEY, exclusive=False)
    storage.write(handle, b"content", 0)
    storage.remove(KEY)
    storage.sync(handle)
    storage.close(handle)
    assert get(storage, KEY) is None
    put(storage, KEY, b"made anew")
    assert get(storage, KEY) == b"made anew"


def test_objects_are_listed_by_range_and_all(storage: Storage) -> None:
    oids = [1, 255, 256, 257, 70000, 1 << 40]
    for oid in oids:
        put(storage, (oid % 5, oid), b"x" * (oid % 1000))
    assert keys(storage) == {(oid % 5, oid) for oid in oids}
    for first, end in ((0, 1 << 41), (1, 257), (256, 257), (258, 70000)):
        expected = {(oid % 5, oid) for oid in oids if first <= oid < end}
        if end - first < 1 << 20:
            assert set(storage.list_range(first, end)) == expected
    lengths = {found.oid: found.length for found in storage.list_all()}
    assert lengths == {oid: oid % 1000 for oid in oids}


def test_space_is_told(storage: Storage) -> None:
    space = storage.space()
    assert space.total >= space.free >= space.available > 0


# --- blobs ---


def test_of_two_who_replace_the_claim_at_once_one_succeeds(made: Kind) -> None:
    found: list[bool] = []

    def replace(content: bytes) -> None:
        found.append(storage.put_blob(CLAIM, content, True, before))

    for number in range(20):
        storage, before = made.again(), made.storage.get_blob(CLAIM)
        found.clear()
        threads = [
            threading.Thread(target=replace, args=(b"%d %d" % (number, who),)) for who in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [False, True]
    assert not made.storage.put_blob(CLAIM, b"late", True, before)


@pytest.mark.parametrize("name", [CLAIM, f"{BACKUP}/some-name.1"])
def test_a_blob_is_what_was_put_last(made: Kind, name: str) -> None:
    assert made.storage.get_blob(name) is None
    for content in (b"first", b"", b"x" * 60000, b"last\n"):
        made.storage.put_blob(name, content)
        assert made.storage.get_blob(name) == content
    made.storage.put_blob(name, b"not durable", durable=False)
    assert made.again().get_blob(name) == b"not durable"
    made.storage.delete_blob(name)
    made.storage.delete_blob(name)
    assert made.again().get_blob(name) is None


def test_blobs_are_listed_and_no_objects(storage: Storage) -> None:
    assert storage.list_blobs(BACKUP) == {}
    storage.put_blob(CLAIM, b"claim")
    storage.put_blob(f"{BACKUP}/one", b"1")
    storage.put_blob(f"{BACKUP}/three", b"333")
    assert storage.list_blobs(BACKUP) == {"one": 1, "three": 3}
    assert list(storage.list_all()) == []


# --- identity ---


def test_a_storage_of_something_else_is_refused(made: Kind) -> None:
    assert made.storage.place == made.again().place is not None
    assert made.storage.pool == made.again().pool
    made.is_marked_as(1)
    with pytest.raises(StoreError, match="says data 1 of store .*, not data 0"):
        made.again()
    with pytest.raises(StoreError):
        made.storage.reach()
    with pytest.raises(StoreError):
        made.storage.create(KEY, exclusive=False)


def test_nothing_is_missing_only_because_the_storage_is_not_there(made: Kind) -> None:
    storage = made.storage
    put(storage, KEY, b"content")
    storage.reach()
    assert storage.works()
    made.vanish()
    assert not storage.works()
    for call, args in (
        (storage.reach, ()),
        (storage.open, (KEY, False)),
        (storage.create, ((7, 1), False)),
        (storage.remove, (KEY,)),
        (storage.list_range, (0, NEAR)),
        (list, (storage.list_all(),)),
        (storage.get_blob, (CLAIM,)),
        (storage.put_blob, (CLAIM, b"claim")),
        (storage.list_blobs, (BACKUP,)),
        (storage.delete_blob, (CLAIM,)),
    ):
        with pytest.raises((FileNotFoundError, StoreError)):
            call(*args)
    with pytest.raises(StoreError):
        made.again()
