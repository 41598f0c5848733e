"""A file that all ranks of a process group read: the plan, the exchange between hosts, and what
they hear of failures.
"""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist

from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.torch import gather_files, gathered, parallel
from aifs.client.torch.gather_files import CHAIN, GATHER, READ, FoundFiles, Speeds, choose, pieces
from aifs.client.torch.gathered import GatherError, read, read_files
from aifs.client.torch.parallel import parallel_load, parallel_save
from aifs.core import files
from tests.support import gloo

RANKS = 4
SIZE = 300_001
PIECE = 100_000
FAST, SLOW = Speeds(100e9, 1e9), Speeds(0.1e9, 1e9)

ranges = st.lists(st.tuples(st.integers(-5, 300), st.integers(-5, 300)), max_size=8)


@pytest.mark.sweep
@given(st.integers(0, 250), ranges, st.integers(1, 100))
def test_pieces_cover_each_byte_once_and_what_is_wanted_first_comes_first(size, order, piece):
    found = list(pieces(size, order, piece))
    covered = [byte for begin, end in found for byte in range(begin, end)]
    assert sorted(covered) == list(range(size))
    assert all(0 < end - begin <= piece for begin, end in found)
    wanted = [byte for begin, end in order for byte in range(max(begin, 0), min(end, size))]
    assert covered[: len(set(wanted))] == list(dict.fromkeys(wanted))


def test_the_fastest_way_is_chosen():
    assert choose(10**9, [Speeds()]) == (READ, 0)
    assert choose(0, [Speeds(), Speeds()]) == (READ, 0)
    assert choose(10**9, [Speeds(), Speeds(1e9, 1e9)])[0] == GATHER  # one knows nothing
    assert choose(10**10, [Speeds(1e9, 10e9)] * 4)[0] == GATHER
    assert choose(10**10, [Speeds(10e9, 1e9)] * 4)[0] == READ  # the network is slower than storage
    assert choose(10**10, [SLOW, FAST, SLOW, SLOW]) == (CHAIN, 1)


# --- in processes ---


def run_ranks(body: Callable[[int, Path], None], directory: Path) -> list[str]:
    """With pieces so small that a file has some."""

    def in_pieces(rank: int, directory: Path) -> None:
        gathered.PIECE, gathered.PAUSE_S = PIECE, 0
        body(rank, directory)

    return gloo.run_ranks(in_pieces, directory, RANKS)


