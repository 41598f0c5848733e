"""Whether the daemon of a mount answers. Commands ask this about each path that they are given, so
little is imported here.
"""

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from aifs.cli import hints
from aifs.core.errors import MountError, UserError
from aifs.core.limits import within
from aifs.core.mountinfo import mounted_at

if TYPE_CHECKING:
    from aifs.store.owner import Owner

WAITS_S = (1.0, 7.0, 22.0)
"""After each of these an owner file is looked at: in 8 s a daemon has noticed that its database is
away. One that answers is not, so what it takes to read the file is not needed then.
"""

ANSWER_S = sum(WAITS_S)
"""How long a daemon may take to answer what it always can. One that works hard takes some
milliseconds.
"""


class Stuck(MountError):
    """The daemon of a mount lives, and does not answer."""


class AwaitsDatabase(MountError):
    """The daemon of a mount lives, and answers nobody before its database does. ``owner``: what it
    says of itself."""

    def __init__(self, path: str, owner: "Owner") -> None:
        super().__init__(f"{path}: {owner.doing}")
        self.owner = owner


def _require_database(path: str) -> None:
    """Raises AwaitsDatabase if the daemon of the mount there says so in its owner file, which can
    be read without asking the mount.
    """
    try:
        from aifs.core import config
        from aifs.store.owner import find_holder, read_owner
    except ImportError:  # where no daemon can run: nobody there knows the file
        return
    mount, owner = mounted_at(path), None
    with suppress(OSError, UserError):  # it may be out of reach for who is not root
        loaded = config.load(mount.source, {}) if mount is not None else None
        if loaded is not None and loaded.is_cluster and find_holder(loaded.meta.directory):
            owner = read_owner(loaded.meta.directory)
    if owner is not None and owner.doing:
        raise AwaitsDatabase(path, owner)


def is_dead(path: str) -> bool:
    """Whether the daemon of the mount at ``path`` was killed without unmounting. Raises Stuck after
    ANSWER_S, AwaitsDatabase.

    Asked by an extended attribute that nothing has: a stat may be answered from the kernel's cache,
    and a statvfs wait for a data server.
    """
    for limit_s in WAITS_S:
        try:
            within(limit_s, os.getxattr, path, hints.NONE)
        except TimeoutError:
            _require_database(path)
        except OSError as error:
            return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        else:
            return False
    raise Stuck(
        f"{path}: no answer for {ANSWER_S:g} s; the daemon is stuck. To mount the store here "
        "again, or aifs umount --force, ends it, and loses nothing that was acknowledged"
    )


def require_answer(path: str) -> None:
    """Raises Stuck if whoever asks about ``path`` would have to wait, and could not be killed."""
    is_dead(path)
