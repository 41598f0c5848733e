"""Key table of the metadata store, format 1. This comment is its only definition.

    key                              value
    ------------------------------   ---------------------------------------------------------------
    S                                superblock (JSON: format, uuid, created_s; of a store of one
                                     host also clean and boot; restored_from, restored_to: numbers
                                     of backups between them count no more; sessions, feed: the
                                     last numbers of the database that the store was in before;
                                     copying: where its metadata are being copied to or from,
                                     moved: where they are now; see store/copying.py)
    c name                           counter (8 bytes little-endian, see kv.Transaction.add)
    s server                         data server or burst directory (JSON, see meta/servers.py)
    i ino                            inode (records.Inode)
    d parent name                    dentry: the name in the directory (records.Dentry)
    e parent cookie                  the same dentry by its directory cookie: ino, type, name
                                     (readdir's order)
    x ino name                       value of an extended attribute
    w ino                            dirty mark: objects may differ from the record; the host that
                                     changes the file
    o ino                            orphan: no name left, still open or known to the kernel; empty
    o ino host                       hold: that host has the orphan open; empty. Not where the store
                                     has one host
    g oid                            garbage: objects to delete (records.Garbage)
    b id                             burst copy: whose it is (records.BurstRecord)
    k oid first                      checksums of a striped file: BLAKE3, 32 bytes for each MiB of
                                     the file, up to DIGESTS_PER_RECORD of them from MiB ``first``
                                     on; none if it was written in place or was mostly holes
    l oid first                      chunk list of an interleaved file, from extent ``first`` on
                                     (meta/chunks.py)
    h digest                         shared chunk: where it lies, and how many extents name it
                                     (meta/shared.py)
    y oid                            loose: the chunk list oid is no file's (yet, or any more), and
                                     to be dropped; the host that makes it, or 0
    t id                             container: layout, length, live bytes (chunks.Container)
    a id                             open container: chunks may be appended to it; the host that
                                     does
    q oid                            degraded: columns that must not be read, a rebuild is due
                                     (records.Degraded)
    m oid server                     stray: an object of oid may lie on a server that its layout
                                     does not name; its ino (8 bytes little-endian; 0: a container)
    u server                         unprotected bytes may lie on that data server; empty; never
                                     removed while it is in use
    z ino                            doomed: a tree that nobody can find by name, to be removed
                                     (meta/dooming.py)
    R ino                            for how long what is removed below a directory is kept
                                     (trash.decode_rule)
    T parent ino                     entry of the trash: an inode whose last name was removed from
                                     that directory (trash.Entry)
    U until ino                      its turn to go for good; the directory (meta/trash.py)
    r ino                            retention of the checkpoints in a directory: text, as in
                                     core/retention.py
    f ino                            rule by which old files below a directory move to other
                                     servers: text, as in core/aging.py
    n ino [number]                   group of a directory, which may be pending; with number (8
                                     bytes): rank that has committed, or file that has been closed;
                                     2^63 + host: what that host has of it (meta/groups.py)
    L ino                            home of the inode's locks: the session of a host (8 bytes
                                     big-endian); only in a cluster (files/lock_homes.py)
    C oid ino                        clone: the file is one of those that share the objects, or the
                                     chunk list, oid; empty (meta/shared.py)
    D ino                            delegation of a directory: the session that has it
                                     (delegations.Delegate); only in a cluster
    Q project                        quota: a directory, and how much its project may have
                                     (meta/quotas.py)
    P project what                   counter: the bytes (what 0), or how many inodes (1) a quota's
                                     project has
    j name                           where a background job that goes through the store has got to;
                                     its own format
    p host                           host: its name, and how it has left (JSON, see meta/hosts.py)
    v host                           the last two windows of ids that the host has taken: the first
                                     id of each, 8 bytes, little-endian (store/ids.py)

ino, parent, cookie, oid, id, first, project and until (ns since the epoch) are 8 bytes, server and
host are 2 bytes, what is one, all big-endian, so that numeric order is key order. A host's number,
also as a value, is that of kv.Engine.host: a host keeps it for ever; 0 is the host of a store that
has one, and nobody where there are several. Inode numbers, cookies and object ids come from one
sequence (counter ``ids``) and are never used again. A cookie is the dentry's place in its directory
for readdir: larger than that of every older dentry, so a listing in progress neither repeats nor
misses an entry that stays.
"""

import struct

ROOT_INO = 1
FIRST_FREE_ID = 2
DIGESTS_PER_RECORD = 256
DIGEST_BYTES = 32

_NUMBER = struct.Struct(">cQ").pack
_TWO_NUMBERS = struct.Struct(">cQQ").pack
_NUMBER_AND_SERVER = struct.Struct(">cQH").pack
_NUMBER_AND_KIND = struct.Struct(">cQB").pack
_SERVER = struct.Struct(">cH").pack

