"""The command ``aifs``, whose mounts have locks as in a cluster, though no other host is there.

python -m tests.support.lock_mount mount SOURCE MOUNTPOINT
"""

import sys
from functools import partial

from aifs.cli.main import main
from aifs.fuse import session

if __name__ == "__main__":
    session.serve = partial(session.serve, has_locks=True)  # type: ignore[assignment]
    sys.exit(main())
