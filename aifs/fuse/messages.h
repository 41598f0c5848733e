/*
 * The FUSE messages that the bridge reads or edits, and what it does to them. Pure: no I/O, no Python.
 *
 * examine_request() looks at a request of the kernel before libfuse does, edit_reply() at a reply of libfuse before the
 * kernel does. Both are given the length that was really read or is really sent, and touch nothing beyond it.
 *
 * The layouts are those of the kernel's <linux/fuse.h>, protocol 7.45; they are repeated here because the header of
 * the machine that compiles this may be older than the kernel that runs it.
 */
#ifndef AIFS_MESSAGES_H
#define AIFS_MESSAGES_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "opens.h"
#include "records.h"

/* --- the protocol --- */

enum opcode {
    GETATTR = 3,
    SETATTR = 4,
    OPEN = 14,
    WRITE = 16,
    RELEASE = 18,
    SETXATTR = 21,
    GETXATTR = 22,
    INIT = 26,
    OPENDIR = 27,
    FSYNCDIR = 30,
    CREATE = 35,
    INTERRUPT = 36,
    IOCTL = 39,
    FALLOCATE = 43,
    READDIRPLUS = 44,
    LSEEK = 46,
    COPY_FILE_RANGE = 47,
    SYNCFS = 50,
    TMPFILE = 51,
    STATX = 52,
    COPY_FILE_RANGE_64 = 53,
    OPCODES = 64, /* one more than the largest that is counted */
};

/* Flags of INIT; those above bit 31 travel in flags2. */
#define INIT_AUTO_INVAL_DATA (UINT64_C(1) << 12)
#define INIT_NO_OPENDIR_SUPPORT (UINT64_C(1) << 24)
#define INIT_EXPLICIT_INVAL_DATA (UINT64_C(1) << 25)
#define INIT_EXT (UINT64_C(1) << 30)
#define INIT_PASSTHROUGH (UINT64_C(1) << 37)

#define FOPEN_DIRECT_IO (1u << 0)
#define FOPEN_KEEP_CACHE (1u << 1)
#define FOPEN_NOFLUSH (1u << 5)
#define FOPEN_PARALLEL_DIRECT_WRITES (1u << 6)
#define FOPEN_PASSTHROUGH (1u << 7)

#define OPEN_NOATIME 01000000u /* O_NOATIME, as the kernel has it */

struct in_header {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, extensions;
};
static_assert(sizeof(struct in_header) == 40, "layout");

struct out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};
static_assert(sizeof(struct out_header) == 16, "layout");

#define NOTIFY_INVAL_INODE 2
struct inval_inode_out { /* offset -1: of the attributes alone */
    struct out_header header;
    uint64_t nodeid;
    int64_t offset, length;
};
static_assert(sizeof(struct inval_inode_out) == 40, "layout");

struct init_in {
    uint32_t major, minor, max_readahead, flags, flags2, unused[11];
};
static_assert(sizeof(struct init_in) == 64, "layout");

struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
    uint16_t request_timeout, unused[11];
};
static_assert(sizeof(struct init_out) == 64 && offsetof(struct init_out, max_stack_depth) == 36, "layout");

struct open_in {
    uint32_t flags, open_flags;
};
struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};
static_assert(sizeof(struct open_out) == 16, "layout");

struct create_out {
    uint64_t nodeid, rest[15];
    struct open_out open;
};
static_assert(sizeof(struct create_out) == 144, "layout");

struct ioctl_in {
    uint64_t fh;
    uint32_t flags, command;
    uint64_t argument;
    uint32_t in_size, out_size;
};
static_assert(sizeof(struct ioctl_in) == 32, "layout");

enum verdict {
    PASS,      /* libfuse gets it */
    ANSWER,    /* the bridge answers it, as the struct answer says */
    HAND_OVER, /* a Python coroutine answers it */
    OFFER,     /* Python is asked whether it is for one of its own; if not: PASS */
};

