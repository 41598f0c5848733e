"""Checkpoints of PyTorch at the speed of the device: docs/guide/training.md. Works on a mount of
AIFS and elsewhere. Names are loaded at first use, because the helper process needs no torch."""

from aifs.core.on_demand import on_demand

_MODULES = {
    "AifsReader": "distributed",
    "AifsWriter": "distributed",
    "CheckpointEngine": "engine",
    "PipelinedCheckpointer": "pipelined",
    "load_safetensors": "contents",
    "parallel_load": "parallel",
    "parallel_save": "parallel",
    "save": "saving",
    "save_safetensors": "contents",
}

__all__ = [*_MODULES]

__getattr__ = on_demand(__name__, _MODULES)
