"""The extended attributes through which commands talk to a mount. vfs/hints.py says what each of
them means.
"""

import errno
import json
import os
from typing import Any

from aifs.core.refusals import explained

ATIME = "user.aifs.atime"
BACKUP = "user.aifs.backup"
CONFIG = "user.aifs.config"
DRAIN = "user.aifs.drain"
EVICT = "user.aifs.evict"
FENCE = "user.aifs.fence"
GROUP = "user.aifs.group"
HINTS = "user.aifs.hints"
HOSTS = "user.aifs.hosts"
LAYOUT = "user.aifs.layout"
NONE = "user.aifs"  # which nothing has
INFO = "user.aifs.info"
ORDER = "user.aifs.order"
QUOTA = "user.aifs.quota"
QUOTAS = "user.aifs.quotas"
REMOVE = "user.aifs.remove"
SCRUB = "user.aifs.scrub"
SERVER_ADD = "user.aifs.server-add"
SERVER_DRAIN = "user.aifs.server-drain"
SERVER_REMOVE = "user.aifs.server-remove"
SERVER_REPLACE = "user.aifs.server-replace"
SERVERS = "user.aifs.servers"
SHARING = "user.aifs.sharing"
STAGE = "user.aifs.stage"
STATE = "user.aifs.state"
STATUS = "user.aifs.status"
TIER = "user.aifs.tier"
TRACE = "user.aifs.trace"
TRASHED = "user.aifs.trashed"
WHY = "user.aifs.why"


def read(path: str, name: str, follow: bool = True) -> dict[str, Any]:
    """The value of the hint. Raises OSError."""
    return json.loads(os.getxattr(path, name, follow_symlinks=follow))


def is_missing(error: OSError) -> bool:
    """Whether it says that there is no such hint."""
    return error.errno == errno.ENODATA


def put(path: str, name: str, value: str = "") -> None:
    """Set the hint. Raises OSError, which says why the mount has refused it."""
    with explained(path, name):
        os.setxattr(path, name, os.fsencode(value))


def remove(path: str, name: str) -> None:
    """Take the hint back. Raises OSError, as ``put``."""
    with explained(path, name):
        os.removexattr(path, name)
