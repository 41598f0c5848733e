"""Damages to a store that fsck can only name."""

from functools import partial
from pathlib import Path

from aifs.data import chunk_codec
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.chunk_lists import CHUNKS_PER_RECORD
from aifs.meta.records import Copy
from tests.support.damaged import COMMON, DamagedStore
from tests.support.damages import COMMON_CHUNK, Damage, common, put_shared, register

STAYS: dict[str, Damage] = {}
stays = partial(register, STAYS)


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
    known = common(store)
    put_shared(store, known._replace(place=known.place._replace(container=4000)))


@stays(*ALL_OF_COMMON)
def shared_chunk_behind_the_end(store: DamagedStore) -> None:
    known = common(store)
    put_shared(store, known._replace(place=known.place._replace(offset=1 << 40)))


@stays(*ALL_OF_COMMON)
def shared_chunk_of_another_length(store: DamagedStore) -> None:
    known = common(store)
    put_shared(store, known._replace(place=known.place._replace(raw=known.place.raw + 1)))


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
