"""Pages that explain what lies beside them name all of it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parents[1] / "support"


def test_the_page_of_the_test_helpers_names_each_of_them() -> None:
    named = set(re.findall(r"`(\w+\.py)`", (SUPPORT / "README.md").read_text()))
    there = {path.name for path in SUPPORT.glob("*.py")} - {"__init__.py"}
    assert named >= there, f"not explained: {there - named}"
    assert all((SUPPORT / name).exists() for name in named if name != "conftest.py")


_LOCKS = {"Lock", "CapacityLimiter", "ParkingLot", "Gate", "Limiter"}


def _locks(tree: ast.Module) -> set[str]:
    """``Class.attribute`` of each lock that a class makes, of those that limit something."""
    found = set()
    for each in ast.walk(tree):
        if not isinstance(each, ast.ClassDef):
            continue
        for node in ast.walk(each):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                name = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                unlimited = [ast.unparse(word) for word in node.value.args] == ["0"]
                if name in _LOCKS and isinstance(target, ast.Attribute) and not unlimited:
                    found.add(f"{each.name}.{target.attr}")
    return found


def test_the_page_of_concurrency_names_each_lock() -> None:
    page = (ROOT / "docs/design/concurrency.md").read_text()
    named = set(re.findall(r"`(\w+\.\w+)`", page))
    for first, more in re.findall(r"`(\w+)\.\w+`((?:, `\.\w+`)+)", page):
        named |= {f"{first}.{name}" for name in re.findall(r"`\.(\w+)`", more)}
    there = set().union(*(_locks(ast.parse(p.read_text())) for p in (ROOT / "aifs").rglob("*.py")))
    assert there <= named | {"Gate._queue"}, f"not explained: {there - named}"
