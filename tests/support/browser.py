"""A real browser without a screen: what it makes of a page."""

import shutil
import subprocess
from pathlib import Path

import pytest

_BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_OPTIONS = ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars")
_LIMIT_S = 300

NEEDED = pytest.mark.skipif(_BROWSER is None, reason="no chromium is installed")
"""A test that uses a browser is marked so: it is skipped before it has begun anything."""


def browse(address: str, scratch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page, and do what the ``options`` of chromium say, such as ``dump-dom``. Its console
    is on stderr, as lines with CONSOLE."""
    assert _BROWSER is not None, "the test is not marked with NEEDED"
    words = [*_OPTIONS, f"user-data-dir={scratch / 'browser'}", "enable-logging=stderr", *options]
    return subprocess.run(
        [_BROWSER, *(f"--{word}" for word in words), address],
        check=True,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