_PARTS = 1 << 63
"""Of numbers of members: those from here on are of hosts."""

SUPERBLOCK = b"S"
COUNTER_IDS = b"cids"  # all ids below it may be in use
COUNTER_INODES = b"cinodes"  # inodes that exist
COUNTER_GUARDED = (
    b"cguarded"  # how often an inode was made immutable or append-only; 0: there is none
)
COUNTER_TRASHED = b"ctrashed"  # entries of the trash
COUNTER_TRASHED_BYTES = b"ctrashed-bytes"  # what they take, as far as is known
COUNTER_SERVERS = (
    b"cservers"  # data servers that have ever been in the table; so the next one's number
)
COUNTER_BURST = b"cburst"  # the same, of burst directories
COUNTER_QUOTAS = b"cquotas"  # quotas that there have ever been
COUNTER_REPAIRS = b"crepairs"  # how often bytes of objects were found to be wrong


def inode(ino: int) -> bytes:
    return _NUMBER(b"i", ino)


def dentry(parent: int, name: bytes) -> bytes:
    return _NUMBER(b"d", parent) + name


def entry(parent: int, cookie: int) -> bytes:
    return _TWO_NUMBERS(b"e", parent, cookie)


def entries_after(parent: int, cookie: int) -> tuple[bytes, bytes]:
    """The key range of a directory's entries with a larger cookie."""
    return _TWO_NUMBERS(b"e", parent, cookie + 1), _NUMBER(b"e", parent + 1)


def xattr(ino: int, name: bytes) -> bytes:
    return _NUMBER(b"x", ino) + name


def xattrs(ino: int) -> tuple[bytes, bytes]:
    """The key range of all extended attributes of an inode."""
    return _NUMBER(b"x", ino), _NUMBER(b"x", ino + 1)


def dirty(ino: int) -> bytes:
    return _NUMBER(b"w", ino)


def orphan(ino: int) -> bytes:
    return _NUMBER(b"o", ino)


def hold(ino: int, host: int) -> bytes:
    return _NUMBER_AND_SERVER(b"o", ino, host)


def holds(ino: int) -> tuple[bytes, bytes]:
    """The key range of the holds of an orphan."""
    return hold(ino, 0), _NUMBER(b"o", ino + 1)


def is_hold(key: bytes) -> bool:
    """Whether an ``o`` key is a hold's, not the orphan's own."""
    return len(key) > 9


def hold_parts(key: bytes) -> tuple[int, int]:
    """The inode number of a hold's key, and its host."""
    return stray_parts(key)


def garbage(oid: int) -> bytes:
    return _NUMBER(b"g", oid)


def burst_copy(copy_id: int) -> bytes:
    return _NUMBER(b"b", copy_id)


def checksums(oid: int, first: int) -> bytes:
    return _TWO_NUMBERS(b"k", oid, first)


def all_checksums(oid: int) -> tuple[bytes, bytes]:
    """The key range of a file's checksums."""
    return _NUMBER(b"k", oid), _NUMBER(b"k", oid + 1)


def degraded(oid: int) -> bytes:
    return _NUMBER(b"q", oid)


def stray(oid: int, server: int) -> bytes:
    return _NUMBER_AND_SERVER(b"m", oid, server)


def strays(oid: int) -> tuple[bytes, bytes]:
    """The key range of all records of strays of an oid."""
    return _NUMBER(b"m", oid), _NUMBER(b"m", oid + 1)


def stray_parts(key: bytes) -> tuple[int, int]:
    """The oid of an ``m`` key, and the server."""
    return int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:], "big")


def unprotected(server: int) -> bytes:
    return _SERVER(b"u", server)


def doomed(ino: int) -> bytes:
    return _NUMBER(b"z", ino)


def trash_rule(ino: int) -> bytes:
    return _NUMBER(b"R", ino)


def trashed(parent: int, ino: int) -> bytes:
    return _TWO_NUMBERS(b"T", parent, ino)


def trashed_after(parent: int, ino: int) -> tuple[bytes, bytes]:
    """The key range of a directory's entries of the trash with larger inode numbers."""
    return _TWO_NUMBERS(b"T", parent, ino + 1), _NUMBER(b"T", parent + 1)


def turn(until_ns: int, ino: int) -> bytes:
    return _TWO_NUMBERS(b"U", until_ns, ino)


def retention(ino: int) -> bytes:
    return _NUMBER(b"r", ino)


def age_rule(ino: int) -> bytes:
    return _NUMBER(b"f", ino)


def quota(project: int) -> bytes:
    return _NUMBER(b"Q", project)


def used_bytes(project: int) -> bytes:
    return _NUMBER_AND_KIND(b"P", project, 0)


def used_inodes(project: int) -> bytes:
    return _NUMBER_AND_KIND(b"P", project, 1)


def use_project(key: bytes) -> int:
    """The project of a ``P`` key."""
    return int.from_bytes(key[1:9], "big")


