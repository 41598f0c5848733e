"""Container images that are unpacked once (aifs image import), in a plain directory."""

import errno
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aifs.cli.main import main
from aifs.client import startup
from aifs.client.startup.images import import_image
from aifs.client.startup.layers import ImageRefused
from aifs.core import beneath
from tests.support import forked
from tests.support.data_servers import hooked
from tests.support.images import (
    Entry,
    digest_of,
    directory,
    docker_archive,
    entry,
    layer,
    link,
    oci_layout,
    symlink,
    typical,
)
from tests.support.mounts import aifs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files their owners")


def described(root: Path) -> dict[str, tuple[object, ...]]:
    """All below, without the times of directories, which unpackers treat differently."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        is_file = stat.S_ISREG(status.st_mode)
        found[str(path.relative_to(root))] = (
            status.st_mode,
            status.st_uid,
            status.st_gid,
            status.st_rdev,
            0 if path.is_dir() and not path.is_symlink() else status.st_mtime_ns,
            status.st_nlink if is_file else 0,
            digest_of(path.read_bytes()) if is_file else "",
            os.readlink(path) if path.is_symlink() else "",
        )
    return found


def left(where: Path) -> list[str]:
    return sorted(path.name for path in (where / "images").rglob("*") if path.name != ".aifs-env")


@pytest.mark.sweep
def test_layers_are_applied_as_another_unpacker_does(tmp_path: Path) -> None:
    digest = oci_layout(tmp_path / "oci", typical())
    with import_image(tmp_path / "oci", tmp_path / "out") as made:
        rootfs = Path(made.path, "rootfs")
        assert made.made and os.path.basename(made.path) == digest
    assert digest_of(Path(made.path, "config.json").read_bytes()) == digest
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o700
    assert os.getxattr(rootfs / "data/attributes", "user.note") == b"kept"
    assert (rootfs / "data/fraction").stat().st_mtime_ns == 1000000000_123456789
    assert (rootfs / "etc").stat().st_mtime == 10**9
    assert sorted(os.listdir(rootfs / "opaque")) == ["kept"]
    if shutil.which("umoci") is None:
        pytest.skip("umoci is not installed: nothing to compare with")
    unpack = ["umoci", "unpack", "--image", f"{tmp_path}/oci:latest", f"{tmp_path}/bundle"]
    subprocess.run(unpack, check=True, capture_output=True)
    assert described(rootfs) == described(tmp_path / "bundle/rootfs")


@pytest.mark.sweep
def test_all_ways_to_pack_an_image_give_the_same(tmp_path: Path) -> None:
    layers = typical()
    digest = oci_layout(tmp_path / "oci", layers, ["tar", "tar+gzip", "tar+zstd"])
    assert docker_archive(tmp_path / "saved.tar", layers) == digest
    with tarfile.open(tmp_path / "oci.tar", "w") as tar:
        tar.add(tmp_path / "oci", ".")
    sources = [tmp_path / name for name in ("oci", "saved.tar", "oci.tar")]
    trees = []
    for number, source in enumerate(sources):
        with import_image(source, tmp_path / str(number)) as made:
            trees.append(described(Path(made.path, "rootfs")))
    assert trees[0] == trees[1] == trees[2]
    with import_image(sources[0], tmp_path / "1") as again:
        assert not again.made


HOSTILE: dict[str, tuple[Entry, ...]] = {
    "above": (entry("../escaped"),),
    "above-later": (entry("a/../../escaped"),),
    "absolute-link": (link("a", "/etc/passwd"),),
    "link-above": (link("a", "../../victim"),),
    "link-to-nothing": (link("a", "missing"),),
    "link-to-itself": (entry("a"), link("a", "a")),
    "link-through-a-symlink": (symlink("a", "{victim}"), link("b", "a/kept")),
    "whiteout-of-above": (entry(".wh..."),),
    "whiteout-of-all": (entry(".wh.."),),
    "disk": (entry("a", type=tarfile.BLKTYPE, devmajor=8, devminor=0),),
    "memory": (entry("a", type=tarfile.CHRTYPE, devmajor=1, devminor=1),),
    "overlay-whiteout": (entry("a", type=tarfile.CHRTYPE, devmajor=0, devminor=0),),
    "order": (entry("a", pax_headers={"SCHILY.xattr.user.aifs.pin": "yes"}),),
    "redirect": (entry("a", pax_headers={"SCHILY.xattr.trusted.overlay.redirect": "/"}),),
    "through-a-loop": (symlink("a", "b"), symlink("b", "a"), entry("a/c")),
    "through-a-file": (symlink("a", "first"), entry("a/c")),
    "through-many": (
        *(symlink(f"a{number}", f"a{number + 1}") for number in range(41)),
        entry("a0/b"),
    ),
    "root-is-a-symlink": (symlink(".", "{victim}"),),
    "deep": (entry("a/" * 300 + "b"),),
    "long": (entry("a" * 200 + "/" + ("b" * 200 + "/") * 20),),
    "header": (entry("a", pax_headers={"comment": "x" * (5 << 20)}),),
    "time": (entry("a", pax_headers={"mtime": "1e30"}),),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_layer_is_refused_whole(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("precious")
    entries = [entry("first", b"x"), *HOSTILE[name]]
    for info, _ in entries:
        info.linkname = info.linkname.replace("{victim}", str(victim))
    docker_archive(tmp_path / "image.tar", [layer(*entries)])
    with pytest.raises(ImageRefused, match=r"image\.tar: layer 1: "):
        import_image(tmp_path / "image.tar", tmp_path / "out")
    assert left(tmp_path / "out") == [] and not list(tmp_path.rglob("escaped"))
    assert os.listdir(victim) == ["kept"] and (victim / "kept").stat().st_nlink == 1


def test_paths_over_symlinks_are_resolved_within_the_image(tmp_path: Path) -> None:
    """As containerd does it; they were refused, and so were names that begin with a slash."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("precious")
    base = layer(
        directory("/usr/lib"),
        entry("/usr/lib/old", b"1"),
        symlink("lib", "usr/lib"),
        symlink("usr/up", "../../../lib"),
        symlink("out", str(outside)),
        symlink("fresh", "/made/below"),
    )
    top = layer(
        entry("lib/.wh.old"),
        entry("lib/new", b"2"),
        link("usr/up/same", "/lib/new"),
        entry("out/file", b"3"),
        entry("out/.wh.kept"),
        entry("fresh/deep/file", b"4"),
        directory("fresh/deep", mtime=5),
    )
    docker_archive(tmp_path / "image.tar", [base, top])
    with import_image(tmp_path / "image.tar", tmp_path / "made") as made:
        root = Path(made.path, "rootfs")
        assert sorted(os.listdir(root / "usr/lib")) == ["new", "same"]
        assert (root / "usr/lib/same").samefile(root / "usr/lib/new")
        assert (root / str(outside)[1:] / "file").read_bytes() == b"3"
        assert (root / "made/below/deep/file").read_bytes() == b"4"
        assert (root / "made/below/deep").stat().st_mtime == 5
        assert os.readlink(root / "lib") == "usr/lib"
    assert os.listdir(outside) == ["kept"]


