"""Checkpoints of transformers' Trainer: ``Trainer(..., callbacks=[PublishCheckpoints()])``. Needs
the package transformers."""

import os
from typing import Any

import torch
from transformers import TrainerCallback

from aifs.client.checkpoints.publishing import plain, publish
from aifs.core import trees


class PublishCheckpoints(TrainerCallback):
    """Publishes each checkpoint-N when all ranks have written it: it gets a manifest, and counts
    for ``latest`` and ``keep``. A crash before that leaves one that is not shown."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises OSError, CheckpointError."""
        _wait_for_all()
        if state.is_world_process_zero:
            final = plain(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))
            hidden = trees.beside(final)
            trees.rename_new(final, hidden)
            publish(hidden, final)
        _wait_for_all()


def _wait_for_all() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
