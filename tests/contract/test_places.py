"""``user.aifs.places.N``: where the files of a directory lie, for many of them at once."""

import pytest

from aifs.core.errors import AccessDenied, NoAttribute
from aifs.reads.virtual import walking
from aifs.vfs import Caller, Filesystem
from tests.support.stores import OWNER, drained, write_file
from tests.support.stores import fs as fs

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)


async def placed(fs: Filesystem, directory: int) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Of each file, by its inode number: size, mtime, container and offset; and how many answers
    it took."""
    found: dict[int, tuple[int, ...]] = {}
    cookie, answers = 0, 0
    while True:
        told = await fs.getxattr(directory, b"user.aifs.places.%d" % cookie, OWNER)
        assert len(told) < 1 << 16
        (cookie,) = walking.NEXT.unpack_from(told)
        for ino, *rest in walking.FILE.iter_unpack(told[walking.NEXT.size :]):
            assert ino not in found
            found[ino] = tuple(rest)
        answers += 1
        if not cookie:
            return answers, found


@pytest.mark.sweep
@pytest.mark.store(servers=2)
async def test_all_files_of_a_directory_are_told_in_few_answers(fs: Filesystem) -> None:
    parent = (await fs.mkdir(ROOT, b"images", 0o755, OWNER)).ino
    await fs.mkdir(parent, b"not a file", 0o755, OWNER)
    assert await placed(fs, parent) == (1, {})
    inos = [
        await write_file(fs, b"%d" % number, b"%04d" % number * 1000, parent, OWNER)
        for number in range(200)
    ]
    _, found = await placed(fs, parent)
    assert {row[2:] for row in found.values()} == {(0, 0)}, "they lie in the burst tier alone"
    await drained(fs, *inos)
    large = await write_file(fs, b"large", b"x", parent, OWNER)
    empty = [
        await fs.mknod(parent, b"empty%d" % number, 0o100644, 0, OWNER) for number in range(1500)
    ]
    answers, found = await placed(fs, parent)
    assert answers == 2
    assert set(found) == {*inos, large, *(inode.ino for inode in empty)}
    assert len({found[ino][2:] for ino in inos}) == len(inos), "each has a place of its own"
    for ino in inos:
        inode = await fs.getattr(ino)
        size, mtime_ns, container, _ = found[ino]
        assert (size, mtime_ns) == (inode.size, inode.mtime_ns) and container


async def test_who_may_not_search_a_directory_is_told_nothing(fs: Filesystem) -> None:
    parent = (await fs.mkdir(ROOT, b"images", 0o744, OWNER)).ino
    ino = await write_file(fs, b"file", b"x", parent, OWNER)
    with pytest.raises(AccessDenied):
        await fs.getxattr(parent, b"user.aifs.places.0", OTHER)
    with pytest.raises(NoAttribute):
        await fs.getxattr(ino, b"user.aifs.places.0", OWNER)
