"""A mount seen from where the daemon's packages are not installed: a training container."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_installation import COMMAND, WITHOUT_EXTRAS

pytestmark = pytest.mark.sweep

COMMANDS = [
    (["status", "."], 0),
    (["info", "x"], 0),
    (["drain", "x"], 0),
    (["pin", "x"], 0),
    (["unpin", "x"], 0),
    (["evict", "x"], 0),
    (["warm", "x"], 0),  # the servers are as near
    (["group", "show", "x"], 1),  # there is none
    (["checkpoint", "ls", "."], 0),
    (["checkpoint", "publish", "new", "final"], 0),
    (["rm", "-r", "final"], 0),
]


def test_commands_for_a_mount_run_without_the_daemons_packages(on_mount: Path) -> None:
    for file in (on_mount / "x", on_mount / "new" / "x"):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"content" * 100_000)
    for command, code in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_EXTRAS + COMMAND, *command],
            check=False,
            capture_output=True,
            text=True,
            cwd=on_mount,
        )
        assert "pip install" not in done.stderr and "Traceback" not in done.stderr
        assert done.returncode == code, (command, done.stderr)
