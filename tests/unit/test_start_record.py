"""Records of what starts touch, and where jobs have theirs (core/start_record, client/startup)."""

import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.client import startup
from aifs.core.errors import Invalid
from aifs.core.mountinfo import mount_of
from aifs.core.start_record import (
    BLOCK,
    HotFile,
    StartRecord,
    decode,
    encode,
    runs_of,
    union,
)


def hot(ino: int, *blocks: int, size: int = 8 * BLOCK, mtime_ns: int = 1) -> HotFile:
    return HotFile(f"/f{ino}", ino, size, mtime_ns, runs_of(blocks))


def record(*files: HotFile, run: str = "1", began_s: float = 5.0) -> StartRecord:
    return StartRecord(run, "host", began_s, 2.5, files)


hot_files = st.builds(
    lambda path, ino, size, mtime_ns, blocks: HotFile(
        path, ino, size, mtime_ns, runs_of(n for n in blocks if n * BLOCK < size)
    ),
    st.binary(max_size=20).map(lambda name: "/" + name.decode("utf-8", "surrogateescape")),
    st.integers(1, 1 << 60),
    st.integers(0, 40 * BLOCK),
    st.integers(-(1 << 60), 1 << 60),
    st.sets(st.integers(0, 39)),
)


@pytest.mark.sweep
@given(st.lists(hot_files, max_size=5))
def test_what_is_encoded_is_decoded(files: list[HotFile]) -> None:
    assert decode(encode(record(*files))) == record(*files)


def test_a_torn_record_is_none() -> None:
    data = encode(record(hot(2, 0, 1, 5), hot(3, 7)))
    for length in range(len(data)):
        with pytest.raises(Invalid):
            decode(data[:length])
    for place in range(len(data)):
        torn = bytearray(data)
        torn[place] ^= 0xFF
        try:  # what the header says of the file's name and time is nobody's business
            assert decode(torn) == record(hot(2, 0, 1, 5), hot(3, 7))
        except Invalid:
            pass


def test_a_record_of_a_time_that_no_calendar_has_is_none() -> None:
    with pytest.raises(Invalid):
        decode(encode(record(hot(2, 0), began_s=1e300)))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '{"version": 2, "files": []}',
        '{"version": 1, "run": "1", "host": "h", "began_s": 1, "took_s": 1, "files": [FILE]}',
    ],
)
@pytest.mark.parametrize(
    "file",
    ['["/f", 0, 1, 1, []]', '["/f", 2, 1, 1, [0, 2]]', '["/f", 2, 1, 1, [0]]', "[1, 2, 1, 1, []]"]
    + ['["/f", 2, 9999999, 1, [3, 1, 0, 1]]', '["/f", 2, "1", 1, []]', '["/f", 2]', "{}", "7"],
)
def test_a_foreign_record_is_none(text: str, file: str) -> None:
    packer = zlib.compressobj(wbits=31)
    data = packer.compress(text.replace("FILE", file).encode()) + packer.flush()
    with pytest.raises(Invalid):
        decode(data)


def test_the_last_file_block_is_as_long_as_the_file() -> None:
    assert hot(2, 0, 2, size=2 * BLOCK + 7).bytes == BLOCK + 7


@given(st.sets(st.integers(0, 30)))
def test_runs_are_blocks(blocks: set[int]) -> None:
    runs = runs_of(blocks)
    assert {first + n for first, count in runs for n in range(count)} == blocks
    assert all(a[0] + a[1] < b[0] for a, b in zip(runs, runs[1:], strict=False))


def test_the_union_has_the_order_of_the_newest() -> None:
    newest, before = record(hot(3, 0), hot(2, 1)), record(hot(5, 4), hot(2, 1, 2), hot(3, 7))
    assert union([newest, before]) == [hot(3, 0, 7), hot(2, 1, 2), hot(5, 4)]
    changed = record(hot(2, 5, mtime_ns=2))
    assert union([newest, changed]) == [hot(3, 0), hot(2, 1)]


