"""The log file."""

import subprocess
import sys
from pathlib import Path

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
