"""The command ``aifs``, whose mounts die by SIGKILL at a request of a kind: before it is done, or
when it has been done and the kernel has no answer yet.

KILL_AT=before|after:OPERATION:FILE python -m tests.support.killed_mount mount SOURCE MOUNTPOINT

Nothing happens before FILE exists. The daemons that go on with the mount do not die, unless
KILL_ALL is in the environment. With WITHOUT_RESEND the kernel sends nothing again, as far as the
daemon can tell.
"""

import functools
import os
import signal
import sys
from dataclasses import replace
from typing import Any

from aifs.cli.main import main
from aifs.fuse import guard
from aifs.fuse.bridge import Bridge
from aifs.fuse.handed_over import HandedOver
from aifs.fuse.operations import Operations


def _dying(handler: Any, when: str, file: str) -> Any:
    def die() -> None:
        if os.path.exists(file):
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(handler)
    async def handle(*args: Any) -> Any:
        if when == "before":
            die()
        try:
            return await handler(*args)
        finally:
            die()

    return handle


if __name__ == "__main__":
    when, operation, file = os.environ["KILL_AT"].split(":")
    kind: Any = Operations if hasattr(Operations, operation) else HandedOver
    if "WITHOUT_RESEND" in os.environ:
        Bridge.can_be_kept = False  # type: ignore[assignment,method-assign]
    if "KILL_ALL" in os.environ:
        start = guard.start_keeper

        def of_this_module(keeping: Any, *args: Any) -> None:
            again = [__spec__.name if word == "aifs.cli.main" else word for word in keeping.again]
            start(replace(keeping, again=again), *args)

        guard.start_keeper = of_this_module
    setattr(kind, operation, _dying(getattr(kind, operation), when, file))
    sys.exit(main())
