"""Fixtures of the tests on real mounts."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.mounts import Mounted, mounted_store


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty directory with a short path (sockets), gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="aifs-mount-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def mounted(scratch: Path) -> Iterator[Mounted]:
    """A mounted store with the default options; afterwards it is unmounted, fsck'ed and its log checked."""
    with mounted_store(scratch) as store:
        yield store


@pytest.fixture
def mount_store(scratch: Path) -> Iterator[Callable[..., Mounted]]:
    """A function of mount options that makes one more mounted store; each is checked afterwards."""
    with ExitStack() as stack:
        count = 0

        def make(*options: str) -> Mounted:
            nonlocal count
            count += 1
            directory = scratch / str(count)
            directory.mkdir()
            return stack.enter_context(mounted_store(directory, options))

        yield make


@pytest.fixture(scope="module")
def module_mount() -> Iterator[Mounted]:
    """One mount for all cases of a file: each works in a directory of its own. All users can reach it."""
    with tempfile.TemporaryDirectory(prefix="aifs-posix-") as scratch:
        os.chmod(scratch, 0o755)
        with mounted_store(Path(scratch)) as store:
            yield store


@pytest.fixture
def here(module_mount: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory on the mount, which is the working directory of the test."""
    directory = module_mount.path / request.node.name
    directory.mkdir()
    before = os.getcwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)
    _close_left_open(module_mount.path)


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
