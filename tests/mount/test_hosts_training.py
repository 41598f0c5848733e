"""Training over hosts, started by torchrun: a host dies, and the others go on from the newest
checkpoint. Skipped where torch is not installed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aifs import client
from tests.support.hosts import Host, many_hosts, require_same
from tests.support.mounts import ROOT, TIMEOUT_S
from tests.support.postgres import Postgres

pytestmark = pytest.mark.sweep

torch = pytest.importorskip("torch", reason="torch is not installed (the demo extra)")

PORT = 29_500
Job = list["subprocess.Popen[str]"]


@contextmanager
def torchrun(hosts: Sequence[Host], last: int, how: str) -> Iterator[Job]:
    """A job with one rank at each host, which saves as ``how`` says (hosts_rank.py); whatever of it
    still runs afterwards is killed."""
    running: Job = []
    try:
        for number, host in enumerate(hosts):
            words = ["--nnodes", len(hosts), "--node-rank", number, "--nproc-per-node", 1]
            words += ["--master-addr", hosts[0].namespace.address, "--master-port", PORT]
            words += ["--local-addr", host.namespace.address, ROOT / "tests/support/hosts_rank.py"]
            command = [*host.inside, sys.executable, "-m", "torch.distributed.run"]
            command += [*map(str, words), str(host.path / "run"), str(last), how]
            running.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ
                    | {
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "PYTHONPATH": str(ROOT),
                        "OMP_NUM_THREADS": "1",
                    },
                    start_new_session=True,
                )
            )
        yield running
    finally:
        for process in running:
            end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """torchrun and its ranks."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def read_until(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    said = ""
    for one in process.stdout:
        said += one
        if one.strip() == line:
            return
    raise AssertionError(f"it does not say {line!r}:\n{said}")


@pytest.mark.long
@pytest.mark.parametrize("how", ["shards", "dcp"])
def test_a_host_dies_and_the_others_go_on_from_the_newest_checkpoint(
    scratch: Path, a_postgres: Postgres, how: str
) -> None:
    with many_hosts(scratch, a_postgres, 3) as hosts:
        a, b, c = hosts
        (a.path / "run").mkdir()
        os.setxattr(a.path / "run", "user.aifs.mirror", b"1")  # else it waits for the dead host
        require_same(hosts.paths)
        with torchrun([a, b, c], 1_000_000, how) as job:
            read_until(job[1], "saved 3")
            os.killpg(job[2].pid, signal.SIGKILL)
            c.kill()
        newest = client.latest(b.path / "run")
        assert newest is not None
        step = int(newest.name.removeprefix("step-"))
        assert step >= 3
        with torchrun([a, b], step + 3, how) as job:
            read_until(job[0], f"resumed {step}")
            read_until(job[0], f"saved {step + 3}")
            assert [process.wait(TIMEOUT_S) for process in job] == [0, 0]
        c.mount()
        require_same(hosts.paths)
        for host in hosts:
            assert os.readlink(host.path / "run" / "latest") == f"step-{step + 3}"
            assert client.verify(host.path / "run" / "latest") == []
            assert client.verify(host.path / "run" / f"step-{step}") == []
