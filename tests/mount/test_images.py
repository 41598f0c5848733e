"""Container images on real mounts: imported to a store, mounted by overlayfs, run in a chroot."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.images import directory, docker_archive, entry, layer, typical
from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs

PROGRAM = r"""
#include <stdio.h>
int main(void) {
    int c;
    FILE *file = fopen("/etc/greeting", "r");
    while ((c = fgetc(file)) != EOF) putchar(c);
    return 0;
}
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image with a program that needs nothing else, and prints a file of another layer."""
    where = tmp_path_factory.mktemp("image")
    (where / "program.c").write_text(PROGRAM)
    build = ["cc", "-static", "-o", str(where / "program"), str(where / "program.c")]
    subprocess.run(build, check=True)
    program = entry("bin/program", (where / "program").read_bytes(), mode=0o755)
    layers = [*typical(), layer(program, directory("etc"), entry("etc/greeting", b"hello\n"))]
    docker_archive(where / "image.tar", layers)
    return where / "image.tar"


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "root"
    where.mkdir()
    yield where
    while os.path.ismount(where):
        subprocess.run(["umount", str(where)], check=True)


def imported(store: Mounted, archive: Path) -> Path:
    return Path(aifs("image", "import", archive, store.path).stdout.strip())


def run_program(root: Path) -> str:
    command = ["chroot", str(root), "/bin/program"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.sweep
def test_an_image_is_used_in_place_and_changed_on_a_local_disk(
    mounted: Mounted, archive: Path, mountpoint: Path, tmp_path: Path
) -> None:
    image = imported(mounted, archive)
    aifs("image", "mount", image, mountpoint, "--upper", tmp_path / "changes")
    assert run_program(mountpoint) == "hello\n"
    with (mountpoint / "etc/greeting").open("a") as greeting:  # copied up
        greeting.write("again\n")
    assert run_program(mountpoint) == "hello\nagain\n"
    os.rename(mountpoint / "etc/replaced", mountpoint / "etc/renamed")
    assert (mountpoint / "etc/renamed").read_bytes() == b"new"
    (mountpoint / "opaque/kept").unlink()
    (mountpoint / "opaque").rmdir()
    (mountpoint / "opaque").mkdir()
    assert os.listdir(mountpoint / "opaque") == []
    subprocess.run(["mv", str(mountpoint / "usr"), str(mountpoint / "moved")], check=True)
    assert not (mountpoint / "usr").exists()
    assert (mountpoint / "bin/sh").is_symlink() and (mountpoint / "etc/again").stat().st_nlink == 2
    refused = aifs("image", "rm", image, check=False)
    assert refused.returncode == 2 and f"is mounted at {mountpoint}" in refused.stderr
    subprocess.run(["umount", str(mountpoint)], check=True)
    rootfs = image / "rootfs"
    assert (rootfs / "etc/greeting").read_bytes() == b"hello\n"
    assert (rootfs / "etc/replaced").exists() and os.listdir(rootfs / "opaque") == ["kept"]
    aifs("image", "mount", image, mountpoint, "--upper", tmp_path / "changes")
    assert run_program(mountpoint) == "hello\nagain\n"  # what was changed is kept


@pytest.mark.sweep
def test_an_image_is_there_after_its_daemon_was_killed(
    mounted: Mounted, archive: Path, mountpoint: Path
) -> None:
    image = imported(mounted, archive)
    mounted.kill()
    mounted.mount()
    assert imported(mounted, archive) == image
    aifs("image", "mount", image, mountpoint)
    assert run_program(mountpoint) == "hello\n"
    with pytest.raises(OSError, match="Read-only"):
        (mountpoint / "new").touch()
    subprocess.run(["umount", str(mountpoint)], check=True)
    assert "train:1" in aifs("image", "ls", mounted.path).stdout
    aifs("image", "rm", image)
    assert "train:1" not in aifs("image", "ls", mounted.path).stdout


def test_the_start_of_a_container_is_recorded(
    mounted: Mounted, archive: Path, mountpoint: Path, tmp_path: Path
) -> None:
    image = imported(mounted, archive)
    aifs("drain", mounted.path)
    mounted.remount()
    aifs("evict", mounted.path)
    aifs("image", "mount", image, mountpoint, "--upper", tmp_path / "changes")
    top = mounted.path / "start"
    started = aifs(
        "start", "run", "--job", "job", "--dir", top, "--", "chroot", mountpoint, "/bin/program"
    )
    assert started.stdout == "hello\n"
    told = json.loads(aifs("start", "show", "job", "--dir", top, "--json").stdout)
    assert [file["path"] for file in told["files"]] == [f"/images/{image.name}/rootfs/bin/program"]


@pytest.mark.sweep
def test_an_import_whose_daemon_is_killed_leaves_no_image(
    mounted: Mounted, archive: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large.tar"
    files = (entry(f"file-{number}", os.urandom(1 << 16)) for number in range(800))
    digest = docker_archive(large, [layer(*files)])
    command = subprocess.Popen(
        [sys.executable, "-m", "aifs.cli.main", "image", "import", large, mounted.path],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    images = mounted.path / "images"
    try:
        while not any(images.glob("*/rootfs/file-1*")):
            assert command.poll() is None, "it was done too soon to be killed"
        mounted.kill()
        _, said = command.communicate(timeout=TIMEOUT_S)
        assert command.returncode and "Traceback" not in said
    finally:
        command.kill()
        command.communicate()
    mounted.mount()
    assert not (images / digest).exists()
    assert imported(mounted, large) == images / digest
