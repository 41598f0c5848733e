"""Environments: directories with installed packages, named by a hash of the key they depend on."""

import glob
import importlib.machinery
import json
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import blake3

from aifs.client.startup.once import MadeDirectory, make_once

DIGITS = 32


def platform_key() -> dict[str, Any]:
    """The machine as compiled modules see it: Python's ABI, processor, C library, NVIDIA GPU
    models."""
    return {
        "python": _abi(),
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "gpu": _gpus(),
    }


def _abi() -> str:
    """``SOABI`` of sysconfig, without its slow import."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]  # such as .cpython-311-x86_64-linux-gnu.so
    return suffix.removesuffix(".so").strip(".") or platform.python_version()


def _gpus() -> list[str]:
    """Distinct models, as the driver names them."""
    models = set()
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        with open(path, errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name == "Model":
                    models.add(value.strip())
    return sorted(models)


def name_of(key: Mapping[str, Any]) -> str:
    """The environment's name for this key of JSON values: 32 hexadecimal digits; order does not
    count. Raises TypeError for other values."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return blake3.blake3(text.encode()).hexdigest()[:DIGITS]


def environment(
    directory: str | os.PathLike[str],
    *,
    key: Mapping[str, Any],
    make: Callable[[str], object],
    expire_s: float | None = None,
) -> MadeDirectory:
    """The environment for ``key`` and this platform (``platform_key``, which ``key`` may override),
    below ``directory``; made by ``make(path)`` if it is not there.

    As ``make_once``; and where files in ``path`` say its name, they say the environment's name
    afterwards. Raises what ``make`` raises, MakingFailed, OSError, TypeError for a key that JSON
    does not have.
    """
    whole = {**platform_key(), **key}
    name = name_of(whole)

    def fill(path: str) -> None:
        from aifs.client.startup.relocate import relocate  # callers that find it there do not

        make(path)
        relocate(path, os.path.basename(path), name)

    return make_once(directory, name, key=whole, make=fill, expire_s=expire_s)
