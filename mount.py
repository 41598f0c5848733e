#!/usr/bin/env python3
"""python mount.py SOURCE MOUNTPOINT [-o ...]: the same as `aifs mount`, from a checkout."""

import sys

from aifs.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["mount", *sys.argv[1:]]))
