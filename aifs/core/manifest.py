"""The manifest of a checkpoint: ``.aifs-manifest.json`` in its directory, which says what belongs
to it.

    {"format": 1, "step": 100, "time": 1763735314.25, "ranks": 4, "attempt": "5f0c...",
     "policy": "unit=4MiB", "bytes": 4096, "tree": "9a3e...", "files": {
    "shard-0.pt": [4096, "04f5..."]
    }}

*step*: null if unknown. *time*: seconds since 1970 when it was written, just before the publish.
*attempt*: which attempt to save it was the one. *policy*: the layout hint of its directory, ''
without AIFS. *files*: path below the directory -> [bytes, BLAKE3 in hex, or '' if it was not
taken]; a line for each, in the order of the paths' bytes. Bytes of names that are no UTF-8 are
written as lone surrogates (``surrogateescape``). All before "files" is one line.

*tree* is a BLAKE3, in hex. It is taken over these bytes of each file, in the same order: the path,
a zero byte, the size as decimal ASCII digits, a zero byte, the 64 hex digits of the file's BLAKE3
(nothing if it was not taken), a newline.

Only regular files are listed. Symlinks and empty directories may be in a checkpoint, but are not
looked after.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import blake3

NAME = ".aifs-manifest.json"
FORMAT = 1
RESERVED = ".aifs-", "..aifs-"
"""Names in a checkpoint's directory of the protocol; the second is left by a crash while
writing."""


class Digest(NamedTuple):
    """Of a file's content: its bytes, and its BLAKE3 in hex, or '' if that is unknown."""

    size: int
    blake3: str


Files = dict[str, Digest]
"""Path below the checkpoint, with ``surrogateescape`` -> digest."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint; the module explains the fields."""

    step: int | None
    """None if it is not known."""
    time: float
    """When it was written, just before the publish: seconds since 1970."""
    ranks: int
    """How many have saved it."""
    attempt: str = ""
    """Which attempt to save it was the one; '' if there was but one."""
    policy: str = ""
    """The layout hint of its directory; '' without AIFS."""
    files: Files = field(default_factory=dict)
    """By path below the directory, size and digest."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def tree(self) -> str:
        """The hash over names, sizes and hashes."""
        hasher = blake3.blake3()
        for path in sorted(self.files, key=os.fsencode):
            size, digest = self.files[path]
            hasher.update(b"%s\0%d\0%s\n" % (os.fsencode(path), size, digest.encode("ascii")))
        return hasher.hexdigest()


def encode(manifest: Manifest) -> Iterator[str]:
    """The text, in pieces."""
    head = {
        "format": FORMAT,
        "step": manifest.step,
        "time": manifest.time,
        "ranks": manifest.ranks,
        "attempt": manifest.attempt,
        "policy": manifest.policy,
        "bytes": manifest.size,
        "tree": manifest.tree,
    }
    yield json.dumps(head)[:-1] + ', "files": {'
    separator = "\n"
    for path in sorted(manifest.files, key=os.fsencode):
        yield f"{separator}{json.dumps(path)}: {json.dumps(manifest.files[path])}"
        separator = ",\n"
    yield "\n}}\n"
