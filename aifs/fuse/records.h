/*
 * Records of the metadata store as the kernel wants them. Pure: no I/O, no Python.
 *
 * What is read of them is documented with their codecs: the end of an entry's key (aifs/meta/keys.py), an entry, and
 * the head of an inode's record (aifs/meta/records.py). Nothing beyond the given lengths is touched.
 */
#ifndef AIFS_RECORDS_H
#define AIFS_RECORDS_H

#include <assert.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define RECORD_FORMAT 1
#define RECORD_FORMAT_IMPORTED 2 /* of form IMPORTED alone; the head is the same */
#define FORM_IMPORTED 5
#define FORM_MASK 63

struct inode_record { /* records.INODE */
    uint8_t format, form, policy_length, servers;
    uint32_t mode, uid, gid, nlink, rdev;
    uint64_t size, blocks;
    int64_t atime_ns, mtime_ns, ctime_ns;
    uint8_t rest[36];
    uint16_t acl_length, default_acl_length;
};
static_assert(sizeof(struct inode_record) == 104 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "layout");

enum { ENTRY_KEY_SIZE = 17, COOKIE_AT = 9, ENTRY_NAME_AT = 9 };

struct span {
    const char *start;
    size_t length;
};

/* What the kernel is told of all files: how long it may keep names, that there is none, and attributes; st_blksize. */
struct keeping {
    uint64_t entry_ns, absent_ns, attr_ns;
    uint32_t block_size;
};

#define SECOND_NS 1000000000

static inline uint64_t big_endian(const char *number)
{
    uint64_t value;
    memcpy(&value, number, sizeof value);
    return __builtin_bswap64(value);
}

static inline void put_time(int64_t time_ns, uint64_t *seconds, uint32_t *rest)
{
    int64_t whole = time_ns / SECOND_NS, part = time_ns % SECOND_NS;
    *seconds = (uint64_t)(whole - (part < 0)); /* C rounds towards zero, and the kernel wants parts that are positive */
    *rest = (uint32_t)(part + (part < 0 ? SECOND_NS : 0));
}

static inline bool is_inode(struct span inode)
{
    if (inode.length < sizeof(struct inode_record))
        return false;
    return inode.start[0] == RECORD_FORMAT ||
           (inode.start[0] == RECORD_FORMAT_IMPORTED && (inode.start[1] & FORM_MASK) == FORM_IMPORTED);
}

/* Whether the records are ones that can be read. */
static inline bool is_entry(struct span key, struct span entry, struct span inode)
{
    return key.length == ENTRY_KEY_SIZE && entry.length > ENTRY_NAME_AT && is_inode(inode);
}

static inline struct inode_record decoded(struct span inode)
{
    struct inode_record record;
    memcpy(&record, inode.start, sizeof record);
    return record;
}

static inline struct fuse_attr attributes_of(uint64_t ino, struct inode_record record, uint32_t block_size)
{
    struct fuse_attr found = {
        .ino = ino,
        .size = record.size,
        .blocks = record.blocks,
        .mode = record.mode,
        .nlink = record.nlink,
        .uid = record.uid,
        .gid = record.gid,
        .rdev = record.rdev,
        .blksize = block_size,
    };
    put_time(record.atime_ns, &found.atime, &found.atimensec);
    put_time(record.mtime_ns, &found.mtime, &found.mtimensec);
    put_time(record.ctime_ns, &found.ctime, &found.ctimensec);
    return found;
}

static inline struct fuse_attr_out attr_out(struct fuse_attr attr, const struct keeping *keeping)
{
    return (struct fuse_attr_out){
        .attr_valid = keeping->attr_ns / SECOND_NS,
        .attr_valid_nsec = keeping->attr_ns % SECOND_NS,
        .attr = attr,
    };
}

static inline struct fuse_entry_out entry_out(uint64_t ino, struct fuse_attr attr, const struct keeping *keeping)
{
    return (struct fuse_entry_out){
        .nodeid = ino,
        .entry_valid = keeping->entry_ns / SECOND_NS,
        .entry_valid_nsec = keeping->entry_ns % SECOND_NS,
        .attr_valid = keeping->attr_ns / SECOND_NS,
        .attr_valid_nsec = keeping->attr_ns % SECOND_NS,
        .attr = attr,
    };
}

/* Puts one entry at `out`; how long it is, or 0 if it is longer than `room`. For is_entry(). */
static inline size_t put_entry(char *out, size_t room, struct span key, struct span entry, struct span inode,
                               const struct keeping *keeping)
{
    size_t name_length = entry.length - ENTRY_NAME_AT, length = sizeof(struct fuse_direntplus) + name_length;
    size_t padded = (length + 7) / 8 * 8;
    if (padded > room)
        return 0;
    struct inode_record record = decoded(inode);
    uint64_t ino = big_endian(entry.start);
    const struct fuse_direntplus plus = {
        .entry_out = entry_out(ino, attributes_of(ino, record, keeping->block_size), keeping),
        .dirent.ino = ino,
        .dirent.off = big_endian(key.start + COOKIE_AT) + 1, /* 0 is the start */
        .dirent.namelen = (uint32_t)name_length,
        .dirent.type = record.mode >> 12 & 15,
    };
    memcpy(out, &plus, sizeof plus);
    memcpy(out + sizeof plus, entry.start + ENTRY_NAME_AT, name_length);
    memset(out + length, 0, padded - length);
    return padded;
}

/* Whether the inode has an ACL, which the kernel may ask for once it has been told of the inode. */
static inline bool has_acl(struct span inode)
{
    struct inode_record record = decoded(inode);
    return record.acl_length || record.default_acl_length;
}

#endif