CONTENT = random.Random(5).randbytes(SIZE)
ORDER = [(250_000, 299_000), (10, 20)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def on_hosts(ranks_each: int) -> None:
    """As if each so many ranks were a host."""
    gathered.host_name = lambda: f"host {dist.get_rank() // ranks_each}"


def counted() -> list[int]:
    """How many bytes this process reads, from now on."""
    read_into, found = files.read_into, []

    def count(fd: int, buffer: memoryview, offset: int) -> int:
        done = read_into(fd, buffer, offset)
        found.append(done)
        return done

    files.read_into = count
    return found


def read_by_all(directory: Path, **options: Any) -> int:
    """Reads in all ways; how many bytes all ranks have read."""
    found, arrived = counted(), []
    data = read(
        directory / "file", order=ORDER, arrived=lambda *part: arrived.append(part), **options
    )
    assert data == CONTENT
    assert arrived == list(pieces(SIZE, ORDER, PIECE))
    return sum_of_all(sum(found))


def sum_of_all(mine: int) -> int:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sum(everyone)


def one_host(rank: int, directory: Path) -> None:
    assert read_by_all(directory) == RANKS * SIZE  # from the page cache
    target = bytearray(SIZE)
    assert read(directory / "file", into=target) == CONTENT == target
    ranks = dist.new_group([1, 3])
    if rank in (1, 3):
        assert read(directory / "file", ranks) == CONTENT
    dist.barrier()


def many_hosts(rank: int, directory: Path) -> None:
    on_hosts(1)
    assert read_by_all(directory) == SIZE
    assert read_by_all(directory, speeds=FAST if rank == 2 else SLOW) == SIZE
    target = bytearray(SIZE)
    assert read(directory / "file", into=target) == CONTENT == target
    gather_files.measured.clear()
    assert read(directory / "empty") == b""
    group = dist.new_group([3, 1, 2])
    if rank:
        assert read(directory / "file", group) == CONTENT
    dist.barrier()


def two_hosts(rank: int, directory: Path) -> None:
    on_hosts(2)
    for speeds in (Speeds(), FAST if rank == 2 else SLOW):
        assert read_by_all(directory, speeds=speeds) == SIZE
    target, seen = bytearray(SIZE), []
    data = read(
        directory / "file",
        into=target,
        arrived=lambda begin, end: seen.append(target[begin:end] == CONTENT[begin:end]),
    )
    assert data == CONTENT == target
    # It is in ``into`` when that is said.
    assert seen == [True] * len(list(pieces(SIZE, (), PIECE)))
    data = read(directory / "file")
    data[:4] = b"mine" if rank == 1 else b"1234"  # nobody else sees it
    dist.barrier()
    assert bytes(data[:4]) == (b"mine" if rank == 1 else b"1234")
    gathered.map_offer = lambda offer, size: None  # another namespace of processes
    assert read(directory / "file") == CONTENT


def fail(*args: Any, **options: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def several_files(rank: int, directory: Path) -> None:
    found, paths, identity = counted(), [], "the same"
    for number, (begin, end) in enumerate(
        [(0, 1), (1, 1), (1, 150_001), (150_001, 150_002), (150_002, SIZE)]
    ):
        paths.append(directory / f"part {rank} {number}" / f"part{number}")
        paths[-1].parent.mkdir()
        paths[-1].write_bytes(CONTENT[begin:end])

    def find() -> FoundFiles:
        return FoundFiles([str(path) for path in paths], identity)

    for ranks_each in (1, 2):
        on_hosts(ranks_each)
        for speeds in (Speeds(), FAST if rank == 2 else SLOW):
            before = len(found)
            assert read_files(find, "parts", order=ORDER, speeds=speeds) == CONTENT
            assert sum_of_all(sum(found[before:])) == SIZE
    identities = iter(["another"] * (rank == 3) + ["the same"] * 9)
    again = read_files(lambda: FoundFiles([str(path) for path in paths], next(identities)), "parts")
    assert again == CONTENT  # rank 3 has looked a moment too early
    identity = "another" if rank == 3 else "the same"
    with pytest.raises(GatherError, match="parts: rank 3 finds other files than rank 0"):
        read_files(find, "parts")
    identity = "the same"
    if rank == 1:
        paths[4].rename(paths[4].parent / "renamed")
        paths[4] = paths[4].parent / "renamed"
    with pytest.raises(GatherError, match="parts: rank 1 finds other files than rank 0"):
        read_files(find, "parts")
    if rank == 1:
        paths[4] = paths[4].parent / "missing"
    with pytest.raises(GatherError, match="parts: rank 1: No such file or directory"):
        read_files(find, "parts")


@pytest.mark.sweep
@pytest.mark.parametrize("body", [one_host, many_hosts, two_hosts, several_files])
def test_all_get_all_and_storage_is_asked_once(body, file, tmp_path):
    (tmp_path / "empty").touch()
    assert run_ranks(body, tmp_path) == [""] * RANKS


def failures(rank: int, directory: Path) -> None:
    on_hosts(2 if (directory / "pairs").exists() else 1)
    path, open_file, read_into = directory / "file", files.open_file, files.read_into

    def expect(what: str, faulty: int, **options: Any) -> None:
        with pytest.raises(GatherError, match=what) as caught:
            read(path, **options)
        assert caught.value.rank == faulty

    if rank == 3:
        files.open_file = fail
    expect("file: rank 3: Input/output error", 3)
    files.open_file = open_file
    for speeds in (Speeds(), FAST if rank == 2 else SLOW):
        if rank == 2:
            reads = iter([read_into, fail, fail])
            files.read_into = lambda *args, reads=reads: next(reads)(*args)
        expect("file: rank 2: Input/output error", 2, speeds=speeds)
        files.read_into = read_into
    expect(
        "rank 1: the buffer has 5 bytes, the file 300001",
        1,
        into=bytearray(5 if rank == 1 else SIZE),
    )
    gather_files.os.fstat = lambda fd, fstat=os.fstat: (
        os.stat(directory / "empty") if rank == 2 else fstat(fd)
    )
    expect("rank 2 finds 0 bytes, rank 0 300001", 2)
    gather_files.os.fstat = lambda fd: os.stat(fd)
    assert read(path) == CONTENT  # the group is as good as before
    dist.barrier()


@pytest.mark.sweep
@pytest.mark.parametrize("pairs", [False, True])
def test_an_error_of_one_rank_reaches_all(pairs, file, tmp_path):
    (tmp_path / "empty").touch()
    if pairs:
        (tmp_path / "pairs").touch()
    assert run_ranks(failures, tmp_path) == [""] * RANKS


def death(rank: int, directory: Path) -> None:
    """Of rank 2: when it is to read for the second time, or before it says anything."""
    way = (directory / "way").read_text()
    on_hosts({"one host": RANKS, "pairs": 2}.get(way, 1))
    gathered.ANSWER_S = 2.0
    read_into, count = files.read_into, 0

    def die(*args: Any) -> int:
        nonlocal count
        count += 1
        if count == 2:
            os._exit(1)
        return read_into(*args)

    if rank == 2 and way == "before":
        dist.barrier()
        os._exit(1)
    if rank == 2:
        files.read_into = die
    dist.barrier()
    with pytest.raises(GatherError, match="rank.* 2.* did not answer, and may have ended"):
        read(directory / "file", speeds={"chain": FAST if rank == 2 else SLOW}.get(way))


@pytest.mark.parametrize("way", ["before", "ring", "chain", "one host", "pairs"])
def test_a_rank_that_ends_is_named_to_the_others(way, file, tmp_path):
    (tmp_path / "way").write_text(way)
    assert run_ranks(death, tmp_path) == ["", "", "died", ""]


# --- the parts of replicas ---


def parts(rank: int, directory: Path) -> None:
    target = directory / "step-1"
    state = {
        "a": torch.arange(100_003),
        "b": torch.full((7, 70), 0.1, dtype=torch.bfloat16),
        "step": 5,
    }
    parallel_save(state, target)
    size, found = sum(path.stat().st_size for path in target.glob("state.pt.*")), counted()
    for ranks_each in (1, 2):
        on_hosts(ranks_each)
        before = len(found)
        loaded = parallel_load(target)
        assert sum_of_all(sum(found[before:])) == size
        assert loaded["step"] == 5
        assert all(torch.equal(loaded[name], state[name]) for name in "ab")
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        assert torch.equal(parallel_load(target, pair)["a"], state["a"])
    read_into = files.read_into
    if rank == 2:
        files.read_into = fail
    with pytest.raises(GatherError, match="step-1: rank 2: Input/output error"):
        parallel_load(target)
    files.read_into = read_into
    if rank == 2:
        (directory / "mine").mkdir()
        for path in target.iterdir():
            (directory / "mine" / path.name).write_bytes(
                path.read_bytes() + b" " * path.name.endswith("json")
            )
    with pytest.raises(GatherError, match="rank 2 finds other files than rank 0"):
        parallel_load(directory / "mine" if rank == 2 else target)
    gathered.ANSWER_S = 2.0
    if rank == 3:
        os._exit(1)
    with pytest.raises(GatherError, match="rank.* 3.* did not answer, and may have ended"):
        parallel_load(target)


def test_parts_are_loaded_by_all_and_storage_is_asked_once(tmp_path):
    assert run_ranks(parts, tmp_path) == ["", "", "", "died"]


def test_parts_are_of_one_checkpoint_while_the_pointer_is_moved(tmp_path, monkeypatch):
    for step in (1, 2):
        parallel_save({"step": step}, tmp_path / f"step-{step}", ("state", 0, 1))
    latest, find_parts = tmp_path / "latest", parallel.find_parts

    def find(*args: Any) -> list[str]:
        parts = find_parts(*args)
        latest.unlink()
        latest.symlink_to("step-1")
        return parts

    monkeypatch.setattr(parallel, "find_parts", find)
    assert parallel_load(latest) == {"step": 2}
    assert parallel_load(latest) == {"step": 1}


def test_alone_it_is_read(file):
    assert read(file) == CONTENT
    target = bytearray(SIZE)
    assert read(file, into=target, order=ORDER) == target == CONTENT
    with pytest.raises(CheckpointError, match="the buffer has 5 bytes, the file 300001"):
        read(file, into=bytearray(5))
    with pytest.raises(FileNotFoundError):
        read(file.parent / "nothing")
