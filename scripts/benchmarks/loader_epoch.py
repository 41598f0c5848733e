"""One epoch over many small files in random order, by torch's DataLoader with 4 workers. Prints the
seconds that it takes.

    python loader_epoch.py DIRECTORY SEED
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

WORKERS, BATCH = 4, 64


class Samples(Dataset):
    """The files of a directory's directories, as bytes."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self._paths[index], "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def main() -> None:
    samples = Samples(sorted(str(path) for path in Path(sys.argv[1]).glob("*/*")))
    order = torch.Generator().manual_seed(int(sys.argv[2]))
    begin = time.perf_counter()
    loader = DataLoader(samples, BATCH, shuffle=True, num_workers=WORKERS, generator=order)
    assert sum(map(len, loader)) == len(samples)
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    main()
