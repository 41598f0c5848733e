"""fsck: each kind of damage is found and named, alone; what can be mended is, and then nothing is
found.
"""

import errno
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from aifs.check import fsck
from aifs.check.findings import KINDS, FsckReport
from aifs.check.fsck import check
from aifs.check.objects import lost_bytes
from aifs.core import config as configuration
from aifs.core import files
from aifs.core.errors import StoreBusy, StoreError, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.data import naming
from aifs.data.containers import chunk_codec
from aifs.layout.interleaved import HEADER_BYTES, Interleaved
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from aifs.meta import chunk_lists, chunks, groups, journal, keys, shared, slices
from aifs.meta.askers import Asker
from aifs.meta.chunk_lists import CHUNKS_PER_RECORD
from aifs.meta.groups import GroupMember, GroupRecord
from aifs.meta.kv import Transaction
from aifs.meta.records import BurstRecord, Copy, Degraded, Garbage, Inode, encode_entry
from aifs.meta.shared import Shared
from aifs.store.owner import OwnerLock
from aifs.store.store import format_store
from aifs.vfs import open_filesystem
from aifs.vfs.filesystem import Filesystem
from tests.support.damaged import CHUNK, COMMON, COPY_ID, NOBODY, ROOT, UNIT, DamagedStore

FILE, DIRECTORY = stat.S_IFREG >> 12, stat.S_IFDIR >> 12
COOKIE = 5000  # of names that the tests make; within the first window of ids

Found = list[tuple[str, str]]


@dataclass
class Damage:
    """What to do to a store, the findings (kind, where), and where paths are after the repair
    (None: gone).

    ``{/path}`` stands for an inode number, ``{server N}`` for a server's directory.
    """

    do: Callable[[DamagedStore], None]
    found: Found
    moves: dict[str, str | None]

    def expected(self, store: DamagedStore) -> Found:
        return sorted((kind, _fill(store, where)) for kind, where in self.found)


MENDED: dict[str, Damage] = {}
STAYS: dict[str, Damage] = {}


def mended(*found: tuple[str, str], moves: dict[str, str | None] | None = None) -> Callable:
    """Register a damage that a repair puts right."""
    return lambda do: MENDED.setdefault(do.__name__, Damage(do, list(found), moves or {}))


def stays(*found: tuple[str, str]) -> Callable:
    """Register a damage that can only be named."""
    return lambda do: STAYS.setdefault(do.__name__, Damage(do, list(found), {}))


def _fill(store: DamagedStore, text: str) -> str:
    for path, ino in store.ino.items():
        text = text.replace(f"{{{path}}}", str(ino))
    for number, path in enumerate(store.config.servers):
        text = text.replace(f"{{server {number}}}", path)
    if "{shared container}" in text:
        text = text.replace("{shared container}", str(store.shared_container()[0]))
    if "{container}" in text:
        text = text.replace("{container}", str(store.container()[0]))
    return text


@pytest.fixture(scope="module")
def template() -> Iterator[DamagedStore]:
    with tempfile.TemporaryDirectory(prefix="aifs-fsck-", dir="/dev/shm") as directory:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "SEGMENT_BYTES", 256 << 10)
            filled = DamagedStore(Path(directory, "store"))
        yield filled


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, template: DamagedStore) -> Iterator[DamagedStore]:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 256 << 10)  # read at each opening of the store
    with tempfile.TemporaryDirectory(prefix="aifs-fsck-", dir="/dev/shm") as directory:
        yield template.copied_to(Path(directory, "store"))


def _kinds(report: FsckReport) -> Found:
    return sorted((finding.kind, finding.where) for finding in report.findings)


# --- what is mended -------------------------------------------------------------------------------


@mended(("wrong-link-count", "/a/striped"))
def too_many_links(store: DamagedStore) -> None:
    store.change("/a/striped", nlink=7)


@mended(("wrong-link-count", "/z/moved"))
def too_few_links(store: DamagedStore) -> None:
    store.change("/z/moved", nlink=0)


@mended(("wrong-link-count", "/a"))
def wrong_links_of_a_directory(store: DamagedStore) -> None:
    store.change("/a", nlink=2)


@mended(("wrong-link-count", "/"))
def wrong_links_of_the_root(store: DamagedStore) -> None:
    store.change("/", nlink=99)


@mended(("wrong-size", "/inline"))
def wrong_size(store: DamagedStore) -> None:
    store.change("/inline", size=4711)


@mended(("wrong-size", "/nothing"))
def size_without_bytes(store: DamagedStore) -> None:
    store.change("/nothing", size=1)


@mended(("dangling-dentry", "/inline"), moves={"/inline": None})
def dangling_dentry(store: DamagedStore) -> None:
    store.delete(keys.inode(store.ino["/inline"]), keys.xattr(store.ino["/inline"], b"user.colour"))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@mended(("dangling-dentry", "/empty"), moves={"/empty": None})
def dangling_directory(store: DamagedStore) -> None:
    store.delete(keys.inode(store.ino["/empty"]))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@mended(("missing-directory", "/a"))
def directory_without_inode(store: DamagedStore) -> None:
    store.delete(keys.inode(store.ino["/a"]), keys.xattr(store.ino["/a"], b"user.colour"))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@mended(("missing-directory", "<inode {/a}>"), moves={"/a": "/lost+found/#{/a}"})
def directory_without_inode_and_name(store: DamagedStore) -> None:
    store.remove_name("/a")
    store.change("/", nlink=5)
    store.delete(keys.inode(store.ino["/a"]))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@mended(("missing-directory", "/"))
def no_root(store: DamagedStore) -> None:
    store.delete(keys.inode(ROOT))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@mended(("orphan-inode", "<inode {/inline}>"), moves={"/inline": "/lost+found/#{/inline}"})
def orphan_file(store: DamagedStore) -> None:
    store.remove_name("/inline")


@mended(("orphan-inode", "<inode {/z/moved}>"), moves={"/z/moved": "/lost+found/#{/z/moved}"})
def deleted_file_without_orphan_record(store: DamagedStore) -> None:
    store.remove_name("/z/moved")
    store.change("/z/moved", nlink=0)


@mended(
    ("orphan-inode", "<inode {/a}>"),
    ("wrong-link-count", "/"),
    moves={"/a": "/lost+found/#{/a}"},
)
def orphan_directory(store: DamagedStore) -> None:
    store.remove_name("/a")


@mended(
    ("orphan-inode", "<inode {/inline}>"),
    ("stray-record", "<inode {/inline}>"),
    moves={"/inline": "/lost+found/#{/inline}"},
)
def orphan_with_links(store: DamagedStore) -> None:
    store.remove_name("/inline")
    store.put(keys.orphan(store.ino["/inline"]), b"")


@mended(("stray-record", "/inline"))
def orphan_record_of_a_named_inode(store: DamagedStore) -> None:
    store.put(keys.orphan(store.ino["/inline"]), b"")


@mended(("stray-record", "inode 4000"))
def orphan_record_without_inode(store: DamagedStore) -> None:
    store.put(keys.orphan(4000), b"")


@mended(("stray-record", "record 6f61"), ("stray-record", "record 77" + 9 * "61"))
def marks_with_a_wrong_key(store: DamagedStore) -> None:
    store.put(b"oa", b"")
    store.put(b"waaaaaaaaa", b"")


@mended(("stray-record", "inode 4000"))
def dirty_mark_without_inode(store: DamagedStore) -> None:
    store.put(keys.dirty(4000), b"")


@mended(("stray-record", "inode 4000"))
def xattr_without_inode(store: DamagedStore) -> None:
    store.put(keys.xattr(4000, b"user.lost"), b"value")


