/*
 * The FUSE messages that the bridge reads or edits, and what it does to them. Pure: no I/O, no Python.
 *
 * examine_request() looks at a request of the kernel before libfuse does, edit_reply() at a reply of libfuse before the
 * kernel does. Both are given the length that was really read or is really sent, and touch nothing beyond it.
 *
 * The layouts are those of <linux/fuse.h>; what is newer than protocol 7.38, of Linux 6.1, is here, because the machine
 * that compiles this may have older headers than the kernel that runs it.
 */
#ifndef AIFS_MESSAGES_H
#define AIFS_MESSAGES_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/xattr.h>

#include "entries.h"
#include "names.h"
#include "opens.h"
#include "places.h"

/* --- the protocol, as far as <linux/fuse.h> may lack it --- */

enum {
    STATX = 52,
    COPY_FILE_RANGE_64 = 53,
    OPCODES = 64, /* one more than the largest that is counted */
};

#define INIT_PASSTHROUGH (UINT64_C(1) << 37)
#define OPEN_PASSTHROUGH (1u << 7)
#define OPEN_NOATIME 01000000u /* O_NOATIME, as the kernel has it */
#define OPEN_AHEAD O_NONBLOCK  /* AHEAD of aifs/files/types.py */

enum { MAX_STACK_DEPTH_AT = 36 }; /* of struct fuse_init_out */

struct open_out { /* struct fuse_open_out, of which the last word was padding */
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

struct create_out {
    struct fuse_entry_out entry;
    struct open_out open;
};
static_assert(sizeof(struct fuse_in_header) == 40 && sizeof(struct create_out) == 144, "layout");

enum verdict {
    PASS,      /* libfuse gets it */
    ANSWER,    /* the bridge answers it, as the struct answer says */
    HAND_OVER, /* a Python coroutine answers it */
    OFFER,     /* Python is asked whether it is for one of its own; if not: PASS */
    TRY,       /* Python is asked to answer it at once; if it cannot: PASS */
    NOTED,     /* it asks for no answer */
};

struct kind {
    enum verdict verdict; /* unless examine_request() knows better */
    uint8_t least;        /* how long the body is at least */
    uint8_t flags_at;     /* where flags lie in it */
    uint16_t kill;        /* the one among them that asks to clear the set-id bits */
};
static const struct kind kinds[OPCODES] = {
    [FUSE_LOOKUP] = {.least = 2},
    [FUSE_SETATTR] = {.least = 88, .flags_at = 0, .kill = FATTR_KILL_SUIDGID},
    [FUSE_READ] = {.least = 40},
    [FUSE_OPEN] = {.least = 8, .flags_at = 4, .kill = FUSE_OPEN_KILL_SUIDGID},
    [FUSE_WRITE] = {.least = 40, .flags_at = 20, .kill = FUSE_WRITE_KILL_SUIDGID},
    [FUSE_RELEASE] = {.least = 24},
    [FUSE_FLUSH] = {.least = 24},
    [FUSE_SETXATTR] = {.least = 8},
    [FUSE_STATFS] = {HAND_OVER},
    [FUSE_GETLK] = {HAND_OVER, .least = 48},
    [FUSE_SETLK] = {HAND_OVER, .least = 48},
    [FUSE_SETLKW] = {HAND_OVER, .least = 48},
    [FUSE_FSYNCDIR] = {.least = 16},
    [FUSE_CREATE] = {.least = 16, .flags_at = 12, .kill = FUSE_OPEN_KILL_SUIDGID},
    [FUSE_TMPFILE] = {.least = 16, .flags_at = 12, .kill = FUSE_OPEN_KILL_SUIDGID},
    [FUSE_INTERRUPT] = {OFFER, .least = 8},
    [FUSE_IOCTL] = {HAND_OVER, .least = 32},
    [FUSE_FALLOCATE] = {HAND_OVER, .least = 32},
    [FUSE_READDIRPLUS] = {HAND_OVER, .least = 40},
    [FUSE_LSEEK] = {HAND_OVER, .least = 24},
    [FUSE_COPY_FILE_RANGE] = {HAND_OVER, .least = 56},
    [COPY_FILE_RANGE_64] = {HAND_OVER, .least = 56},
    [FUSE_SYNCFS] = {HAND_OVER, .least = 8},
    [STATX] = {HAND_OVER, .least = 24},
};

/* --- the state of one mount --- */

/* A handle of the filesystem, as it answers OPEN and CREATE: the backing id (0: none; the kernel counts them up to
 * INT_MAX) above the handle proper. */
#define HANDLE_BITS 33
#define WRITABLE_HANDLE (UINT64_C(1) << 32) /* of a handle that can write */
#define LENT_HERE 0 /* a handle of an inode that is lent, which the filesystem has opened so */

/* Requests whose reply will be looked at; more than the filesystem works on at once. */
#define EXPECTED_MAX 512

#define LATE_NS 100000000

#define READ_MAX ((size_t)1 << 20) /* a larger READ is not answered here */

enum { INODES_MAX = 1 << 20, PLAIN_MAX = 8192, TOLD_MAX = 1 << 23, SHARED_MAX = 1024 };

/* Inodes that the kernel has forgotten, as a request: Python hears of many of them at once. */
enum { FORGOTTEN_MAX = 256 };

struct forgotten {
    struct fuse_in_header header; /* its length counts those that are there; 0: none are */
    uint64_t nodeids[FORGOTTEN_MAX];
    uint64_t due_ns; /* when Python is to hear of them at the latest, as now_ns */
};

#define FORGOTTEN_NS 10000000

struct expected {
    uint64_t unique, nodeid, xattr_changes;
    uint64_t name; /* the hash of the one that it asks for, or makes; 0: none */
    uint32_t opcode;
};

/* What Python reads and writes in place: class BridgeState of aifs/fuse/bridge.py, field for field. */
struct state {
    /* Chosen before the mount. */
    uint64_t wanted; /* flags of INIT to ask for where the kernel offers them */
    struct keeping keeping;
    uint16_t max_background; /* requests without a waiting process that the kernel sends at once; 0: its default */
    uint8_t ioctl_type;      /* commands of another type are no business of the filesystem */
    bool busy_polls;         /* clients have another processor */