struct kind {
    enum verdict verdict; /* unless examine_request() knows better */
    uint8_t least;        /* how long the body is at least */
    uint8_t flags_at;     /* where flags lie in it */
    uint16_t kill;        /* the one among them that asks to clear the set-id bits */
};
static const struct kind kinds[OPCODES] = {
    [SETATTR] = {.least = 88, .flags_at = 0, .kill = 1 << 11},
    [OPEN] = {.least = sizeof(struct open_in), .flags_at = 4, .kill = 1 << 0},
    [WRITE] = {.least = 40, .flags_at = 20, .kill = 1 << 2},
    [RELEASE] = {.least = 24},
    [FSYNCDIR] = {.least = 16},
    [CREATE] = {.least = 16, .flags_at = 12, .kill = 1 << 0},
    [TMPFILE] = {.least = 16, .flags_at = 12, .kill = 1 << 0},
    [IOCTL] = {HAND_OVER, .least = sizeof(struct ioctl_in)},
    [FALLOCATE] = {HAND_OVER, .least = 32},
    [READDIRPLUS] = {HAND_OVER, .least = 40},
    [LSEEK] = {HAND_OVER, .least = 24},
    [COPY_FILE_RANGE] = {HAND_OVER, .least = 56},
    [COPY_FILE_RANGE_64] = {HAND_OVER, .least = 56},
    [SYNCFS] = {HAND_OVER, .least = 8},
    [STATX] = {HAND_OVER, .least = 24},
};

#define GETXATTR_NAME_AT 8
#define INTERRUPT_SIZE 8

/* --- the state of one mount --- */

/* A handle of the filesystem, as it answers OPEN and CREATE: the backing id (0: none; the kernel counts them up to
 * INT_MAX) above the handle proper. */
#define HANDLE_BITS 33

/* Requests whose reply will be looked at; more than the filesystem works on at once. */
#define EXPECTED_MAX 512

/* Inodes that may have an ACL, by a hash of their number: bits, never cleared. */
#define ACLS_MAX (1 << 20)

/* Inodes known to have no security.capability: the last ones created or asked for, by a hash of their number. */
#define PLAIN_MAX 8192

struct expected {
    uint64_t unique, nodeid, xattr_changes;
    uint32_t opcode;
};

struct bridge {
    /* Chosen before the mount. */
    uint64_t wanted; /* flags of INIT to ask for where the kernel offers them */
    uint16_t max_background;
    uint8_t ioctl_type; /* commands of another type are no business of the filesystem */

    /* Learned from INIT. */
    uint64_t offered, granted;

    /* Of the request examined last. */
    bool kill_privileges;
    uint64_t nodeid;
    uint32_t uid, pid;
    uint64_t counts[OPCODES][2]; /* of all requests, and of those that were answered here */
    uint64_t xattr_changes;
    uint64_t plain[PLAIN_MAX];
    uint8_t acls[ACLS_MAX / 8];
    struct expected expected[EXPECTED_MAX];
    size_t expected_count;

    bool sees_all; /* somebody wants to see all requests: what Python can answer is passed on */
    struct keeping keeping;
    struct attr_out directories[DIRECTORIES_MAX];
    struct opens opens;
};

struct answer {
    int error;
    bool is_access; /* the kernel's idea of the inode's times is old, and it does not know */
    size_t size; /* of what goes with it */
    union {
        struct open_out open;
        struct attr_out attr;
    };
};

/* --- requests --- */

static inline bool expect_reply(struct bridge *bridge, const struct in_header *header)
{
    if (bridge->expected_count == EXPECTED_MAX)
        return false;
    bridge->expected[bridge->expected_count++] = (struct expected){
        .unique = header->unique,
        .nodeid = header->nodeid,
        .xattr_changes = bridge->xattr_changes,
        .opcode = header->opcode,
    };
    return true;
}

static inline enum verdict refuse(struct answer *answer, int error)
{
    answer->error = error;
    return ANSWER;
}

/* Whether the name that GETXATTR asks for begins so. */
static inline bool asks_for(const char *body, size_t size, const char *start, size_t length)
{
    return size >= GETXATTR_NAME_AT + length && memcmp(body + GETXATTR_NAME_AT, start, length) == 0;
}

static inline void note_acl(struct bridge *bridge, uint64_t nodeid)
{
    bridge->acls[nodeid % ACLS_MAX / 8] |= (uint8_t)(1 << nodeid % 8);
}

static inline bool may_have_acl(const struct bridge *bridge, uint64_t nodeid)
{
    return bridge->acls[nodeid % ACLS_MAX / 8] >> nodeid % 8 & 1;
}

