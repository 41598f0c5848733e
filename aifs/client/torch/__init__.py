"""Checkpoints of PyTorch at the speed of the device: see docs/guide/training.md.

Works on a mount of AIFS and in any other directory. Each name is loaded when it is first asked for,
so that the helper process, which needs no torch, does not load it.
"""

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
