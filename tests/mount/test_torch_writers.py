"""How fast checkpoint writers write, on a mount: aligned past the page cache, with a tail; and the
client's own.

Skipped, but for the first, where torch is not installed.
"""

import mmap
import os
from pathlib import Path

import pytest

from aifs import client
from tests.support.mounts import Mounted

pytestmark = pytest.mark.sweep

ALIGNMENT = 4096


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def write_fast(path: Path, pieces: list[bytes]) -> None:
    """As DeepSpeed's fast file writer: O_DIRECT while it is aligned, the tail buffered; further
    pieces are appended by O_DIRECT again."""
    for number, piece in enumerate(pieces):
        whole = len(piece) // ALIGNMENT * ALIGNMENT
        flags = os.O_CREAT | os.O_TRUNC if number == 0 else os.O_APPEND
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | flags, 0o644)
        for begin in range(0, whole, 1 << 20):
            assert os.write(fd, aligned(piece[begin : min(begin + (1 << 20), whole)])) == min(
                1 << 20, whole - begin
            )
        os.close(fd)
        if piece[whole:]:
            fd = os.open(path, os.O_WRONLY | os.O_APPEND)
            assert os.write(fd, piece[whole:]) == len(piece) - whole
            os.fsync(fd)
            os.close(fd)


def test_direct_writes_with_a_buffered_tail(remounted: Mounted, on_remounted: Path) -> None:
    pieces = [
        os.urandom((3 << 20) + 8 * ALIGNMENT),
        os.urandom(ALIGNMENT),
        os.urandom((1 << 20) + 77),
    ]
    path = on_remounted / "state.pt"
    write_fast(path, pieces)
    assert path.read_bytes() == b"".join(pieces)
    write_fast(path, pieces[2:])
    assert path.read_bytes() == pieces[2]
    remounted.remount()
    assert path.read_bytes() == pieces[2]


def test_the_client_saves_on_a_mount(remounted: Mounted, on_remounted: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")
    from aifs.client.torch import PipelinedCheckpointer, parallel_load, parallel_save, save

    state = {"a": torch.randn(700_001), "b": torch.arange(9)}
    for method in ("buffered", "direct"):
        save(state, on_remounted / method, method=method)
    with PipelinedCheckpointer(on_remounted / "step-{step}") as checkpointer:
        for step in range(2):
            checkpointer.save(state, step)
    parallel_save(state, on_remounted / "parts-1", ("model", 0, 1))
    remounted.kill()
    remounted.mount()
    for path in ("buffered", "direct", "latest/model.pt", "step-0/state-0.pt", "step-1/state-0.pt"):
        found = (
            parallel_load(on_remounted / "latest")
            if "model" in path
            else torch.load(on_remounted / path)
        )
        assert torch.equal(found["a"], state["a"]) and torch.equal(found["b"], state["b"])
    assert client.verify(on_remounted / "step-1") == []