/* Whether an OPEN is answered here: for reading, of an inode that is lent. */
static inline bool opens_lent(struct bridge *bridge, uint64_t ino, const struct open_in *in, uint64_t now_ns,
                              struct answer *answer)
{
    if (bridge->sees_all || (in->flags & (O_ACCMODE | O_TRUNC)) != O_RDONLY || in->open_flags != 0)
        return false;
    const struct lent *lent = open_lent(&bridge->opens, ino, now_ns, !(in->flags & OPEN_NOATIME));
    if (lent == NULL)
        return false;
    answer->open = (struct open_out){
        .fh = LENT_HANDLE | ino,
        .open_flags = FOPEN_NOFLUSH | (lent->backing ? FOPEN_PASSTHROUGH : FOPEN_KEEP_CACHE),
        .backing_id = lent->backing,
    };
    answer->size = sizeof answer->open;
    answer->is_access = lent->backing == 0 && lent->accessed_ns == now_ns;
    return true;
}

/*
 * The kernel asks for ACLs whenever somebody else than its owner first uses an inode: nearly none has one, and whatever
 * the filesystem answers about an inode that has, it says so before (note_acl).
 *
 * It asks for security.capability before the first write to an inode: nearly no file has one. The negative answer is
 * kept for inodes that were just created or have just been asked for. An inode number is never used again, and every
 * change of an attribute passes here.
 */
static inline enum verdict examine_getxattr(struct bridge *bridge, const struct in_header *header, const char *body,
                                            size_t size, struct answer *answer)
{
    static const char acl[] = "system.posix_acl_", capability[] = "security.capability";
    if (asks_for(body, size, acl, sizeof acl - 1))
        return may_have_acl(bridge, header->nodeid) ? PASS : refuse(answer, ENODATA);
    if (!asks_for(body, size, capability, sizeof capability))
        return PASS;
    if (header->nodeid != 0 && bridge->plain[header->nodeid % PLAIN_MAX] == header->nodeid)
        return refuse(answer, ENODATA);
    expect_reply(bridge, header);
    return PASS;
}

/* A request in full (header and body), and the time of day: the verdict, and for ANSWER the answer. Edits it in place. */
static inline enum verdict examine_request(struct bridge *bridge, void *message, size_t size, uint64_t now_ns,
                                           struct answer *answer)
{
    struct in_header *header = message;
    *answer = (struct answer){0};
    bridge->kill_privileges = false;
    if (size < sizeof *header || header->len != size)
        return PASS; /* libfuse says what it thinks of it */
    bridge->nodeid = header->nodeid;
    bridge->uid = header->uid;
    bridge->pid = header->pid;
    if (header->opcode >= OPCODES)
        return PASS;
    bridge->counts[header->opcode][0]++;
    const struct kind *kind = &kinds[header->opcode];
    void *body = header + 1;
    size -= sizeof *header;
    if (size < kind->least)
        return refuse(answer, EINVAL);
    if (kind->kill) {
        uint32_t flags;
        memcpy(&flags, (char *)body + kind->flags_at, sizeof flags);
        bridge->kill_privileges = flags & kind->kill;
    }

    switch (header->opcode) {
    case INIT: {
        const struct init_in *in = body;
        if (size >= sizeof *in) {
            bridge->offered = in->flags;
            if (in->flags & INIT_EXT)
                bridge->offered |= (uint64_t)in->flags2 << 32;
            expect_reply(bridge, header);
        }
        return PASS;
    }
    case GETATTR: {
        const struct attr_out *found = bridge->sees_all ? NULL : find_directory(bridge->directories, header->nodeid);
        if (found == NULL)
            return PASS;
        answer->attr = *found;
        answer->size = sizeof answer->attr;
        return ANSWER;
    }
    case RELEASE: {
        uint64_t handle;
        memcpy(&handle, body, sizeof handle);
        return close_lent(&bridge->opens, handle) ? ANSWER : PASS;
    }
    case OPEN:
        if (opens_lent(bridge, header->nodeid, body, now_ns, answer))
            return ANSWER;
        break;
    case TMPFILE: /* as a CREATE, which libfuse knows, of the name "/" that it comes with and that no file can have */
        header->opcode = CREATE;
        break;
    case CREATE:
        break;

    case SETXATTR:
        bridge->xattr_changes++;
        bridge->plain[header->nodeid % PLAIN_MAX] = 0;
        return PASS;
    case GETXATTR:
        return examine_getxattr(bridge, header, body, size, answer);
    case OPENDIR:
        /* Told once, the kernel opens directories by itself from then on, and caches what it has listed. */
        return bridge->offered & bridge->wanted & INIT_NO_OPENDIR_SUPPORT ? refuse(answer, ENOSYS) : PASS;
    case FSYNCDIR:
        /* A directory's handle is its inode number; the kernel has none to send when it did not ask OPENDIR. */
        memcpy(body, &header->nodeid, sizeof header->nodeid);
        return PASS;
    case IOCTL: {
        const struct ioctl_in *in = body;
        uint32_t type = in->command >> 8 & 0xff;
        if (type != bridge->ioctl_type && type != 'f' && type != 'X') /* two of them are chattr's */
            return refuse(answer, ENOTTY); /* isatty(3), which Python's open() calls, among others */
        return size - sizeof *in == in->in_size ? HAND_OVER : refuse(answer, EINVAL);
    }
    case INTERRUPT:
        return size >= INTERRUPT_SIZE ? OFFER : PASS;
    default:
        return kind->verdict;
    }
    /* Without the edit of its reply, the kernel would take the backing id for a part of the handle. */
    return expect_reply(bridge, header) ? PASS : refuse(answer, ENFILE);
}

