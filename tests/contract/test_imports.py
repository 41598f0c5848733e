"""Imported files on the filesystem in process: their bytes are those of the bucket, as they were.

The store of the bucket speaks S3 on loopback, because processes that move bytes read it, too.
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from aifs.core.errors import Invalid, NameTooLong, NotPermitted, Unavailable
from aifs.data.bucket import Bucket
from aifs.files.types import ROOT as ROOT_USER
from aifs.vfs import Filesystem, SetAttr
from tests.support import modes
from tests.support.object_stores import KEYS, make_bucket, moto
from tests.support.stores import (
    OWNER,
    ask,
    call,
    drained,
    moved_out,
    opened,
    overwrite,
    read_file,
    write_file,
)

pytest.importorskip("obstore")

ROOT = 1
LARGE = 5 << 20
BLOCKS = {"burst.blocks": "always"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        make_bucket(endpoint, "bucket")
        yield endpoint


@pytest.fixture
def url(endpoint: str, tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}?endpoint={endpoint}"


@pytest.fixture
def bucket(url: str) -> Bucket:
    return Bucket(url)


@pytest.fixture
async def fs(directory: Path) -> AsyncIterator[Filesystem]:
    async with opened(directory, BLOCKS) as fs:
        yield fs


async def make(fs: Filesystem, url: str, *entries: tuple[str, int, str]) -> list[str]:
    """Call the ioctl with name, size and ETag of each; the states."""
    names, sizes, etags = zip(*entries, strict=True)
    answer = await call(
        fs,
        ROOT,
        "import",
        ROOT_USER,
        bucket=url,
        names="\n".join(names),
        etags="\n".join(etags),
        sizes=sizes,
        mtimes=[10**18] * len(names),
    )
    return answer["states"].split("\n")


async def imported(fs: Filesystem, url: str, *contents: tuple[str, bytes]) -> list[int]:
    """Put objects, and import them; their inode numbers."""
    bucket = Bucket(url)
    entries = [(name, len(data), bucket.put(name, data) or "") for name, data in contents]
    assert await make(fs, url, *entries) == ["made"] * len(contents)
    return [(await fs.lookup(ROOT, name.encode())).ino for name, _ in contents]


async def test_files_have_size_time_and_bytes_of_their_objects(fs: Filesystem, url: str) -> None:
    contents = ("a", os.urandom(3000)), ("large", os.urandom(LARGE)), ("empty", b"")
    inos = await imported(fs, url, *contents)
    for ino, (name, data) in zip(inos, contents, strict=True):
        inode = await fs.getattr(ino)
        assert (inode.size, inode.mtime_ns, inode.mode & 0o777) == (len(data), 10**18, 0o644)
        assert await read_file(fs, ino) == data, name
    info = await ask(fs, inos[1], "info")
    assert info["form"] == "imported"
    assert info["source"]["url"] == f"{url.partition('?')[0]}/large"


async def test_blocks_outlive_the_mount_and_the_object(
    directory: Path, url: str, bucket: Bucket
) -> None:
    async with opened(directory, BLOCKS) as fs:
        (ino,) = await imported(fs, url, ("large", data := os.urandom(LARGE)))
        while not fs.blocks.room:  # until the device has been looked at
            await trio.lowlevel.checkpoint()
        assert await fs.stager.warm(ino)
    bucket.delete(["large"])
    async with opened(directory) as fs:
        assert await read_file(fs, ino) == data
        assert (await ask(fs, ino, "info"))["block_bytes"] == LARGE


@pytest.mark.parametrize("change", ["replaced", "deleted"])
async def test_an_object_that_is_another_is_an_error(
    fs: Filesystem,
    url: str,
    bucket: Bucket,
    change: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (ino,) = await imported(fs, url, ("a", b"1" * 3000))
    bucket.put("a", b"2" * 3000) if change == "replaced" else bucket.delete(["a"])
    with pytest.raises(Unavailable, match="was replaced or deleted"):
        await read_file(fs, ino)
    with pytest.raises(Unavailable, match="was replaced or deleted"):
        await overwrite(fs, ino, 0, b"x")
    assert f"{url.partition('?')[0]}/a: is not what was imported" in caplog.text
    caplog.clear()


async def test_a_file_that_changes_is_ours(fs: Filesystem, url: str, bucket: Bucket) -> None:
    a, b, c = await imported(fs, url, ("a", b"1" * 3000), ("b", os.urandom(LARGE)), ("c", b"33"))
    await overwrite(fs, a, 100, b"new")
    await fs.setattr(b, SetAttr(size=4096), ROOT_USER)
    await overwrite(fs, c, 0, b"", os.O_TRUNC)
    kept = bucket.get("b")
    assert kept is not None
    expected = b"1" * 100 + b"new" + b"1" * 2897
    assert await read_file(fs, a) == expected
    bucket.delete(["a", "b", "c"])
    await moved_out(fs, a, b, c)
    assert await read_file(fs, a) == expected
    assert await read_file(fs, b) == kept[0][:4096]
    assert await read_file(fs, c) == b""
    assert (await ask(fs, a, "info"))["form"] != "imported"


async def test_a_file_is_pinned_to_the_burst_tier(fs: Filesystem, url: str, bucket: Bucket) -> None:
    (ino,) = await imported(fs, url, ("a", data := os.urandom(LARGE)))
    assert await fs.stager.stage(ino)
    bucket.delete(["a"])
    assert await read_file(fs, ino) == data
    await fs.evictor.evict(ino)
    assert (await ask(fs, ino, "info"))["form"] == "imported"


async def test_clones_have_the_same_object(fs: Filesystem, url: str, bucket: Bucket) -> None:
    (ino,) = await imported(fs, url, ("a", b"1" * 3000))
    await fs.clone(ROOT, b"a", ROOT, b"b", ROOT_USER)
    clone = (await fs.lookup(ROOT, b"b")).ino
    await overwrite(fs, ino, 0, b"x")
    assert await read_file(fs, clone) == b"1" * 3000
    await fs.unlink(ROOT, b"a")
    await drained(fs, clone)
    assert await read_file(fs, clone) == b"1" * 3000
    assert bucket.get("a") is not None


async def test_names_that_are_there_stay(fs: Filesystem, url: str, bucket: Bucket) -> None:
    await imported(fs, url, ("a", b"1"), ("b", b"2"), ("c", b"3"), ("e", b""))
    await write_file(fs, b"d", b"ours")
    c = (await fs.lookup(ROOT, b"c")).ino
    await overwrite(fs, c, 0, b"4")
    entries = [(name, 1, (bucket.get(name) or (b"", ""))[1]) for name in "abc"]
    entries[1] = ("b", 1, "another")
    entries += [("d", 4, "etag"), ("e", 0, "etag"), ("f", 4, "etag")]
    states = ["same", "changed", "other", "other", "same", "made"]
    assert await make(fs, url, *entries) == states
    assert await make(fs, f"{url}&region=other", entries[0]) == ["changed"]
    assert await make(fs, url.replace("?", "/?"), entries[0]) == ["changed"]
    assert await make(fs, url.replace("?", "/x?"), entries[0]) == ["other"]
    assert await read_file(fs, c) == b"4"


@pytest.mark.parametrize(
    "settings", [{}, {"data.verify": "read"}, {"burst.blocks": "off"}], ids=str
)
async def test_a_second_mount_reads_the_same(directory: Path, url: str, settings: dict) -> None:
    async with opened(directory, {**modes.OFF, **settings}, base={}) as fs:
        (ino,) = await imported(fs, url, ("a", data := os.urandom(LARGE)))
    async with opened(directory) as fs:
        assert await read_file(fs, ino) == data
        await fs.unlink(ROOT, b"a")


async def test_wrong_calls_are_refused(fs: Filesystem, url: str) -> None:
    good = {"bucket": url, "names": "a\nb", "etags": "1\n2", "sizes": [1, 2], "mtimes": [1, 2]}
    wrong: list[dict[str, object]] = [
        {"bucket": ""},
        {"names": "a"},
        {"names": "a\n"},
        {"names": "a/b\nc"},
        {"names": "a\n" + "b" * 256},
        {"names": "a\n\udc80"},
        {"etags": "1\n"},
        {"sizes": [1]},
        {"sizes": [1, 1 << 63]},
        {"mtimes": [1, 1 << 63]},
    ]
    for change in wrong:
        with pytest.raises((Invalid, NameTooLong)):
            await call(fs, ROOT, "import", ROOT_USER, **{**good, **change})
    with pytest.raises(NotPermitted):
        await call(fs, ROOT, "import", OWNER, **good)
    assert not len(await fs.readdir(ROOT, 0))


async def test_a_bucket_that_does_not_answer_is_an_error(fs: Filesystem, url: str) -> None:
    await make(fs, url.replace("bucket/", "none/"), ("a", 1, "etag"))
    ino = (await fs.lookup(ROOT, b"a")).ino
    with pytest.raises(Unavailable):
        await read_file(fs, ino)