@mended(("name-index", "/a/striped"))
def dentry_without_entry(store: DamagedStore) -> None:
    store.delete(store.entry_key("/a/striped"))


@mended(("name-index", "/a/striped"))
def entry_without_dentry(store: DamagedStore) -> None:
    store.delete(store.dentry_key("/a/striped"))


@mended(("name-index", "/a/b"))
def entry_without_dentry_of_a_directory(store: DamagedStore) -> None:
    store.delete(store.dentry_key("/a/b"))


@mended(("name-index", "/z/gone"))
def entry_of_a_removed_name(store: DamagedStore) -> None:
    entry = encode_entry(store.ino["/inline"], FILE, b"gone")
    store.put(keys.entry(store.ino["/z"], COOKIE), entry)


@mended(("name-index", "/inline"))
def name_listed_twice(store: DamagedStore) -> None:
    store.put(keys.entry(ROOT, COOKIE), encode_entry(store.ino["/inline"], FILE, b"inline"))


@mended(("name-index", "/inline"))
def entry_with_another_inode(store: DamagedStore) -> None:
    store.put(store.entry_key("/inline"), encode_entry(store.ino["/nothing"], FILE, b"inline"))


@mended(("name-index", "/inline"))
def unreadable_entry(store: DamagedStore) -> None:
    store.put(store.entry_key("/inline"), b"?")


@mended(("name-index", "/inline"))
def name_in_another_names_place(store: DamagedStore) -> None:
    dentry, taken = store.dentry("/inline"), store.dentry("/nothing").cookie
    store.delete(store.entry_key("/inline"))
    store.put(store.dentry_key("/inline"), dentry._replace(cookie=taken).encode())


@mended(("name-index", "/inline"))
def name_before_the_first_place(store: DamagedStore) -> None:
    dentry = store.dentry("/inline")
    store.delete(store.entry_key("/inline"))
    store.add_name("/inline", dentry.ino, FILE, 0)


@mended(("wrong-type", "/inline"))
def wrong_type(store: DamagedStore) -> None:
    dentry = store.dentry("/inline")
    store.add_name("/inline", dentry.ino, stat.S_IFIFO >> 12, dentry.cookie)


@mended(("unreadable-record", "/inline"))
def unreadable_dentry(store: DamagedStore) -> None:
    store.put(store.dentry_key("/inline"), b"?")


@mended(
    ("unreadable-record", "/inline"),
    ("orphan-inode", "<inode {/inline}>"),
    moves={"/inline": "/lost+found/#{/inline}"},
)
def unreadable_dentry_and_no_entry(store: DamagedStore) -> None:
    store.delete(store.entry_key("/inline"))
    store.put(store.dentry_key("/inline"), b"?")


@mended(("unreadable-record", "entry 5000 of directory 1"))
def unreadable_entry_of_nothing(store: DamagedStore) -> None:
    store.put(keys.entry(ROOT, COOKIE), b"?")


@mended(("unreadable-record", "garbage record 4000"))
def unreadable_garbage(store: DamagedStore) -> None:
    store.put(keys.garbage(4000), b"?")


@mended(("wrong-parent", "/a/b"))
def wrong_parent(store: DamagedStore) -> None:
    store.change("/a/b", parent=store.ino["/z"])


@mended(("wrong-parent", "/"))
def wrong_parent_of_the_root(store: DamagedStore) -> None:
    store.change("/", parent=store.ino["/z"])


@mended(("second-name", "/z/twice"))
def directory_with_two_names(store: DamagedStore) -> None:
    store.add_name("/z/twice", store.ino["/a"], DIRECTORY, COOKIE)
    store.change("/z", nlink=3)


@mended(("second-name", "/a/twice"), moves={"/z": "/a/b/c/z"})
def directory_with_two_names_the_wrong_one_first(store: DamagedStore) -> None:
    store.add_name("/a/twice", store.ino["/z"], DIRECTORY, COOKIE)
    store.change("/a", nlink=4)
    # The one that the directory itself knows is met later: its parent has the larger number.
    store.change("/z", parent=store.ino["/a/b/c"])
    store.remove_name("/z")
    store.change("/", nlink=5)
    store.ino["/a/b/c/z"] = store.ino["/z"]
    store.add_name("/a/b/c/z", store.ino["/z"], DIRECTORY, COOKIE + 1)
    store.change("/a/b/c", nlink=3)


@mended(("loop", "/z/root"))
def root_with_a_name(store: DamagedStore) -> None:
    store.add_name("/z/root", ROOT, DIRECTORY, COOKIE)
    store.change("/z", nlink=3)


@mended(
    ("loop", "<inode {/a}>/b/c/up"),
    moves={"/a": "/lost+found/#{/a}"},
)
def loop(store: DamagedStore) -> None:
    store.remove_name("/a")
    store.change("/", nlink=5)
    store.add_name("/a/b/c/up", store.ino["/a"], DIRECTORY, COOKIE)
    store.change("/a/b/c", nlink=3)
    store.change("/a", parent=store.ino["/a/b/c"])


@mended(("bad-name", "/x/y"), moves={"/inline": "/lost+found/#{/inline}"})
def bad_name(store: DamagedStore) -> None:
    store.remove_name("/inline")
    ino = store.ino["/inline"]
    store.put(
        keys.dentry(ROOT, b"x/y"),
        store.dentry("/nothing")._replace(ino=ino, cookie=COOKIE).encode(),
    )
    store.put(keys.entry(ROOT, COOKIE), encode_entry(ino, FILE, b"x/y"))


@mended(("misplaced-dentry", "/nothing/below"))
def name_below_a_file(store: DamagedStore) -> None:
    store.add_name("/nothing/below", store.ino["/inline"], FILE, COOKIE)
    store.change("/inline", nlink=2)


@mended(("unreadable-record", "/"))
def root_that_is_a_file(store: DamagedStore) -> None:
    store.change("/", mode=0o100644)


@mended(("unreadable-record", "/"))
def unreadable_root(store: DamagedStore) -> None:
    store.put(keys.inode(ROOT), b"?")


@mended(("misplaced-dentry", "<inode 4000>/lost"))
def name_below_nothing(store: DamagedStore) -> None:
    dentry = store.dentry("/inline")
    store.put(keys.dentry(4000, b"lost"), dentry._replace(cookie=COOKIE).encode())


@mended(("wrong-counter", "counter inodes"))
def wrong_inode_counter(store: DamagedStore) -> None:
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -3))


@mended(("wrong-counter", "counter ids"))
def wrong_id_counter(store: DamagedStore) -> None:
    store.put(keys.COUNTER_IDS, (3).to_bytes(8, "little"))


@mended(("wrong-counter", "counter ids"), ("wrong-counter", "counter inodes"))
def no_counters(store: DamagedStore) -> None:
    store.delete(keys.COUNTER_IDS, keys.COUNTER_INODES)


@mended(("garbage-in-use", "/a/striped"))
def garbage_in_use(store: DamagedStore) -> None:
    inode = store.inode("/a/striped")
    store.put(keys.garbage(inode.oid), Garbage(inode.ino, inode.layout).encode())


@mended(("garbage-in-use", "/a/rewritten"))
def garbage_in_use_with_another_id(store: DamagedStore) -> None:
    inode = store.inode("/a/rewritten")
    assert inode.oid != inode.ino
    store.put(keys.garbage(inode.oid), Garbage(inode.ino, inode.layout).encode())


@mended(("unknown-server", "garbage record 4000"))
def garbage_on_an_unknown_server(store: DamagedStore) -> None:
    store.put(keys.garbage(4000), Garbage(4000, Striped(UNIT, (1, 77))).encode())


