"""Hosts of one store that start the same job at once, from servers of which each gives 200 MiB/s to
all of them together (limited.py): how even they are, as ``aifs start report`` tells it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import Row, told
from systems import HERE, REPOSITORY

sys.path.insert(0, str(HERE.parent))

from machines import Cluster, Failed, Host, cluster, until

from aifs.client import startup

EVEN = 1.15
SERVER_MIB_S = 200
SETTINGS = {"burst": {"drain_delay": "0s"}, "scrub": {"bandwidth": 0}}
FILES = 4
PROGRAM = """
import sys
from pathlib import Path
from aifs.client import startup
with startup.stage("files"):
    for path in sorted(Path(sys.argv[1]).iterdir()):
        path.read_bytes()
"""


def start_hosts_rows(base: Path, count: int, mib: int) -> list[Row]:
    """Each of ``count`` hosts reads the same ``mib``; recorded once, and once more with that
    record."""
    links = base / "links"
    links.mkdir()
    os.environ |= {"SERVER_LINKS": str(links), "SERVER_MIB_S": str(SERVER_MIB_S)}
    os.chmod(base, 0o711)  # PostgreSQL runs as an ordinary user
    names = [f"h{number}" for number in range(count)]
    program = (sys.executable, str(HERE / "limited.py"))
    try:
        with cluster(base / "starting", names, SETTINGS, program) as made:
            return _measure(made, mib)
    except (Failed, OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode().strip() or error
        return [Row(f"{count} hosts", "", None, None, None, "", f"not measured: {said}", False)]


def _measure(made: Cluster, mib: int) -> list[Row]:
    first, *_ = made.hosts
    first.aifs("format", first.source)
    first.mount()
    site = first.path / "site"
    site.mkdir()
    for number in range(FILES):
        (site / f"{number:02}").write_bytes(os.urandom((mib << 20) // FILES))
    first.aifs("drain", first.path)
    rows, ranks = [], range(len(made.hosts))
    for run in ("1", "2"):
        first.aifs("evict", first.path)
        first.unmount()
        for host in made.hosts:
            host.mount()
        for host in made.hosts:
            until((host.path / "site").exists, f"{host.name} sees the files")
        before = _server_bytes(made.hosts)
        with ThreadPoolExecutor(len(made.hosts)) as pool:
            list(pool.map(lambda rank, run=run: _start(made.hosts[rank], rank, run), ranks))
        fetched = _server_bytes(made.hosts) - before
        _, stages = startup.report(str(first.path / "start" / "job"), run)
        (stage,) = stages
        if run == "1":
            said = f"{stage.ratio:.2f}; servers read {fetched / (mib << 20):.1f} times"
            rows.append(told(f"{stage.ranks} hosts, first start: max / median", said))
        else:
            rows.append(_row(stage, fetched / (mib << 20)))
        for host in made.hosts:
            host.aifs("drain", host.path)  # what it has noted, before nobody can ask it any more
        for host in made.hosts[1:]:
            host.unmount()
    return rows


def _row(stage: startup.StageReport, fetched: float) -> Row:
    return Row(
        f"{stage.ranks} hosts, servers with {SERVER_MIB_S} MiB/s: max / median of a stage",
        "",
        None,
        None,
        None,
        f"{stage.ratio:.2f} (median {stage.median_s:.2f} s); servers read {fetched:.1f} times",
        f"<= {EVEN}",
        stage.ratio <= EVEN,
    )


def _start(host: Host, rank: int, run: str) -> None:
    """By a host name of its own: stages are noted in a file of that name."""
    words: Sequence[object] = ("--job", "job", "--dir", host.path / "start", "--run", run, "--")
    aifs = (sys.executable, "-m", "aifs.cli.main", "start", "run")
    command = (sys.executable, "-c", PROGRAM, host.path / "site")
    named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.name)
    subprocess.run(
        [*host.namespace.enter, *map(str, (*named, *aifs, *words, *command))],
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "RANK": str(rank)},
    )


def _server_bytes(hosts: Sequence[Host]) -> int:
    return sum(server["read_bytes"] for host in hosts for server in host.status()["servers"])
