"""Damages to inodes, names and counters that a repair puts right."""

import stat

from aifs.meta import keys
from aifs.meta.records import encode_entry
from tests.support.damaged import ROOT, DamagedStore
from tests.support.damages import Damages, changed, put, put_at

MENDED = Damages()

FILE, DIRECTORY = stat.S_IFREG >> 12, stat.S_IFDIR >> 12
COOKIE = 5000  # of names that the tests make; within the first window of ids


@MENDED.of("dangling-dentry /inline", moves={"/inline": None})
def dangling_dentry(store: DamagedStore) -> None:
    store.delete(keys.inode(store.ino["/inline"]), keys.xattr(store.ino["/inline"], b"user.colour"))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@MENDED.of("dangling-dentry /empty", moves={"/empty": None})
def dangling_directory(store: DamagedStore) -> None:
    store.delete(keys.inode(store.ino["/empty"]))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@MENDED.of("missing-directory /a")
def directory_without_inode(store: DamagedStore) -> None:
    store.delete(keys.inode(store.ino["/a"]), keys.xattr(store.ino["/a"], b"user.colour"))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@MENDED.of("missing-directory <inode {/a}>", moves={"/a": "/lost+found/#{/a}"})
def directory_without_inode_and_name(store: DamagedStore) -> None:
    store.remove_name("/a")
    store.change("/", nlink=5)
    store.delete(keys.inode(store.ino["/a"]))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@MENDED.of("missing-directory /")
def no_root(store: DamagedStore) -> None:
    store.delete(keys.inode(ROOT))
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -1))


@MENDED.of("orphan-inode <inode {/inline}>", moves={"/inline": "/lost+found/#{/inline}"})
def orphan_file(store: DamagedStore) -> None:
    store.remove_name("/inline")


@MENDED.of("orphan-inode <inode {/z/moved}>", moves={"/z/moved": "/lost+found/#{/z/moved}"})
def deleted_file_without_orphan_record(store: DamagedStore) -> None:
    store.remove_name("/z/moved")
    store.change("/z/moved", nlink=0)


@MENDED.of("orphan-inode <inode {/a}>", "wrong-link-count /", moves={"/a": "/lost+found/#{/a}"})
def orphan_directory(store: DamagedStore) -> None:
    store.remove_name("/a")


@MENDED.of(
    "orphan-inode <inode {/inline}>",
    "stray-record <inode {/inline}>",
    moves={"/inline": "/lost+found/#{/inline}"},
)
def orphan_with_links(store: DamagedStore) -> None:
    store.remove_name("/inline")
    store.put(keys.orphan(store.ino["/inline"]), b"")


@MENDED.of("stray-record record 6f61", "stray-record record 77616161616161616161")
def marks_with_a_wrong_key(store: DamagedStore) -> None:
    store.put(b"oa", b"")
    store.put(b"waaaaaaaaa", b"")


@MENDED.of("name-index /a/b")
def entry_without_dentry_of_a_directory(store: DamagedStore) -> None:
    store.delete(store.dentry_key("/a/b"))


@MENDED.of("name-index /z/gone")
def entry_of_a_removed_name(store: DamagedStore) -> None:
    entry = encode_entry(store.ino["/inline"], FILE, b"gone")
    store.put(keys.entry(store.ino["/z"], COOKIE), entry)


@MENDED.of("name-index /inline")
def name_listed_twice(store: DamagedStore) -> None:
    store.put(keys.entry(ROOT, COOKIE), encode_entry(store.ino["/inline"], FILE, b"inline"))


@MENDED.of("name-index /inline")
def entry_with_another_inode(store: DamagedStore) -> None:
    store.put(store.entry_key("/inline"), encode_entry(store.ino["/nothing"], FILE, b"inline"))


@MENDED.of("name-index /inline")
def name_in_another_names_place(store: DamagedStore) -> None:
    dentry, taken = store.dentry("/inline"), store.dentry("/nothing").cookie
    store.delete(store.entry_key("/inline"))
    store.put(store.dentry_key("/inline"), dentry._replace(cookie=taken).encode())


@MENDED.of("name-index /inline")
def name_before_the_first_place(store: DamagedStore) -> None:
    dentry = store.dentry("/inline")
    store.delete(store.entry_key("/inline"))
    store.add_name("/inline", dentry.ino, FILE, 0)


@MENDED.of("wrong-type /inline")
def wrong_type(store: DamagedStore) -> None:
    dentry = store.dentry("/inline")
    store.add_name("/inline", dentry.ino, stat.S_IFIFO >> 12, dentry.cookie)


@MENDED.of(
    "unreadable-record /inline",
    "orphan-inode <inode {/inline}>",
    moves={"/inline": "/lost+found/#{/inline}"},
)
def unreadable_dentry_and_no_entry(store: DamagedStore) -> None:
    store.delete(store.entry_key("/inline"))
    store.put(store.dentry_key("/inline"), b"?")


