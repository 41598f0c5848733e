"""What ranks save of a real GPT, for the ways of parallel training of AITurbo's Table 1: a grouped
write puts the distinct bytes on the servers, and no more than metadata beyond. Skipped where torch
is not installed."""

import os
from collections.abc import Iterator, Sequence

import pytest

from tests.support.groups import begin, described, wait_durable
from tests.support.mounts import Mounted, mounted_store

torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")

from tests.support import gpt

pytestmark = pytest.mark.sweep

RANKS = 4
OF_BYTES, PER_FILE = 0.03, 64 << 10
"""What metadata may take: names and headers of tensors, headers and padding of chunks."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """One mount for all cases, which have different models; no backup of the metadata comes onto
    its servers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mounted_store(tmp_path_factory.mktemp("group"), ("meta.backup_interval=0",)) as store:
        yield store
    torch.set_num_threads(threads)


def on_servers(store: Mounted) -> int:
    return sum(path.stat().st_size for path in (store.source / "data").rglob("*") if path.is_file())


def save_step(store: Mounted, name: str, states: Sequence[gpt.State], form: str) -> int:
    """All ranks save into a directory of their own as one grouped write; the bytes that this has
    put on the servers."""
    before = on_servers(store)
    directory = store.path / name
    directory.mkdir()
    begin(directory, f"name={name.partition('@')[0]},ranks={len(states)}")
    for rank, state in enumerate(states):
        gpt.save(state, directory / f"rank{rank}.{form}")
    wait_durable(directory)
    for rank in range(len(states)):
        os.setxattr(directory / f"rank{rank}.{form}", "user.aifs.evict", b"")
    for rank, state in enumerate(states):
        assert gpt.same(gpt.load(directory / f"rank{rank}.{form}"), state)
    return on_servers(store) - before


def require_distinct(stored: int, expected: int, files: int) -> None:
    slack = OF_BYTES * expected + PER_FILE * files
    assert expected - slack <= stored <= expected + slack, (
        f"{stored} bytes on servers, {expected} distinct"
    )


# ZeRO-2 saves what ZeRO-1 does: once is enough.
@pytest.mark.parametrize(
    ("way", "form"),
    [
        (way, form)
        for way in gpt.WAYS
        for form in ("pt", "safetensors")
        if (way, form) != ("dp-zero2", "pt")
    ],
)
def test_the_servers_get_the_distinct_bytes(store: Mounted, way: str, form: str) -> None:
    training = gpt.Training(seed=[*gpt.WAYS].index(way) * 2 + (form == "pt"))
    before: list[gpt.State] = []
    for step in range(2):
        # Step 0: moments are zero, which costs nothing, and equal, which must not stick.
        states = gpt.WAYS[way](training, RANKS)
        expected = gpt.new_bytes(states, before)
        stored = save_step(store, f"{way}-{form}@{step}", states, form)
        require_distinct(stored, expected, RANKS)
        before = states
        training.train()


@pytest.mark.parametrize("way", ["dp", "tp-pp"])
def test_what_has_not_changed_since_the_last_step_costs_nothing(store: Mounted, way: str) -> None:
    training = gpt.Training(seed=100 + [*gpt.WAYS].index(way), frozen=2)
    training.train()
    first = gpt.WAYS[way](training, RANKS)
    save_step(store, f"frozen-{way}@1", first, "safetensors")
    training.train()
    second = gpt.WAYS[way](training, RANKS)
    expected = gpt.new_bytes(second, first)
    assert expected < 0.9 * gpt.new_bytes(second)
    stored = save_step(store, f"frozen-{way}@2", second, "safetensors")
    require_distinct(stored, expected, RANKS)


def test_what_is_told_of_a_group_adds_up(store: Mounted) -> None:
    training = gpt.Training(seed=300)
    states = gpt.data_parallel(training, RANKS)
    save_step(store, "told@0", states, "safetensors")
    told = described(store.path / "told@0")
    sizes = [path.stat().st_size for path in (store.path / "told@0").iterdir()]
    assert told["state"] == "durable" and told["file_count"] == RANKS
    assert told["bytes"] == sum(sizes)
    parts = ("zero_bytes", "duplicate_bytes", "found_bytes", "distinct_bytes")
    assert sum(told[part] for part in parts) == told["bytes"]
    # Headers and small tensors make a difference: they may share a chunk with others.
    assert told["duplicate_bytes"] >= 0.95 * (RANKS - 1) * gpt.new_bytes(states)


@pytest.mark.long
@pytest.mark.parametrize("way", gpt.WAYS)
def test_eight_ranks_of_a_larger_model(store: Mounted, way: str) -> None:
    training = gpt.Training(
        gpt.Size(vocabulary=4096, width=256, blocks=8), seed=400 + [*gpt.WAYS].index(way)
    )
    before: list[gpt.State] = []
    for step in range(3):
        states = gpt.WAYS[way](training, 8)
        stored = save_step(store, f"large-{way}@{step}", states, "pt")
        require_distinct(stored, gpt.new_bytes(states, before), 8)
        before = states
        training.train()
