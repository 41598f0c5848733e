#!/usr/bin/env python3
"""python mount.py SOURCE MOUNTPOINT [-o ...]: the same as `aifs mount`, from a checkout.

If AIFS was installed from the checkout, and not in place, the compiled part is in what was
installed: that is used then.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    if not any(HERE.glob("aifs/fuse/_bridge*.so")):
        sys.path.append(sys.path.pop(0))
    from aifs.cli.main import main

    sys.exit(main(["mount", *sys.argv[1:]]))
