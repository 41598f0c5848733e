"""The filesystem, in process, against an oracle: random operations, remounts and kills, then fsck.

A failure prints the shortest sequence found that still fails, ready to be pasted into a test.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aifs.check.fsck import check
from aifs.core.config import Config
from aifs.store import store
from tests.support import engines, lives, lockstep, model_ops, modes
from tests.support.sequences import Op, listing, shrink

LENGTH = 1000
LONG = pytest.mark.long
SMALL = {"layout.unit": "4KiB"}
EAGER = {"meta.commit_interval": "10ms", "data.writeback_interval": "100ms"}
NO_INLINE = {"layout.inline_limit": "0"}
SHAPES = {
    "off": modes.OFF | SMALL,
    "off-no-inline": modes.OFF | NO_INLINE | {"layout.unit": "8KiB", "layout.count": "2"},
    "off-eager": modes.OFF | SMALL | EAGER,
    "defaults": {},
    "waiting": modes.WAITING | SMALL | NO_INLINE,
    "tiny": modes.TINY | SMALL | EAGER,
    "tiny-daemon": modes.TINY | modes.BY_DAEMON | SMALL | NO_INLINE,
    "waiting-interleaved": modes.WAITING
    | modes.INTERLEAVED
    | NO_INLINE
    | {"layout.compress": "zstd:3"},
    "tiny-interleaved": modes.TINY | modes.INTERLEAVED | SMALL | NO_INLINE | EAGER,
    "tiny-replicas": modes.TINY | modes.REPLICAS | SMALL | NO_INLINE | EAGER,
    "tiny-coded": modes.TINY | modes.CODED | SMALL | NO_INLINE | EAGER,
    "tiny-interleaved-coded": modes.TINY
    | modes.INTERLEAVED
    | modes.CODED
    | SMALL
    | NO_INLINE
    | EAGER,
    "trash": modes.ON | SMALL | {"trash.keep": "7d"},
    "tiny-trash": modes.TINY | SMALL | NO_INLINE | {"trash.keep": "7d"},
    "tiny-whole": modes.TINY | SMALL | NO_INLINE | {"layout.count": "1"},
}

QUOTA_SHAPES = {  # none that are passed through, for which no limit is exact
    "off": modes.OFF | SMALL,
    "tiny-trash": modes.TINY | modes.BY_DAEMON | SMALL | NO_INLINE | {"trash.keep": "7d"},
}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory in memory, if the machine has one: no test here depends on a disk."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    directory = tempfile.mkdtemp(prefix="aifs-model-", dir=parent)
    yield Path(directory)
    shutil.rmtree(directory)


def _run(scratch: Path, shape: dict[str, str], ops: list[Op]) -> int:
    """Operations on a new store, then fsck. Returns the number of kills."""
    source = Path(tempfile.mkdtemp(dir=scratch)) / "store"
    try:
        lives.in_child(_format, source, shape)
        config = modes.config_of(source)
        kills = lives.run(config, ops)
        findings, _ = lives.in_child(_check, config)
        if findings:
            raise lives.Mismatch(f"fsck finds {findings}")
        return kills
    finally:
        shutil.rmtree(source.parent)


def _format(writer: int, source: Path, shape: dict[str, str]) -> None:
    modes.make_store(source, shape)
    lives.send(writer, (False,))


def _check(writer: int, config: Config) -> None:
    lives.send(writer, (check(config, repair=False).findings, False))


def _require_agreement(
    scratch: Path,
    shape: dict[str, str],
    seed: int,
    length: int = LENGTH,
    generate: Callable[[int, int], list[Op]] = model_ops.generate,
) -> None:
    ops = generate(seed, length)
    try:
        kills = _run(scratch, shape, ops)
    except lives.Mismatch as mismatch:
        kind = mismatch.kind

        def fails(candidate: list[Op]) -> bool:
            try:
                _run(scratch, shape, candidate)
            except lives.Mismatch as again:
                return again.kind == kind
            return False

        shortest = shrink(ops, fails)
        pytest.fail(
            f"{mismatch}\nseed {seed}, shape {shape}, {len(shortest)} "
            f"operations:\n{listing(shortest)}"
        )
    assert kills == sum(op[0] == "crash" for op in ops)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG)])
def test_random_operations(scratch: Path, shape: str, seed: int) -> None:
    _require_agreement(scratch, SHAPES[shape], seed * 100 + list(SHAPES).index(shape))


@pytest.mark.parametrize("shape", QUOTA_SHAPES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=LONG) for n in range(1, 50))])
def test_random_operations_with_quotas(scratch: Path, shape: str, seed: int) -> None:
    generate = model_ops.generate_with_quotas
    _require_agreement(scratch, QUOTA_SHAPES[shape], seed, generate=generate)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_operations_on_hostile_engines(
    scratch: Path, shape: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Each shape on one of them; with --long all tests here run on all."""
    number = list(SHAPES).index(shape)
    hostile = [name for name in engines.ENGINES if name != "lmdb"]
    engines.seed(request.config.getoption("--engine-seed"))
    engine = engines.ENGINES[hostile[number % len(hostile)]]
    monkeypatch.setattr(store, "LmdbEngine", engine)
    _require_agreement(scratch, SHAPES[shape], 300 + number, length=LENGTH // 4)


@LONG
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_random_operations(scratch: Path, shape: str, seed: int) -> None:
    _require_agreement(scratch, SHAPES[shape], seed, length=2000)


def test_there_are_enough_kinds_of_operations() -> None:
    assert len(model_ops.KINDS) >= 25
    used = {op[0] for seed in range(5) for op in model_ops.generate_with_quotas(seed, LENGTH)}
    assert used == set(model_ops.KINDS)


def test_a_wrong_oracle_is_noticed(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: an oracle that forgets to count links must not agree."""
    monkeypatch.setattr(lockstep.Oracle, "link", lambda self, ino, parent, name: self.inodes[ino])
    ops = [("mknod", (b"a",), 0o100644, 0, (0, 0)), ("link", (b"a",), (b"b",))]
    with pytest.raises(lives.Mismatch, match="oracle"):
        _run(scratch, {}, ops)


@pytest.mark.sweep
def test_kill_keeps_acknowledged_names_and_fsynced_bytes(scratch: Path) -> None:
    ops = [
        ("mkdir", (b"a",), 0o755, (0, 0)),
        ("create", 0, (b"a", b"b"), 0o644, os.O_RDWR | os.O_EXCL, (0, 0)),
        ("write", 0, 1, 30000, 0),
        ("fsync", 0, False),
        ("unlink", (b"a", b"b")),
        ("create", 1, (b"a", b"c"), 0o644, os.O_RDWR | os.O_EXCL, (0, 0)),
        ("write", 1, 2, 30000, 5000),
        ("fsync", 1, False),
        ("rename", (b"a", b"c"), (b"b",), 0),
        ("crash",),
        ("compare",),
    ]
    assert _run(scratch, {}, ops) == 1
