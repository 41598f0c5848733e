"""Carries out makings in a process of its own, which gets nothing but the pickled values and where
the servers of the store are."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio

from aifs.burst.making import ColumnMaking, Made, Making, MakingTools, carry_out
from aifs.burst.transfer import Limiter, Mover
from aifs.data.servers import Servers

ROOT = Path(__file__).resolve().parents[2]


async def make_elsewhere(
    makings: Sequence[Making | ColumnMaking], servers: Servers
) -> list[Made | None]:
    """What ``carry_out`` returns of each."""
    table = {number: servers[number].address for number in servers}
    asked = pickle.dumps((makings, table, servers[next(iter(servers))].store))
    command = [sys.executable, "-m", "tests.support.maker"]
    run = partial(
        subprocess.run, command, input=asked, stdout=subprocess.PIPE, cwd=ROOT, check=True
    )
    return pickle.loads((await trio.to_thread.run_sync(run)).stdout)


async def make_all(
    makings: Sequence[Making | ColumnMaking], tools: MakingTools
) -> list[Made | None]:
    return [await carry_out(making, tools) for making in makings]


def main() -> None:
    makings, table, store = pickle.load(sys.stdin.buffer)
    servers = Servers(table, store)
    servers.check_identity()
    tools = MakingTools(servers, Mover(servers.budget, Limiter(0), "idle"))
    made = trio.run(make_all, makings, tools)
    servers.close()
    sys.stdout.buffer.write(pickle.dumps(made))


if __name__ == "__main__":
    main()
