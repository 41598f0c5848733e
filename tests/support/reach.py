"""Which test files a change can reach, by the imports of the package, the tests and the scripts.

A test that starts a command or a mount counts as importing all of the package. A file that is no
Python (C, SQL, a page, a default configuration) counts as imported by every module of its folder.
"""

import ast
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_STARTS_COMMANDS = {"tests/support/forked.py", "tests/support/mounts.py", "aifs/cli/main.py"}
"""A test that imports one of these may run any command."""
_CONCERN_ALL = {"tests/conftest.py", "setup.cfg", "setup.py", "pyproject.toml"}
_READ_THE_PACKAGE = {"tests/unit/test_architecture.py", "tests/unit/test_documents.py"}
"""They look into all of its files, without importing any."""
_TEXTS = ("README.md", "docs/", "config/", "scripts/", ".ci/")
"""Places of files that some tests read as text."""


def changed_since(revision: str) -> set[str]:
    """Paths of files that differ from what ``revision`` had, also those that git does not know.
    Raises ValueError if there is no such revision."""
    done = [
        _git("diff", "--name-only", revision),
        _git("ls-files", "--others", "--exclude-standard"),
    ]
    return {line for text in done for line in text.splitlines()}


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], check=False, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        raise ValueError(done.stderr.strip())
    return done.stdout


def reached(changed: Iterable[str]) -> set[str]:
    """The test files, by path, that a change of these files can make fail."""
    changed = set(changed)
    tests = {path for path in _python_files() if _is_test(path)}
    if changed & _CONCERN_ALL:
        return tests
    package = frozenset(path for path in _python_files() if path.startswith("aifs/"))
    found = _READ_THE_PACKAGE & tests
    for test in tests:
        below = {test, *_all_imports(test)}
        if test.startswith("tests/mount/") or below & _STARTS_COMMANDS:
            below |= package
        folders = {str(Path(path).parent) for path in below}
        if any(
            path in below or (not path.endswith(".py") and str(Path(path).parent) in folders)
            for path in changed
        ):
            found.add(test)
    if any(path.startswith(_TEXTS) for path in changed):
        found |= {test for test in tests if _reads_texts(test)}
    return found


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")


def _reads_texts(test: str) -> bool:
    return any(f'"{text.strip("/")}' in (ROOT / test).read_text() for text in _TEXTS)


@cache
def _python_files() -> frozenset[str]:
    """Those of the working tree, relative to its root."""
    return frozenset(
        str(path.relative_to(ROOT))
        for folder in ("aifs", "tests", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    )


@cache
def _imports(path: str) -> frozenset[str]:
    """The files that a module imports, anywhere in it; not those that it names as text."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = {name.replace(".", "/") for name in names}
    beside = str(Path(path).parent)  # scripts import their neighbours
    places |= {f"{beside}/{place}" for place in places}
    return _python_files() & {
        f"{place}{end}" for place in places for end in (".py", "/__init__.py")
    }


@cache
def _all_imports(path: str) -> frozenset[str]:
    found: set[str] = set()
    left = [path]
    while left:
        for one in _imports(left.pop()) - found:
            found.add(one)
            left.append(one)
    return frozenset(found)
