"""A checkpoint engine with the methods that DeepSpeed calls, without DeepSpeed. That names
directory and files, and writes ``latest`` after ``commit``; each file appears whole and durable."""

import os
from typing import Any

import torch

from aifs.client.checkpoints.publishing import PathLike, plain
from aifs.client.torch.saving import save
from aifs.core import files, trees


class CheckpointEngine:
    """``create``, ``save`` for each file, ``commit``; ``load`` at any time. The rest is for
    DeepSpeed."""

    def __init__(self, config_params: Any = None) -> None:
        self.name = "aifs"
        self._directories: set[str] = set()

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Of replicas one writes."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether it saves in the background: no, the state is durable when ``save`` returns."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Tensors that share memory do so in the file: copy views before a save."""
        return True

    def set_commit_info(self, info: Any) -> None:
        """Nothing to do: ``commit`` gets the same."""

    def get_commit_info(self) -> None:
        """Nothing waits to be committed."""

    def cleanup(self) -> None:
        """Nothing goes on in the background."""

    def makedirs(self, path: PathLike, exist_ok: bool = False) -> None:
        """Raises FileExistsError, OSError."""
        if not trees.make_dir(plain(path)) and not exist_ok:
            raise FileExistsError(f"{path}: exists")

    def create(self, info: Any) -> None:
        """A checkpoint begins. ``info``: its tag."""
        self._directories.clear()

    def save(self, state_dict: Any, path: PathLike) -> None:
        """The file is durable, under its name, when this returns. Raises OSError."""
        target = plain(path)
        trees.make_dir(os.path.dirname(target))
        save(state_dict, target)
        self._directories.add(os.path.dirname(target))

    def load(self, path: PathLike, map_location: Any = None) -> Any:
        """The saved state; as in DeepSpeed any object. Raises OSError."""
        return torch.load(plain(path), map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """Make all saves of this rank since ``create`` durable, with directories' names. Raises
        OSError."""
        for directory in sorted(self._directories):
            files.sync_dir(os.path.dirname(directory))
        self._directories.clear()
        return True
