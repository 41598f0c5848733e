"""Random system calls on a mount and on a directory of a local kernel filesystem: they must answer
alike.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.agreement import require_agreement, tree_difference
from tests.support.machine import Machine
from tests.support.mounts import Mounted
from tests.support.posix_ops import generate
from tests.support.sequences import Op, shrink

LENGTH = 1000

MountStore = Callable[..., Mounted]


_TINY = (
    "burst.capacity=256KiB",
    "burst.high_water=0.5",
    "burst.low_water=0.2",
    "burst.reserve=0",
    "burst.drain_delay=0s",
    "burst.throttle_max=1ms",
)
SHAPES = {
    "defaults": (),
    "no-burst": ("layout.unit=4KiB", "layout.count=3"),
    "no-bridge": (
        "kernel.bridge=off",
        "layout.unit=16KiB",
        "layout.inline_limit=0",
        "burst.drain_delay=0s",
    ),
    "drained": ("layout.unit=4KiB", "layout.inline_limit=0", "burst.drain_delay=0s"),
    "tiny": (
        *_TINY,
        "layout.unit=4KiB",
        "meta.commit_interval=10ms",
        "data.writeback_interval=100ms",
    ),
    "tiny-interleaved": (*_TINY, "layout.kind=interleaved", "layout.inline_limit=0"),
}


def _generate(shape: str, seed: int, length: int) -> list[Op]:
    return generate(seed, length, bridged=shape != "no-bridge")


@pytest.mark.parametrize("shape", SHAPES)
def test_random_system_calls(mount_store: MountStore, reference: Path, shape: str) -> None:
    store = mount_store(*SHAPES[shape], burst=shape != "no-burst")
    store.expected.append("is full: writers of files")
    first = 10 * list(SHAPES).index(shape)
    for seed in range(first, first + 2):
        require_agreement(store.path, reference, _generate(shape, seed, LENGTH))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_many_random_system_calls(mount_store: MountStore, reference: Path, shape: str) -> None:
    store = mount_store(*SHAPES[shape], burst=shape != "no-burst")
    for seed in range(1000, 1100):
        require_agreement(store.path, reference, _generate(shape, seed, 3000))


@pytest.mark.sweep
def test_the_tree_is_the_same_after_a_remount(mounted: Mounted, reference: Path) -> None:
    directory = mounted.path / "tree"
    directory.mkdir(mode=0o777)
    reference.chmod(0o755)
    with Machine(str(reference)) as expected, Machine(str(directory)) as found:
        for op in generate(77, LENGTH):
            assert found.run(op) == expected.run(op), op
    mounted.remount()
    with Machine(str(reference)) as expected, Machine(str(directory)) as found:
        assert len(expected.tree()) > 5
        assert tree_difference(expected.tree(), found.tree()) is None


def test_a_difference_is_found_and_made_small(scratch: Path, reference: Path) -> None:
    """The comparison itself: a directory with one file more must not agree."""
    other = scratch / "other"
    other.mkdir()

    def disagree(ops: list[Op]) -> bool:
        shutil.rmtree(other)
        other.mkdir()
        (other / "a").touch()
        shutil.rmtree(reference)
        reference.mkdir()
        with Machine(str(reference)) as expected, Machine(str(other)) as found:
            return any(expected.run(op) != found.run(op) for op in ops)

    ops = generate(1, 200, users=False)
    assert disagree(ops)
    assert len(shrink(ops, disagree)) == 1
