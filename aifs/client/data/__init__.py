"""Datasets for training: rows of any format in an order that is computed, shuffled at the speed of
sequential reading, resumable to the row (docs/guide/datasets.md).

Works on a mount of AIFS and in any other directory. Needs the extra ``data``; ``Loader``, torch.
"""

from typing import TYPE_CHECKING, Any

from aifs.client.data.dataset import Dataset
from aifs.client.data.opening import open
from aifs.client.data.reader import BUFFER, Reader, reader

if TYPE_CHECKING:
    from aifs.client.data.torch import Loader, TorchRows

__all__ = ["BUFFER", "Dataset", "Loader", "Reader", "TorchRows", "open", "reader"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for."""
    if name not in ("Loader", "TorchRows"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aifs.client.data import torch

    return getattr(torch, name)
