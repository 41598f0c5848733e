"""Which environment a job needs: the name is a hash of what the environment depends on."""

import json
import platform
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3

_GPUS = Path("/proc/driver/nvidia/gpus")
DIGITS = 32


def platform_key() -> dict[str, Any]:
    """What compiled modules depend on, of this machine: Python's ABI, the processor, the C library,
    the models of its NVIDIA GPUs."""
    return {
        "python": sysconfig.get_config_var("SOABI") or platform.python_version(),
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "gpu": _gpus(),
    }


def _gpus() -> list[str]:
    """Distinct models, as the driver names them."""
    models = set()
    for path in _GPUS.glob("*/information"):
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                models.add(value.strip())
    return sorted(models)


def name_of(key: Mapping[str, Any]) -> str:
    """The name of the environment with this key: 32 hexadecimal digits. Values are what JSON has;
    the order of names does not count. Raises TypeError for others."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return blake3.blake3(text.encode()).hexdigest()[:DIGITS]
