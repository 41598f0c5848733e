"""Checkpoints of Lightning: ``Trainer(plugins=[AifsCheckpointIO()])``. Needs the package
lightning."""

import os
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.torch.saving import save
from aifs.core import trees


class AifsCheckpointIO(TorchCheckpointIO):
    """Files appear whole, and are durable when a save returns; they are those of torch.save."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None
    ) -> None:
        """Raises TypeError for ``storage_options``, OSError."""
        if storage_options is not None:
            raise TypeError("AifsCheckpointIO takes no storage_options")
        target = plain(path)
        trees.make_dir(os.path.dirname(target))
        save(checkpoint, target)
