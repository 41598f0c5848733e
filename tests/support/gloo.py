"""Ranks of torch.distributed: processes of a gloo group on this machine."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 200


def run_ranks(body: Callable[[int, Path], None], directory: Path, ranks: int) -> list[str]:
    """``body(rank, directory)`` in so many processes; what went wrong in each: a traceback, "died",
    "hangs", or ""."""
    fork = multiprocessing.get_context("fork")
    running = []
    for rank in range(ranks):
        reader, writer = fork.Pipe(duplex=False)
        process = fork.Process(target=_main, args=(body, rank, ranks, directory, writer))
        process.start()
        writer.close()
        running.append((process, reader))
    problems = []
    for process, reader in running:
        try:
            problems.append(reader.recv() if reader.poll(PATIENCE_S) else "hangs")
        except EOFError:
            problems.append("died")
        reader.close()
        process.kill()
        process.join()
        process.close()
    return problems


def _main(
    body: Callable[[int, Path], None], rank: int, ranks: int, directory: Path, say: Any
) -> None:
    problem = ""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks
        )
        body(rank, directory)
    except BaseException:  # noqa: BLE001 (told to the parent)
        problem = traceback.format_exc()
    say.send(problem)
    say.close()
    os._exit(0)
