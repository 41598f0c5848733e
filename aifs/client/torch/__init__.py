"""Checkpoints of PyTorch at the speed of the device: see docs/guide/training.md.

Works on a mount of AIFS and in any other directory. Each name is loaded when it is first asked for,
so that the helper process, which needs no torch, does not load it.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "AifsReader": "distributed",
    "AifsWriter": "distributed",
    "CheckpointEngine": "engine",
    "PipelinedCheckpointer": "pipelined",
    "load_safetensors": "tensors",
    "parallel_load": "parallel",
    "parallel_save": "parallel",
    "save": "saving",
    "save_safetensors": "tensors",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
