"""scripts/demo --hosts: several hosts of one store, on this machine. One of them dies."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from demonstration.job import Ranks, command
from machines import Cluster, cluster, until, working
from rich.console import Console

from aifs.core.units import describe_size

SETTINGS = {"burst": {"drain_delay": "1s"}}
BLOCK = 1 << 20
GOES_ON = 50
"""Files that a host makes, renames and removes, to show that it works."""

WRITER = f"""
import os, sys
with open(sys.argv[1], "wb", buffering=0) as file:
    for number in range(1 << 20):
        file.write(bytes([number % 251]) * {BLOCK})
        os.fsync(file.fileno())
        print(number + 1, flush=True)
"""
"""Prints how many blocks are synced."""


def demonstrate(work: Path, count: int, size: int, console: Console) -> None:
    """``count`` hosts save a model of ``size`` bytes in all. Raises Failed; OSError,
    CalledProcessError where network namespaces cannot be made. Leaves nothing but what is in
    ``work``.
    """
    began_s = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began_s:6.1f} s  {what}", soft_wrap=True)

    names = [f"host-{number}" for number in range(1, count + 1)]
    with cluster(work, names, SETTINGS) as made:
        HostsDemo(made, work, size // count, say).run()


class HostsDemo:
    """``shard``: bytes that each host saves. The last host is the one that dies."""

    def __init__(self, made: Cluster, work: Path, shard: int, say: Callable[[str], None]) -> None:
        self.hosts = made.hosts
        self.others, self.victim = made.hosts[:-1], made.hosts[-1]
        self._cluster = made
        self._plain = work / "plain"
        self._shard = shard
        self._say = say

    def run(self) -> None:
        self._mount()
        self._save()
        self._load("Each host loads the shard of another one, and compares it")
        with ExitStack() as stack:
            counts = [
                stack.enter_context(working(host.path / "run", host.name)) for host in self.others
            ]
            for told in counts:
                until(lambda told=told: told.rounds > GOES_ON, "they work")
            synced = self._kill_while_it_writes()
            at_kill_s = time.monotonic()
            self._say(f"The others go on. This is what aifs host ls says on {self.hosts[0].name}:")
            print(self.hosts[0].aifs("host", "ls", self.hosts[0].path))
            until(lambda: self.victim.name not in self._cluster.live(), "its session is over")
            self._say(
                f"{time.monotonic() - at_kill_s:.1f} s after its death the session of "
                f"{self.victim.name} has ended: its lease is over, and nobody waits for it."
            )
            for told in counts:
                until(lambda told=told, now=told.rounds: told.rounds > now + GOES_ON, "they go on")
        for host, told in zip(self.others, counts, strict=True):
            if told.failed:
                sys.exit(f"an operation on {host.name} has failed: {told.failed[0]}")
            self._say(
                f"{host.name} has made, renamed and removed {told.rounds} files meanwhile. No "
                f"operation has failed; the longest has waited {told.longest_s:.1f} s for the "
                f"lease of {self.victim.name}."
            )
        self._come_back(synced)
        self._load("Each host loads the shard of another one again, and compares it")
        self._finish()

    def _mount(self) -> None:
        self._say(
            f"{len(self.hosts)} hosts, each in a network namespace of its own, reach the database "
            f"at {self._cluster.settings['meta']['url']}, which aifs meta serve runs."
        )
        first = self.hosts[0]
        first.aifs("format", first.source)
        for host in self.hosts:
            start_s = time.monotonic()
            host.mount()
            took_s = time.monotonic() - start_s
            self._say(f"{host.name} at {host.namespace.address} has mounted it in {took_s:.1f} s.")

    def _save(self) -> None:
        """Each host a shard, to the store and to a plain directory; published by the last one."""
        (self.hosts[0].path / "run").mkdir()
        pending = self.hosts[0].path / "run" / "tmp"
        pending.mkdir()
        os.setxattr(pending, "user.aifs.pending", b"ranks=%d" % len(self.hosts))
        self._plain.mkdir()
        self._say(f"Each host builds a shard of {describe_size(self._shard)} and saves it.")
        ranks = Ranks(
            command(
                "save",
                rank,
                self._shard,
                (host.path / "run" / "tmp", self._plain),
                host.namespace.enter,
            )
            for rank, host in enumerate(self.hosts)
        )
        start_s = time.monotonic()
        saved = sum(count for _, count in ranks.step())
        took_s = time.monotonic() - start_s
        ranks.step()
        ranks.finish()
        self._say(
            f"{describe_size(saved)} are durable in the burst tiers of the {len(self.hosts)} hosts "
            f"after {took_s:.2f} s ({saved / took_s / 1e9:.2f} GB/s)."
        )
        for rank, host in enumerate(self.hosts):
            os.setxattr(host.path / "run" / "tmp", "user.aifs.commit", b"%d" % rank)
        publisher, start_s = self.hosts[-1], time.monotonic()
        run = publisher.path / "run"
        publisher.aifs("checkpoint", "publish", run / "tmp", run / "step-1", "--latest", "latest")
        took_s = time.monotonic() - start_s
        for host in self.hosts:
            (host.path / "run" / "latest" / "shard-0.pt").stat()
        self._say(
            f"{publisher.name} has published them as run/step-1 in {took_s:.2f} s, hashes of all "
            "shards included; all hosts see it whole."
        )

    def _load(self, what: str) -> None:
        count = len(self.hosts)
        ranks = Ranks(
            command(
                "load",
                (rank + 1) % count,
                0,
                (host.path / "run" / "latest", self._plain),
                host.namespace.enter,
            )
            for rank, host in enumerate(self.hosts)
        )
        start_s = time.monotonic()
        read = sum(size for _, size in ranks.step())
        took_s = time.monotonic() - start_s
        ranks.step()
        tensors = sum(int(found) for found, _ in ranks.step())
        ranks.finish()
        self._say(
            f"{what}: {describe_size(read)} in {took_s:.2f} s ({read / took_s / 1e9:.2f} GB/s); "
            f"{tensors} tensors are equal bit by bit."
        )

    def _kill_while_it_writes(self) -> int:
        """How many bytes were synced by then."""
        victim = self.victim
        target = victim.path / "run" / "unfinished"
        writer = subprocess.Popen(
            [*victim.namespace.enter, sys.executable, "-c", WRITER, str(target)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with writer:
            synced = 0
            for line in itertools.islice(writer.stdout, 20):
                synced = int(line)
            os.kill(victim.pid, signal.SIGKILL)
            for line in writer.stdout:
                synced = int(line)
        victim.kill()  # what is left of its mount
        self._say(
            f"{victim.name} is killed (kill -9) while it writes run/unfinished, of which it had "
            f"synced {describe_size(synced * BLOCK)}."
        )
        return synced * BLOCK

    def _come_back(self, synced: int) -> None:
        start_s = time.monotonic()
        self.victim.mount()
        self._say(f"{self.victim.name} is back after {time.monotonic() - start_s:.1f} s:")
        print(self.victim.aifs("host", "ls", self.victim.path))
        with (self.hosts[0].path / "run" / "unfinished").open("rb") as file:
            for number in range(synced // BLOCK):
                if file.read(BLOCK) != bytes([number % 251]) * BLOCK:
                    sys.exit(f"what {self.victim.name} had synced is not there")
        self._say(
            f"All that it had synced is there: {self.hosts[0].name} has read it and compared it."
        )

    def _finish(self) -> None:
        for host in self.hosts:
            host.aifs("drain", host.path)
        self._say("Everything is on the data servers.")
        for host in self.hosts:
            host.unmount()
        first = self.hosts[0]
        said = first.aifs("fsck", first.source).strip().splitlines()[-1]
        self._say(f"All have unmounted the store. fsck says: {said}")
