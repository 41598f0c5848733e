"""One process of the demo: ``rank.py save|load RANK SIZE DIRECTORY...``; lines on standard input
start each step.

save: builds its shard's state once; for each DIRECTORY, waits for a line, saves, syncs, prints
seconds and bytes. load: for each DIRECTORY, waits for a line, loads, prints seconds and bytes; at
the end compares them all with one another and prints how many tensors are equal. Exit status 1 if
any differ.
"""

import io
import os
import sys
import time
import warnings

import torch
from gpt import same, tensors, trained_state


def say(*words: object) -> None:
    print(*words, flush=True)


def save(rank: int, size: int, directories: list[str]) -> None:
    state = trained_state(rank, size)
    with open(os.devnull, "wb") as sink:
        torch.save(
            state, sink
        )  # the first save in a process costs more than the others, wherever it goes
    say("ready")
    for directory in directories:
        sys.stdin.readline()
        path = os.path.join(directory, f"shard-{rank}.pt")
        start = time.monotonic()
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        say(time.monotonic() - start, os.path.getsize(path))


def load(rank: int, directories: list[str]) -> None:
    first = io.BytesIO()
    torch.save({"tensor": torch.zeros(1)}, first)
    first.seek(0)
    torch.load(first)  # as in save
    say("ready")
    states = []
    for directory in directories:
        sys.stdin.readline()
        path = os.path.join(directory, f"shard-{rank}.pt")
        start = time.monotonic()
        states.append(torch.load(path))
        say(time.monotonic() - start, os.path.getsize(path))
    sys.stdin.readline()
    equal = all(same(states[0], other) for other in states[1:])
    say(tensors(states[0]), int(equal))
    sys.exit(0 if equal else 1)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # nothing here uses it
    action, rank, size, *directories = sys.argv[1:]
    if action == "save":
        save(int(rank), int(size), directories)
    else:
        load(int(rank), directories)


main()
