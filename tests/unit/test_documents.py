"""Pages that explain what lies beside them name all of it."""

import re
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"


def test_the_page_of_the_test_helpers_names_each_of_them() -> None:
    named = set(re.findall(r"`(\w+\.py)`", (SUPPORT / "README.md").read_text()))
    there = {path.name for path in SUPPORT.glob("*.py")} - {"__init__.py"}
    assert named >= there, f"not explained: {there - named}"
    assert all((SUPPORT / name).exists() for name in named if name != "conftest.py")