def test_jobs_are_directories(tmp_path: Path) -> None:
    directory = Path(startup.directory_of(str(tmp_path), "llama", "64gpu"))
    assert directory.name == "llama+64gpu"
    for name in ("", "..", "a/b", ".hidden", "x" * 200):
        with pytest.raises(startup.StartUnknown):
            startup.directory_of(str(tmp_path), name)
    with pytest.raises(startup.StartUnknown, match="no start of this job was recorded"):
        startup.read_records(str(directory))
    directory.mkdir()
    (tmp_path / "file").touch()
    older, newer = record(hot(2, 0), run="a", began_s=1.0), record(hot(2, 1), run="b", began_s=2.0)
    (directory / "a.start").write_bytes(encode(older))
    (directory / "b.start").write_bytes(encode(newer))
    (directory / "c.start").write_bytes(encode(newer)[:-3])
    (directory / ".d.start").write_bytes(encode(newer))
    assert startup.list_jobs(str(tmp_path)) == {"llama+64gpu": [newer, older]}
    startup.forget(str(directory))
    assert startup.list_jobs(str(tmp_path)) == {}
    with pytest.raises(startup.StartUnknown):
        startup.forget(str(directory))


def test_a_start_is_called_as_the_scheduler_calls_it() -> None:
    assert startup.run_name({"SLURM_JOB_ID": "1234"}) == "1234"
    assert startup.run_name({"SLURM_JOB_ID": "../x"}).endswith("Z")


def test_records_that_never_end_are_left_out(tmp_path: Path) -> None:
    good = record(hot(2, 0))
    (tmp_path / "a.start").write_bytes(encode(good))
    os.mkfifo(tmp_path / "b.start")
    (tmp_path / "c.start").touch()
    os.truncate(tmp_path / "c.start", 1 << 40)
    (tmp_path / "d.start").symlink_to("/dev/zero")
    assert startup.read_records(str(tmp_path)) == [good]


def test_a_record_that_goes_while_they_are_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount keeps the last three: an old one ended the prefetching of a job."""
    good, listed = record(hot(2, 0)), os.listdir
    (tmp_path / "a.start").write_bytes(encode(good))
    monkeypatch.setattr(os, "listdir", lambda path: ["gone.start", *listed(path)])
    assert startup.read_records(str(tmp_path)) == [good]


def test_where_everybody_may_write_only_records_that_can_be_trusted_count(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    tmp_path.chmod(0o1777)
    for name in ("a", "b"):
        (tmp_path / f"{name}.start").write_bytes(encode(record(hot(2, 0), run=name)))
    os.chown(tmp_path / "b.start", 65534, 65534)
    assert [found.run for found in startup.read_records(str(tmp_path))] == ["a"]


def test_what_is_prefetched_lies_on_the_mount(tmp_path: Path) -> None:
    """A record may be anybody's; a FIFO of another directory was opened, as a device would be."""
    fifo, file, job = tmp_path / "fifo", tmp_path / "file", tmp_path / "job"
    os.mkfifo(fifo)
    file.write_bytes(b"x" * 5)
    job.mkdir()
    mount = mount_of(str(tmp_path))
    top = "/" if mount is None else mount.mountpoint
    found = file.stat()
    (tmp_path / "link").symlink_to(tmp_path)
    paths = ("/.." * 20 + str(fifo), str(tmp_path / "link" / "file"), str(file), str(fifo))
    files = [
        HotFile("/" + os.path.relpath(path, top), found.st_ino, 5, found.st_mtime_ns, ((0, 1),))
        for path in paths[1:]
    ]
    files.append(files[0]._replace(path=paths[0]))
    for number, (each, fetched) in enumerate(zip(files, (0, 1, 0, 0), strict=True)):
        (job / "a.start").write_bytes(encode(record(each, began_s=float(number))))
        assert startup.prefetch(str(job)).files == fetched, each.path


@pytest.mark.sweep
@pytest.mark.parametrize(
    "files",
    [
        [hot(2, size=1 << 62)._replace(runs=((0, 1 << 22),))],
        [hot(2, size=1 << 62)._replace(runs=tuple((2 * n, 1) for n in range(600_000)))],
        [hot(2)] * 140_000,
    ],
)
def test_a_record_that_would_become_much_more_in_memory_is_none(files: list[HotFile]) -> None:
    """A few bytes name as many blocks as a number can say, of which the daemon made a set."""
    with pytest.raises(Invalid, match="more than"):
        decode(encode(record(*files)))
