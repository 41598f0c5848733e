"""Environments on real mounts: installed by pip and uv, used by another host, captured."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.hosts import Cluster, until
from tests.support.mounts import TIMEOUT_S, Mounted, aifs

pytestmark = pytest.mark.sweep

SAY = "import sys, tiny; sys.exit(tiny.__file__)"
PIP = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--disable-pip-version-check")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package with a console script, ``tiny``, that prints 42."""
    files = {
        "tiny/__init__.py": "def main():\n    print(42)\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        "tiny-1.0.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    }
    record = ""
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            record += f"{name},sha256={digest.rstrip(b'=').decode()},{len(text)}\n"
        archive.writestr("tiny-1.0.dist-info/RECORD", record + "tiny-1.0.dist-info/RECORD,,\n")
    return path


def installed(directory: Path, *words: object) -> Path:
    done = aifs("env", "run", "--dir", directory, "--key", "tiny", *words)
    return Path(done.stdout.strip())


def by_pip(wheel: Path) -> tuple[str, ...]:
    """Into a virtual environment without a pip of its own."""
    pip = f'{sys.executable} -m pip --python "$AIFS_ENV/bin/python" install -q --no-index'
    make = f'{sys.executable} -m venv --without-pip "$AIFS_ENV"'
    return ("--", "sh", "-c", f"{make} && {pip} {wheel}")


def require_works(environment: Path) -> None:
    """Its console script, found by its own path; and Python finds the package there."""
    script = environment / "bin" / "tiny"
    assert script.read_bytes().startswith(b"#!" + os.fsencode(environment))
    done = subprocess.run([script], check=True, capture_output=True, timeout=TIMEOUT_S)
    assert done.stdout == b"42\n"
    done = aifs("env", "use", environment, "--", "python", "-c", SAY, check=False)
    assert done.stderr.startswith(f"{environment}/lib/")


def test_what_pip_installs_works_in_place(mounted: Mounted, wheel: Path) -> None:
    require_works(installed(mounted.path / "envs", *by_pip(wheel)))


def test_what_uv_installs_works_in_place(mounted: Mounted, wheel: Path, tmp_path: Path) -> None:
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not os.access(uv, os.X_OK):
        pytest.skip("uv is not installed")
    script = (
        f'{uv} venv -q --allow-existing --python {sys.executable} "$AIFS_ENV" && '
        f"{uv} pip install -q --cache-dir {tmp_path}/cache --no-index "
        f'--python "$AIFS_ENV/bin/python" {wheel}'
    )
    require_works(installed(mounted.path / "envs", "--", "sh", "-c", script))


def test_console_scripts_work_on_another_host(two: Cluster, wheel: Path) -> None:
    """Whose mount is at the same place, as on hosts that are machines."""
    here, there = (host.path / "envs" for host in two)
    environment = installed(here, *by_pip(wheel))
    until((there / environment.name / "bin" / "tiny").exists, "the environment is seen")
    moved = f'mount --bind "{two[1].path}" "{two[0].path}" && exec "{environment}/bin/tiny"'
    done = two[1].run("unshare", "-m", "sh", "-c", moved)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_an_installation_into_a_mount_is_captured(
    on_mount: Path, wheel: Path, tmp_path: Path
) -> None:
    """And put into another directory of the mount, as hard links, and of a local disk."""
    sites = [on_mount / "first", on_mount / "second", tmp_path / "local-and-longer"]
    for site in sites:
        installed(
            on_mount / "envs",
            *("--capture", site, "--", "sh", "-c", f'{" ".join(PIP)} --target "$AIFS_ENV" {wheel}'),
        )
        code = f"import sys; sys.path.insert(0, {str(site)!r}); import tiny; tiny.main()"
        done = subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True)
        assert done.stdout == b"42\n"
    links = [os.stat(site / "tiny" / "__init__.py").st_nlink for site in sites]
    assert links == [1, 2, 1]


@pytest.mark.long
@pytest.mark.parametrize("package", ["numpy", "pyarrow", "torch"])
def test_large_packages_work_in_place(mounted: Mounted, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, so its version is not known")
    version = importlib.metadata.version(package)
    command = [sys.executable, "-m", "pip", "download", "-q", "--dest", tmp_path / "wheels"]
    if subprocess.run([*command, f"{package}=={version}"], check=False).returncode:
        pytest.skip(f"{package} cannot be downloaded here")
    options = ("--no-index", "--find-links", tmp_path / "wheels")
    environment = installed(
        mounted.path / "envs", "--venv", "--", "pip", "install", "-q", *options, package
    )
    mounted.remount()
    code = f"import {package}; print({package}.__version__)"
    done = aifs("env", "use", environment, "--", "python", "-c", code)
    assert done.stdout.strip() == version
