"""Damages to a store that fsck can only name."""

from pathlib import Path

from aifs.data import chunk_codec
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.chunks import CHUNKS_PER_RECORD
from aifs.meta.records import Copy
from tests.support.damaged import COMMON, DamagedStore
from tests.support.damages import (
    COMMON_CHUNK,
    Damages,
    changed,
    common,
    put,
    put_at,
    put_shared,
)

STAYS = Damages()


@STAYS.of("unreadable-record /a/striped")
def inode_that_is_cut_off(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/a/striped"]), store.inode("/a/striped").encode()[:-2])


@STAYS.of("unreadable-record /a/striped")
def impossible_layout(store: DamagedStore) -> None:
    store.change("/a/striped", layout=Striped(0, (0, 1, 2, 3)))


@STAYS.of("unknown-server /a/striped")
def layout_with_an_unknown_server(store: DamagedStore) -> None:
    _, path = store.object("/a/striped", 3)
    path.unlink()
    layout = store.inode("/a/striped").layout
    store.change("/a/striped", layout=Striped(layout.unit, (*layout.servers[:3], 77)))


@STAYS.of("shared-objects /z/moved")
def two_files_with_one_object_id(store: DamagedStore) -> None:
    for number in range(4):
        for path in Path(store.config.servers[number]).glob(
            f"objects/*/*/*.{store.ino['/z/moved']:x}"
        ):
            path.rename(path.with_name(f"{store.ino['/a/striped']:016x}.{store.ino['/z/moved']:x}"))
    store.delete(keys.checksums(store.inode("/z/moved").oid, 0))
    store.change("/z/moved", oid=store.ino["/a/striped"])


@STAYS.of("foreign-file {server 1}/objects/0/notes.txt", "foreign-file {server 2}/movie.mkv")
def foreign_files(store: DamagedStore) -> None:
    for number, name in ((1, "objects/0/notes.txt"), (2, "movie.mkv")):
        Path(store.config.servers[number], name).write_bytes(b"mine")


@STAYS.of("unknown-server /fast/new")
def copy_on_an_unknown_device(store: DamagedStore) -> None:
    store.copy("/fast/new").unlink()
    copy = Copy(BURST_FIRST + 7, store.inode("/fast/new").copy.id)
    store.change("/fast/new", copy=copy)
    store.change_copy_record("/fast/new", server=copy.server)


@STAYS.of("shared-objects /fast/tiny")
def two_files_with_one_copy(store: DamagedStore) -> None:
    copy = store.inode("/fast/cached").copy
    store.delete(keys.burst_copy(store.inode("/fast/tiny").copy.id))
    store.copy("/fast/tiny").unlink()
    store.change("/fast/tiny", copy=copy)


@STAYS.of("unreadable-record /fast/new")
def unreadable_inode_with_a_copy(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/fast/new"]), b"?")


ALL_OF_COMMON = ["lost-chunk /a/first", "lost-chunk /a/first", "lost-chunk /z/other"]
"""The first file has it in two records of its list."""

NOT_ALIVE = "wrong-live-bytes container {shared container}"


@STAYS.of(*ALL_OF_COMMON, NOT_ALIVE)
def shared_chunk_without_record(store: DamagedStore) -> None:
    store.delete(keys.shared(chunk_codec.digest_of(COMMON.data)))


@STAYS.of(f"unreadable-record {COMMON_CHUNK}", *ALL_OF_COMMON, NOT_ALIVE)
def unreadable_shared_chunk(store: DamagedStore) -> None:
    store.put(keys.shared(chunk_codec.digest_of(COMMON.data)), b"?")


@STAYS.of(*ALL_OF_COMMON, NOT_ALIVE)
def shared_chunk_in_no_container(store: DamagedStore) -> None:
    known = common(store)
    put_shared(store, known._replace(place=known.place._replace(container=4000)))


@STAYS.of(*ALL_OF_COMMON)
def shared_chunk_behind_the_end(store: DamagedStore) -> None:
    known = common(store)
    put_shared(store, known._replace(place=known.place._replace(offset=1 << 40)))


@STAYS.of(*ALL_OF_COMMON)
def shared_chunk_of_another_length(store: DamagedStore) -> None:
    known = common(store)
    put_shared(store, known._replace(place=known.place._replace(raw=known.place.raw + 1)))


@STAYS.of("lost-chunk /a/first")
def gap_in_an_extent_list(store: DamagedStore) -> None:
    store.delete(keys.chunk_list(store.inode("/a/first").oid, CHUNKS_PER_RECORD))


@STAYS.of("lost-chunk /a/first")
def extent_list_without_its_end(store: DamagedStore) -> None:
    store.delete(keys.chunk_list(store.inode("/a/first").oid, 2 * CHUNKS_PER_RECORD))


@STAYS.of("lost-chunk /a/first", "lost-chunk /a/first", NOT_ALIVE)
def extent_list_without_its_beginning(store: DamagedStore) -> None:
    store.delete(keys.chunk_list(store.inode("/a/first").oid, 0))


@STAYS.of("unreadable-record /a/first")
def unreadable_record_of_an_extent_list(store: DamagedStore) -> None:
    store.put(keys.chunk_list(store.inode("/a/first").oid, CHUNKS_PER_RECORD), b"\2?")


add = STAYS.add
add("unreadable_inode", put_at("/inline", keys.inode, b"\1?"), "unreadable-record /inline")
add("unreadable_directory", put_at("/a", keys.inode), "unreadable-record /a")
add("fifo_with_bytes", changed("/fifo", data=b"bytes", size=5), "unreadable-record /fifo")
add("unknown_file_type", changed("/fifo", mode=0o170644), "unreadable-record /fifo")
add("unknown_record", put(b"ff", b"?"), "unknown-record record 6666")
add("record_with_a_short_key", put(b"i\1", b"?"), "unknown-record record 6901")
add("fifo_with_a_copy", changed("/fifo", copy=Copy(BURST_FIRST, 4000)), "unreadable-record /fifo")
add("extent_list_of_another_size", changed("/z/other", size=799), "lost-chunk /z/other")
