"""Checkpoints of PyTorch at the speed of the device: docs/guide/training.md. Works on a mount of
AIFS and elsewhere. Names are loaded at first use, because the helper process needs no torch."""

from aifs.core.on_demand import by_name, on_demand

_MODULES = by_name(
    {
        "contents": "load_safetensors save_safetensors",
        "distributed": "AifsReader AifsWriter",
        "engine": "CheckpointEngine",
        "lightning": "AifsCheckpointIO",
        "parallel": "parallel_load parallel_save",
        "pipelined": "PipelinedCheckpointer",
        "saving": "save",
        "transformers": "PublishCheckpoints",
    }
)

__all__ = [*_MODULES]

__getattr__ = on_demand(__name__, _MODULES)