@mended(("unreadable-record", "garbage record 4000"))
def garbage_on_no_server(store: DamagedStore) -> None:
    store.put(keys.garbage(4000), Garbage(4000, Striped(UNIT, ())).encode())


@mended(
    ("stray-record", "inode 4002"),
    ("unknown-host", "/a/striped"),
    ("unknown-host", "chunk list 4001"),
    ("unknown-host", "container {container}"),
    ("unknown-host", "garbage record 4000"),
)
def records_of_hosts_of_which_there_are_none(store: DamagedStore) -> None:
    """Left to a host that never mounts the store they would stay for ever."""
    store.put(keys.hold(4002, 7), b"")
    store.put(keys.dirty(store.ino["/a/striped"]), keys.host_value(7))
    store.put(keys.loose(4001), keys.host_value(7))
    store.put(keys.open_container(store.container()[0]), keys.host_value(7))
    store.put(keys.garbage(4000), Garbage(4000, Striped(UNIT, (1,)), 7).encode())


@mended(("unreadable-record", "host 7"))
def record_of_a_host_that_cannot_be_read(store: DamagedStore) -> None:
    store.put(keys.host(7), b"seven")


@mended(("server-mark", "data server 1"))
def server_without_mark(store: DamagedStore) -> None:
    store.delete(keys.unprotected(1))


@mended(("stray-record", "data server 77"))
def mark_of_an_unknown_server(store: DamagedStore) -> None:
    store.put(keys.unprotected(77), b"")


@mended(("stray-record", "degraded objects 4000"))
def degraded_objects_of_nobody(store: DamagedStore) -> None:
    store.put(keys.degraded(4000), Degraded(store.ino["/a/striped"], 1).encode())


@mended(("stray-record", "degraded objects {/a/striped}"))
def degraded_columns_of_a_plain_file(store: DamagedStore) -> None:
    ino = store.ino["/a/striped"]
    store.put(keys.degraded(store.inode("/a/striped").oid), Degraded(ino, 1).encode())


@mended(("unreadable-record", "degraded objects 4000"))
def damaged_record_of_degraded_objects(store: DamagedStore) -> None:
    store.put(keys.degraded(4000), b"?")


@mended(("unreadable-record", "stray of 4000"))
def damaged_record_of_a_stray(store: DamagedStore) -> None:
    store.put(keys.stray(4000, 1), b"?")


@mended(("stray-record", "record 6d00"))
def stray_with_a_short_key(store: DamagedStore) -> None:
    store.put(b"m\0", b"")


@mended(("copy-record", "/fast/new"))
def copy_without_record(store: DamagedStore) -> None:
    store.delete(keys.burst_copy(store.inode("/fast/new").copy.id))


@mended(("copy-record", "/fast/new"))
def record_of_another_inode(store: DamagedStore) -> None:
    store.change_copy_record("/fast/new", ino=store.ino["/inline"])


@mended(("copy-record", "/fast/new"))
def record_of_a_copy_elsewhere(store: DamagedStore) -> None:
    store.change_copy_record("/fast/new", server=BURST_FIRST + 7)


@mended(("copy-record", "/fast/new"))
def record_says_that_it_is_drained(store: DamagedStore) -> None:
    store.change_copy_record("/fast/new", undrained=False, durable=False)


@mended(("copy-record", "/fast/cached"))
def record_says_that_it_is_not_drained(store: DamagedStore) -> None:
    store.change_copy_record("/fast/cached", undrained=True)


@mended(("unreadable-record", "/fast/new"))
def unreadable_record_of_a_copy(store: DamagedStore) -> None:
    store.put(keys.burst_copy(store.inode("/fast/new").copy.id), b"?")


@mended(("unreadable-record", "record of burst copy 4000"))
def unreadable_record_of_no_copy(store: DamagedStore) -> None:
    store.put(keys.burst_copy(4000), b"?")


@mended(
    ("stray-record", "record of burst copy 4000"), ("stray-record", "record of burst copy 4001")
)
def records_of_no_copy(store: DamagedStore) -> None:
    store.put(
        keys.burst_copy(4000),
        BurstRecord(store.ino["/inline"], BURST_FIRST, True, True, 1).encode(),
    )
    store.put(keys.burst_copy(4001), BurstRecord(4711, BURST_FIRST, False, True, 1).encode())


@mended(("garbage-in-use", "/fast/new"))
def garbage_copy_in_use(store: DamagedStore) -> None:
    copy = store.inode("/fast/new").copy
    store.put(keys.garbage(copy.id), Garbage(0, Striped(1, (copy.server,))).encode())


@mended(("bad-cache", "/fast/cached"), ("bad-cache", "/fast/tiny"))
def caches_of_another_length(store: DamagedStore) -> None:
    os.truncate(store.copy("/fast/cached"), UNIT)
    os.truncate(store.copy("/fast/tiny"), 2 * UNIT)


@mended(("bad-cache", "/fast/cached"))
def missing_cache(store: DamagedStore) -> None:
    store.copy("/fast/cached").unlink()


@mended(("bad-cache", "/fast/new"))
def missing_copy_of_an_empty_file(store: DamagedStore) -> None:
    store.copy("/fast/new").unlink()
    store.change("/fast/new", size=0)


@mended(("unknown-server", "/fast/tiny"))
def cache_on_an_unknown_device(store: DamagedStore) -> None:
    store.copy("/fast/tiny").unlink()
    copy = Copy(BURST_FIRST + 7, store.inode("/fast/tiny").copy.id)
    store.change("/fast/tiny", copy=copy)
    store.change_copy_record("/fast/tiny", server=copy.server)


@mended(("wrong-size", "/fast/new"))
def copy_that_is_longer(store: DamagedStore) -> None:
    with store.copy("/fast/new").open("ab") as file:
        file.write(b"appended")


@mended(("stray-record", "checksums of objects 4000"))
def checksums_of_nothing(store: DamagedStore) -> None:
    store.put(keys.checksums(4000, 0), bytes(32))


@mended(("stray-record", "/z/moved"))
def too_many_checksums(store: DamagedStore) -> None:
    store.put(keys.checksums(store.inode("/z/moved").oid, 0), bytes(64))


@mended(("stray-record", "/z/moved"))
def checksums_that_do_not_begin_with_the_file(store: DamagedStore) -> None:
    oid = store.inode("/z/moved").oid
    store.delete(keys.checksums(oid, 0))
    store.put(keys.checksums(oid, 256), bytes(32))


@mended(("stray-record", "/z/moved"))
def checksums_of_a_changing_file(store: DamagedStore) -> None:
    store.put(keys.dirty(store.ino["/z/moved"]), b"")


@mended(("stray-record", "/a/chunks"))
def dirty_mark_of_an_interleaved_file(store: DamagedStore) -> None:
    store.put(keys.dirty(store.ino["/a/chunks"]), b"")


@mended(("wrong-live-bytes", "container {container}"))
def wrong_count_of_live_bytes(store: DamagedStore) -> None:
    number, _ = store.container()
    record = store.transact(lambda tx: chunks.find_container(tx, number))
    store.put(keys.container(number), record._replace(live=record.live - 5).encode())


COMMON_CHUNK = f"shared chunk {chunk_codec.digest_of(COMMON.data).hex()[:16]}"
UNKNOWN = chunk_codec.digest_of(b"unknown")
GROUP = GroupRecord(
    7,
    groups.GroupOptions(b"step", 2, 1 << 20, False, 1000, 0, b""),
    Asker(0, (0,)),
    1,
    state="durable",
)
UNKNOWN_CHUNK = f"shared chunk {UNKNOWN.hex()[:16]}"


def _common(store: DamagedStore) -> Shared:
    return store.transact(lambda tx: shared.find_shared(tx, chunk_codec.digest_of(COMMON.data)))


