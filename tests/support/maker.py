"""Carries out makings in a process of its own, which gets nothing but the pickled values and where
the servers of the store are."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio

from aifs.burst.making import MakingTools, carry_out, never
from aifs.burst.pool import Function
from aifs.burst.transfer import Limiter, Mover
from aifs.data.servers import Servers

ROOT = Path(__file__).resolve().parents[2]


async def make_elsewhere(
    values: Sequence[Any], servers: Servers, function: Function[Any, Any] = carry_out
) -> list[Any]:
    """What ``function`` returns of each value."""
    table = {number: servers[number].address for number in servers}
    asked = pickle.dumps((function, values, table, servers[next(iter(servers))].store))
    command = [sys.executable, "-m", "tests.support.maker"]
    run = partial(
        subprocess.run, command, input=asked, stdout=subprocess.PIPE, cwd=ROOT, check=True
    )
    return pickle.loads((await trio.to_thread.run_sync(run)).stdout)


async def make_all(
    function: Function[Any, Any], values: Sequence[Any], tools: MakingTools
) -> list[Any]:
    return [await function(value, tools, never) for value in values]


def main() -> None:
    function, values, table, store = pickle.load(sys.stdin.buffer)
    servers = Servers(table, store)
    servers.check_identity()
    tools = MakingTools(servers, Mover(servers.budget, Limiter(0), "idle"))
    made = trio.run(make_all, function, values, tools)
    servers.close()
    sys.stdout.buffer.write(pickle.dumps(made))


if __name__ == "__main__":
    main()
