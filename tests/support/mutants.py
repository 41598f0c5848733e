"""Mutants: copies of this tree with one small mistake each, which tests should notice.

    python -m tests.support.mutants --count 60 --seed 1 [--all] [FILE...]

Draws mistakes in the files (without any: ``HOT``), runs the tests that can reach each one until the
first of them fails, and prints what survived. Works in a copy; takes a minute or so for a mutant.
"""

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import reach
from tests.support.reach import ROOT

HOT = (
    "aifs/burst/tier.py",
    "aifs/files/draining.py",
    "aifs/files/transitions.py",
    "aifs/layout/striped.py",
    "aifs/meta/journal.py",
    "aifs/meta/memtable.py",
    "aifs/meta/namespace.py",
    "aifs/meta/publishing.py",
    "aifs/vfs/names.py",
)
"""Where bytes and names are lost if a line is wrong."""
_LIMIT_S = 900

_OPPOSITES = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE)]
_OPPOSITES += [(ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)]
_COMPARED = dict(_OPPOSITES) | {second: first for first, second in _OPPOSITES}


class Mutant:
    """A file with one node replaced."""

    def __init__(self, path: str, source: bytes, node: ast.AST, instead: str) -> None:
        lines = source.splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset  # type: ignore[attr-defined]
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset  # type: ignore[attr-defined]
        self.source = source[:start] + instead.encode() + source[end:]
        self.path = path
        was = " ".join(source[start:end].decode().split())
        self.name = f"{path}:{node.lineno}: {was[:60]} -> {instead[:60]}"  # type: ignore[attr-defined]


def mutants_of(path: str) -> Iterator[Mutant]:
    """All mistakes that can be made in a file."""
    source = (ROOT / path).read_bytes()
    for node in ast.walk(ast.parse(source)):
        if (instead := _mistake(node)) is not None:
            text = ast.unparse(instead)
            yield Mutant(path, source, node, f"({text})" if isinstance(instead, ast.expr) else text)


def _mistake(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Compare(left, [op, *more], others) if type(op) in _COMPARED:
            return ast.Compare(left, [_COMPARED[type(op)](), *more], others)
        case ast.BoolOp(op, values):
            return ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.BinOp(left, ast.Add(), right):
            return ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left, ast.Sub(), right):
            return ast.BinOp(left, ast.Add(), right)
        case ast.Expr(ast.Call() | ast.Await()):
            return ast.Pass()
    return None


def _lives(place: Path, mutant: Mutant, tier: str) -> bool:
    """Whether all tests pass with the mistake. Tests that name the file come first, mounts last."""
    (place / mutant.path).write_bytes(mutant.source)
    module = mutant.path.removesuffix(".py").replace("/", ".")

    def order(test: str) -> tuple[bool, bool, str]:
        text = (ROOT / test).read_text()
        is_named = module in text or f"from {module.rpartition('.')[0]} import" in text
        return test.startswith("tests/mount/"), not is_named, test

    tests = sorted(reach.reached({mutant.path}), key=order)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tier, *tests]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, cwd=place, timeout=_LIMIT_S
        )
        return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.copy(ROOT / mutant.path, place / mutant.path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=HOT, metavar="FILE")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="with the tests of scripts/test --all")
    asked = parser.parse_args()
    mutants = [mutant for path in asked.files for mutant in mutants_of(path)]
    chosen = random.Random(asked.seed).sample(mutants, min(asked.count, len(mutants)))
    survived = 0
    with tempfile.TemporaryDirectory(prefix="aifs-mutants-") as temporary:
        place = Path(temporary) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, place, ignore=ignored, symlinks=True)
        for number, mutant in enumerate(chosen, 1):
            lives = _lives(place, mutant, "--all" if asked.all else "--default")
            survived += lives
            print(f"{number:3} {'SURVIVED' if lives else 'found   '} {mutant.name}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} found")


if __name__ == "__main__":
    main()
