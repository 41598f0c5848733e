/*
 * Names that programs have looked up: so a file that is lent is found again without the filesystem when the kernel has
 * forgotten its name, as it does with many before it forgets their pages. Only where there are no other hosts. Pure: no
 * I/O, no Python.
 *
 * All changes of records pass here (note_entry), before anybody can see them; so what is found here is always true.
 */
#ifndef AIFS_ENTRIES_H
#define AIFS_ENTRIES_H

#include "directories.h"

enum {
    ENTRIES_MAX = 1 << 15, /* names that are known, each in its place by its hash */
    ASKED_MAX = 256,       /* the same, of requests that have not been answered, by their number */
    SHORT_MAX = 47,        /* longer names are not known */
};

struct entry {
    uint64_t parent, ino; /* parent 0: a free place */
    uint8_t length;
    char name[SHORT_MAX];
};

struct entries {
    uint64_t changes; /* of names */
    struct asked {
        uint64_t unique, changes; /* as it was when it was asked */
        struct entry entry;
    } asked[ASKED_MAX];
    struct entry entries[ENTRIES_MAX];
};

static inline bool is_entry_of(const struct entry *entry, uint64_t parent, struct span name)
{
    return parent != 0 && entry->parent == parent && entry->length == name.length
           && memcmp(entry->name, name.start, name.length) == 0;
}

static inline struct entry *entry_at(struct entries *all, uint64_t parent, struct span name)
{
    return all->entries + name_hash(parent, name) % ENTRIES_MAX;
}

/* The inode that a name leads to; 0: it is not known. */
static inline uint64_t find_entry(struct entries *all, uint64_t parent, struct span name)
{
    const struct entry *found = entry_at(all, parent, name);
    return is_entry_of(found, parent, name) ? found->ino : 0;
}

/* The filesystem gets the LOOKUP of a name. */
static inline void note_asked(struct entries *all, uint64_t unique, uint64_t parent, struct span name)
{
    struct asked *asked = all->asked + unique % ASKED_MAX;
    if (name.length > SHORT_MAX)
        return;
    *asked = (struct asked){unique, all->changes, {.parent = parent, .length = (uint8_t)name.length}};
    memcpy(asked->entry.name, name.start, name.length);
}

/* It has found this inode. If any name has changed since it was asked, that may not be true any more. */
static inline void note_found(struct entries *all, uint64_t unique, uint64_t ino)
{
    struct asked *asked = all->asked + unique % ASKED_MAX;
    struct span name = {asked->entry.name, asked->entry.length};
    if (asked->unique != unique || asked->entry.parent == 0)
        return;
    asked->entry.ino = ino;
    if (asked->changes == all->changes)
        *entry_at(all, asked->entry.parent, name) = asked->entry;
    asked->entry.parent = 0;
}

/* Names of a directory may lead nowhere from now on, though their records stay for a while. */
static inline void forget_entries(struct entries *all)
{
    all->changes++;
    memset(all->entries, 0, sizeof all->entries);
}

/* The record of a name has changed. */
static inline void note_entry(struct entries *all, uint64_t parent, struct span name)
{
    struct entry *known = entry_at(all, parent, name);
    all->changes++;
    if (is_entry_of(known, parent, name))
        known->parent = 0;
}

#endif