@MENDED.of("unreadable-record entry 5000 of directory 1")
def unreadable_entry_of_nothing(store: DamagedStore) -> None:
    store.put(keys.entry(ROOT, COOKIE), b"?")


@MENDED.of("second-name /z/twice")
def directory_with_two_names(store: DamagedStore) -> None:
    store.add_name("/z/twice", store.ino["/a"], DIRECTORY, COOKIE)
    store.change("/z", nlink=3)


@MENDED.of("second-name /a/twice", moves={"/z": "/a/b/c/z"})
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


@MENDED.of("loop /z/root")
def root_with_a_name(store: DamagedStore) -> None:
    store.add_name("/z/root", ROOT, DIRECTORY, COOKIE)
    store.change("/z", nlink=3)


@MENDED.of("loop <inode {/a}>/b/c/up", moves={"/a": "/lost+found/#{/a}"})
def loop(store: DamagedStore) -> None:
    store.remove_name("/a")
    store.change("/", nlink=5)
    store.add_name("/a/b/c/up", store.ino["/a"], DIRECTORY, COOKIE)
    store.change("/a/b/c", nlink=3)
    store.change("/a", parent=store.ino["/a/b/c"])


@MENDED.of("bad-name /x/y", moves={"/inline": "/lost+found/#{/inline}"})
def bad_name(store: DamagedStore) -> None:
    store.remove_name("/inline")
    ino = store.ino["/inline"]
    store.put(
        keys.dentry(ROOT, b"x/y"),
        store.dentry("/nothing")._replace(ino=ino, cookie=COOKIE).encode(),
    )
    store.put(keys.entry(ROOT, COOKIE), encode_entry(ino, FILE, b"x/y"))


@MENDED.of("misplaced-dentry /nothing/below")
def name_below_a_file(store: DamagedStore) -> None:
    store.add_name("/nothing/below", store.ino["/inline"], FILE, COOKIE)
    store.change("/inline", nlink=2)


@MENDED.of("misplaced-dentry <inode 4000>/lost")
def name_below_nothing(store: DamagedStore) -> None:
    dentry = store.dentry("/inline")
    store.put(keys.dentry(4000, b"lost"), dentry._replace(cookie=COOKIE).encode())


@MENDED.of("wrong-counter counter inodes")
def wrong_inode_counter(store: DamagedStore) -> None:
    store.transact(lambda tx: tx.add(keys.COUNTER_INODES, -3))


@MENDED.of("wrong-counter counter ids", "wrong-counter counter inodes")
def no_counters(store: DamagedStore) -> None:
    store.delete(keys.COUNTER_IDS, keys.COUNTER_INODES)


add = MENDED.add
add("too_many_links", changed("/a/striped", nlink=7), "wrong-link-count /a/striped")
add("too_few_links", changed("/z/moved", nlink=0), "wrong-link-count /z/moved")
add("wrong_links_of_a_directory", changed("/a", nlink=2), "wrong-link-count /a")
add("wrong_links_of_the_root", changed("/", nlink=99), "wrong-link-count /")
add("wrong_size", changed("/inline", size=4711), "wrong-size /inline")
add("size_without_bytes", changed("/nothing", size=1), "wrong-size /nothing")
add("orphan_record_of_a_named_inode", put_at("/inline", keys.orphan), "stray-record /inline")
add("orphan_record_without_inode", put(keys.orphan(4000)), "stray-record inode 4000")
add("dirty_mark_without_inode", put(keys.dirty(4000)), "stray-record inode 4000")
add("xattr_without_inode", put(keys.xattr(4000, b"user.lost"), b"value"), "stray-record inode 4000")
add("dentry_without_entry", lambda s: s.delete(s.entry_key("/a/striped")), "name-index /a/striped")
add("entry_without_dentry", lambda s: s.delete(s.dentry_key("/a/striped")), "name-index /a/striped")
add("unreadable_entry", lambda s: s.put(s.entry_key("/inline"), b"?"), "name-index /inline")
add(
    "unreadable_dentry", lambda s: s.put(s.dentry_key("/inline"), b"?"), "unreadable-record /inline"
)
add("unreadable_garbage", put(keys.garbage(4000), b"?"), "unreadable-record garbage record 4000")
add("wrong_parent", lambda s: s.change("/a/b", parent=s.ino["/z"]), "wrong-parent /a/b")
add("wrong_parent_of_the_root", lambda s: s.change("/", parent=s.ino["/z"]), "wrong-parent /")
add("root_that_is_a_file", changed("/", mode=0o100644), "unreadable-record /")
add("unreadable_root", put(keys.inode(ROOT), b"?"), "unreadable-record /")
add(
    "wrong_id_counter",
    put(keys.COUNTER_IDS, (3).to_bytes(8, "little")),
    "wrong-counter counter ids",
)
