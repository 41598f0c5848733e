"""One rank of a data-parallel job: all ranks hold the same tensors. Started by grouped.py, obeys
JSON lines on stdin.

{"save": PATH, "fast": BOOL}   torch.save and fsync, or (fast) the client's save; answers {"bytes":
                               SIZE}
{"train": N}                   tensors become those of step N; answers {}

python scripts/benchmarks/rank.py MIB
"""

import json
import os
import sys

import torch

from aifs.client.torch import save

TENSORS = 16


def main(mib: int) -> None:
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    first = torch.empty((mib << 20) // TENSORS // 8, dtype=torch.int64).random_(generator=random)
    state = {f"layer {number}": first + number for number in range(TENSORS)}
    now = 0
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = {}
        if "train" in order:
            for tensor in state.values():
                tensor += (order["train"] - now) * TENSORS  # no two of all steps are the same
            now = order["train"]
        else:
            if order["fast"]:
                save(state, order["save"], method="buffered")
            else:
                torch.save(state, order["save"])
                with open(order["save"], "rb") as file:
                    os.fsync(file.fileno())
            answer = {"bytes": os.path.getsize(order["save"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