def _put_shared(store: DamagedStore, record: Shared) -> None:
    store.transact(lambda tx: shared.put_shared(tx, record))


@mended(("wrong-references", COMMON_CHUNK))
def too_few_references(store: DamagedStore) -> None:
    _put_shared(store, _common(store)._replace(references=1))


@mended(("wrong-references", COMMON_CHUNK))
def too_many_references(store: DamagedStore) -> None:
    _put_shared(store, _common(store)._replace(references=9))


@mended(("wrong-references", UNKNOWN_CHUNK))
def shared_chunk_that_nobody_names(store: DamagedStore) -> None:
    place = _common(store).place

    def put(tx: Transaction) -> None:
        shared.put_shared(tx, Shared(place._replace(digest=UNKNOWN), 1))
        chunks.adjust_live(tx, place.container, HEADER_BYTES + place.stored)

    store.transact(put)


@mended(("unreadable-record", UNKNOWN_CHUNK))
def unreadable_shared_chunk_that_nobody_names(store: DamagedStore) -> None:
    store.put(keys.shared(UNKNOWN), b"?")


@mended(("stray-record", "chunk list 4000"))
def extent_list_of_no_file(store: DamagedStore) -> None:
    oid = store.inode("/a/first").oid
    store.transact(lambda tx: tx.put(keys.chunk_list(4000, 0), tx.get(keys.chunk_list(oid, 0))))


@mended(("garbage-in-use", "/a/first"))
def loose_mark_of_a_list_in_use(store: DamagedStore) -> None:
    store.put(keys.loose(store.inode("/a/first").oid), b"")


@mended(("stray-record", "/inline"))
def group_of_a_file(store: DamagedStore) -> None:
    store.put(keys.group(store.ino["/inline"]), GROUP.encode())


@mended(("stray-record", "inode 4000"))
def group_of_no_directory(store: DamagedStore) -> None:
    store.put(keys.group(4000), GROUP.encode())


@mended(("stray-record", "/a"))
def member_without_group(store: DamagedStore) -> None:
    store.put(keys.group_member(store.ino["/a"], 1), GroupMember(5).encode())


@mended(("unreadable-record", "/a"), ("unreadable-record", "/z"))
def unreadable_groups(store: DamagedStore) -> None:
    store.put(keys.group(store.ino["/z"]), b"?")
    store.put(keys.group(store.ino["/a"]), GROUP.encode())
    store.put(keys.group_member(store.ino["/a"], 1), b"?")


@mended(("wrong-live-bytes", "container {shared container}"))
def wrong_count_of_live_bytes_of_shared_chunks(store: DamagedStore) -> None:
    number, length = store.shared_container()[0], _common(store).place.stored
    store.transact(lambda tx: chunks.adjust_live(tx, number, -length))


@pytest.mark.parametrize("damage", MENDED.values(), ids=MENDED)
def test_damage_is_named_and_mended(store: DamagedStore, damage: Damage) -> None:
    before = store.tree()
    damage.do(store)
    expected = damage.expected(store)
    assert store.found() == expected
    report = store.check(repair=True)
    assert _kinds(report) == expected
    assert report.ok and all(finding.repaired for finding in report.findings)
    assert store.found() == []
    after = store.tree()
    lost_and_found = after.pop("/lost+found", None)
    assert after == _moved(store, before, damage.moves)
    assert (lost_and_found is not None) == any(path.startswith("/lost+found") for path in after)
    assert store.found() == []


def _moved(
    store: DamagedStore, tree: dict[str, int], moves: dict[str, str | None]
) -> dict[str, int]:
    moved = {}
    for path, ino in tree.items():
        for old, new in moves.items():
            if path == old or path.startswith(f"{old}/"):
                path = "" if new is None else _fill(store, new) + path.removeprefix(old)
        if path:
            moved[path] = ino
    return moved


# --- what stays -----------------------------------------------------------------------------------


