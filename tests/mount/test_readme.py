"""Every command of the README works, in the order in which a reader would type them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900  # of one command, on a machine with much else to do

# Commands that take longer than a reader of the test's output would wait, and what shows that they
# start and work.
SHORTER = {
    "scripts/demo": "scripts/demo --help",
    "scripts/test": "scripts/test --collect-only -q tests/unit/test_units.py",
    "scripts/bench": "scripts/bench --help",
    "python3 -m venv .venv": "python3 -m venv --help",
    "source .venv/bin/activate": "true",
    "pip install '.[mount]'": "true",
}


def commands() -> list[str]:
    """The lines of all shell blocks."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dir", "missing"), "missing: there is no such directory"),
        (("--size", "1EB"), "the demo needs"),
        (("--size", "1MB"), "the smallest model takes"),
        (("--size", "big"), "invalid size value: 'big'"),
    ],
)
def test_the_demo_says_at_once_what_it_lacks(
    scratch: Path, arguments: tuple[str, str], said: str
) -> None:
    command = [sys.executable, ROOT / "scripts/demo.py", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=scratch, timeout=TIMEOUT_S
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_every_command_works(scratch: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("an example needs torch, which is not installed")
    lines = [SHORTER.get(line, line) for line in commands()]
    assert len(lines) > 15
    try:
        for line in lines:
            run(
                line.replace("/srv/", f"{scratch}/srv-").replace("/mnt/", f"{scratch}/mnt-"),
                scratch,
            )
    finally:
        subprocess.run(["umount", "-l", f"{scratch}/mnt-aifs"], check=False, capture_output=True)


@pytest.mark.sweep
@pytest.mark.timeout(TIMEOUT_S)
def test_the_demo_works(scratch: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("the demo needs torch, which is not installed")
    run("scripts/demo --size 210MB", scratch)


def run(line: str, scratch: Path) -> None:
    """A line of the README, in the repository, with the commands of this installation."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(scratch),
    }
    done = subprocess.run(
        ["bash", "-c", line],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
