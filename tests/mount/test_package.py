"""What scripts/package builds: it installs without a package index and without a compiler, and
mounts.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.mounts import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PROCESSOR_S = 120
"""Of building; most of it is compiling."""

VERSION = r"aifs \d\S+ [0-9a-f]{10}"
"""What the command says of itself: the commit, too."""

NO_INDEX = "No matching distribution found"
"""What pip says where it reaches no index."""

USE = """
set -eu
cd "$1"
export PATH="$2:/usr/bin:/bin:/usr/sbin:/sbin"
aifs --version
aifs format store
mkdir mnt
aifs mount store mnt
head -c 3000000 /dev/urandom >content
cp content mnt/file
aifs status mnt
aifs umount mnt
aifs mount store mnt
cmp content mnt/file
aifs umount mnt
aifs fsck store
"""
"""With the command ``aifs`` of the directory $2, below $1."""

BY_TYPE = """
mount -t aifs /use/store /use/mnt
cmp /use/content /use/mnt/file
if dpkg --remove aifs-fuse; then exit 1; fi
umount /use/mnt
test -s /usr/share/man/man1/aifs-mount.1.gz
dpkg --purge aifs-fuse
if ls -d /opt/aifs /usr/bin/aifs /usr/sbin/mount.aifs; then exit 1; fi
ls /use/store/data/0
"""
"""What comes after it in a system that has the package: mount(8), and removal, which leaves the
store."""


def run(*command: str | Path, **options: object) -> str:
    """Its output. What pip is told by the environment does not hold."""
    environment = {name: value for name, value in os.environ.items() if name[:4] != "PIP_"}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        [*map(str, command)],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **{"env": environment, **options},
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-5000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [ROOT / "scripts/package", directory], check=False, capture_output=True, text=True
    )
    if NO_INDEX in done.stderr:
        pytest.skip("no package index is reached")
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def deb(dist: Path) -> Path:
    (found,) = dist.glob("aifs-fuse_*.deb")
    return found


def test_wheels_mount_without_index_and_compiler(dist: Path, tmp_path: Path) -> None:
    run("/usr/bin/python3", "-m", "venv", tmp_path / "venv")
    (tmp_path / "bin").mkdir()  # no compiler
    run(
        tmp_path / "venv/bin/pip",
        *("install", "--no-index", "--find-links", dist, "aifs-fuse[mount]"),
        env={"PATH": str(tmp_path / "bin"), "PIP_CONFIG_FILE": os.devnull},
    )
    (tmp_path / "use").mkdir()
    said = run("sh", "-c", USE, "sh", tmp_path / "use", tmp_path / "venv/bin")
    assert re.match(VERSION, said)


def test_the_debian_package_holds_all_that_it_runs(deb: Path, tmp_path: Path) -> None:
    """Its environment is moved: the test has no right to /opt of this machine."""
    run("dpkg-deb", "--extract", deb, tmp_path)
    for program in ("mount.aifs", "mount.fuse.aifs", "umount.aifs", "umount.fuse.aifs"):
        assert "/opt/aifs/bin/aifs" in (tmp_path / "usr/sbin" / program).read_text()
    assert os.readlink(tmp_path / "usr/bin/aifs") == "/opt/aifs/bin/aifs"
    script = tmp_path / "opt/aifs/bin/aifs"
    script.write_text(script.read_text().replace("/opt/aifs", f"{tmp_path}/opt/aifs"))
    (tmp_path / "use").mkdir()
    said = run("sh", "-c", USE, "sh", tmp_path / "use", script.parent)
    assert re.match(VERSION, said)


@pytest.fixture(scope="module")
def clean_root(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minimal Debian in which apt has installed the package."""
    if not shutil.which("mmdebstrap"):
        pytest.skip("mmdebstrap is not installed")
    release = platform.freedesktop_os_release()
    if release["ID"] != "debian":
        pytest.skip("this is no Debian")
    root = tmp_path_factory.mktemp("clean") / "root"
    done = subprocess.run(
        [
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            "--hook-dir=/usr/share/mmdebstrap/hooks/file-mirror-automount",
            f"--include={deb}",
            release["VERSION_CODENAME"],
            root,
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if "Failed to fetch" in done.stderr or "Could not resolve" in done.stderr:
        pytest.skip("no mirror of Debian is reached")
    assert done.returncode == 0, done.stderr
    return root


def test_the_debian_package_mounts_in_a_clean_system(clean_root: Path) -> None:
    (clean_root / "use").mkdir()
    inside = """
    root=$1
    shift
    # Daemons of others would live as long as their mounts here.
    umount --all --types fuse.aifs --lazy --internal-only --no-canonicalize || true
    for place in dev proc sys; do mount --rbind /$place "$root/$place"; done
    exec chroot "$root" sh -c "$@"
    """
    words = ("unshare", "--mount", "--propagation", "private", "sh", "-euc", inside, "sh")
    said = run(*words, clean_root, USE + BY_TYPE, "sh", "/use", "/usr/bin")
    assert re.match(VERSION, said)
    assert "unmount these first: /use/mnt" in said