@stays(("unreadable-record", "/inline"))
def unreadable_inode(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/inline"]), b"\1?")


@stays(("unreadable-record", "/a/striped"))
def inode_that_is_cut_off(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/a/striped"]), store.inode("/a/striped").encode()[:-2])


@stays(("unreadable-record", "/a"))
def unreadable_directory(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/a"]), b"")


@stays(("unreadable-record", "/fifo"))
def fifo_with_bytes(store: DamagedStore) -> None:
    store.change("/fifo", data=b"bytes", size=5)


@stays(("unreadable-record", "/fifo"))
def unknown_file_type(store: DamagedStore) -> None:
    store.change("/fifo", mode=0o170644)


@stays(("unreadable-record", "/a/striped"))
def impossible_layout(store: DamagedStore) -> None:
    store.change("/a/striped", layout=Striped(0, (0, 1, 2, 3)))


@stays(("unknown-record", "record 6666"))
def unknown_record(store: DamagedStore) -> None:
    store.put(b"ff", b"?")


@stays(("unknown-record", "record 6901"))
def record_with_a_short_key(store: DamagedStore) -> None:
    store.put(b"i\1", b"?")


@stays(("unknown-server", "/a/striped"))
def layout_with_an_unknown_server(store: DamagedStore) -> None:
    _, path = store.object("/a/striped", 3)
    path.unlink()
    layout = store.inode("/a/striped").layout
    store.change("/a/striped", layout=Striped(layout.unit, (*layout.servers[:3], 77)))


@stays(("shared-objects", "/z/moved"))
def two_files_with_one_object_id(store: DamagedStore) -> None:
    for number in range(4):
        for path in Path(store.config.servers[number]).glob(
            f"objects/*/*/*.{store.ino['/z/moved']:x}"
        ):
            path.rename(path.with_name(f"{store.ino['/a/striped']:016x}.{store.ino['/z/moved']:x}"))
    store.delete(keys.checksums(store.inode("/z/moved").oid, 0))
    store.change("/z/moved", oid=store.ino["/a/striped"])


@stays(("foreign-file", "{server 1}/objects/0/notes.txt"), ("foreign-file", "{server 2}/movie.mkv"))
def foreign_files(store: DamagedStore) -> None:
    for number, name in ((1, "objects/0/notes.txt"), (2, "movie.mkv")):
        Path(store.config.servers[number], name).write_bytes(b"mine")


@stays(("unknown-server", "/fast/new"))
def copy_on_an_unknown_device(store: DamagedStore) -> None:
    store.copy("/fast/new").unlink()
    copy = Copy(BURST_FIRST + 7, store.inode("/fast/new").copy.id)
    store.change("/fast/new", copy=copy)
    store.change_copy_record("/fast/new", server=copy.server)


@stays(("shared-objects", "/fast/tiny"))
def two_files_with_one_copy(store: DamagedStore) -> None:
    copy = store.inode("/fast/cached").copy
    store.delete(keys.burst_copy(store.inode("/fast/tiny").copy.id))
    store.copy("/fast/tiny").unlink()
    store.change("/fast/tiny", copy=copy)


@stays(("unreadable-record", "/fast/new"))
def unreadable_inode_with_a_copy(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/fast/new"]), b"?")


@stays(("unreadable-record", "/fifo"))
def fifo_with_a_copy(store: DamagedStore) -> None:
    store.change("/fifo", copy=Copy(BURST_FIRST, 4000))


ALL_OF_COMMON = [("lost-chunk", "/a/first"), ("lost-chunk", "/a/first"), ("lost-chunk", "/z/other")]
"""The first file has it in two records of its list."""
NOT_ALIVE = ("wrong-live-bytes", "container {shared container}")


@stays(*ALL_OF_COMMON, NOT_ALIVE)
def shared_chunk_without_record(store: DamagedStore) -> None:
    store.delete(keys.shared(chunk_codec.digest_of(COMMON.data)))


@stays(("unreadable-record", COMMON_CHUNK), *ALL_OF_COMMON, NOT_ALIVE)
def unreadable_shared_chunk(store: DamagedStore) -> None:
    store.put(keys.shared(chunk_codec.digest_of(COMMON.data)), b"?")


@stays(*ALL_OF_COMMON, NOT_ALIVE)
def shared_chunk_in_no_container(store: DamagedStore) -> None:
    known = _common(store)
    _put_shared(store, known._replace(place=known.place._replace(container=4000)))


@stays(*ALL_OF_COMMON)
def shared_chunk_behind_the_end(store: DamagedStore) -> None:
    known = _common(store)
    _put_shared(store, known._replace(place=known.place._replace(offset=1 << 40)))


@stays(*ALL_OF_COMMON)
def shared_chunk_of_another_length(store: DamagedStore) -> None:
    known = _common(store)
    _put_shared(store, known._replace(place=known.place._replace(raw=known.place.raw + 1)))


@stays(("lost-chunk", "/a/first"))
def gap_in_an_extent_list(store: DamagedStore) -> None:
    store.delete(keys.chunk_list(store.inode("/a/first").oid, CHUNKS_PER_RECORD))


@stays(("lost-chunk", "/a/first"))
def extent_list_without_its_end(store: DamagedStore) -> None:
    store.delete(keys.chunk_list(store.inode("/a/first").oid, 2 * CHUNKS_PER_RECORD))


@stays(("lost-chunk", "/a/first"), ("lost-chunk", "/a/first"), NOT_ALIVE)
def extent_list_without_its_beginning(store: DamagedStore) -> None:
    store.delete(keys.chunk_list(store.inode("/a/first").oid, 0))


@stays(("unreadable-record", "/a/first"))
def unreadable_record_of_an_extent_list(store: DamagedStore) -> None:
    store.put(keys.chunk_list(store.inode("/a/first").oid, CHUNKS_PER_RECORD), b"\2?")


@stays(("lost-chunk", "/z/other"))
def extent_list_of_another_size(store: DamagedStore) -> None:
    store.change("/z/other", size=799)


@stays(("lost-chunk", "/z/other"))
def extent_list_of_a_file_of_another_form(store: DamagedStore) -> None:
    store.change("/z/other", layout=Interleaved(CHUNK))


@pytest.mark.parametrize("damage", STAYS.values(), ids=STAYS)
def test_what_cannot_be_mended_is_named_and_left_alone(store: DamagedStore, damage: Damage) -> None:
    damage.do(store)
    before, objects = store.records(), store.stored()
    for repair in (False, True, False):
        report = store.check(repair)
        assert _kinds(report) == damage.expected(store)
        assert not report.ok and not any(finding.repaired for finding in report.findings)
    assert store.records() == before
    assert store.stored() == objects


# --- objects --------------------------------------------------------------------------------------


def test_a_missing_object_is_named_with_the_lost_bytes_and_stays_missing(
    store: DamagedStore,
) -> None:
    server, path = store.object("/a/striped", 2)
    path.unlink()
    for repair in (False, True, False):
        report = store.check(repair)
        (finding,) = report.findings
        assert (finding.kind, finding.where) == ("missing-object", "/a/striped")
        assert not finding.repaired and not report.ok
        assert f"data server {server}:" in finding.detail and str(path) in finding.detail
        assert finding.detail.endswith(
            f"lost: {2 * UNIT + 5} bytes between {2 * UNIT} and {10 * UNIT + 4}"
        )
    assert not path.exists()

    async def read(fs: Filesystem) -> None:
        handle = (await fs.open(store.ino["/a/striped"], os.O_RDONLY)).handle
        assert len(await fs.read(handle, 0, 2 * UNIT)) == 2 * UNIT
        with pytest.raises(Unavailable):
            await fs.read(handle, 0, 3 * UNIT)
        await fs.release(handle)

    store.use(read)


def test_a_short_object_is_named_with_the_lost_bytes(store: DamagedStore) -> None:
    server, path = store.object("/a/striped", 3)
    os.truncate(path, UNIT + 10)
    for repair in (False, True):
        (finding,) = store.check(repair).findings
        assert (finding.kind, finding.where, finding.repaired) == (
            "short-object",
            "/a/striped",
            False,
        )
        assert f"data server {server}: {path} has {UNIT + 10} of {2 * UNIT} bytes" in finding.detail
        assert finding.detail.endswith(f"lost: bytes {7 * UNIT + 10} to {8 * UNIT - 1}")
    assert path.stat().st_size == UNIT + 10


def test_every_file_of_a_lost_server_is_named(store: DamagedStore) -> None:
    shutil.rmtree(Path(store.config.servers[0], "objects"))
    report = store.check()
    kinds = {"missing-object", "missing-container", "lost-chunk"}
    assert {finding.kind for finding in report.findings} == kinds
    here = {path for path, ino in store.ino.items() if _lies_on(store.inode(path), 0)}
    here |= {"/a/chunks", "/z/chunk", str(store.container()[1])}
    assert {finding.where for finding in report.findings} == here and len(here) >= 6


def _lies_on(inode: Inode, server: int) -> bool:
    layout = inode.layout
    return isinstance(layout, Striped) and bool(
        server in layout.servers and layout.object_length(layout.servers.index(server), inode.size)
    )


def test_a_longer_object_is_no_damage(store: DamagedStore) -> None:
    _, path = store.object("/a/b/short", 0)
    os.truncate(path, 3 * UNIT)
    beyond = store.inode("/a/b/short").layout.servers[1]
    other = Path(
        store.config.servers[beyond], path.relative_to(store.config.servers[_owner(store, path)])
    )
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(b"an append that a power cut undid")
    assert store.found(repair=True) == []
    assert other.exists()


def _owner(store: DamagedStore, path: Path) -> int:
    return next(
        number for number, root in enumerate(store.config.servers) if path.is_relative_to(root)
    )


def test_a_file_with_a_dirty_mark_may_lack_objects_until_recovery_has_settled_it(
    store: DamagedStore,
) -> None:
    _, path = store.object("/a/striped", 1)
    os.truncate(path, 7)
    store.put(keys.dirty(store.ino["/a/striped"]), b"")
    report = store.check()
    assert report.findings == [] and report.counts["recovered_unsynced_files"] == 1
    assert path.stat().st_size == 3 * UNIT


@pytest.mark.parametrize("ino", [4000, "inline", "other oid", "other server"])
def test_an_orphan_object_is_moved_aside(store: DamagedStore, ino: int | str) -> None:
    root = Path(store.config.servers[2])
    name = (
        f"{4000:016x}.{ino if isinstance(ino, str) else 4000:x}"
        if ino == 4000
        else {
            "inline": f"{4000:016x}.{store.ino['/inline']:x}",
            "other oid": f"{4000:016x}.{store.ino['/a/striped']:x}",
            "other server": f"{4000:016x}.{store.ino['/z/moved']:x}",
        }[str(ino)]
    )
    if ino == "other server":
        store.change("/z/moved", oid=store.ino["/z/moved"])
        layout = store.inode("/z/moved").layout
        root = Path(store.config.servers[min(set(range(4)) - set(layout.servers))])
        name = f"{store.ino['/z/moved']:016x}.{store.ino['/z/moved']:x}"
    oid = int(name[:16], 16)
    path = root / f"objects/{oid >> 16:x}/{oid >> 8 & 255:02x}/{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"whose?")
    assert store.found() == [("orphan-object", str(path))]
    (root / "lost+found").mkdir()
    (root / "lost+found" / name).write_bytes(b"an earlier one")
    report = store.check(repair=True)
    assert _kinds(report) == [("orphan-object", str(path))] and report.ok
    assert not path.exists()
    assert (root / "lost+found" / name).read_bytes() == b"an earlier one"
    assert (root / "lost+found" / f"{name}.1").read_bytes() == b"whose?"
    assert store.found(repair=True) == []


def test_objects_of_an_unreadable_inode_are_not_orphans(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/a/striped"]), b"?")
    objects = store.stored()
    assert store.found(repair=True) == [("unreadable-record", "/a/striped")]
    assert store.stored() == objects


def test_a_server_that_cannot_be_listed_is_named_and_its_objects_are_not_called_missing(
    store: DamagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = store.config.servers[1]
    list_all = naming.list_all

    def fail(root: str) -> Iterator:
        yield from itertools.islice(list_all(root), 1 if root == broken else None)
        if root == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), root)

    monkeypatch.setattr(naming, "list_all", fail)
    (finding,) = store.check(repair=True).findings
    assert (finding.kind, finding.where, finding.repaired) == ("unlistable-server", broken, False)


@pytest.mark.parametrize(
    ("index", "length", "text"),
    [
        (0, 0, "10 bytes between 0 and 25"),
        (0, 7, "3 bytes between 15 and 25"),
        (0, 8, "bytes 24 to 25"),
        (1, 0, "8 bytes between 4 and 19"),
        (1, 4, "bytes 16 to 19"),
        (2, 5, "bytes 21 to 23"),
    ],
)
def test_lost_bytes_are_told_as_ranges_of_the_file(index: int, length: int, text: str) -> None:
    assert lost_bytes(Striped(4, (0, 1, 2)), index, length, 26) == text


# --- burst copies, containers, and what they hold -------------------------------------------------


def test_a_missing_burst_copy_is_named_with_the_lost_bytes(store: DamagedStore) -> None:
    path = store.copy("/fast/new")
    path.unlink()
    for repair in (False, True):
        (finding,) = store.check(repair).findings
        assert (finding.kind, finding.where, finding.repaired) == (
            "missing-object",
            "/fast/new",
            False,
        )
        assert (
            finding.detail
            == f"burst directory 0: {path} is missing; lost: bytes 0 to {3 * UNIT + 6}"
        )


def test_a_short_burst_copy_is_named_with_the_lost_bytes(store: DamagedStore) -> None:
    path = store.copy("/fast/new")
    os.truncate(path, UNIT)
    for repair in (False, True):
        (finding,) = store.check(repair).findings
        assert (finding.kind, finding.where, finding.repaired) == (
            "short-object",
            "/fast/new",
            False,
        )
        lost = f"lost: bytes {UNIT} to {3 * UNIT + 6}"
        assert finding.detail.endswith(f"has {UNIT} of {3 * UNIT + 7} bytes; {lost}")
    assert path.stat().st_size == UNIT


def test_a_longer_burst_copy_counts(store: DamagedStore) -> None:
    with store.copy("/fast/new").open("ab") as file:
        file.write(b"appended")
    store.check(repair=True)
    assert store.inode("/fast/new").size == 3 * UNIT + 7 + 8
    contents = store.read("/fast/new")
    assert contents.endswith(b"appended") and len(contents) == 3 * UNIT + 15


def test_a_burst_copy_with_a_dirty_mark_may_have_any_length(store: DamagedStore) -> None:
    os.truncate(store.copy("/fast/new"), UNIT)
    store.put(keys.dirty(store.ino["/fast/new"]), b"")
    assert store.found() == []
    assert store.inode("/fast/new").size == UNIT


def test_a_file_without_its_cache_is_whole(store: DamagedStore) -> None:
    contents = {path: store.read(path) for path in ("/fast/cached", "/fast/tiny")}
    old = store.copy("/fast/tiny")
    store.copy("/fast/cached").unlink()
    old.write_bytes(b"something else")
    assert store.check(repair=True).ok
    for path, data in contents.items():
        assert store.inode(path).copy is None
        assert store.read(path) == data
    assert store.found() == [] and not old.exists()


@pytest.mark.parametrize("ino", [0, 4000, "inline"])
@pytest.mark.parametrize("where", ["burst", "data"])
def test_an_object_that_nothing_refers_to_is_moved_aside(
    store: DamagedStore, ino: int | str, where: str
) -> None:
    root = Path(store.config.burst.directories[0] if where == "burst" else store.config.servers[1])
    owner = store.ino["/inline"] if ino == "inline" else int(ino)
    path = Path(naming.object_path(str(root), owner, 4000))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"whose?")
    assert store.found() == [("orphan-object", str(path))]
    assert store.check(repair=True).ok
    assert (root / "lost+found" / path.name).read_bytes() == b"whose?"
    assert store.found() == []


def test_the_copy_of_a_record_that_nobody_refers_to_is_moved_aside(store: DamagedStore) -> None:
    path = store.copy("/fast/tiny")
    store.change("/fast/tiny", copy=None)
    store.put(keys.burst_copy(COPY_ID + 1), b"?")
    report = store.check(repair=True)
    unreadable = ("unreadable-record", f"record of burst copy {COPY_ID + 1}")
    assert _kinds(report) == [("orphan-object", str(path)), unreadable]
    assert (
        report.ok and (Path(store.config.burst.directories[0]) / "lost+found" / path.name).exists()
    )
    assert store.found() == []


def test_a_burst_directory_that_is_missing_is_named_with_what_is_at_stake(
    store: DamagedStore,
) -> None:
    burst = Path(store.config.burst.directories[0])
    burst.rename(burst.with_name("away"))
    with pytest.raises(
        StoreError, match="burst directory 0.*1 files have their newest bytes there alone"
    ):
        store.check()


def test_a_missing_container_is_named_with_the_files_that_lost_bytes(store: DamagedStore) -> None:
    _, path = store.container()
    path.unlink()
    for repair in (False, True):
        report = store.check(repair)
        expected = [
            ("lost-chunk", "/a/chunks"),
            ("lost-chunk", "/z/chunk"),
            ("missing-container", str(path)),
        ]
        assert _kinds(report) == expected and not any(
            finding.repaired for finding in report.findings
        )


def test_a_short_container_is_named_with_the_files_that_lost_bytes(store: DamagedStore) -> None:
    _, path = store.container()
    os.truncate(path, path.stat().st_size - 10)
    for repair in (False, True):
        assert store.found(repair) == [("lost-chunk", "/z/chunk"), ("short-container", str(path))]


@pytest.mark.parametrize("record", [None, b"?"])
def test_a_container_that_files_name_is_never_moved(
    store: DamagedStore, record: bytes | None
) -> None:
    number, path = store.container()
    if record is None:
        store.delete(keys.container(number), keys.open_container(number))
    else:
        store.put(keys.container(number), record)
    for repair in (False, True):
        kinds = {kind for kind, _ in store.found(repair)}
        assert kinds == ({"lost-chunk"} if record is None else {"unreadable-record"})
    assert path.exists()


def test_what_is_left_of_a_loose_list_counts_until_it_is_dropped(
    store: DamagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beginning has gone, and nothing of what is left is a stray."""
    oid, other = store.inode("/a/first").oid, 4000

    def loosen(tx: Transaction) -> None:
        first, last = (
            tx.get(keys.chunk_list(oid, number)) for number in (0, 2 * CHUNKS_PER_RECORD)
        )
        tx.put(keys.chunk_list(other, 0), first)
        tx.put(keys.chunk_list(other, 2 * CHUNKS_PER_RECORD), last)
        tx.put(keys.loose(other), b"")
        _, extents_of_first = chunk_lists.decode_extents(first)
        _, extents_of_last = chunk_lists.decode_extents(last)
        for extent in [*extents_of_first, *extents_of_last]:
            if extent.shared:
                known = shared.find_shared(tx, extent.digest)
                shared.put_shared(tx, known._replace(references=known.references + 1))
            elif extent.place is not None:
                chunks.adjust_live(tx, extent.place.container, HEADER_BYTES + extent.place.stored)
        chunks.drop_some(tx, other)

    monkeypatch.setattr(chunks, "DROPPED_AT_ONCE", 1)
    store.transact(loosen)
    assert [key[:1] for key in store.records()].count(b"y") == 1
    assert store.found() == []
    assert not any(key[:1] == b"y" for key in store.records())


def test_all_files_that_lost_a_shared_chunk_are_named(store: DamagedStore) -> None:
    _, path = store.shared_container()
    os.truncate(path, 0)
    for repair in (False, True):
        assert store.found(repair) == [*ALL_OF_COMMON, ("short-container", str(path))]
    assert store.check().findings[-1].detail.endswith(f"2 chunks from 0 to 1 lay in {path}")


# --- all bytes ------------------------------------------------------------------------------------


def test_all_bytes_are_what_was_stored(store: DamagedStore) -> None:
    calls: list[tuple[str, int, int]] = []
    report = check(store.config, False, lambda *call: calls.append(call), deep=True)
    assert report.findings == []
    records = [value for key, value in store.records().items() if key[:1] == b"t"]
    size = store.inode("/z/moved").size + sum(
        chunks.decode_container(record).length for record in records
    )
    assert [call for call in calls if call[0] == "bytes"][-1] == ("bytes", size, size)


def test_changed_bytes_of_striped_files_are_found_by_a_deep_check_alone(
    store: DamagedStore,
) -> None:
    server, path = store.object("/z/moved", 1)
    _spoil(path, 5)
    assert store.found() == []
    (finding,) = store.check(repair=True, deep=True).findings
    assert (finding.kind, finding.where, finding.repaired) == ("wrong-checksum", "/z/moved", False)
    numbers = sorted(store.inode("/z/moved").layout.servers)
    servers = " or ".join(f"data server {number}" for number in numbers)
    assert finding.detail == f"bytes 0 to 49999, on {servers}"


def test_each_wrong_mib_of_a_large_file_is_told(store: DamagedStore) -> None:
    mib = 1 << 20
    data = bytes(range(256)) * (20 * mib // 256) + b"end"
    store.use(lambda fs: store.write(fs, "/a/large", data))
    parts = [data[start : start + mib] for start in range(0, len(data), mib)]
    store.put(
        keys.checksums(store.inode("/a/large").oid, 0), b"".join(map(chunk_codec.digest_of, parts))
    )
    assert store.check(deep=True).findings == []
    for index, number in ((0, 3), (1, 4), (0, 9)):
        _spoil(store.object("/a/large", index)[1], number * mib // 2)  # two servers
    _spoil(store.object("/a/large", 0)[1], len(store.object("/a/large", 0)[1].read_bytes()) - 1)
    (finding,) = store.check(deep=True).findings
    ranges = [part.split(",")[0] for part in finding.detail.split("; ")]
    assert finding.where == "/a/large"
    assert ranges == [
        f"bytes {3 * mib} to {5 * mib - 1}",
        f"bytes {9 * mib} to {10 * mib - 1}",
        f"bytes {20 * mib} to {len(data) - 1}",
    ]


def test_changed_bytes_of_chunks_are_found(store: DamagedStore) -> None:
    number, path = store.container()
    places = store.transact(lambda tx: chunks.get_chunks(tx, store.ino["/a/chunks"], 0)[1])
    _spoil(path, places[1].offset + HEADER_BYTES)
    _spoil(path, places[2].offset + 20)
    _spoil(path, places[2].offset + HEADER_BYTES + 1)
    (finding,) = store.check(deep=True).findings
    assert (finding.kind, finding.where) == ("wrong-checksum", "/a/chunks")
    assert finding.detail == f"bytes {CHUNK} to {3 * CHUNK - 1}, on data server {places[1].server}"


def test_changed_bytes_of_a_shared_chunk_are_read_once_and_all_its_users_are_named(
    store: DamagedStore,
) -> None:
    _, path = store.shared_container()
    place = _common(store).place
    _spoil(path, place.offset + HEADER_BYTES + 1)
    found = {finding.where: finding.detail for finding in store.check(deep=True).findings}
    size, last = store.inode("/a/first").size, place.raw - 1
    assert found == {
        "/a/first": (
            f"bytes 0 to {last}, on data server 2; bytes {size - place.raw} to {size - 1}, "
            "on data server 2"
        ),
        "/z/other": f"bytes 500 to {500 + last}, on data server 2",
    }


def test_bytes_that_a_server_does_not_give_are_named(
    store: DamagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = files.read_into

    def fail(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files, "read_into", fail)
    found = sorted((finding.kind, finding.where) for finding in store.check(deep=True).findings)
    paths = ("/a/chunks", "/a/first", "/z/chunk", "/z/moved", "/z/other")
    assert found == [("unreadable-bytes", path) for path in paths]
    monkeypatch.setattr(files, "read_into", read_into)


@pytest.mark.parametrize("path", ["/z/moved", "/a/chunks"])
def test_a_cached_copy_with_other_bytes_is_dropped(store: DamagedStore, path: str) -> None:
    data = store.read(path)
    store.add_copy(path, data)
    assert store.check(deep=True).findings == []
    _spoil(store.copy(path), 40_000)
    assert store.found() == []
    report = store.check(repair=True, deep=True)
    assert _kinds(report) == [("bad-cache", path)] and report.ok
    assert store.inode(path).copy is None and store.read(path) == data
    assert store.check(deep=True).findings == []


def test_a_cached_copy_is_kept_where_the_data_servers_lack_bytes(store: DamagedStore) -> None:
    store.add_copy("/z/moved", store.read("/z/moved"))
    _spoil(store.object("/z/moved", 1)[1], 5)
    (finding,) = store.check(repair=True, deep=True).findings
    assert finding.kind == "wrong-checksum" and finding.detail.endswith(
        f"whole: {store.copy('/z/moved')}"
    )
    _spoil(store.copy("/z/moved"), 10)
    report = store.check(repair=True, deep=True)
    assert _kinds(report) == [("bad-cache", "/z/moved"), ("wrong-checksum", "/z/moved")]
    assert not any(finding.repaired for finding in report.findings)


@pytest.mark.parametrize("kind", ["striped", "interleaved"])
def test_what_drains_and_stages_leave_is_in_order(tmp_path: Path, kind: str) -> None:
    options = {"layout.kind": kind, "layout.unit": str(UNIT), "burst.drain_delay": "0s"}
    config = configuration.load(str(tmp_path), options)
    format_store(config, force=False)

    async def work() -> None:
        async with open_filesystem(config) as fs:
            inos = []
            for number, size in enumerate((0, 100, 50_000, (3 << 20) + 1)):
                (handle, *_), inode = await fs.create(
                    ROOT, b"%d" % number, 0o644, os.O_RDWR, NOBODY
                )
                await fs.write(handle, 0, os.urandom(size))
                await fs.release(handle)
                inos.append(inode.ino)
            fs.drain.request(inos)
            await fs.drain.wait(inos)
            assert await fs.evictor.evict(inos[3])
            await fs.evictor.evict(inos[2])
            assert await fs.stager.stage(inos[3])

    trio.run(work)
    for _ in range(2):
        report = check(config, repair=True, deep=True)
        assert report.findings == [] and report.counts["undrained"] == 0


def test_files_that_lack_bytes_are_not_read(store: DamagedStore) -> None:
    store.object("/z/moved", 0)[1].unlink()
    store.container()[1].unlink()
    kinds = {kind for kind, _ in _kinds(store.check(deep=True))}
    assert kinds == {"missing-object", "missing-container", "lost-chunk"}


def _spoil(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes((byte[0] ^ 255,)))


# --- the whole ------------------------------------------------------------------------------------


def test_a_healthy_store_has_no_findings_and_is_counted(store: DamagedStore) -> None:
    report = store.check()
    assert report.findings == [] and report.ok
    assert report.counts["inodes"] == len(set(store.ino.values()))
    assert report.counts["directories"] == 7
    assert report.counts["files"] == 14
    assert report.counts["undrained"] == 1
    stripes = sum(bool(length) for path in store.ino for length in _lengths(store.inode(path)))
    copies, containers = 3, 2
    assert report.counts["objects"] == stripes + copies + containers
    assert report.counts["bytes"] > 10 * UNIT
    records, objects = store.records(), store.stored()
    assert store.found(repair=True) == []
    assert store.records() == records and store.stored() == objects


def _lengths(inode: Inode) -> list[int]:
    layout = inode.layout if isinstance(inode.layout, Striped) else None
    return (
        [layout.object_length(index, inode.size) for index in range(len(layout.servers))]
        if layout
        else []
    )


def test_a_store_whose_daemon_was_killed_is_recovered_first(store: DamagedStore) -> None:
    async def work(fs: Filesystem) -> None:
        await store.write(fs, "/late", b"z" * 9 * UNIT)
        for path in ("/open", "/deleted"):
            (handle, *_), inode = await fs.create(ROOT, path[1:].encode(), 0o644, os.O_RDWR, NOBODY)
            await fs.write(handle, 0, b"w" * 5 * UNIT)
            store.ino[path] = inode.ino
        await fs.unlink(ROOT, b"deleted")
        await fs.unlink(ROOT, b"inline")
        raise SimulatedCrash

    with pytest.raises(BaseException) as caught:
        store.use(work)
    assert "SimulatedCrash" in repr(caught.value)
    report = store.check()
    assert report.findings == []
    assert report.counts["recovered_unsynced_files"] >= 2
    assert report.counts["recovered_orphans"] == 2
    report = store.check()
    assert report.findings == [] and not any(name.startswith("recovered") for name in report.counts)
    assert store.tree().keys() >= {"/late"} and "/deleted" not in store.tree()


def test_recovery_that_fails_is_named(store: DamagedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise Unavailable("the disk is on fire")

    monkeypatch.setattr(fsck, "recover", fail)
    store.put(keys.dirty(store.ino["/a/striped"]), b"")
    _, path = store.object("/a/striped", 1)
    path.unlink()
    (finding,) = store.check(repair=True).findings
    assert (finding.kind, finding.detail, finding.repaired) == (
        "unrecovered",
        "the disk is on fire",
        False,
    )


def test_a_new_store_has_no_findings(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = configuration.load(str(source), {})
    format_store(config, force=False)
    report = check(config, repair=True)
    assert report.findings == []
    counts = {"inodes": 1, "directories": 1, "files": 0, "objects": 0, "bytes": 0, "undrained": 0}
    assert report.counts == counts


def test_progress_never_goes_back(store: DamagedStore) -> None:
    calls: list[tuple[str, int, int]] = []
    check(store.config, False, lambda *call: calls.append(call))
    assert {what for what, _, _ in calls} == {"metadata", "objects"}
    for kind in ("metadata", "objects"):
        done = [number for what, number, _ in calls if what == kind]
        assert done == sorted(done) and done[-1] > 0
    assert all(number <= total for _, number, total in calls)


def test_records_are_read_in_batches(store: DamagedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 3)
    assert store.found() == []
    MENDED["orphan_directory"].do(store)
    assert store.found() == MENDED["orphan_directory"].expected(store)


def test_damage_upon_damage_is_mended_in_one_go(store: DamagedStore) -> None:
    parts = (
        "orphan_directory",
        "too_many_links",
        "wrong_size",
        "wrong_id_counter",
        "orphan_record_without_inode",
    )
    for name in parts:
        MENDED[name].do(store)
    report = store.check(repair=True)
    assert len(report.findings) == 6 and report.ok
    assert store.found() == []
    assert store.tree()[f"/lost+found/#{store.ino['/a']}/striped"] == store.ino["/a/striped"]


def test_lost_and_found_may_be_taken_by_a_file(store: DamagedStore) -> None:
    store.use(lambda fs: store.write(fs, "/lost+found", b"a file"))
    store.remove_name("/inline")
    store.remove_name("/fifo")
    assert store.check(repair=True).ok
    tree = store.tree()
    assert tree["/lost+found"] == store.ino["/lost+found"]
    assert tree[f"/lost+found.1/#{store.ino['/inline']}"] == store.ino["/inline"]
    assert tree[f"/lost+found.1/#{store.ino['/fifo']}"] == store.ino["/fifo"]


def test_a_name_in_lost_and_found_may_be_taken(store: DamagedStore) -> None:
    async def make(fs: Filesystem) -> None:
        store.ino["/lost+found"] = (await fs.mkdir(ROOT, b"lost+found", 0o700, NOBODY)).ino
        await store.write(fs, f"/lost+found/#{store.ino['/inline']}", b"")

    store.use(make)
    store.remove_name("/inline")
    assert store.check(repair=True).ok
    assert store.tree()[f"/lost+found/#{store.ino['/inline']}.1"] == store.ino["/inline"]
    assert store.found() == []


def test_paths_are_printable(store: DamagedStore) -> None:
    async def make(fs: Filesystem) -> None:
        store.ino["/odd"] = (await fs.mkdir(ROOT, b"new\nline \xff \xc3\xa9", 0o700, NOBODY)).ino

    store.use(make)
    store.change("/odd", nlink=5)
    (finding,) = store.check().findings
    assert finding.where == "/new\\nline \\xff é"


def test_a_store_that_recovery_would_damage_is_not_recovered_without_repair(
    store: DamagedStore,
) -> None:
    """The orphan record would have the collector erase a file that has a name."""
    store.put(keys.orphan(store.ino["/inline"]), b"")
    store.put(keys.dirty(store.ino["/a/striped"]), b"")
    report = store.check()
    assert "recovered_unsynced_files" not in report.counts
    assert keys.dirty(store.ino["/a/striped"]) in store.records()
    report = store.check(repair=True)
    assert report.counts["recovered_unsynced_files"] == 1
    assert store.tree()["/inline"] == store.ino["/inline"]


def test_a_mounted_store_is_refused(store: DamagedStore) -> None:
    owner = OwnerLock(store.config.meta.directory, "/mnt/somewhere")
    try:
        with pytest.raises(StoreBusy, match="/mnt/somewhere"):
            store.check()
    finally:
        owner.release(orderly=True)


def test_a_wrong_server_directory_is_refused(store: DamagedStore) -> None:
    Path(store.config.servers[3], ".aifs").unlink()
    with pytest.raises(StoreError, match=store.config.servers[3]):
        store.check()


def test_every_kind_of_finding_is_tested() -> None:
    tested = {kind for damage in (*MENDED.values(), *STAYS.values()) for kind, _ in damage.found}
    by_themselves = {
        "damaged-record",
        "missing-object",
        "short-object",
        "orphan-object",
        "unlistable-server",
        "unrecovered",
    }
    by_themselves |= {"degraded", "lost-chunk", "missing-container", "short-container"}
    by_themselves |= {"no-turn", "unreadable-bytes", "wrong-checksum", "wrong-references"}
    assert tested | by_themselves == set(KINDS)
