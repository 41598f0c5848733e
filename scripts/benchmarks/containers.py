"""Containers: a Python that starts in an image which is mounted over a store, beside the same files
unpacked to a plain directory of the same medium."""

import hashlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from pathlib import Path

from report import Row, longer
from systems import REPOSITORY, Aifs, System, drop_caches

COLD, WARM = 2.0, 1.1
PYTHON = Path("/usr/bin/python3")
COMMAND = (str(PYTHON), "-c", "pass")
AIFS = (sys.executable, "-m", "aifs.cli.main")


def image_archive(path: Path) -> None:
    """Make what ``docker save`` writes of an image that has the distribution's Python."""
    layer = path.with_name("layer.tar")
    with tarfile.open(layer, "w") as tar:
        for name in sorted(_files()):
            tar.add(name, name.lstrip("/"), recursive=False)
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = path.with_name("config.json")
    config.write_text(
        json.dumps(
            {
                "architecture": machine,
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            }
        )
    )
    manifest = path.with_name("manifest.json")
    manifest.write_text(
        json.dumps([{"Config": "config.json", "RepoTags": ["bench:1"], "Layers": ["layer.tar"]}])
    )
    with tarfile.open(path, "w") as tar:
        for one in (manifest, config, layer):
            tar.add(one, one.name)
            one.unlink()


def _files() -> set[str]:
    """Python, its library, and what these are linked with: as the dynamic linker names it, so that
    it is found where it is looked for."""
    library = Path(f"/usr/lib/{PYTHON.resolve().name}")
    found = {str(PYTHON), str(PYTHON.resolve())}
    for top, directories, names in os.walk(library):
        directories[:] = [one for one in directories if one not in ("test", "idlelib")]
        found.update(os.path.join(top, name) for name in names)
    programs = [PYTHON, *library.glob("lib-dynload/*.so")]
    told = subprocess.run(["ldd", *programs], check=True, capture_output=True, text=True).stdout
    linked = set(re.findall(r"(/\S+) \(0x", told))
    return {name for name in found if os.path.exists(name)} | _flat(linked)


def _flat(names: set[str]) -> set[str]:
    """Symlinks, and what they lead to."""
    found = set()
    for name in names:
        while os.path.islink(name):
            found.add(name)
            name = os.path.join(os.path.dirname(name), os.readlink(name))
        found.add(os.path.normpath(name))
    return found


def container_rows(base: Path, rounds: int) -> list[Row]:
    """Needs root."""
    archive = base / "python.tar"
    image_archive(archive)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with System("container-plain", base) as plain, Aifs("container-aifs", base) as store:
        _aifs("image", "import", archive, store.path)
        (image,) = (store.path / "images").glob("[0-9a-f]*")
        subprocess.run(["tar", "xf", archive, "-C", plain.path, "layer.tar"], check=True)
        subprocess.run(["tar", "xf", "layer.tar"], cwd=plain.path, check=True)
        store.rest()
        for _ in range(rounds):
            subprocess.run(["umount", store.path], check=True)
            store.daemon.wait()
            root, upper = base / "root", base / "upper"
            root.mkdir(), upper.mkdir()
            drop_caches()
            store.mount_again()
            _aifs("image", "mount", image, root, "--upper", upper)
            try:
                for how in ("cold", "warm", "warm", "warm"):
                    found["plain", how].append(_start_s(plain.path))
                    found["overlay", how].append(_start_s(root))
            finally:
                subprocess.run(["umount", root], check=True)
                shutil.rmtree(root), shutil.rmtree(upper)
    archive.unlink()
    times = {key: statistics.median(values) for key, values in found.items()}
    return [
        longer(
            f"container: python -c pass, {how} / unpacked",
            times["plain", how],
            times["overlay", how],
            most,
        )
        for how, most in (("cold", COLD), ("warm", WARM))
    ]


def _aifs(*words: object) -> None:
    subprocess.run([*AIFS, *map(str, words)], check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)


def _start_s(root: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(["chroot", root, *COMMAND], check=True)
    return time.perf_counter() - begun
