"""The manifest of a checkpoint (``core.manifest``) in its directory: written, read, judged."""

import errno
import json
import math
import os
from typing import Any

from aifs.core.clock import require_time
from aifs.core.errors import UserError
from aifs.core.files import read_foreign
from aifs.core.manifest import FORMAT, NAME, Digest, Files, Manifest, encode
from aifs.core.trees import replace_file

__all__ = ["NAME", "CheckpointError", "Digest", "Files", "Manifest", "encode", "read", "write"]

_BYTES_MAX = 1 << 28


class CheckpointError(UserError):
    """A checkpoint cannot be made, found, or is not what its manifest says. One line."""

    exit_code = 8


def write(directory: str, manifest: Manifest) -> None:
    """Durable, except for its name: that takes a ``sync_dir``."""
    replace_file(os.path.join(directory, NAME), "".join(encode(manifest)).encode())


def decode(data: bytes) -> Manifest:
    """Raises CheckpointError if this is no manifest, is damaged, or has an unknown format."""
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise CheckpointError(
                f"its manifest has format {value['format']}; this version knows {FORMAT}"
            )
        manifest = Manifest(
            value["step"],
            require_time(value["time"]),
            value["ranks"],
            value["attempt"],
            value["policy"],
            decode_files(value["files"]),
        )
        if not _is_number(manifest.step or 0):
            raise ValueError("a step is none")
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
    """A file that a save left beside a checkpoint, or None. Anybody may have planted it: raises
    CheckpointError for a symlink, no regular file, or a long one; OSError."""
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
