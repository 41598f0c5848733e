"""The recipes of docs/guide/training.md, run by the packages that they are for. Each is skipped
where its package is not installed (the recipes extra)."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from aifs.client import latest, list_checkpoints, verify
from tests.support.mounts import TIMEOUT_S

ROOT = Path(__file__).parents[2]

LIGHTNING = """
import os, sys, torch, lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from aifs.client.torch import AifsCheckpointIO

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

def fit(epochs, path=None):
    model, keep = Model(), ModelCheckpoint(dirpath=sys.argv[1], filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, plugins=[AifsCheckpointIO()],
        callbacks=[keep], logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(32, 8), 8), ckpt_path=path)
    return model, trainer

model, _ = fit(2)
path = os.path.join(sys.argv[1], "epoch=1.ckpt")
saved = torch.load(path, weights_only=False)["state_dict"]
assert saved
assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
_, trainer = fit(3, path)
assert trainer.global_step == 12, "it did not go on from the checkpoint"
"""

TRANSFORMERS = """
import os, sys, torch
import torch.multiprocessing as mp

def run(rank, directory, store, ranks):
    from transformers import Trainer, TrainingArguments
    from aifs.client import latest
    from aifs.client.torch import PublishCheckpoints
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        }
        address = f"file://{store}"
        torch.distributed.init_process_group("gloo", address, rank=rank, world_size=ranks)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean()}

    def trainer(steps):
        args = TrainingArguments(
            output_dir=directory, max_steps=steps, save_steps=2, use_cpu=True, report_to=[],
            per_device_train_batch_size=2, disable_tqdm=True, logging_strategy="no",
        )
        data = [{"x": torch.ones(8)}] * 64
        return Trainer(Model(), args, train_dataset=data, callbacks=[PublishCheckpoints()])

    trainer(4).train()
    second = trainer(6)
    second.train(resume_from_checkpoint=str(latest(directory)))
    assert second.state.global_step == 6

if __name__ == "__main__":
    ranks = int(sys.argv[3])
    args = (sys.argv[1], sys.argv[2], ranks)
    run(0, *args) if ranks == 1 else mp.spawn(run, args, nprocs=ranks)
"""

MEGATRON = """
import os, sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def run(rank, directory, store):
    # Which Megatron asks for whatever the device is.
    torch.cuda.synchronize, torch.cuda.current_device = (lambda *_: None), (lambda: "cpu")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from aifs.client import checkpoint

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(1, 1)
    tensor, final = torch.full((4, 8), float(rank)), os.path.join(directory, "iter_0000100")

    def state(tensor):
        return {"weight": ShardedTensor.from_rank_offsets("weight", tensor, (0, rank, 2))}

    tracker = "latest_checkpointed_iteration.txt"
    with checkpoint(final, ranks=2, rank=rank, tracker=tracker, latest=None) as tmp:
        dist_checkpointing.save(state(tensor), str(tmp))
    assert torch.equal(dist_checkpointing.load(state(torch.empty(4, 8)), final)["weight"], tensor)
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1], sys.argv[2]), nprocs=2)
"""

DEEPSPEED = """
import os, sys, torch
import torch.distributed as dist
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
import deepspeed
from aifs.client.torch import CheckpointEngine

def engine():
    model = torch.nn.Linear(8, 8)
    found, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.Adam(model.parameters()), config={"train_batch_size": 4}
    )
    found.checkpoint_engine = CheckpointEngine()
    return found

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
first = engine()
first.backward(first(torch.ones(4, 8)).square().mean())
first.step()
first.save_checkpoint(sys.argv[1], "global_step1")
second = engine()
assert second.load_checkpoint(sys.argv[1])[0], "nothing was loaded"
assert torch.equal(first.module.weight, second.module.weight)
"""


def need(package: str) -> None:
    if find_spec(package) is None or find_spec("torch") is None:
        pytest.skip(f"{package} is not installed (the recipes extra)")


def run(directory: Path, script: str, *args: Path | str) -> None:
    path = directory / "recipe.py"
    path.write_text(script)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "PATH": tools,
        "TORCH_EXTENSIONS_DIR": str(directory),
    }
    found = subprocess.run(
        [sys.executable, "-W", "ignore", path, *args],
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=4 * TIMEOUT_S,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_lightning(on_mount: Path, tmp_path: Path) -> None:
    need("lightning")
    run(tmp_path, LIGHTNING, on_mount / "run")
    assert sorted(os.listdir(on_mount / "run")) == [f"epoch={number}.ckpt" for number in range(3)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_transformers(on_mount: Path, tmp_path: Path, ranks: int) -> None:
    need("transformers")
    need("accelerate")
    runs = on_mount / "run"
    run(tmp_path, TRANSFORMERS, runs, tmp_path / "store", str(ranks))
    names = ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert sorted(os.listdir(runs)) == names
    assert [one.state for one in list_checkpoints(runs)] == ["complete"] * 3
    assert latest(runs) == runs / "checkpoint-6" and not verify(runs / "checkpoint-4")


def test_megatron(on_mount: Path, tmp_path: Path) -> None:
    need("megatron")
    need("megatron.core")
    run(tmp_path, MEGATRON, on_mount, tmp_path / "store")
    assert sorted(os.listdir(on_mount)) == ["iter_0000100", "latest_checkpointed_iteration.txt"]
    assert (on_mount / "latest_checkpointed_iteration.txt").read_text().strip() == "100"


def test_deepspeed(tmp_path: Path) -> None:
    """Our engine has all that DeepSpeed's own have."""
    need("deepspeed")
    script = """
import inspect
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as Base
from aifs.client.torch import CheckpointEngine
names = [name for name, _ in inspect.getmembers(Base, inspect.isfunction)]
assert "commit" in names
assert not [name for name in names if not hasattr(CheckpointEngine, name)]
"""
    run(tmp_path, script)


@pytest.mark.long
def test_deepspeed_saves_and_loads(on_mount: Path, tmp_path: Path) -> None:
    """It compiles a library of its own first."""
    need("deepspeed")
    run(tmp_path, DEEPSPEED, on_mount / "run", tmp_path / "store")
    assert sorted(os.listdir(on_mount / "run")) == ["global_step1", "latest"]