def test_a_name_that_cannot_be_made_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a mount names below ``.aifs-data`` are the filesystem's own: a traceback."""

    def make_directory(name: str, parent: int) -> None:
        if name == ".aifs-data":
            raise OSError(errno.EEXIST, "File exists", name)
        beneath_make(name, parent)

    beneath_make = beneath.make_directory
    monkeypatch.setattr(beneath, "make_directory", make_directory)
    docker_archive(tmp_path / "image.tar", [layer(entry("a/.aifs-data/x", b"1"))])
    with pytest.raises(ImageRefused, match=r"layer 1: a/\.aifs-data/x: File exists"):
        import_image(tmp_path / "image.tar", tmp_path / "out")
    assert left(tmp_path / "out") == []


def layer_of(oci: Path) -> Path:
    """The longest blob: the layer."""
    return max((oci / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)


@pytest.mark.sweep
@pytest.mark.parametrize("packing", ["tar", "tar+gzip", "tar+zstd"])
@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "missing"])
def test_a_damaged_layer_is_refused_whole(tmp_path: Path, packing: str, damage: str) -> None:
    layers = [layer(entry("data", os.urandom(50_000)), entry("more", os.urandom(5000)))]
    oci_layout(tmp_path / "oci", layers, [packing])
    blob = layer_of(tmp_path / "oci")
    data = blob.read_bytes()
    middle = len(data) // 2
    if damage == "missing":
        blob.unlink()
    else:
        changed = {
            "cut": data[:middle],
            "longer": data + bytes(512),
            "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        }
        blob.write_bytes(changed[damage])
    with pytest.raises(ImageRefused, match="layer 1: "):
        import_image(tmp_path / "oci", tmp_path / "out")
    assert left(tmp_path / "out") == []


@pytest.mark.parametrize("packing", ["tar+gzip", "tar+zstd"])
def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, packing: str) -> None:
    oci_layout(tmp_path / "oci", [layer(entry("zeros", bytes(8 << 20)))], [packing])
    with pytest.raises(ImageRefused, match="--bytes-max"):
        import_image(tmp_path / "oci", tmp_path / "out", bytes_max=1 << 20)
    assert left(tmp_path / "out") == []


