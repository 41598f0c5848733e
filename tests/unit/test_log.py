"""The log file."""

import logging
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from aifs.core.errors import Invalid
from aifs.files.refusals import Refusals
from aifs.vfs import Caller

PROGRAM = r"""
import logging, sys
from aifs.core import log
log.setup(sys.argv[1], "info")
logging.getLogger("aifs").info("setxattr is refused: %s", "kind=\udcff is unknown")
"""


def test_what_is_no_text_is_logged_all_the_same(tmp_path: Path) -> None:
    """Names, and what programs set as hints, are bytes."""
    file = tmp_path / "log"
    command = [sys.executable, "-c", PROGRAM, file]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert not done.stderr and r"kind=\udcff is unknown" in file.read_text()


def test_a_user_who_is_refused_again_and_again_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request was a line, with all that it had asked for."""
    refusals = Refusals()
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            with suppress(Invalid), refusals.noted(1, Caller(uid=1000), "a hint"):
                raise Invalid("x" * 60_000)
        with suppress(Invalid), refusals.noted(1, Caller(uid=1001), "a hint"):
            raise Invalid("y")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) < 100 and max(map(len, lines)) < 2000 and lines[-1].endswith("y")
