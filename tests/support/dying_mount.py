"""The command ``aifs``, whose mounts die by SIGKILL when they reach a fault point.

DIE_AT=POINT:FILE python -m tests.support.dying_mount mount SOURCE MOUNTPOINT

Nothing happens before FILE exists.
"""

import os
import signal
import sys

from aifs.cli.main import main
from aifs.core import faults
from aifs.fuse import session
from aifs.meta.replicated import engine

if __name__ == "__main__":
    point, _, file = os.environ["DIE_AT"].partition(":")

    def die() -> None:
        if os.path.exists(file):
            os.kill(os.getpid(), signal.SIGKILL)

    assert session and engine  # which have declared all points
    faults.arm(point, die)
    sys.exit(main())