def lock_home(ino: int) -> bytes:
    return _NUMBER(b"L", ino)


def delegation(ino: int) -> bytes:
    return _NUMBER(b"D", ino)


def job(name: bytes) -> bytes:
    return b"j" + name


def server(number: int) -> bytes:
    return _SERVER(b"s", number)


def host(number: int) -> bytes:
    return _SERVER(b"p", number)


def host_number(key: bytes) -> int:
    """The host of its record's key."""
    return int.from_bytes(key[1:], "big")


def windows(host: int) -> bytes:
    return _SERVER(b"v", host)


def host_value(host: int) -> bytes:
    """A host, as the value of a record."""
    return host.to_bytes(2, "big")


def host_of(value: bytes) -> int:
    return int.from_bytes(value, "big")


def describe(key: bytes) -> str:
    """A readable key: its letter, then names as text, other parts as numbers."""
    kind, rest = key[:1].decode(errors="backslashreplace"), key[1:]
    if kind in "cj":
        return f"{kind} {rest.decode(errors='backslashreplace')}"
    parts = [str(int.from_bytes(rest[:8], "big"))] if rest else []
    if rest[8:]:
        name = rest[8:].decode(errors="backslashreplace")
        parts.append(repr(name) if kind in "dx" else str(int.from_bytes(rest[8:], "big")))
    return " ".join([kind, *parts])


def all_of(kind: bytes) -> tuple[bytes, bytes]:
    """The key range of all records of one kind (its first letter)."""
    return kind, bytes((kind[0] + 1,))


def number(key: bytes) -> int:
    """The ino, oid or server number that follows the letter of a one-number key."""
    return int.from_bytes(key[1:], "big")


def entry_numbers(key: bytes) -> tuple[int, int]:
    """The two numbers of a key: of an ``e`` key parent and cookie."""
    return int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:], "big")


def dentry_parts(key: bytes) -> tuple[int, bytes]:
    """Parent and name of a ``d`` key."""
    return int.from_bytes(key[1:9], "big"), key[9:]


def xattr_parts(key: bytes) -> tuple[int, bytes]:
    """Inode number and attribute name of an ``x`` key."""
    return int.from_bytes(key[1:9], "big"), key[9:]


def chunk_list(oid: int, first: int) -> bytes:
    return _TWO_NUMBERS(b"l", oid, first)


def chunk_lists(oid: int) -> tuple[bytes, bytes]:
    """The key range of a file's chunk list."""
    return _NUMBER(b"l", oid), _NUMBER(b"l", oid + 1)


def chunk_list_parts(key: bytes) -> tuple[int, int]:
    """The oid of an ``l`` key, and the number of the first chunk."""
    return int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:], "big")


def container(container_id: int) -> bytes:
    return _NUMBER(b"t", container_id)


def open_container(container_id: int) -> bytes:
    return _NUMBER(b"a", container_id)


def shared(digest: bytes) -> bytes:
    return b"h" + digest


def shared_digest(key: bytes) -> bytes:
    """The digest of an ``h`` key."""
    return key[1:]


def group(ino: int) -> bytes:
    return _NUMBER(b"n", ino)


def group_member(ino: int, number: int) -> bytes:
    return _TWO_NUMBERS(b"n", ino, number)


def group_members(ino: int) -> tuple[bytes, bytes]:
    """The key range of the members of a directory's group."""
    return _TWO_NUMBERS(b"n", ino, 0), _TWO_NUMBERS(b"n", ino, _PARTS)


def group_part(ino: int, host: int) -> bytes:
    return _TWO_NUMBERS(b"n", ino, _PARTS | host)


def group_parts(ino: int) -> tuple[bytes, bytes]:
    """The key range of what hosts have of a directory's group."""
    return _TWO_NUMBERS(b"n", ino, _PARTS), _NUMBER(b"n", ino + 1)


def is_group(key: bytes) -> bool:
    """Whether an ``n`` key is the group's own, not a member's or a host's part."""
    return len(key) == 9


def part_host(key: bytes) -> int | None:
    """The host whose part of a group this is; None: it is the key of a member."""
    number = member_number(key)
    return number - _PARTS if number >= _PARTS else None


def member_number(key: bytes) -> int:
    """The number of a group's member, from its key."""
    return int.from_bytes(key[9:], "big")


def clone(oid: int, ino: int) -> bytes:
    return _TWO_NUMBERS(b"C", oid, ino)


def clones(oid: int) -> tuple[bytes, bytes]:
    """The key range of all files that share oid."""
    return _NUMBER(b"C", oid), _NUMBER(b"C", oid + 1)


def clone_parts(key: bytes) -> tuple[int, int]:
    """The oid of a ``C`` key, and the inode number."""
    return chunk_list_parts(key)


def loose(oid: int) -> bytes:
    return _NUMBER(b"y", oid)
