"""PyTorch on a mount: save, load, and load by mapping the file. Skipped where torch is not
installed.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aifs.cli.checkpoint import plan_command
from aifs.cli.main import main
from tests.support.mounts import Mounted, aifs

torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")

from aifs.client.torch import AifsWriter, parallel_save


@pytest.fixture
def state() -> dict:
    """A model's and an optimizer's state, some 20 MB."""
    torch.manual_seed(1)
    model = torch.nn.TransformerEncoderLayer(256, 4, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 2, 256)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "large": torch.randn(1200, 1200),
        "step": 17,
    }


def _same(left: object, right: object) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_save_rename_load(remounted: Mounted, on_remounted: Path, state: dict) -> None:
    temporary, final = on_remounted / "checkpoint.tmp", on_remounted / "checkpoint"
    temporary.mkdir()
    for rank in range(2):
        with (temporary / f"rank{rank}.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
    temporary.rename(final)
    remounted.remount()
    for rank in range(2):
        assert _same(torch.load(final / f"rank{rank}.pt"), state)


@pytest.mark.sweep
def test_load_by_mapping(remounted: Mounted, on_remounted: Path, state: dict) -> None:
    os.setxattr(on_remounted, "user.aifs.layout", b"unit=64KiB")
    path = on_remounted / "state.pt"
    torch.save(state, path)
    remounted.remount()
    mapped = torch.load(path, mmap=True)
    assert _same(mapped, state)
    path.unlink()
    assert _same(mapped["model"], state["model"])  # the mapping outlives the name


def test_a_checkpoint_is_whole_after_kill(
    remounted: Mounted, on_remounted: Path, state: dict
) -> None:
    old, new = on_remounted / "step1.pt", on_remounted / "step2.pt"
    torch.save(state, old)
    torch.save({**state, "step": 18}, new)
    os.rename(new, old)  # publishes: nothing else was synced
    remounted.kill()
    remounted.mount()
    found = torch.load(old)
    assert found["step"] == 18
    assert _same({**found, "step": 17}, state)
    assert not new.exists()


@pytest.mark.sweep
def test_another_process_reads_what_was_saved(on_mount: Path, state: dict) -> None:
    path = on_mount / "state.pt"
    torch.save(state, path)
    program = "import sys, torch; print(float(torch.load(sys.argv[1])['large'].sum()))"
    done = subprocess.run(
        [sys.executable, "-c", program, path],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert float(done.stdout) == float(state["large"].sum())


@pytest.mark.sweep
def test_a_plan_of_loads_knows_where_the_bytes_are(
    mount_store: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each example of the command's help is run."""
    import torch.distributed.checkpoint as dcp

    def planned(*words: object) -> str:
        capsys.readouterr()
        assert main(["checkpoint", "plan", *map(str, words)]) == 0
        return capsys.readouterr().out

    mounted = mount_store("layout.stripe_above=0")  # the kernel reads one object by itself
    state = {"large": torch.randn(1500, 1500), "step": torch.tensor(17)}
    run, path = mounted.path / "run", mounted.path / "model.pt"
    run.mkdir()
    parallel_save(state, run / "step-100", ("state", 0, 1))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, storage_writer=AifsWriter(run / "step-200"))
    torch.save(state, path)
    size = path.stat().st_size
    facts = json.loads(planned(path, "--json"))
    assert (facts["files"][0]["place"], facts["server_bytes"]) == ("burst tier here", 0)
    aifs("drain", mounted.path)
    aifs("evict", mounted.path)
    facts = json.loads(planned(path, "--json"))  # as it is before the plan looks into the file
    assert facts["ranks"][0]["bytes"] == facts["server_bytes"] == size
    mounted.remount()
    aifs("evict", mounted.path)
    for line in re.findall(r"^  aifs checkpoint plan (.*)", plan_command.epilog, re.MULTILINE):
        assert "data servers" in planned(*line.replace("/mnt/store", str(mounted.path)).split())
    mounted.remount()
    aifs("evict", mounted.path)
    before = read_bytes(mounted)
    assert _same(torch.load(path), state)
    assert 0.99 * size <= read_bytes(mounted) - before <= 1.2 * size
    aifs("pin", mounted.path)  # blocks of what is as near are not kept
    facts = json.loads(planned(path, "--json"))
    assert (facts["files"][0]["place"], facts["server_bytes"]) == ("burst tier here", 0)


def read_bytes(mounted: Mounted) -> int:
    """What the daemon and the bridge have read of the data servers since the mount, if nothing was
    read from blocks."""
    status = json.loads(os.getxattr(mounted.path, "user.aifs.status"))
    servers = sum(server["read_bytes"] for server in status["servers"])
    return servers + status["bridge"]["read_bytes"]
