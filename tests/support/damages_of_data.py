"""Damages to records of objects, copies, containers and groups that a repair puts right."""

import os

from aifs.data import chunk_codec
from aifs.layout.interleaved import HEADER_BYTES
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from aifs.meta import chunks, groups, keys, shared
from aifs.meta.askers import Asker
from aifs.meta.groups import GroupMember, GroupRecord
from aifs.meta.kv import Transaction
from aifs.meta.records import BurstRecord, Copy, Degraded, Garbage
from aifs.meta.shared import Shared
from tests.support.damaged import UNIT, DamagedStore
from tests.support.damages import (
    COMMON_CHUNK,
    Damages,
    common,
    put,
    put_at,
    put_shared,
)

MENDED = Damages()


@MENDED.of("garbage-in-use /a/striped")
def garbage_in_use(store: DamagedStore) -> None:
    inode = store.inode("/a/striped")
    store.put(keys.garbage(inode.oid), Garbage(inode.ino, inode.layout).encode())


@MENDED.of("garbage-in-use /a/rewritten")
def garbage_in_use_with_another_id(store: DamagedStore) -> None:
    inode = store.inode("/a/rewritten")
    assert inode.oid != inode.ino
    store.put(keys.garbage(inode.oid), Garbage(inode.ino, inode.layout).encode())


@MENDED.of("unknown-server garbage record 4000")
def garbage_on_an_unknown_server(store: DamagedStore) -> None:
    store.put(keys.garbage(4000), Garbage(4000, Striped(UNIT, (1, 77))).encode())


@MENDED.of("unreadable-record garbage record 4000")
def garbage_on_no_server(store: DamagedStore) -> None:
    store.put(keys.garbage(4000), Garbage(4000, Striped(UNIT, ())).encode())


@MENDED.of(
    "stray-record inode 4002",
    "unknown-host /a/striped",
    "unknown-host chunk list 4001",
    "unknown-host container {container}",
    "unknown-host garbage record 4000",
)
def records_of_hosts_of_which_there_are_none(store: DamagedStore) -> None:
    """Left to a host that never mounts the store they would stay for ever."""
    store.put(keys.hold(4002, 7), b"")
    store.put(keys.dirty(store.ino["/a/striped"]), keys.host_value(7))
    store.put(keys.loose(4001), keys.host_value(7))
    store.put(keys.open_container(store.container()[0]), keys.host_value(7))
    store.put(keys.garbage(4000), Garbage(4000, Striped(UNIT, (1,)), 7).encode())


@MENDED.of("stray-record degraded objects 4000")
def degraded_objects_of_nobody(store: DamagedStore) -> None:
    store.put(keys.degraded(4000), Degraded(store.ino["/a/striped"], 1).encode())


@MENDED.of("stray-record degraded objects {/a/striped}")
def degraded_columns_of_a_plain_file(store: DamagedStore) -> None:
    ino = store.ino["/a/striped"]
    store.put(keys.degraded(store.inode("/a/striped").oid), Degraded(ino, 1).encode())


@MENDED.of("unreadable-record degraded objects 4000")
def damaged_record_of_degraded_objects(store: DamagedStore) -> None:
    store.put(keys.degraded(4000), b"?")


@MENDED.of("copy-record /fast/new")
def copy_without_record(store: DamagedStore) -> None:
    store.delete(keys.burst_copy(store.inode("/fast/new").copy.id))


@MENDED.of("copy-record /fast/new")
def record_of_another_inode(store: DamagedStore) -> None:
    store.change_copy_record("/fast/new", ino=store.ino["/inline"])


@MENDED.of("copy-record /fast/new")
def record_of_a_copy_elsewhere(store: DamagedStore) -> None:
    store.change_copy_record("/fast/new", server=BURST_FIRST + 7)


@MENDED.of("copy-record /fast/new")
def record_says_that_it_is_drained(store: DamagedStore) -> None:
    store.change_copy_record("/fast/new", undrained=False, durable=False)


@MENDED.of("copy-record /fast/cached")
def record_says_that_it_is_not_drained(store: DamagedStore) -> None:
    store.change_copy_record("/fast/cached", undrained=True)


@MENDED.of("unreadable-record /fast/new")
def unreadable_record_of_a_copy(store: DamagedStore) -> None:
    store.put(keys.burst_copy(store.inode("/fast/new").copy.id), b"?")


@MENDED.of("unreadable-record record of burst copy 4000")
def unreadable_record_of_no_copy(store: DamagedStore) -> None:
    store.put(keys.burst_copy(4000), b"?")


@MENDED.of("stray-record record of burst copy 4000", "stray-record record of burst copy 4001")
def records_of_no_copy(store: DamagedStore) -> None:
    store.put(
        keys.burst_copy(4000),
        BurstRecord(store.ino["/inline"], BURST_FIRST, True, True, 1).encode(),
    )
    store.put(keys.burst_copy(4001), BurstRecord(4711, BURST_FIRST, False, True, 1).encode())


@MENDED.of("garbage-in-use /fast/new")
def garbage_copy_in_use(store: DamagedStore) -> None:
    copy = store.inode("/fast/new").copy
    store.put(keys.garbage(copy.id), Garbage(0, Striped(1, (copy.server,))).encode())


@MENDED.of("bad-cache /fast/cached", "bad-cache /fast/tiny")
def caches_of_another_length(store: DamagedStore) -> None:
    os.truncate(store.copy("/fast/cached"), UNIT)
    os.truncate(store.copy("/fast/tiny"), 2 * UNIT)


