"""The pyfuse3 adapter: turns kernel requests into calls of vfs and its answers into replies.

Importing it loads the bridge (bridge.c), if built, before pyfuse3, which then mounts through it:
see ``bridge.py``.
"""

import importlib
import os
import sys
from typing import Any

__all__ = ["extension", "extension_error"]

extension: Any = None
"""The C module, which has no types; None: ``extension_error`` says why."""

extension_error = ""

_INTERFACE = 8
"""Of bridge.c; both numbers go up when the functions between the two change."""

_flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
try:
    extension = importlib.import_module("aifs.fuse._bridge")
    if "pyfuse3" in sys.modules:
        extension_error = "pyfuse3 was imported before aifs.fuse"
    elif getattr(extension, "INTERFACE", 1) != _INTERFACE:
        extension, extension_error = None, "it was built from other sources than these"
except ModuleNotFoundError:
    extension_error = "it has not been built"
except ImportError as error:
    extension_error = str(error)
finally:
    sys.setdlopenflags(_flags)
