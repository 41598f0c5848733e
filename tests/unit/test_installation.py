"""What ``pip install aifs-fuse`` has to install: the client runs with the base requirements alone,
and without a compiler.
"""

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.cli.main import MOUNT_PACKAGES

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "aifs").rglob("*.py")
}
FRAMEWORKS = {"torch", "numpy", "isal", "lightning", "transformers"}
"""What programs bring along that use aifs.client.torch."""

ASKED_FOR = {"trio"}
"""Imported by the client only where the program has imported it before."""

WITHOUT_EXTRAS = f"""
import sys
for name in {sorted(MOUNT_PACKAGES | {"pydantic_core"})!r}:
    sys.modules[name] = None  # as if it were not installed
sys.modules["aifs.fuse._bridge"] = None
"""


def requirements(extra: str | None = None) -> set[str]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    text = (
        parser["options.extras_require"][extra] if extra else parser["options"]["install_requires"]
    )
    names = {re.split(r"[<>=]", line)[0] for line in text.split()}
    imported_as = {"PyYAML": "yaml", "grpcio": "grpc", "protobuf": "google"}
    return {imported_as.get(name, name) for name in names}


def imported(module: str) -> Iterator[str]:
    """By the module, wherever in it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reachable(modules: set[str]) -> set[str]:
    """These, what they import of AIFS, and so on."""
    found: set[str] = set()
    left = set(modules)
    while left:
        module = left.pop()
        found.add(module)
        left |= {name for name in imported(module) if name in MODULES} - found
    return found


@pytest.mark.sweep
def test_the_client_imports_what_is_always_installed() -> None:
    client = {name for name in MODULES if name.startswith("aifs.client")}
    data = {name for name in client if name.startswith("aifs.client.data")}
    asked_by_url = {"aifs.client.fsspec"}
    csi = {name for name in MODULES if name.startswith("aifs.csi")}
    images = {"aifs.client.startup.images"}  # imported by root, on hosts that mount
    for asked, extras, layers in (
        (client - data - asked_by_url - images, requirements(), {"client", "core"}),
        (images, requirements() | requirements("mount"), {"client", "core"}),
        (asked_by_url, requirements() | requirements("fsspec"), {"client", "core"}),
        (data, requirements() | requirements("data"), {"client", "core", "datasets", "layout"}),
        (csi, requirements() | requirements("csi"), {"csi", "core"}),
    ):
        ours = reachable(asked)
        names = {name.partition(".")[0] for module in ours for name in imported(module)}
        others = names - set(sys.stdlib_module_names) - {"aifs"}
        assert others - FRAMEWORKS - ASKED_FOR <= extras
        assert {module.split(".")[1] for module in ours if "." in module} <= layers


@pytest.mark.sweep
def test_nothing_says_to_install_a_package_of_our_name_that_is_not_ours() -> None:
    """AIFS is installed from a checkout, or from files beside it; the index has something else
    under the name of the command."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").glob("*")]
    for path in (*MODULES.values(), *filter(Path.is_file, documents)):
        text = re.sub(r"\s+", " ", path.read_text())
        for command in re.findall(r"pip install(?: -\S+| dist)* ['\"]?aifs\b\S*", text):
            assert "--no-index" in command and "aifs-fuse" in command, path
        assert not re.search(r"pip install[^.:;]* aifs\b(?![.-])", text), path


def test_the_command_knows_what_the_daemon_needs() -> None:
    assert requirements("mount") == MOUNT_PACKAGES


def run(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_checkpoint_is_saved_and_loaded_without_extras(tmp_path: Path) -> None:
    done = run(
        """
from aifs import client

with client.checkpoint(sys.argv[1] + "/step-7") as directory:
    (directory / "state").write_bytes(b"content")
    group = client.Group("step", 0, 1, directory=directory)
    client.group_putfile("more", b"more", group).durable.result()
newest = client.latest(sys.argv[1])
assert (newest / "state").read_bytes() == b"content", newest
assert bytes(client.getfile(newest / "more").to_buffer()) == b"more"
assert client.verify(newest) == []
print([one.step for one in client.list_checkpoints(sys.argv[1])])
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "[7]\n"), done.stderr


COMMAND = "from aifs.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("arguments", [["--help"], ["checkpoint", "ls", "."]])
def test_commands_that_need_no_daemon_run_without_extras(
    tmp_path: Path, arguments: list[str]
) -> None:
    place = [str(tmp_path) if argument == "." else argument for argument in arguments]
    done = run(COMMAND, *place)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.sweep
@pytest.mark.parametrize("command", ["format", "mount", "fsck"])
def test_commands_that_need_the_daemon_say_what_to_install(tmp_path: Path, command: str) -> None:
    (tmp_path / "mnt").mkdir()
    places = [tmp_path / "store", *([tmp_path / "mnt"] if command == "mount" else [])]
    done = run(COMMAND, command, *places)
    assert done.returncode == 1
    assert "pip install '.[mount]'" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "store").exists()


def test_a_bridge_that_was_built_from_other_sources_is_not_used() -> None:
    script = """
import sys, types
sys.modules["aifs.fuse._bridge"] = types.ModuleType("_bridge")
from aifs.fuse import extension, extension_error
print(extension, extension_error)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=ROOT)
    assert done.stdout == b"None it was built from other sources than these\n"


def test_mount_py_uses_what_was_installed_if_the_checkout_is_not_built(tmp_path: Path) -> None:
    script = tmp_path / "mount.py"
    script.write_text((ROOT / "mount.py").read_text())
    (tmp_path / "aifs").mkdir()
    (tmp_path / "aifs/__init__.py").write_text("raise SystemExit('not built')")
    command = [sys.executable, script, "--help"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "Mount the store SOURCE" in done.stdout, done.stderr
