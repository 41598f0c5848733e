"""``aifs start`` on real mounts: the first start of a job is recorded, the next one prefetched."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from aifs.burst import copy
from aifs.core.start_record import BLOCK
from tests.support.hosts import Cluster, many_hosts, until
from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs
from tests.support.postgres import Postgres

SLOW = ("burst.drain_delay=1h", "layout.stripe_above=0")
LARGE = 8


def make_package(top: Path) -> None:
    """Importing it reads two modules, and a few bytes of ``table``."""
    top.mkdir()
    (top / "__init__.py").write_text("from package import part\n" + "# filler\n" * 500)
    (top / "part.py").write_text(
        "import os\n"
        "with open(os.path.join(os.path.dirname(__file__), 'table'), 'rb', 0) as file:\n"
        "    data = os.pread(file.fileno(), 10, 6 << 20)\n" + "# filler\n" * 500
    )
    (top / "unused.py").write_text("# filler\n" * 500)
    (top / "table").write_bytes(os.urandom(LARGE * BLOCK))


def cold(store: Mounted) -> None:
    """All is on the data servers alone, and the kernel has nothing of it in memory."""
    aifs("drain", store.path)
    store.remount()
    aifs("evict", store.path)


def start(store: Mounted, *words: str, run: str = "1") -> subprocess.CompletedProcess[str]:
    top = store.path / "start"
    command = words or (sys.executable, "-B", "-c", "import package")
    os.environ["PYTHONPATH"] = str(store.path)
    try:
        options = ("--job", "job", "--dir", top, "--run", run)
        return aifs("start", "run", *options, "--", *command, check=False)
    finally:
        del os.environ["PYTHONPATH"]


def shown(store: Mounted) -> dict[str, int]:
    """By path, the bytes of each file that the next start prefetches, in order."""
    told = json.loads(aifs("start", "show", "job", "--dir", store.path / "start", "--json").stdout)
    return {file["path"]: file["hot"] for file in told["files"]}


def in_memory(path: Path) -> list[bool]:
    """By block, whether any of it is in the kernel's page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        pages = copy.resident(fd, os.fstat(fd).st_size, BLOCK)
        if pages is None:
            pytest.skip("the system does not tell what is in memory: cachestat(2)")
        return [bool(each) for each in pages]
    finally:
        os.close(fd)


