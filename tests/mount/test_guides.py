"""Every block of shell and Python in the README and the guides works, in the order in which a
reader would type it: one page after the other, on one store.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
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
    "docs/guide/datasets.md",
    "docs/guide/grouped.md",
    "docs/guide/startup.md",
    "docs/guide/training.md",
    "docs/operate/configure.md",
    "docs/operate/metrics.md",
    "docs/operate/objects.md",
    "docs/operate/install.md",
)
WITHOUT_BLOCKS = {
    "docs/guide/buckets.md",
    "docs/operate/hosts.md",
    "docs/operate/kubernetes.md",
    "docs/operate/security.md",
    "docs/operate/servers.md",
    "docs/operate/troubleshoot.md",
    "docs/operate/update.md",
    "docs/operate/versions.md",
}

INSTEAD = {
    "scripts/demo": ("scripts/demo --help", "takes minutes; a sweep runs it"),
    "scripts/test": ("scripts/test --version", "would run this test"),
    "apt-get update": ("true", "needs the network"),
    "apt-get install -y fuse3 gcc libfuse3-dev pkg-config python3-dev python3-venv": (
        "dpkg-query -W fuse3 gcc libfuse3-dev pkg-config python3-dev python3-venv",
        "changes the machine",
    ),
    "python3 -m venv /opt/aifs": ("python3 -m venv --help", "a sweep makes one"),
    "/opt/aifs/bin/pip install '.[mount]'": ("true", "needs the network; a sweep does it"),
    "export PATH=/opt/aifs/bin:$PATH": ("true", "the test has its own"),
    "pip install '.[objects]'": ("true", "needs the network"),
}
"""Lines that do not run as they stand: the line that runs instead, and why."""

IN_PYTHON = "aifs checkpoint plan"
"""How commands begin that import torch, and so run where the blocks of Python do."""

QUOTED = {
    "docs/guide/grouped.md": "scripts/examples/grouped.py",
    "docs/guide/datasets.md": "scripts/examples/datasets.py",
}
"""Pages whose blocks of Python may be lines of an example, which another test runs."""

LANGUAGES = {"sh", "python"}
"""Of blocks that run. Others are no programs: ``text`` needs machines or changes the system."""


class Block(NamedTuple):
    page: str
    language: str
    text: str


def all_blocks(page: str) -> list[Block]:
    """Those that a reader would take for programs."""
    text = (ROOT / page).read_text()
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [Block(page, language, text) for language, text in found if language in LANGUAGES]


def blocks(page: str) -> list[Block]:
    """The blocks of a page that run."""
    return [block for block in all_blocks(page) if not is_quoted(block)]


def is_quoted(block: Block) -> bool:
    """Whether all lines are of the page's example."""
    if block.page not in QUOTED or block.language != "python":
        return False
    example = (ROOT / QUOTED[block.page]).read_text()
    return code_of(block.text) <= code_of(example)


def code_of(text: str) -> set[str]:
    """Its lines, as far as they do something."""
    return {line.partition("  #")[0].strip() for line in text.splitlines()}


class Reader:
    """Runs blocks, with all paths below ``/srv`` and ``/mnt`` in ``scratch`` instead."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._python: subprocess.Popen[str] | None = None
        """All blocks of Python, as importing torch is most of what they take."""

    def run(self, block: Block) -> None:
        if block.language == "python":
            self._run_python(block)
            return
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
            if line.startswith("aifs umount"):
                self.end_python()  # it may use an environment there
            if line.startswith(IN_PYTHON):
                code = (
                    f"from aifs.cli.main import main\nassert main({shlex.split(line)[1:]}) == 0\n"
                )
                self._run_python(Block(block.page, "python", code))
            elif line:
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
        """Each block has a namespace of its own."""
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", RUN_BLOCKS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment(self._scratch),
            )
        assert self._python.stdin is not None and self._python.stdout is not None
        self._python.stdin.write(json.dumps(self._placed(block.text)) + "\n")
        self._python.stdin.flush()
        error = json.loads(self._python.stdout.readline())
        assert not error, f"{block.page}:\n{block.text}\n{error}"

    def end_python(self) -> None:
        if self._python is not None:
            self._python.communicate()
            self._python = None


RUN_BLOCKS = """
import gc, json, os, sys, traceback
answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
for line in sys.stdin:
    error = ""
    try:
        exec(compile(json.loads(line), "block", "exec"), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    gc.collect()  # what it has mapped
    print(json.dumps(error), file=answers, flush=True)
"""


def environment(scratch: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(scratch),
    }


@contextmanager
def reader(scratch: Path) -> Iterator[Reader]:
    one = Reader(scratch)
    try:
        yield one
    finally:
        subprocess.run(["umount", "-l", f"{scratch}/mnt-aifs"], check=False, capture_output=True)
        one.end_python()


def run_pages(scratch: Path, pages: Iterable[str]) -> None:
    with reader(scratch) as one:
        for page in pages:
            there = blocks(page)
            assert there, page
            for block in there:
                one.run(block)


def test_the_first_pages_work(scratch: Path) -> None:
    run_pages(scratch, PAGES[:2])


def test_the_page_of_buckets_works(scratch: Path) -> None:
    if find_spec("obstore") is None or find_spec("moto") is None:
        pytest.skip("needs obstore and moto: pip install '.[test]'")
    try:
        run_pages(scratch, ["docs/operate/objects.md"])
    finally:
        subprocess.run(["umount", "-l", scratch / "mnt-objects"], check=False, capture_output=True)


@pytest.mark.sweep
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_every_block_works(scratch: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("an example needs torch, which is not installed")
    run_pages(scratch, PAGES)


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
def test_the_first_steps_work_in_a_clean_clone_and_environment(scratch: Path) -> None:
    """Word by word, except that the packages of the system are there."""
    clone = scratch / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    (steps,) = (block.text for block in blocks("README.md") if "format" in block.text)
    lines = [INSTEAD[line][0] if "apt-get" in line else line for line in steps.splitlines()]
    script = re.sub(r"(?<![\w.])/(srv|mnt|opt)/", rf"{scratch}/\1-", "\n".join(lines))
    try:
        done = subprocess.run(
            ["bash", "-ec", script], check=False, capture_output=True, text=True, cwd=clone
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        subprocess.run(["umount", "-l", f"{scratch}/mnt-aifs"], check=False, capture_output=True)


def test_all_exceptions_stand_in_a_page() -> None:
    there = [block for page in PAGES for block in all_blocks(page)]
    assert {line for block in there for line in block.text.splitlines()} >= INSTEAD.keys()


def test_all_guides_are_run() -> None:
    pages = [*ROOT.glob("docs/guide/*.md"), *ROOT.glob("docs/operate/*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages} == {*PAGES[1:], *WITHOUT_BLOCKS}
    assert not [page for page in WITHOUT_BLOCKS if all_blocks(page)]


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
