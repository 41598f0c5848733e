"""The manifest of a checkpoint: ``.aifs-manifest.json`` in its directory, which says what belongs
to it.

    {"format": 1, "step": 100, "time": 1763735314.25, "ranks": 4, "attempt": "5f0c...", "policy":
    "unit=4MiB",
     "bytes": 4096, "tree": "9a3e...", "files": {
    "shard-0.pt": [4096, "04f5..."]
    }}

*step*: null if unknown. *time*: seconds since 1970 when it was written, just before the publish.
*attempt*: which attempt to save it was the one. *policy*: the layout hint of its directory, ''
without AIFS. *files*: path below the directory -> [bytes, BLAKE3 in hex, or '' if it was not
taken]; a line for each, in the order of the paths' bytes. Bytes of names that are no UTF-8 are
written as lone surrogates (``surrogateescape``).

*tree* is the BLAKE3, in hex, of for each file in the same order: the bytes of the path, a zero
byte, the size as decimal ASCII digits, a zero byte, the 64 hex digits of its BLAKE3 (nothing if it
was not taken), a newline.

Only regular files are listed. Symlinks and empty directories may be in a checkpoint, but are not
looked after.
"""

import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import blake3

from aifs.core.errors import UserError
from aifs.core.files import read_foreign
from aifs.core.trees import replace_file

NAME = ".aifs-manifest.json"
FORMAT = 1
_BYTES_MAX = 1 << 28


class Digest(NamedTuple):
    """What is known of a file's content: bytes, and BLAKE3 in hex, or ''."""

    size: int
    blake3: str


Files = dict[str, Digest]
"""Path below the checkpoint, with ``surrogateescape`` -> digest."""


class CheckpointError(UserError):
    """A checkpoint cannot be made, found, or is not what its manifest says. One line."""

    exit_code = 8


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint; the module says what the fields mean."""

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


def write(directory: str, manifest: Manifest) -> None:
    """Durable, but for its name: that takes a ``sync_dir``."""
    replace_file(os.path.join(directory, NAME), "".join(encode(manifest)).encode())


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


def decode(data: bytes) -> Manifest:
    """Raises CheckpointError for what is no manifest, is damaged, or of a format that is not
    known.
    """
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise CheckpointError(
                f"its manifest has format {value['format']}; this version knows {FORMAT}"
            )
        manifest = Manifest(
            value["step"],
            value["time"],
            value["ranks"],
            value["attempt"],
            value["policy"],
            decode_files(value["files"]),
        )
        if not (_is_number(manifest.time) and _is_number(manifest.step or 0)):
            raise ValueError("a step or a time is none")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError("its manifest cannot be read") from None
    if (manifest.size, manifest.tree) != (value["bytes"], value["tree"]):
        raise CheckpointError("its manifest is damaged: it does not have the hash that it says")
    return manifest


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def decode_files(value: dict[str, Any]) -> Files:
    """The files of a manifest or a commit. Raises ValueError, TypeError."""
    files = {path: Digest(*pair) for path, pair in value.items()}
    if not all(
        type(size) is int and size >= 0 and isinstance(digest, str)
        for size, digest in files.values()
    ):
        raise ValueError("a size or a hash is none")
    if not all(
        path and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path
        for path in files
    ):
        raise ValueError("a path leads out of the checkpoint")
    return files


def read_document(path: str) -> bytes | None:
    """What somebody has written beside the files of a checkpoint, or None. Raises CheckpointError
    for what nobody has who means well, OSError."""
    try:
        return read_foreign(path, _BYTES_MAX)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.EFBIG):
            raise CheckpointError(f"{path}: {error.strerror}") from None
        raise


def read(directory: str) -> Manifest | None:
    """The manifest in a directory, or None if there is none. Raises CheckpointError, OSError."""
    data = read_document(os.path.join(directory, NAME))
    if data is None:
        return None
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