@pytest.mark.sweep
def test_an_import_that_is_killed_leaves_no_image(tmp_path: Path) -> None:
    source, out = tmp_path / "image.tar", tmp_path / "out"
    digest = docker_archive(source, typical())
    script = (
        "import os, signal, sys\n"
        "from aifs.client.startup.images import import_image\n"
        "from aifs.core import files\n"
        "class Kill:\n"
        "    left = int(sys.argv[1])\n"
        "    def before(self, op, path):\n"
        "        self.left -= 1\n"
        "        if not self.left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    def after(self, op, path, *args): pass\n"
        "files.set_hook(Kill())\n"
        f"import_image({str(source)!r}, {str(out)!r})\n"
    )
    for point in (20, 60, 100, 150):
        command = [sys.executable, "-c", script, str(point)]
        died = subprocess.run(command, cwd=forked.ROOT, capture_output=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
        assert not (out / "images" / digest).exists()
        assert startup.list_made(out / "images") == {}
    with import_image(source, out) as made:
        assert made.made
    assert sorted(os.listdir(out / "images")) == [".aifs-env", digest]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    writes = itertools.count(1)

    def fill(op: str, path: str) -> None:
        if op == "write_at" and next(writes) == 12:
            raise OSError(errno.ENOSPC, "No space left on device", path)

    docker_archive(tmp_path / "image.tar", typical())
    with hooked(fill), pytest.raises(OSError, match="No space"):
        import_image(tmp_path / "image.tar", tmp_path / "out")
    assert left(tmp_path / "out") == []


def test_of_two_importers_one_unpacks(tmp_path: Path) -> None:
    docker_archive(tmp_path / "image.tar", typical())
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda _: import_image(tmp_path / "image.tar", tmp_path / "out"), range(2))
        )
    assert sorted(one.made for one in found) == [False, True]
    with pytest.raises(startup.MakingFailed, match="is in use"):
        startup.remove(found[0].path)
    for one in found:
        one.close()
    startup.remove(found[0].path)
    assert left(tmp_path / "out") == []


def test_an_image_that_somebody_else_has_planted_is_not_used(tmp_path: Path) -> None:
    """Its digest is public: root got the path of another user's files, as those of the image."""
    digest = oci_layout(tmp_path / "oci", typical())
    images = tmp_path / "out" / "images"
    (images / digest / "rootfs").mkdir(parents=True)
    for path in (images, images / digest):
        os.chown(path, 65534, 65534)
    for planted in (images, images / digest):
        with pytest.raises(startup.MakingFailed, match=f"{planted}: was made by user 65534"):
            import_image(tmp_path / "oci", tmp_path / "out")
        os.chown(planted, 0, 0)
    import_image(tmp_path / "oci", tmp_path / "out").close()
    os.chown(images / digest, 65534, 65534)
    with pytest.raises(startup.MakingFailed, match="made by user 65534"):
        startup.made_at(images / digest, 0)


def test_no_symlink_in_the_place_of_images_is_followed(tmp_path: Path) -> None:
    oci_layout(tmp_path / "oci", typical())
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.mkdir()
    out.mkdir()
    (out / "images").symlink_to(victim)
    with pytest.raises(startup.MakingFailed, match="no directory"):
        import_image(tmp_path / "oci", out)
    assert not os.listdir(victim)


@pytest.mark.parametrize("change", [{"made_s": 1e300}, {"key": {"names": 5}}])
def test_a_record_that_somebody_else_has_planted_is_listed(
    tmp_path: Path, change: dict[str, object]
) -> None:
    images, name = tmp_path / "images", "a" * 64
    (images / name).mkdir(parents=True)
    (images / ".aifs-env").mkdir()
    (images / ".aifs-env" / name).write_text(json.dumps({"bytes": 5} | change))
    assert name in aifs("image", "ls", tmp_path).stdout


def test_no_upper_directory_of_somebody_else_is_mounted(tmp_path: Path) -> None:
    """What programs in the image write went wherever another user let it go."""
    oci_layout(tmp_path / "oci", typical())
    with import_image(tmp_path / "oci", tmp_path / "out") as made:
        image = made.path
    upper, victim = tmp_path / "scratch", tmp_path / "victim"
    upper.mkdir()
    victim.mkdir()
    (tmp_path / "mnt").mkdir()
    (upper / "upper").symlink_to(victim)
    assert main(["image", "mount", image, str(tmp_path / "mnt"), "--upper", str(upper)]) == 2
    (upper / "upper").unlink()
    (upper / "upper").mkdir()
    os.chown(upper / "upper", 65534, 65534)
    upper.chmod(0o1777)
    assert main(["image", "mount", image, str(tmp_path / "mnt"), "--upper", str(upper)]) == 2
