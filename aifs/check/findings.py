"""Findings of a check: kinds, problems in work, the report."""

from collections.abc import Callable
from dataclasses import dataclass, field

from aifs.meta.kv import Transaction

KINDS = {
    "bad-cache": "a burst copy that is not what the file holds; the file is whole without it",
    "bad-name": "a name that no program can use",
    "copy-record": "a burst copy and its record do not match",
    "damaged-record": (
        "a record of the metadata that is not as it was stored; the last backup may have it"
    ),
    "dangling-dentry": "a name that leads to no inode",
    "degraded": (
        "an object of protected bytes is missing or short; they are whole without it, and "
        "a rebuild makes it anew"
    ),
    "foreign-file": "a file in a data server's directory that is not of the store; never touched",
    "garbage-in-use": "a record that would have the objects of an existing file deleted",
    "loop": "a directory that lies below itself",
    "lost-chunk": (
        "bytes of a file are lost: chunks are not where its list says, or the list is not whole"
    ),
    "misplaced-dentry": "a name in something that is not a directory",
    "missing-container": "a container of chunks that is not on its data server",
    "missing-directory": "a directory with names in it but without an inode",
    "missing-object": "bytes of a file are lost: an object is not on its data server",
    "name-index": "a name and its place in the directory listing do not match",
    "no-turn": "an entry of the trash that would stay there for ever",
    "orphan-inode": "an inode without a name that is not waiting for deletion",
    "orphan-object": "an object that belongs to no file",
    "second-name": "a directory with more than one name",
    "server-mark": (
        "a data server that holds unprotected bytes without being marked so; a mount "
        "might do without it"
    ),
    "shared-objects": "an object id that two files use",
    "short-container": "a container of chunks that is shorter than its record says",
    "short-object": "bytes of a file are lost: an object is shorter than the file calls for",
    "stray-record": "a record that belongs to an inode that does not exist, or contradicts it",
    "unknown-host": "a host that the store does not have",
    "unknown-record": "a record that is not of this format",
    "unknown-server": "a data server that the store does not have",
    "unlistable-server": "a data server whose objects could not be checked",
    "unreadable-record": "a record that cannot be decoded",
    "unrecovered": "what the last use of the store left behind could not be dealt with",
    "unreadable-bytes": "bytes of a file cannot be read from their data server",
    "wrong-checksum": "bytes of a file are not those that were stored",
    "wrong-counter": "a counter that contradicts the records",
    "wrong-link-count": "a link count that is not the number of names",
    "wrong-live-bytes": "a container's count of bytes in use that is not that of the chunk lists",
    "wrong-parent": "a directory that says it lies somewhere else",
    "wrong-references": (
        "a shared chunk whose count of references is not the number of extents that name it"
    ),
    "wrong-size": "a size that is not that of the bytes in the inode, or in the burst copy",
    "wrong-type": "a name that tells a wrong type of its inode",
}
"""Every kind of finding, with its meaning. Kinds once published keep their meaning."""

SILENT = ""
"""The kind of changes that are due only because something else is mended; not reported."""

Fix = Callable[[Transaction], object]
"""A transaction function that mends one problem, by the records as they are then."""

Subject = str | int | tuple[int, bytes]
"""The subject of a problem: a text, an inode, or a name in a directory."""

RECOVERY, RECORDS, NAMELESS = range(3)
"""When a problem is mended: before recovery acts on it; after; with all link counts right."""


@dataclass(slots=True)
class Finding:
    """``where``: the path, as far as there is one; else the record or the file on the server."""

    kind: str
    where: str
    detail: str
    repaired: bool = False


@dataclass(slots=True)
class Problem:
    """A finding on its way."""

    kind: str
    """One of KINDS, or SILENT."""
    subject: Subject
    detail: str
    """The fault, for people."""
    fix: Fix | None = None
    """The repair; None: it must stay."""
    stage: int = RECORDS
    """When that may be done: RECOVERY, RECORDS or NAMELESS."""
    where: str = ""
    """The subject with its path, which comes when all directories are known; '': none."""
    repaired: bool = False
    """It has been mended."""

    def finding(self) -> Finding:
        return Finding(self.kind, self.where, self.detail, self.repaired)


@dataclass(slots=True)
class FsckReport:
    """``counts``: inodes, directories, files, objects, bytes (on the servers), results of
    recovery."""

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Nothing is wrong any more."""
        return all(finding.repaired for finding in self.findings)


Progress = Callable[[str, int, int], None]
"""Called with the thing being checked, how much is done, and an estimate of all."""


def printable(name: bytes) -> str:
    """A name as text that is safe to print, whatever its bytes."""
    text = name.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
