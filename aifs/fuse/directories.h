/*
 * What is known of directories, so that nobody else has to be asked: the attributes of those that were changed lately,
 * names that do not exist, and where listings end. Pure: no I/O, no Python.
 *
 * All changes of records pass here (note_record), before anybody can see them; so what is found here is always true.
 */
#ifndef AIFS_DIRECTORIES_H
#define AIFS_DIRECTORIES_H

#include <linux/limits.h>
#include <sys/stat.h>

#include "records.h"

enum {
    ATTRIBUTES_MAX = 1024, /* directories whose attributes are known, each in its place by its number */
    ENDS_MAX = 64,         /* the same, of those whose end is known */
    FRESH_MAX = 4096,      /* the same, of those all of whose names are marked */
    MARKS_MAX = 1 << 23,   /* bits of the Bloom filter */
    DENTRY_NAME_AT = 9,    /* of a dentry's key: type, parent, name */
};

struct directories {
    /* Directories that were changed lately, each as GETATTR of it is answered. After each change of a name the kernel
     * asks anew for the attributes of its directory, before the next name in it is used. */
    struct fuse_attr_out attributes[ATTRIBUTES_MAX];

    /* Names that were put into any directory since this was empty: two bits for each in a Bloom filter, which may mark
     * others, too. What it does not mark is in no directory that was made since. */
    uint64_t marks[MARKS_MAX / 64];
    uint32_t marked; /* how many bits are set; with half of them, all begins anew */

    struct end {
        uint64_t ino, offset; /* READDIRPLUS has nothing from that offset on */
    } ends[ENDS_MAX];
};

/* The answer about a directory, or NULL. */
static inline struct fuse_attr_out *find_directory(struct directories *directories, uint64_t ino)
{
    struct fuse_attr_out *place = directories->attributes + ino % ATTRIBUTES_MAX;
    return ino != 0 && place->attr.ino == ino ? place : NULL;
}

/* Where the bits of a name are, 32 bits each (FNV-1a). */
static inline uint64_t name_hash(uint64_t parent, struct span name)
{
    uint64_t hash = (parent ^ UINT64_C(0xcbf29ce484222325)) * UINT64_C(0x9E3779B97F4A7C15);
    for (size_t i = 0; i < name.length; i++)
        hash = (hash ^ (uint8_t)name.start[i]) * UINT64_C(0x100000001b3);
    return hash ^ hash >> 32;
}

static inline bool is_marked(const struct directories *directories, uint32_t place)
{
    return directories->marks[place % MARKS_MAX / 64] >> place % 64 & 1;
}

static inline void mark(struct directories *directories, uint32_t place)
{
    directories->marked += !is_marked(directories, place);
    directories->marks[place % MARKS_MAX / 64] |= UINT64_C(1) << place % 64;
}

/* Names that lead somewhere and are no entries: ".", "..", and ".aifs-data", where virtual files are. */
static inline bool is_special(struct span name)
{
    static const char virtual[] = ".aifs-data"; /* VIRTUAL of aifs/core/names.py */
    return name.start[0] == '.' && (name.length <= 2 || (name.length == sizeof virtual - 1
                                                         && memcmp(name.start, virtual, name.length) == 0));
}

/* Whether the name is in no directory, if its parent is one of `fresh`. */
static inline bool is_absent(const struct directories *directories, const uint64_t *fresh, uint64_t parent,
                             struct span name)
{
    if (parent == 0 || fresh[parent % FRESH_MAX] != parent || name.length > NAME_MAX || is_special(name))
        return false;
    uint64_t hash = name_hash(parent, name);
    return !is_marked(directories, (uint32_t)hash) || !is_marked(directories, (uint32_t)(hash >> 32));
}

static inline void note_name(struct directories *directories, uint64_t *fresh, uint64_t parent, struct span name)
{
    uint64_t hash = name_hash(parent, name);
    if (directories->marked >= MARKS_MAX / 2) {
        memset(directories->marks, 0, sizeof directories->marks);
        memset(fresh, 0, FRESH_MAX * sizeof *fresh);
        directories->marked = 0;
    }
    mark(directories, (uint32_t)hash);
    mark(directories, (uint32_t)(hash >> 32));
}

/* The place where the end of the directory's listing is known, or another one's. */
static inline struct end *end_of(struct directories *directories, uint64_t ino)
{
    return directories->ends + ino % ENDS_MAX;
}

/* The entry with this key, of ENTRY_KEY_SIZE, is the last one of its directory. */
static inline void note_end(struct directories *directories, struct span key)
{
    uint64_t ino = big_endian(key.start + 1);
    *end_of(directories, ino) = (struct end){ino, big_endian(key.start + COOKIE_AT) + 1};
}

/* An inode's record has changed. One with an ACL is left to others, who say so to the kernel's other questions before
 * they answer GETATTR. */
static inline void note_inode(struct directories *directories, uint64_t ino, struct span inode,
                              const struct keeping *keeping)
{
    struct fuse_attr_out *known = find_directory(directories, ino);
    if (known != NULL)
        known->attr.ino = 0;
    if (is_inode(inode) && !has_acl(inode) && S_ISDIR(decoded(inode).mode))
        directories->attributes[ino % ATTRIBUTES_MAX] =
            attr_out(attributes_of(ino, decoded(inode), keeping->block_size), keeping);
}

/* A record has changed; an empty one: it has been erased. */
static inline void note_record(struct directories *directories, uint64_t *fresh, struct span key, struct span record,
                               const struct keeping *keeping)
{
    if (key.length < DENTRY_NAME_AT)
        return;
    uint64_t number = big_endian(key.start + 1);
    if (key.start[0] == 'i' && key.length == DENTRY_NAME_AT)
        note_inode(directories, number, record, keeping);
    else if (key.start[0] == 'e')
        end_of(directories, number)->ino = 0;
    else if (key.start[0] == 'd' && record.length != 0)
        note_name(directories, fresh, number,
                  (struct span){key.start + DENTRY_NAME_AT, key.length - DENTRY_NAME_AT});
}

#endif