/* --- replies --- */

static inline void edit_init(struct bridge *bridge, struct init_out *out)
{
    uint64_t flags = out->flags | (out->flags & INIT_EXT ? (uint64_t)out->flags2 << 32 : 0);
    flags |= bridge->offered & bridge->wanted;
    if (bridge->offered & INIT_EXT)
        flags |= INIT_EXT;
    if (flags & INIT_EXPLICIT_INVAL_DATA)
        flags &= ~INIT_AUTO_INVAL_DATA; /* where both are set, the kernel takes this one */
    if (flags & INIT_PASSTHROUGH)
        out->max_stack_depth = 1;
    if (bridge->max_background) {
        out->max_background = bridge->max_background;
        out->congestion_threshold = (uint16_t)(bridge->max_background - bridge->max_background / 4);
    }
    out->flags = (uint32_t)flags;
    if (flags & INIT_EXT)
        out->flags2 = (uint32_t)(flags >> 32);
    bridge->granted = flags;
}

static inline void edit_open(struct open_out *out)
{
    uint64_t backing = out->fh >> HANDLE_BITS;
    out->fh &= (UINT64_C(1) << HANDLE_BITS) - 1;
    out->open_flags |= FOPEN_NOFLUSH; /* a write leaves nothing to do for close(2) */
    if (backing) {
        /* It goes with no flag about the page cache. Direct I/O comes to us all the same; mappings do not. */
        out->open_flags = FOPEN_PASSTHROUGH | FOPEN_NOFLUSH | (out->open_flags & FOPEN_DIRECT_IO);
        out->backing_id = (int32_t)backing;
    } else if (out->open_flags & FOPEN_DIRECT_IO) {
        out->open_flags |= FOPEN_PARALLEL_DIRECT_WRITES;
    }
}

/* A reply, as its header and the part behind it (size 0: none). Edits both in place. */
static inline void edit_reply(struct bridge *bridge, const struct out_header *header, void *body, size_t size)
{
    size_t i = 0;
    while (i < bridge->expected_count && bridge->expected[i].unique != header->unique)
        i++;
    if (i == bridge->expected_count)
        return;
    struct expected request = bridge->expected[i];
    bridge->expected[i] = bridge->expected[--bridge->expected_count];

    uint64_t plain = 0; /* an inode that has no security.capability */
    if (request.opcode == INIT && header->error == 0 && size >= sizeof(struct init_out)) {
        edit_init(bridge, body);
    } else if (request.opcode == OPEN && header->error == 0 && size >= sizeof(struct open_out)) {
        edit_open(body);
    } else if (request.opcode == CREATE && header->error == 0 && size >= sizeof(struct create_out)) {
        edit_open(&((struct create_out *)body)->open);
        plain = ((struct create_out *)body)->nodeid;
    } else if (request.opcode == GETXATTR && header->error == -ENODATA) {
        plain = request.nodeid;
    }
    if (plain && request.xattr_changes == bridge->xattr_changes)
        bridge->plain[plain % PLAIN_MAX] = plain;
}

#endif