def test_the_first_start_is_recorded_and_the_next_one_prefetched(
    mount_store: Callable[..., Mounted],
) -> None:
    store = mount_store(*SLOW)  # or pages move to the burst copies
    package = store.path / "package"
    make_package(package)
    cold(store)
    done = start(store)
    assert (done.returncode, done.stderr) == (0, "")
    hot = shown(store)
    assert [*hot] == [f"/package/{name}" for name in ("__init__.py", "part.py", "table")]
    assert hot["/package/table"] <= 2 * BLOCK  # what the kernel has read ahead is touched, too
    cold(store)
    assert not any(in_memory(package / "table")) and not any(in_memory(package / "part.py"))
    said = aifs("start", "prefetch", "job", "--dir", store.path / "start").stdout
    assert said.endswith(" of 3 files; changed since, or out of reach: 0\n")
    assert in_memory(package / "table")[6] and in_memory(package / "part.py")[0]
    assert not in_memory(package / "table")[0]
    assert not any(in_memory(package / "unused.py"))
    done = start(store, run="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert shown(store) == hot  # what was in memory before stays in the record
    listed = aifs("start", "ls", "--dir", store.path / "start").stdout
    assert listed.splitlines()[1].split()[:3] == ["job", "2", "3"]
    aifs("start", "rm", "job", "--dir", store.path / "start")
    assert aifs("start", "ls", "--dir", store.path / "start", "--json").stdout.strip() == "[]"


@pytest.mark.sweep
def test_what_is_not_used_any_more_goes(mount_store: Callable[..., Mounted]) -> None:
    """Though it is prefetched, until the last two records do not have it."""
    store = mount_store(*SLOW)
    make_package(store.path / "package")
    for run, words in enumerate((("package",), ("package.part",), ("sys",), ("sys",))):
        cold(store)
        script = f"import {words[0]}"
        assert start(store, sys.executable, "-B", "-c", script, run=str(run)).returncode == 0
        found = [os.path.basename(path) for path in shown(store)]
        assert found == (["__init__.py", "part.py", "table"] if run < 3 else [])


@pytest.mark.sweep
def test_files_of_the_burst_tier_are_judged_by_what_is_in_memory(
    mount_store: Callable[..., Mounted],
) -> None:
    store = mount_store(*SLOW)
    make_package(store.path / "package")
    if not json.loads(os.getxattr(store.path, "user.aifs.status"))["bridge"]["passthrough"]:
        pytest.skip("the kernel passes nothing through")
    aifs("drain", store.path)  # which reads them
    store.remount()
    for path in (store.source / "burst").rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert start(store).returncode == 0
    assert shown(store)["/package/table"] <= 2 * BLOCK
    assert [*shown(store)] == [f"/package/{name}" for name in ("__init__.py", "part.py", "table")]


@pytest.mark.sweep
def test_what_has_changed_since_is_left_out(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store(*SLOW)
    package = store.path / "package"
    make_package(package)
    cold(store)
    start(store)
    (package / "part.py").write_text("# filler\n" * 300)
    (package / "table").unlink()
    (package / "table").symlink_to("/etc/passwd")
    said = aifs("start", "prefetch", "job", "--dir", store.path / "start").stdout
    assert said.endswith(" of 1 file; changed since, or out of reach: 2\n")


@pytest.mark.sweep
def test_a_record_that_is_torn_is_ignored(mounted: Mounted) -> None:
    make_package(mounted.path / "package")
    start(mounted)
    record = mounted.path / "start" / "job" / "1.start"
    record.write_bytes(record.read_bytes()[:-5])
    assert shown(mounted) == {}
    assert start(mounted, run="2").returncode == 0
    assert "/package/part.py" in shown(mounted)


PREFETCH = """
import sys
from aifs.client import startup
from aifs.core import files
class Hook:
    def before(self, op, path): pass
    def after(self, op, path, *args):
        if op == "open_file" and path.endswith("/table"):
            print("open", flush=True)
            sys.stdin.readline()
files.set_hook(Hook())
print(*startup.prefetch(sys.argv[1]), flush=True)
"""


@pytest.mark.sweep
def test_a_daemon_that_is_killed_while_it_prefetches_leaves_the_record(
    mount_store: Callable[..., Mounted],
) -> None:
    """The prefetcher has a file open that it has not read."""
    store = mount_store(*SLOW)
    package = store.path / "package"
    make_package(package)
    cold(store)
    assert start(store).returncode == 0
    planned = shown(store)
    store.remount()
    command = [sys.executable, "-c", PREFETCH, store.path / "start" / "job"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "open\n"
        store.kill()
        said, _ = running.communicate("\n", timeout=TIMEOUT_S)
    _, _, left_out = map(int, said.split())
    assert running.returncode == 0 and left_out >= 1
    store.mount()
    assert shown(store) == planned
    done = aifs("start", "prefetch", "job", "--dir", store.path / "start")
    assert done.stdout.endswith("out of reach: 0\n")
    assert in_memory(package / "table")[6]


def masks(told: str) -> list[int]:
    """Of signals that are blocked and ignored, as the kernel tells them of a process."""
    return [int(mask, 16) & 0x7FFFFFFF for mask in told.split()[1::2]]


@pytest.mark.sweep
def test_the_command_is_as_if_it_ran_alone(mounted: Mounted, tmp_path: Path) -> None:
    top = mounted.path / "start"
    done = start(mounted, "sh", "-c", "cat; echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert start(mounted, "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM
    # None is blocked or ignored that is not by us, but for two that the C library keeps for itself.
    looks = ("grep", "Sig[BI]", "/proc/self/status")
    alone = subprocess.run(looks, capture_output=True, text=True, check=True).stdout
    assert masks(start(mounted, *looks).stdout) == masks(alone)
    done = start(mounted, "/no/such/program")
    assert done.returncode == 2 and done.stderr == (
        "aifs: /no/such/program: No such file or directory\n"
    )
    command = [sys.executable, "-m", "aifs.cli.main", "start", "run", "--job", "job"]
    script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done"
    with subprocess.Popen(
        [*command, "--dir", top, "--", "sh", "-c", script], stdout=subprocess.PIPE, cwd=ROOT
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(TIMEOUT_S) == 9


@pytest.mark.sweep
def test_a_job_runs_where_nothing_can_be_recorded(mounted: Mounted, tmp_path: Path) -> None:
    """Elsewhere, under a wrong name, in a directory of somebody else, and when the mount dies."""
    for options, why in (
        (("--job", "job", "--dir", tmp_path), "not on an AIFS, where alone starts are recorded"),
        (("--job", "../job", "--dir", mounted.path), "is no name of a job"),
        (("--job", "job", "--dir", mounted.path / "file"), "Not a directory"),
        (("--job", "job", "--dir", mounted.path, "--run", "a/b"), "is neither stop nor record"),
    ):
        (mounted.path / "file").touch()
        done = aifs("start", "run", *options, "--", "sh", "-c", "exit 3", check=False)
        assert done.returncode == 3 and why in done.stderr and done.stderr.count("\n") == 1
    kill = f"kill -9 {mounted.pid}; exit 4"
    assert start(mounted, "sh", "-c", kill).returncode == 4
    mounted.wait_for_end()
    subprocess.run(["umount", "-l", mounted.path], check=True)
    mounted.mount()
    assert start(mounted, "true", run="2").returncode == 0
    assert (mounted.path / "start" / "job" / "2.start").exists()


@pytest.mark.sweep
def test_a_launcher_needs_no_command(mounted: Mounted) -> None:
    (mounted.path / "job").mkdir()
    (mounted.path / "read").write_bytes(b"x" * 5000)
    os.setxattr(mounted.path / "job", "user.aifs.start", b"record=7")
    (mounted.path / "read").read_bytes()
    os.setxattr(mounted.path / "job", "user.aifs.start", b"stop")
    until(lambda: (mounted.path / "job" / "7.start").exists(), "the record is written")
    assert os.listdir(mounted.path / "job") == ["7.start"]


STAYS_OPEN = """
import glob, os, sys, time
from contextlib import suppress
from aifs.burst.copy import resident
table, block = sys.argv[1], 1 << 20
fd = os.open(table, os.O_RDONLY)
while not resident(fd, os.fstat(fd).st_size, block)[6]:
    time.sleep(0.001)
os.close(fd)
found = set()
for path in glob.glob("/proc/[0-9]*/fd/*"):
    with suppress(OSError):
        found.add(os.readlink(path))
sys.exit(table not in found)
"""


@pytest.mark.sweep
def test_what_is_prefetched_stays_open_for_hosts_that_start_later(
    mount_store: Callable[..., Mounted],
) -> None:
    store = mount_store(*SLOW)
    package = store.path / "package"
    make_package(package)
    cold(store)
    assert start(store).returncode == 0
    cold(store)
    in_memory(package / "table")  # or the test is skipped
    command = (sys.executable, "-c", STAYS_OPEN, package / "table")
    done = start(store, *map(str, command), run="2")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sweep
def test_hosts_that_prefetch_pass_on_what_servers_gave(scratch: Path, a_postgres: Postgres) -> None:
    """A file is open for as long as it is prefetched: else hosts do not know of each other, and
    each has the servers read all of it."""
    large = 32 * BLOCK
    settings = {"burst": {"drain_delay": "0s"}}
    with many_hosts(scratch, a_postgres, settings=settings) as cluster:
        first = cluster[0]
        top = first.path / "start"
        (first.path / "large").write_bytes(os.urandom(large))
        (top / "job").mkdir(parents=True)
        cold(first)
        os.setxattr(top / "job", "user.aifs.start", b"record=1")
        (first.path / "large").read_bytes()
        os.setxattr(top / "job", "user.aifs.start", b"stop")
        until(lambda: (top / "job" / "1.start").exists(), "the record is written")
        until(lambda: prefetch_on_all(cluster) <= 1.5 * large, "they pass it on")


def prefetch_on_all(cluster: Cluster) -> int:
    """All hosts prefetch the job at once, and have it in memory then; the bytes that servers gave
    for it. On a busy machine hosts may miss each other: who is met is waited for for 0.1 s."""
    for host in cluster:
        host.remount()
    with ExitStack() as stack:
        for host in cluster:  # who is done first has it open still
            stack.enter_context((host.path / "large").open("rb", 0)).read(10)
        command = (sys.executable, "-m", "aifs.cli.main", "start", "prefetch", "job", "--dir")
        running = [
            subprocess.Popen(
                [*host.inside, *command, host.path / "start"], stdout=subprocess.PIPE, cwd=ROOT
            )
            for host in cluster
        ]
        for host, process in zip(cluster, running, strict=True):
            said, _ = process.communicate(timeout=TIMEOUT_S)
            assert said == b"prefetched 32.0 MiB of 1 file; changed since, or out of reach: 0\n"
        # Other tests drop the kernel's caches.
        is_there = all(all(in_memory(host.path / "large")) for host in cluster)
    return server_bytes(cluster) if is_there else sys.maxsize


def server_bytes(cluster: Cluster) -> int:
    """That servers have given to all hosts since they mounted."""
    told = [json.loads(os.getxattr(host.path, "user.aifs.status")) for host in cluster]
    return sum(server["read_bytes"] for one in told for server in one["servers"])