    int32_t device; /* /dev/fuse, while the bridge is in use; else -1 */
    int32_t clock;  /* a file that is stamped to learn the present: stamped_fd() of aifs/core/clock.py */
    bool sees_all;  /* all requests are to be seen: those that Python can answer are passed on */
    uint64_t sure_until_ns; /* by CLOCK_BOOTTIME; from then on that is passed on, too, as what other hosts have changed
                             * may not be known here. 0: there are none */

    /* Of the request examined last. */
    bool kill_privileges; /* it asks to clear the set-id bits */
    bool appends;         /* it is a WRITE of a file that is open with O_APPEND, or a SETXATTR with XATTR_CREATE */
    uint32_t uid, pid;
    uint64_t nodeid;
    uint64_t unique;

    uint64_t offered, granted;   /* flags of INIT; 0 before */
    uint64_t counts[OPCODES][2]; /* of all requests, and of those that were answered here */
    uint64_t read_bytes;         /* of files, in answers from here */
    uint64_t fresh[FRESH_MAX];   /* directories all of whose names have been noted, each in its place by its number */
    uint8_t acls[INODES_MAX / 8]; /* inodes that may have an ACL, by a hash of their number: bits, never cleared */
    uint8_t told[TOLD_MAX / 8];   /* inodes that the kernel may know, in the same way, where there are other hosts */
    uint64_t shared[SHARED_MAX];  /* directories of which the kernel keeps no names, as `fresh` */
};

struct bridge {
    struct state state;
    uint8_t locked[INODES_MAX / 8]; /* inodes that may have been locked, in the same way */
    uint64_t plain[PLAIN_MAX]; /* inodes known to have no security.capability, by a hash of their number */
    uint64_t xattr_changes;
    bool is_sure; /* when the request examined last came, it was: see sure_until_ns */
    struct expected expected[EXPECTED_MAX];
    size_t expected_count;
    struct directories directories;
    struct opens opens;
    struct counted earlier; /* by the daemon that had the mount before, if there was one */
    struct entries entries; /* where there are no other hosts */
    struct forgotten forgotten;
    struct places places;
    struct part parts[PARTS_MAX]; /* of the answer to the request examined last */
    uint64_t now_ns;                    /* by CLOCK_MONOTONIC, as the kernel's timeouts; bridge.c sets it */
    struct told_name names[NAMES_MAX];  /* where there are other hosts */
};

struct answer {
    int error;
    struct lent *accessed; /* the open counts as access to this: its time of access is to be set; else NULL */
    size_t size;    /* of what goes with it */
    size_t parts;   /* that is read from so many of bridge->parts; where that is not possible at once: PASS */
    union {
        struct open_out open;
        struct fuse_attr_out attr;
        struct fuse_entry_out entry;
    };
};

/* --- records --- */

static const char capability[] = "security.capability";

static inline void note_in(uint8_t *inodes, uint64_t nodeid)
{
    inodes[nodeid % INODES_MAX / 8] |= (uint8_t)(1 << nodeid % 8);
}

static inline void forget_plain(struct bridge *bridge, uint64_t nodeid)
{
    bridge->xattr_changes++;
    bridge->plain[nodeid % PLAIN_MAX] = 0;
}

/* A record has changed, perhaps by another host, whose requests do not pass here; an empty one: it has been erased. */
static inline void note_change(struct bridge *bridge, struct span key, struct span record)
{
    enum { REST_AT = 1 + sizeof(uint64_t), NAME_LENGTH = sizeof capability - 1 };
    if (key.length == REST_AT + NAME_LENGTH && key.start[0] == 'x' &&
        memcmp(key.start + REST_AT, capability, NAME_LENGTH) == 0)
        forget_plain(bridge, big_endian(key.start + 1));
    if (key.length == REST_AT && key.start[0] == 'i' && is_inode(record) && has_acl(record))
        note_in(bridge->state.acls, big_endian(key.start + 1));
    if (key.length == REST_AT && key.start[0] == 'i')
        note_new_attributes(&bridge->opens, big_endian(key.start + 1), record, bridge->state.keeping.block_size);
    if (key.length != 0 && key.start[0] == 'z') /* a directory is doomed */
        forget_entries(&bridge->entries);
    if (key.length >= DENTRY_NAME_AT && key.start[0] == 'd')
        note_entry(&bridge->entries, big_endian(key.start + 1),
                   (struct span){key.start + DENTRY_NAME_AT, key.length - DENTRY_NAME_AT});
    note_record(&bridge->directories, bridge->state.fresh, key, record, &bridge->state.keeping);
}

/* --- requests --- */

static inline bool has_locks(const struct state *state)
{
    return state->granted & FUSE_POSIX_LOCKS;
}

/* The name in the body of a request, which begins at `at`; with a length of 0 if there is none. */
static inline struct span name_at(const char *body, size_t size, size_t at)
{
    const char *end = at < size ? memchr(body + at, 0, size - at) : NULL;
    return end != NULL ? (struct span){body + at, (size_t)(end - body) - at} : (struct span){NULL, 0};
}

/* Where the name lies that a request asks for, or makes: behind its struct. */
static inline size_t name_of(uint32_t opcode)
{
    return opcode == FUSE_CREATE || opcode == FUSE_MKNOD ? 16 : opcode == FUSE_MKDIR || opcode == FUSE_LINK ? 8 : 0;
}

/* As expect_reply, of a request whose reply may have the kernel keep a name, where other hosts may change it. */
static inline bool expect_entry(struct bridge *bridge, const struct fuse_in_header *header, size_t size)
{
    struct span name = name_at((const char *)(header + 1), size, name_of(header->opcode));
    uint64_t hash = has_locks(&bridge->state) && name.length != 0 ? name_hash(header->nodeid, name) : 0;
    if (bridge->expected_count == EXPECTED_MAX)
        return false;
    bridge->expected[bridge->expected_count++] =
        (struct expected){header->unique, header->nodeid, bridge->xattr_changes, hash, header->opcode};
    return true;
}

static inline bool expect_reply(struct bridge *bridge, const struct fuse_in_header *header)
{
    return expect_entry(bridge, header, 0);
}

/* The kernel takes the time when it reads the reply, which may be later than now. */
static inline void note_name_told(struct bridge *bridge, uint64_t hash, uint64_t ino, uint64_t kept_ns)
{
    kept_ns += kept_ns ? LATE_NS : 0;
    note_told_name(bridge->names, (struct told_name){hash, ino, bridge->now_ns + kept_ns}, bridge->now_ns);
}

/* The kernel may keep of the new name what it keeps of the old one, if RENAME succeeds; and the other way round. */
static inline void note_moved(struct bridge *bridge, const struct fuse_in_header *header, const char *body, size_t size)
{
    size_t at = header->opcode == FUSE_RENAME ? sizeof(struct fuse_rename_in) : sizeof(struct fuse_rename2_in);
    uint64_t new_parent, hashes[2];
    struct span old = name_at(body, size, at), new = name_at(body, size, at + old.length + 1);
    if (!has_locks(&bridge->state) || new.length == 0)
        return;
    memcpy(&new_parent, body, sizeof new_parent);
    hashes[0] = name_hash(header->nodeid, old);
    hashes[1] = name_hash(new_parent, new);
    struct told_name told[] = {find_told_name(bridge->names, hashes[0], bridge->now_ns),
                               find_told_name(bridge->names, hashes[1], bridge->now_ns)};
    for (int i = 0; i < 2; i++)
        note_told_name(bridge->names, (struct told_name){hashes[!i], UNKNOWN_INO, told[i].until_ns}, bridge->now_ns);
}

/* What the kernel may keep of a name. While it may be told at any moment of one that is being made, that is unknown. */
static inline struct told_name find_kept_name(const struct bridge *bridge, uint64_t parent, struct span name)
{
    uint64_t hash = name_hash(parent, name);
    for (size_t i = 0; i < bridge->expected_count; i++)
        if (bridge->expected[i].name == hash && bridge->expected[i].opcode != FUSE_LOOKUP)
            return (struct told_name){hash, UNKNOWN_INO, bridge->now_ns + bridge->state.keeping.entry_ns};
    return find_told_name(bridge->names, hash, bridge->now_ns);
}

static inline enum verdict refuse(struct answer *answer, int error)
{
    answer->error = error;
    return ANSWER;
}

/* Whether the name that GETXATTR asks for begins so. */
static inline bool asks_for(const char *body, size_t size, const char *start, size_t length)
{
    size_t at = sizeof(struct fuse_getxattr_in);
    return size >= at + length && memcmp(body + at, start, length) == 0;
}

static inline bool is_in(const uint8_t *inodes, uint64_t nodeid)
{
    return inodes[nodeid % INODES_MAX / 8] >> nodeid % 8 & 1;
}

/* The kernel is about to be told of an inode, which other hosts may change then. */
static inline void note_told(struct state *state, uint64_t ino)
{
    if (has_locks(state))
        state->told[ino % TOLD_MAX / 8] |= (uint8_t)(1 << ino % 8);
}

/* The flag of an open file that says that close(2) need not be told to us: a write leaves nothing to do for it. Where
 * locks are ours it may end one. */
static inline uint32_t no_flush(const struct state *state)
{
    return has_locks(state) ? 0 : FOPEN_NOFLUSH;
}

static inline bool passes_on(const struct bridge *bridge)
{
    return bridge->state.sees_all || !bridge->is_sure;
}

/* Whether a FLUSH is of a file that is open for writing, which other hosts are told of then. */
static inline bool was_written(const struct fuse_flush_in *in)
{
    return (in->fh & (LENT_HANDLE | WRITABLE_HANDLE)) == WRITABLE_HANDLE;
}

#define RESENT (UINT64_C(1) << 63) /* of the unique number of a request that an earlier daemon has got, too */

/* Whether an earlier daemon has counted this request about an inode that is lent; its answer may have been lost. */
static inline bool was_counted(const struct bridge *bridge, const struct fuse_in_header *header, struct answer *answer)
{
    const struct counted *counted = &bridge->earlier;
    if (!(header->unique & RESENT) || counted->unique == 0 || (header->unique ^ counted->unique) & ~RESENT)
        return false;
    if (header->opcode == FUSE_OPEN) {
        answer->open = (struct open_out){LENT_HANDLE | header->nodeid, counted->open_flags, counted->backing};
        answer->size = sizeof answer->open;
    }
    return true;
}

/* Whether an OPEN is answered here: for reading, of an inode that is lent. What was not locked before is closed without
 * a FLUSH, for which close(2) would wait: a lock that is taken by it ends with its RELEASE. */
static inline bool opens_lent(struct bridge *bridge, uint64_t ino, const struct fuse_open_in *in, uint64_t now_ns,
                              uint64_t unique, struct answer *answer)
{
    const struct opener by = {bridge->state.uid, !(in->flags & OPEN_NOATIME), in->flags & OPEN_AHEAD};
    if (passes_on(bridge) || (in->flags & (O_ACCMODE | O_TRUNC)) != O_RDONLY || in->open_flags != 0)
        return false;
    if (is_in(bridge->locked, ino))
        return false;
    struct lent *lent = open_lent(&bridge->opens, ino, now_ns, by, unique);
    if (lent == NULL)
        return false;
    answer->open = (struct open_out){
        .fh = LENT_HANDLE | ino,
        .open_flags = FOPEN_NOFLUSH | (lent->backing ? OPEN_PASSTHROUGH : FOPEN_KEEP_CACHE),
        .backing_id = lent->backing,
    };
    bridge->opens.kept.counted.open_flags = answer->open.open_flags;
    answer->size = sizeof answer->open;
    answer->accessed = lent->accessed_ns == now_ns ? lent : NULL;
    return true;
}

/* Whether a LOOKUP is answered here: of a name that leads to an inode that is lent, whose attributes are known. */
static inline bool finds_lent(struct bridge *bridge, uint64_t parent, struct span name, struct answer *answer)
{
    uint64_t ino = has_locks(&bridge->state) ? 0 : find_entry(&bridge->entries, parent, name);
    const struct fuse_attr *known = find_attributes(&bridge->opens, ino);
    const struct keeping *keeping = &bridge->state.keeping;
    if (known == NULL || passes_on(bridge) || bridge->opens.watched)
        return false;
    answer->entry = entry_out(ino, *known, keeping);
    answer->size = sizeof answer->entry;
    return true;
}

/* Whether a READ is answered here: of a file whose bytes lie where the filesystem has said, whatever the handle. */
static inline bool reads_placed(struct bridge *bridge, uint64_t ino, const struct fuse_read_in *in, struct answer *answer)
{
    struct placed *file = find_placed(&bridge->places, ino);
    if (file == NULL || passes_on(bridge) || bridge->opens.watched || in->size > READ_MAX)
        return false;
    size_t left = in->offset < file->size ? file->size - in->offset : 0, length = in->size < left ? in->size : left;
    answer->parts = length ? parts_of(&bridge->places, file, in->offset, length, bridge->parts) : 0;
    answer->size = length;
    file->used = true;
    return length == 0 || answer->parts != 0;
}

/*
 * The kernel asks for ACLs whenever somebody else than its owner first uses an inode: nearly none has one, and whatever
 * the filesystem answers about an inode that has, it says so before (acls).
 *
 * It asks for security.capability before the first write to an inode: nearly no file has one. The negative answer is
 * kept for inodes that were just created or have just been asked for. An inode number is never used again, and every
 * change of an attribute passes here, as a request or, of another host, as a record.
 */
static inline enum verdict examine_getxattr(struct bridge *bridge, const struct fuse_in_header *header,
                                            const char *body, size_t size, struct answer *answer)
{
    static const char acl[] = "system.posix_acl_";
    if (!bridge->is_sure)
        return PASS;
    if (asks_for(body, size, acl, sizeof acl - 1))
        return is_in(bridge->state.acls, header->nodeid) ? PASS : refuse(answer, ENODATA);
    if (!asks_for(body, size, capability, sizeof capability))
        return PASS;
    if (header->nodeid != 0 && bridge->plain[header->nodeid % PLAIN_MAX] == header->nodeid)
        return refuse(answer, ENODATA);
    expect_reply(bridge, header);
    return PASS;
}

/* Whether there was room for another inode that the kernel has forgotten. */
static inline bool note_forgotten(struct bridge *bridge, uint64_t nodeid)
{
    struct forgotten *all = &bridge->forgotten;
    if (all->header.len == 0) {
        all->header = (struct fuse_in_header){.len = sizeof all->header, .opcode = FUSE_FORGET};
        all->due_ns = bridge->now_ns + FORGOTTEN_NS;
    }
    size_t count = (all->header.len - sizeof all->header) / sizeof nodeid;
    if (count == FORGOTTEN_MAX)
        return false;
    all->nodeids[count] = nodeid;
    all->header.len += sizeof nodeid;
    return true;
}

/* A request in full (header and body), and the time of day: the verdict, and for ANSWER the answer. Edits it in place.
 * `is_sure`: see sure_until_ns. */
static inline enum verdict examine_request(struct bridge *bridge, void *message, size_t size, uint64_t now_ns,
                                           bool is_sure, struct answer *answer)
{
    struct state *state = &bridge->state;
    bridge->is_sure = is_sure;
    struct fuse_in_header *header = message;
    *answer = (struct answer){0};
    state->kill_privileges = state->appends = false;
    if (size < sizeof *header || header->len != size)
        return PASS; /* libfuse says what it thinks of it */
    state->nodeid = header->nodeid;
    state->uid = header->uid;
    state->pid = header->pid;
    state->unique = header->unique;
    if (header->opcode >= OPCODES)
        return PASS;
    state->counts[header->opcode][0]++;
    const struct kind *kind = &kinds[header->opcode];
    void *body = header + 1;
    size -= sizeof *header;
    if (size < kind->least)
        return refuse(answer, EINVAL);
    if (kind->kill) {
        uint32_t flags;
        memcpy(&flags, (char *)body + kind->flags_at, sizeof flags);
        state->kill_privileges = flags & kind->kill;
    }
    if (header->opcode == FUSE_WRITE)
        state->appends = ((const struct fuse_write_in *)body)->flags & O_APPEND;
    if (header->opcode == FUSE_SETXATTR)
        state->appends = ((const struct fuse_setxattr_in *)body)->flags & XATTR_CREATE;

    switch (header->opcode) {
    case FUSE_INIT: {
        const struct fuse_init_in *in = body;
        struct kept *kept = &bridge->opens.kept;
        if (size >= sizeof *in && header->len <= sizeof kept->init) {
            memcpy(kept->init, message, header->len);
            kept->init_size = header->len;
        }
        if (size >= sizeof *in) {
            state->offered = in->flags | (in->flags & FUSE_INIT_EXT ? (uint64_t)in->flags2 << 32 : 0);
            expect_reply(bridge, header);
        }
        return PASS;
    }
    case FUSE_FORGET:
        return !state->sees_all && note_forgotten(bridge, header->nodeid) ? NOTED : PASS;
    case FUSE_GETATTR: {
        const struct fuse_attr_out *found = find_directory(&bridge->directories, header->nodeid);
        const struct fuse_attr *known = find_attributes(&bridge->opens, header->nodeid);
        if ((found == NULL && known == NULL) || passes_on(bridge))
            return PASS;
        answer->attr = found ? *found : attr_out(*known, &state->keeping);
        answer->size = sizeof answer->attr;
        return ANSWER;
    }
    case FUSE_LOOKUP: {
        const struct span name = {body, size - 1}; /* behind it is a zero */
        if (finds_lent(bridge, header->nodeid, name, answer))
            return ANSWER;
        if (passes_on(bridge) || !is_absent(&bridge->directories, state->fresh, header->nodeid, name)) {
            if (has_locks(state) && !expect_entry(bridge, header, size))
                return refuse(answer, ENFILE);
            note_asked(&bridge->entries, header->unique, header->nodeid, name);
            return has_locks(state) || passes_on(bridge) ? PASS : TRY;
        }
        uint64_t kept_ns = state->shared[header->nodeid % SHARED_MAX] == header->nodeid ? 0 : state->keeping.absent_ns;
        if (has_locks(state))
            note_name_told(bridge, name_hash(header->nodeid, name), 0, kept_ns);
        answer->entry.entry_valid = kept_ns / SECOND_NS;
        answer->entry.entry_valid_nsec = kept_ns % SECOND_NS;
        answer->size = sizeof answer->entry;
        return ANSWER;
    }
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_SYMLINK:
    case FUSE_LINK:
        return !has_locks(state) || expect_entry(bridge, header, size) ? PASS : refuse(answer, ENFILE);
    case FUSE_RENAME:
    case FUSE_RENAME2:
        note_moved(bridge, header, body, size);
        return PASS;
    case FUSE_READDIRPLUS: {
        const struct fuse_read_in *in = body;
        const struct end *end = end_of(&bridge->directories, header->nodeid);
        bool is_end = end->ino == header->nodeid && end->offset == in->offset && !passes_on(bridge);
        return is_end ? ANSWER : HAND_OVER;
    }
    case FUSE_SETLK:
    case FUSE_SETLKW:
        note_in(bridge->locked, header->nodeid);
        return HAND_OVER;
    case FUSE_FLUSH:
        if (no_flush(state))
            return PASS;
        return is_in(bridge->locked, header->nodeid) || was_written(body) ? HAND_OVER : ANSWER;
    case FUSE_RELEASE: {
        uint64_t handle;
        if (is_in(bridge->locked, header->nodeid))
            return HAND_OVER;
        if (was_counted(bridge, header, answer))
            return ANSWER;
        memcpy(&handle, body, sizeof handle);
        return close_lent(&bridge->opens, handle, header->unique) ? ANSWER : PASS;
    }
    case FUSE_READ:
        return reads_placed(bridge, header->nodeid, body, answer) ? ANSWER : PASS;
    case FUSE_OPEN:
        if (was_counted(bridge, header, answer) ||
            opens_lent(bridge, header->nodeid, body, now_ns, header->unique, answer))
            return ANSWER;
        break;
    case FUSE_TMPFILE: /* as a CREATE, which libfuse knows, of the name "/" that it comes with and no file can have */
        header->opcode = FUSE_CREATE;
        break;
    case FUSE_CREATE:
        break;

    case FUSE_SETXATTR:
        forget_plain(bridge, header->nodeid);
        return PASS;
    case FUSE_GETXATTR:
        return examine_getxattr(bridge, header, body, size, answer);
    case FUSE_OPENDIR:
        /* Told once, the kernel opens directories by itself from then on, and caches what it has listed. */
        return state->offered & state->wanted & FUSE_NO_OPENDIR_SUPPORT ? refuse(answer, ENOSYS) : PASS;
    case FUSE_FSYNCDIR:
        /* A directory's handle is its inode number; the kernel has none to send when it did not ask OPENDIR. */
        memcpy(body, &header->nodeid, sizeof header->nodeid);
        return PASS;
    case FUSE_IOCTL: {
        const struct fuse_ioctl_in *in = body;
        uint32_t type = in->cmd >> 8 & 0xff;
        if (type != state->ioctl_type && type != 'f' && type != 'X') /* two of them are chattr's */
            return refuse(answer, ENOTTY); /* isatty(3), which Python's open() calls, among others */
        return size - sizeof *in == in->in_size ? HAND_OVER : refuse(answer, EINVAL);
    }
    default:
        return kind->verdict;
    }
    /* Without the edit of its reply, the kernel would take the backing id for a part of the handle. */
    return expect_entry(bridge, header, header->opcode == FUSE_CREATE ? size : 0) ? PASS : refuse(answer, ENFILE);
}

/* --- replies --- */

static inline void edit_init(struct state *state, struct fuse_init_out *out)
{
    uint64_t flags = out->flags | (out->flags & FUSE_INIT_EXT ? (uint64_t)out->flags2 << 32 : 0);
    flags |= state->offered & (state->wanted | FUSE_INIT_EXT);
    if (flags & FUSE_EXPLICIT_INVAL_DATA)
        flags &= ~(uint64_t)FUSE_AUTO_INVAL_DATA; /* where both are set, the kernel takes this one */
    if (flags & INIT_PASSTHROUGH)
        memcpy((char *)out + MAX_STACK_DEPTH_AT, &(uint32_t){1}, sizeof(uint32_t));
    if (state->max_background) {
        out->max_background = state->max_background;
        out->congestion_threshold = (uint16_t)(state->max_background - state->max_background / 4);
    }
    out->flags = (uint32_t)flags;
    if (flags & FUSE_INIT_EXT)
        out->flags2 = (uint32_t)(flags >> 32);
    state->granted = flags;
}

static inline void edit_open(const struct state *state, uint64_t nodeid, struct open_out *out)
{
    uint64_t backing = out->fh >> HANDLE_BITS;
    out->open_flags |= no_flush(state);
    if (out->fh == LENT_HERE) {
        out->fh = LENT_HANDLE | nodeid;
        return;
    }
    out->fh &= (UINT64_C(1) << HANDLE_BITS) - 1;
    if (backing) {
        /* It goes with no flag about the page cache. Direct I/O comes to us all the same; mappings do not. */
        out->open_flags = OPEN_PASSTHROUGH | no_flush(state) | (out->open_flags & FOPEN_DIRECT_IO);
        out->backing_id = (int32_t)backing;
    } else if (out->open_flags & FOPEN_DIRECT_IO) {
        out->open_flags |= FOPEN_PARALLEL_DIRECT_WRITES;
    }
}

/* A reply, as its header and the part behind it. One with an entry is known by its length; another of that length does
 * no harm. */
static inline void note_reply(struct bridge *bridge, const struct fuse_out_header *header, const void *body, size_t size)
{
    struct fuse_entry_out entry;
    if (header->error != 0 || (size != sizeof entry && size != sizeof(struct create_out)))
        return;
    memcpy(&entry, body, sizeof entry);
    note_told(&bridge->state, entry.nodeid);
    /* A name that the kernel must not keep, as others do, is asked for each time. */
    bool is_kept = entry.entry_valid || entry.entry_valid_nsec || bridge->state.keeping.entry_ns == 0;
    if (entry.nodeid != 0 && is_kept)
        note_found(&bridge->entries, header->unique, entry.nodeid);
}

/* A reply, as its header and the part behind it (size 0: none). Edits both in place. */
static inline void edit_reply(struct bridge *bridge, const struct fuse_out_header *header, void *body, size_t size)
{
    size_t i = 0;
    while (i < bridge->expected_count && bridge->expected[i].unique != header->unique)
        i++;
    if (i == bridge->expected_count)
        return;
    struct expected request = bridge->expected[i];
    bridge->expected[i] = bridge->expected[--bridge->expected_count];

    if (request.name && header->error == 0 && size >= sizeof(struct fuse_entry_out)) {
        struct fuse_entry_out entry;
        memcpy(&entry, body, sizeof entry);
        note_name_told(bridge, request.name, entry.nodeid, entry.entry_valid * SECOND_NS + entry.entry_valid_nsec);
    }
    uint64_t plain = 0; /* an inode that has no security.capability */
    if (request.opcode == FUSE_INIT && header->error == 0 && size >= sizeof(struct fuse_init_out)) {
        edit_init(&bridge->state, body);
        bridge->opens.kept.granted = bridge->state.granted;
    } else if (request.opcode == FUSE_OPEN && header->error == 0 && size >= sizeof(struct open_out)) {
        edit_open(&bridge->state, request.nodeid, body);
    } else if (request.opcode == FUSE_CREATE && header->error == 0 && size >= sizeof(struct create_out)) {
        edit_open(&bridge->state, request.nodeid, &((struct create_out *)body)->open);
        plain = ((struct create_out *)body)->entry.nodeid;
    } else if (request.opcode == FUSE_GETXATTR && header->error == -ENODATA) {
        plain = request.nodeid;
    }
    if (plain && request.xattr_changes == bridge->xattr_changes)
        bridge->plain[plain % PLAIN_MAX] = plain;
}

#endif
