"""Every block of shell and Python in the README and the guides works, in the order in which a
reader would type it: one page after the other, on one store.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900  # of one command, on a machine with much else to do
PROCESSOR_S = 15.0

PAGES = (
    "README.md",
    "docs/guide/quickstart.md",
    "docs/guide/checkpoints.md",
    "docs/guide/clones.md",
    "docs/guide/trash.md",
    "docs/guide/quotas.md",
    "docs/guide/startup.md",
    "docs/guide/datasets.md",
    "docs/guide/grouped.md",
    "docs/operate/configure.md",
    "docs/operate/metrics.md",
    "docs/operate/install.md",
)

INSTEAD = {
    "scripts/demo": ("scripts/demo --help", "takes minutes; a sweep runs it"),
    "scripts/test": ("scripts/test --collect-only -q tests/unit/test_units.py", "these tests"),
    "apt-get install -y fuse3 gcc libfuse3-dev pkg-config python3-dev python3-venv": (
        "dpkg-query -W fuse3 gcc libfuse3-dev pkg-config python3-dev python3-venv",
        "changes the machine",
    ),
    "python3 -m venv /opt/aifs": ("python3 -m venv --help", "a sweep makes one"),
    "/opt/aifs/bin/pip install '.[mount]'": ("true", "needs the network; a sweep does it"),
    "export PATH=/opt/aifs/bin:$PATH": ("true", "the test has its own"),
}
"""Lines that do not run as they stand: the line that runs instead, and why."""

LANGUAGES = {"sh", "python"}
"""Of blocks that run. Others do not: ``text`` needs machines or changes the system, ``py`` is part
of an example in scripts/examples, which tests run."""


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page that run."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [Block(page, language, text) for language, text in found if language in LANGUAGES]


class Reader:
    """Runs blocks, with all paths below ``/srv`` and ``/mnt`` in ``scratch`` instead."""

    def __init__(self, scratch: Path, python: "subprocess.Popen[str]") -> None:
        self._scratch = scratch
        self._python = python

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._run_python(block)
            return
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
            if line:
                done = self._run_line(self._placed(INSTEAD.get(line, (line, ""))[0]))
                said = f"{block.page}: {line}\n{done.stdout}{done.stderr}"
                assert done.returncode == 0, said

    def _placed(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(srv|mnt)/", rf"{self._scratch}/\1-", text)

    def _run_line(self, line: str) -> "subprocess.CompletedProcess[str]":
        """By the shell; a command of ours without anything of the shell is forked, at a tenth of
        the price."""
        if line.startswith("aifs ") and not set(line) & set("|&;<>$`*()"):
            return forked.run(shlex.split(line)[1:], timeout_s=TIMEOUT_S)
        return subprocess.run(
            ["bash", "-c", line],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(self._scratch),
            timeout=TIMEOUT_S,
        )

    def _run_python(self, block: Block) -> None:
        """In one process with all blocks, as importing torch is most of what they take; each has a
        namespace of its own."""
        assert self._python.stdin is not None and self._python.stdout is not None
        self._python.stdin.write(json.dumps(self._placed(block.text)) + "\n")
        self._python.stdin.flush()
        error = json.loads(self._python.stdout.readline())
        assert not error, f"{block.page}:\n{block.text}\n{error}"


RUN_BLOCKS = """
import json, os, sys, traceback
answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
for line in sys.stdin:
    error = ""
    try:
        exec(compile(json.loads(line), "block", "exec"), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
"""


def environment(scratch: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(scratch),
    }


@contextmanager
def reader(scratch: Path) -> Iterator[Reader]:
    python = subprocess.Popen(
        [sys.executable, "-c", RUN_BLOCKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(scratch),
    )
    with python:
        try:
            yield Reader(scratch, python)
        finally:
            subprocess.run(
                ["umount", "-l", f"{scratch}/mnt-aifs"], check=False, capture_output=True
            )


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_every_block_works(scratch: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("an example needs torch, which is not installed")
    with reader(scratch) as one:
        for page in PAGES:
            there = blocks(page)
            assert there, page
            for block in there:
                one.run(block)


def test_all_that_is_done_instead_stands_in_a_page() -> None:
    lines = {line for page in PAGES for block in blocks(page) for line in block.text.splitlines()}
    assert lines >= INSTEAD.keys()


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


@pytest.mark.sweep
@pytest.mark.timeout(TIMEOUT_S)
def test_the_demo_works(scratch: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("the demo needs torch, which is not installed")
    subprocess.run(
        ["scripts/demo", "--size", "210MB"],
        check=True,
        cwd=ROOT,
        env=environment(scratch),
        timeout=TIMEOUT_S,
    )
