"""Prints by how many bytes the memory of this process has grown when it has opened a dataset, the
first argument, and has given a row in shuffled order.
"""

import sys
from pathlib import Path

from aifs.client import data


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text().split("\n")
    return next(int(field.split()[1]) << 10 for field in fields if field.startswith("VmRSS:"))


if __name__ == "__main__":
    __import__("pyarrow.parquet")
    before = resident_bytes()
    dataset = data.open(sys.argv[1])
    with data.reader(dataset, seed=1) as reader:
        next(reader)
        print(resident_bytes() - before)