@MENDED.of("bad-cache /fast/new")
def missing_copy_of_an_empty_file(store: DamagedStore) -> None:
    store.copy("/fast/new").unlink()
    store.change("/fast/new", size=0)


@MENDED.of("unknown-server /fast/tiny")
def cache_on_an_unknown_device(store: DamagedStore) -> None:
    store.copy("/fast/tiny").unlink()
    copy = Copy(BURST_FIRST + 7, store.inode("/fast/tiny").copy.id)
    store.change("/fast/tiny", copy=copy)
    store.change_copy_record("/fast/tiny", server=copy.server)


@MENDED.of("wrong-size /fast/new")
def copy_that_is_longer(store: DamagedStore) -> None:
    with store.copy("/fast/new").open("ab") as file:
        file.write(b"appended")


@MENDED.of("stray-record checksums of objects 4000")
def checksums_of_nothing(store: DamagedStore) -> None:
    store.put(keys.checksums(4000, 0), bytes(32))


@MENDED.of("stray-record /z/moved")
def too_many_checksums(store: DamagedStore) -> None:
    store.put(keys.checksums(store.inode("/z/moved").oid, 0), bytes(64))


@MENDED.of("stray-record /z/moved")
def checksums_that_do_not_begin_with_the_file(store: DamagedStore) -> None:
    oid = store.inode("/z/moved").oid
    store.delete(keys.checksums(oid, 0))
    store.put(keys.checksums(oid, 256), bytes(32))


@MENDED.of("wrong-live-bytes container {container}")
def wrong_count_of_live_bytes(store: DamagedStore) -> None:
    number, _ = store.container()
    record = store.transact(lambda tx: chunks.find_container(tx, number))
    store.put(keys.container(number), record._replace(live=record.live - 5).encode())


UNKNOWN = chunk_codec.digest_of(b"unknown")

GROUP = GroupRecord(
    7,
    groups.GroupOptions(b"step", 2, 1 << 20, False, 1000, 0, b""),
    Asker(0, (0,)),
    1,
    state="durable",
)

UNKNOWN_CHUNK = f"shared chunk {UNKNOWN.hex()[:16]}"


@MENDED.of(f"wrong-references {COMMON_CHUNK}")
def too_few_references(store: DamagedStore) -> None:
    put_shared(store, common(store)._replace(references=1))


@MENDED.of(f"wrong-references {COMMON_CHUNK}")
def too_many_references(store: DamagedStore) -> None:
    put_shared(store, common(store)._replace(references=9))


@MENDED.of(f"wrong-references {UNKNOWN_CHUNK}")
def shared_chunk_that_nobody_names(store: DamagedStore) -> None:
    place = common(store).place

    def put(tx: Transaction) -> None:
        shared.put_shared(tx, Shared(place._replace(digest=UNKNOWN), 1))
        chunks.adjust_live(tx, place.container, HEADER_BYTES + place.stored)

    store.transact(put)


@MENDED.of(f"unreadable-record {UNKNOWN_CHUNK}")
def unreadable_shared_chunk_that_nobody_names(store: DamagedStore) -> None:
    store.put(keys.shared(UNKNOWN), b"?")


@MENDED.of("stray-record chunk list 4000")
def extent_list_of_no_file(store: DamagedStore) -> None:
    oid = store.inode("/a/first").oid
    store.transact(lambda tx: tx.put(keys.chunk_list(4000, 0), tx.get(keys.chunk_list(oid, 0))))


@MENDED.of("garbage-in-use /a/first")
def loose_mark_of_a_list_in_use(store: DamagedStore) -> None:
    store.put(keys.loose(store.inode("/a/first").oid), b"")


@MENDED.of("stray-record /a")
def member_without_group(store: DamagedStore) -> None:
    store.put(keys.group_member(store.ino["/a"], 1), GroupMember(5).encode())


@MENDED.of("unreadable-record /a", "unreadable-record /z")
def unreadable_groups(store: DamagedStore) -> None:
    store.put(keys.group(store.ino["/z"]), b"?")
    store.put(keys.group(store.ino["/a"]), GROUP.encode())
    store.put(keys.group_member(store.ino["/a"], 1), b"?")


@MENDED.of("wrong-live-bytes container {shared container}")
def wrong_count_of_live_bytes_of_shared_chunks(store: DamagedStore) -> None:
    number, length = store.shared_container()[0], common(store).place.stored
    store.transact(lambda tx: chunks.adjust_live(tx, number, -length))


add = MENDED.add
add("record_of_a_host_that_cannot_be_read", put(keys.host(7), b"seven"), "unreadable-record host 7")
add("server_without_mark", lambda s: s.delete(keys.unprotected(1)), "server-mark data server 1")
add("mark_of_an_unknown_server", put(keys.unprotected(77)), "stray-record data server 77")
add("damaged_record_of_a_stray", put(keys.stray(4000, 1), b"?"), "unreadable-record stray of 4000")
add("stray_with_a_short_key", put(b"m\0"), "stray-record record 6d00")
add("missing_cache", lambda s: s.copy("/fast/cached").unlink(), "bad-cache /fast/cached")
add("checksums_of_a_changing_file", put_at("/z/moved", keys.dirty), "stray-record /z/moved")
add("dirty_mark_of_an_interleaved_file", put_at("/a/chunks", keys.dirty), "stray-record /a/chunks")
add("group_of_a_file", put_at("/inline", keys.group, GROUP.encode()), "stray-record /inline")
add("group_of_no_directory", put(keys.group(4000), GROUP.encode()), "stray-record inode 4000")
