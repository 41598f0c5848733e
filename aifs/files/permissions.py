"""Permission to change names, for requests past the kernel's checks (ioctls, attributes).

The rules of path_resolution(7) and unlink(2): write and search permission on the directory, and in
a sticky one ownership of the directory or of the entry.
"""

import stat

from aifs.core.errors import AccessDenied, NotFound, NotPermitted, ReadOnly
from aifs.files.types import CallerLike
from aifs.files.views import Confined, may_write, reaches
from aifs.meta import acl, namespace
from aifs.meta.askers import Asker
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode

READ, WRITE, SEARCH = 4, 2, 1


def require_may(directory: Inode, caller: CallerLike, wanted: int = WRITE | SEARCH) -> None:
    """Raises AccessDenied unless mode and ACL of ``directory`` give ``caller`` ``wanted``."""
    if caller.uid == 0:
        return
    of = (directory.acl, directory.mode, directory.uid, directory.gid)
    if not acl.granted(*of, caller.uid, groups_of(caller), wanted):
        raise AccessDenied()


def is_member(gid: int, caller: CallerLike) -> bool:
    """Whether ``caller`` is of this group, or root."""
    return caller.uid == 0 or gid in groups_of(caller)


def require_may_remove(directory: Inode, inode: Inode, caller: CallerLike) -> None:
    """Raises AccessDenied or NotPermitted unless ``caller`` may take ``inode`` out of
    ``directory``."""
    require_may(directory, caller)
    if directory.mode & stat.S_ISVTX and caller.uid not in (0, directory.uid, inode.uid):
        raise NotPermitted(
            "the directory is sticky, and neither it nor what is named is the caller's"
        )


def require_may_remove_tree(directory: Inode, inode: Inode, caller: CallerLike) -> None:
    """Like ``require_may_remove``, for a whole tree: the owner of the directory may remove it, even
    if others own files below.
    """
    require_may_remove(directory, inode, caller)
    require_owner(inode, caller)


def require_reach(tx: ReadTransaction, directory: Inode, caller: CallerLike) -> None:
    """Raises AccessDenied unless ``caller`` may search all above ``directory``, up to where that is
    mounted in its container; ReadOnly if it is mounted so; NotFound if it has been removed. For
    directories named by number."""
    tops = caller.tops if isinstance(caller, Confined) else {ROOT_INO: True}
    require_within(tx, directory, caller)
    require_writable(tx, directory.ino, caller)
    while directory.ino not in tops:
        directory = namespace.get_directory(tx, directory.parent)
        require_may(directory, caller, SEARCH)


def require_within(tx: ReadTransaction, directory: Inode, caller: CallerLike) -> None:
    """Raises AccessDenied if ``directory`` is not mounted in the caller's container."""
    if not reaches(tx, directory, caller):
        raise AccessDenied("it lies outside of what is mounted for this process")


def require_writable(tx: ReadTransaction, ino: int, caller: CallerLike) -> None:
    """Raises ReadOnly if the caller's container has the inode by a read-only mount alone. For
    calls, which the kernel lets pass."""
    inode = namespace.find_inode(tx, ino)
    if inode is not None and not may_write(tx, inode, caller):
        raise ReadOnly()


def may_find(tx: ReadTransaction, inode: Inode, top: int, caller: CallerLike) -> bool:
    """Whether ``caller`` may search all above ``inode``, and list it from ``top`` on, so may see
    its path. False for several names."""
    wanted = READ | SEARCH
    try:
        while inode.ino != ROOT_INO:
            inode = namespace.get_directory(tx, inode.parent)
            require_may(inode, caller, wanted)
            if inode.ino == top:
                wanted = SEARCH
    except (AccessDenied, NotFound):
        return False
    return True


def require_owner(inode: Inode, caller: CallerLike) -> None:
    """Raises NotPermitted unless ``caller`` owns the inode, or is root."""
    if caller.uid not in (0, inode.uid):
        raise NotPermitted("only its owner and root may do this")


def asker_of(caller: CallerLike) -> Asker:
    """The caller, for the record."""
    return Asker(caller.uid, (caller.gid, *sorted(groups_of(caller) - {caller.gid})))


def groups_of(caller: CallerLike) -> set[int]:
    """All that ``caller`` is a member of."""
    if isinstance(caller, Asker):
        return set(caller.gids)
    return {caller.gid, *_groups(caller.pid)}


def _groups(pid: int) -> set[int]:
    """Supplementary groups of a process; none if it is gone, or in another namespace."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next(line for line in file if line.startswith(b"Groups:"))
    except (OSError, StopIteration):
        return set()
    return set(map(int, line.split()[1:]))
