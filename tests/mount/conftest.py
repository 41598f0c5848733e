"""Fixtures of the tests on real mounts."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support import caches, postgres
from tests.support.hosts import Both, Cluster, many_hosts, until
from tests.support.mounts import Mounted, mounted_store


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty directory with a short path (sockets), gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="aifs-mount-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def mounted(scratch: Path) -> Iterator[Mounted]:
    """A mounted store with the default options; afterwards it is unmounted, fsck'ed and its log
    checked."""
    with mounted_store(scratch) as store:
        yield store


@pytest.fixture
def mount_store(scratch: Path) -> Iterator[Callable[..., Mounted]]:
    """A function of mount options that makes one more mounted store, with or without a burst tier.

    Each is checked afterwards.
    """
    with ExitStack() as stack:
        count = 0

        def make(*options: str, burst: bool = True) -> Mounted:
            nonlocal count
            count += 1
            directory = scratch / str(count)
            directory.mkdir()
            return stack.enter_context(mounted_store(directory, options, burst=burst))

        yield make


@pytest.fixture(scope="session")
def shared_mounts() -> Iterator[Callable[..., Mounted]]:
    """A function of mount options that returns a mounted store with them: the same one for all
    tests of this process, each of which works in a directory of its own. All users can reach it. It
    is unmounted and checked when all tests have run; after a test that ends it another one is made.
    """
    with ExitStack() as stack:
        made: dict[tuple[tuple[str, ...], bool], Mounted] = {}

        def get(*options: str, burst: bool = True) -> Mounted:
            key = options, burst
            if key not in made or not made[key].is_mounted():
                scratch = Path(stack.enter_context(TemporaryDirectory(prefix="aifs-shared-")))
                scratch.chmod(0o755)
                made[key] = stack.enter_context(mounted_store(scratch, options, burst=burst))
            return made[key]

        yield get


@pytest.fixture(scope="module")
def shared(shared_mounts: Callable[..., Mounted]) -> Mounted:
    """The mount for most tests, which all users can reach."""
    return shared_mounts("allow_other")


@pytest.fixture
def on_mount(shared: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on ``shared``, of the test's own."""
    yield from _own_directory(shared, request)


@pytest.fixture(scope="module")
def remounted() -> Iterator[Mounted]:
    """A mount for the tests of one file, which may remount it, or kill it and mount it again."""
    with TemporaryDirectory(prefix="aifs-remounted-") as place:
        with mounted_store(Path(place)) as store:
            yield store


@pytest.fixture
def on_remounted(remounted: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on ``remounted``, of the test's own."""
    yield from _own_directory(remounted, request)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(((), True), id="bridge"),
        pytest.param((("kernel.bridge=off",), True), id="plain"),
        pytest.param(((), False), id="no-burst", marks=pytest.mark.long),
        pytest.param(
            (("layout.kind=interleaved", "burst.drain_delay=0s"), True),
            id="interleaved",
            marks=pytest.mark.long,
        ),
    ],
)
def module_mount(shared_mounts: Callable[..., Mounted], request: pytest.FixtureRequest) -> Mounted:
    """A shared mount with all that the bridge gives, and one with plain pyfuse3."""
    options, burst = request.param
    return shared_mounts(*options, burst=burst)


@pytest.fixture
def here(module_mount: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on the mount, which is the working directory of the test."""
    before = os.getcwd()
    for directory in _own_directory(module_mount, request):
        os.chdir(directory)
        yield directory
        os.chdir(before)


def _own_directory(mount: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    directory = mount.path / f"{request.path.stem.removeprefix('test_')}-{request.node.name}"
    directory.mkdir()
    yield directory
    mount.check_log()
    _close_left_open(mount.path)


@pytest.fixture(scope="module")
def _two_hosts(postgres_servers: postgres.Servers) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="aifs-hosts-") as place:
        with many_hosts(Path(place), postgres_servers.get("wheel")) as cluster:
            yield cluster


@pytest.fixture
def two(_two_hosts: Cluster) -> Cluster:
    """Two mounted hosts, the same ones for all tests of a file: each leaves them mounted and live,
    and has ``Cluster.another`` for what it kills."""
    assert all(host.is_alive() for host in _two_hosts), "an earlier test has lost a host"
    return _two_hosts


@pytest.fixture
def both(two: Cluster, request: pytest.FixtureRequest) -> Both:
    """An empty directory of the test's own, as either host has it."""
    here, there = [host.path / request.node.name for host in two]
    here.mkdir()
    until(there.is_dir, "what is made is seen")
    return here, there


def _close_left_open(path: Path) -> None:
    """A test that failed must not keep the mount busy for the others."""
    for number in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{number}"
        if os.path.lexists(link) and os.readlink(link).startswith(f"{path}/"):
            os.close(int(number))


@pytest.fixture
def file(here: Path) -> Path:
    path = here / "file"
    path.write_bytes(b"content")
    path.chmod(0o644)
    return path


@pytest.fixture
def names_stay_cached() -> Iterator[None]:
    """For what counts requests: they come again if another test drops the kernel's caches."""
    with caches.kept():
        yield


@pytest.fixture
def reference(scratch: Path) -> Path:
    """A directory of the local filesystem that temporary files are on."""
    directory = scratch / "reference"
    directory.mkdir()
    return directory
