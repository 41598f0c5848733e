"""Workers of one run, each of which collects all tests, compile each file of tests once between
them.
"""

import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def import_ahead(config: pytest.Config, is_wanted: Callable[[Path], bool]) -> None:
    """In a worker of a run of all folders: import the files of tests that are wanted. Each worker
    begins at another one.

    pytest rewrites the assertions of a file as it compiles it, which takes 26 s for all, and keeps
    the result on disk. Workers that import in the same order compile every file at the same moment,
    each for itself.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if is_wanted(file)]
    first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
    for file in files[first:] + files[:first]:
        # The collection says why a file cannot be imported, or is skipped.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
