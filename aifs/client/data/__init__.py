"""Datasets for training: rows of any format in a computed order, shuffled at the speed of
sequential reading, resumable to the row (docs/guide/datasets.md).

Works on a mount of AIFS and elsewhere. Needs the extra ``data``; ``Loader``, torch.
"""

from typing import TYPE_CHECKING

from aifs.client.data.dataset import Dataset, open
from aifs.client.data.reader import BUFFER, Reader, reader
from aifs.core.on_demand import on_demand

if TYPE_CHECKING:
    from aifs.client.data.torch import Loader, TorchRows

__all__ = ["BUFFER", "Dataset", "Loader", "Reader", "TorchRows", "open", "reader"]

__getattr__ = on_demand(__name__, {"Loader": "torch", "TorchRows": "torch"})
