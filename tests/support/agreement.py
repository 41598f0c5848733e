"""Random system calls on a mount and on a directory of a local kernel filesystem must answer alike.
Where the store has several hosts, another one lists, stats and reads all the while, and sees the
same.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import Machine
from tests.support.mounts import ROOT
from tests.support.sequences import Op, listing, shrink

CHECKPOINT = 100

_SHOWN = frozenset(
    "rename rename2 unlink rmdir chmod chown setxattr removexattr set_acl drop_acl".split()
)
"""What is there on all hosts when it has returned, with all that was done before, if it has done
anything."""
_OF_NAMES = ("ino", "mode", "nlink", "uid", "gid", "rdev")


def require_agreement(
    mountpoint: Path, reference: Path, ops: list[Op], other: Path | None = None
) -> None:
    """``other``: where another host has the store mounted."""
    difference = _disagreement(mountpoint, reference, ops, other)
    if difference:
        shortest = shrink(
            ops,
            lambda candidate: _disagreement(mountpoint, reference, candidate, other) is not None,
        )
        difference = _disagreement(mountpoint, reference, shortest, other) or difference
        pytest.fail(f"{difference}\n{len(shortest)} operations:\n{listing(shortest)}")


def _disagreement(
    mountpoint: Path, reference: Path, ops: list[Op], other: Path | None
) -> str | None:
    """Run the operations below fresh directories of both; what first differed, or None."""
    pair = [tempfile.mkdtemp(dir=parent) for parent in (reference, mountpoint)]
    for directory in pair:
        os.chmod(directory, 0o777)
    try:
        with Machine(pair[0]) as expected, Machine(pair[1]) as found:
            if other is None:
                return _run(ops, expected, found, None)
            with Machine(str(other / os.path.basename(pair[1]))) as there, watched(there.root):
                return _run(ops, expected, found, there)
    finally:
        for directory in pair:
            shutil.rmtree(directory)


def _run(ops: list[Op], expected: Machine, found: Machine, there: Machine | None) -> str | None:
    for position, op in enumerate(ops):
        wanted, got = expected.run(op), found.run(op)
        if wanted != got:
            return f"operation {position}, {op!r}:\n  expected {wanted}\n  found    {got}"
        plain = op[2] if op[0] == "as_user" else op
        if there is not None and plain[0] in _SHOWN and got[0][0] == "ok":
            here = _names(found.describe(op))
            if _changes(plain, here) and here != (seen := _names(there.describe(op))):
                return (
                    f"after operation {position}, {op!r}:\n  here {here}\n  the other host {seen}"
                )
        if position % CHECKPOINT == CHECKPOINT - 1 or position == len(ops) - 1:
            trees = {"the mount": found.tree()}
            if there is not None:
                found.show()
                trees["the other host"] = there.tree()
            for who, tree in trees.items():
                if difference := tree_difference(expected.tree(), tree):
                    return f"after operation {position}, {who}: {difference}"
    return None


def _changes(op: Op, here: dict[Any, dict[str, int] | None]) -> bool:
    """Whether an operation that has succeeded, after which attributes are these, has done anything
    of which the filesystem hears."""
    if op[0] == "chown":
        return op[2:4] != (-1, -1)
    if op[0] in ("rename", "rename2") and (new := here[op[2]]) is not None:
        old = here[op[1]]  # of two names of one inode both stay
        return old is None or old["ino"] != new["ino"]
    return True


def _names(described: dict[Any, dict[str, int] | None]) -> dict[Any, dict[str, int] | None]:
    """What does not depend on who has a file open for writing."""
    return {
        path: about and {name: about[name] for name in _OF_NAMES if name in about}
        for path, about in described.items()
        if isinstance(path, bytes)
    }


def tree_difference(expected: dict[bytes, tuple], found: dict[bytes, tuple]) -> str | None:
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            return f"{path!r}:\n  expected {expected.get(path)}\n  found    {found.get(path)}"
    return None


@contextmanager
def watched(root: int) -> Iterator[None]:
    """Somebody lists, stats and reads all that is below an open directory, all the time; nothing
    may fail, but that something has gone or is of another kind by now.

    A process of its own: operations of a Machine change who we are."""
    command = [sys.executable, "-m", "tests.support.watcher", str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[root], cwd=ROOT, text=True
    ) as watcher:
        try:
            yield
        finally:
            said, _ = watcher.communicate()
    assert watcher.returncode == 0, said
