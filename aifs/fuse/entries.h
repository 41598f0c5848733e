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
    ENTRY_SETS = 1 << 13, /* a name that is known has its place in one of these, by its hash */
    ENTRY_WAYS = 4,
    ASKED_MAX = 256, /* requests that have not been answered, each in its place by its number */
    SHORT_MAX = 47,  /* longer names are not known */
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
    uint32_t hand;
    struct entry entries[ENTRY_SETS * ENTRY_WAYS];
};

static inline struct entry *entry_at(struct entries *all, uint64_t parent, struct span name)
{
    struct entry *set = all->entries + name_hash(parent, name) % ENTRY_SETS * ENTRY_WAYS;
    for (int i = 0; parent != 0 && i < ENTRY_WAYS; i++)
        if (set[i].parent == parent && set[i].length == name.length && memcmp(set[i].name, name.start, name.length) == 0)
            return set + i;
    return NULL;
}

/* The inode that a name leads to; 0: it is not known. */
static inline uint64_t find_entry(struct entries *all, uint64_t parent, struct span name)
{
    const struct entry *found = entry_at(all, parent, name);
    return found ? found->ino : 0;
}

/* A name leads to this inode, as its record says now. */
static inline void put_entry_of(struct entries *all, uint64_t parent, struct span name, uint64_t ino)
{
    struct entry *place = entry_at(all, parent, name);
    if (name.length > SHORT_MAX || parent == 0)
        return;
    if (place == NULL) {
        place = all->entries + name_hash(parent, name) % ENTRY_SETS * ENTRY_WAYS;
        int i = 0;
        while (i < ENTRY_WAYS && place[i].parent != 0)
            i++;
        place += i < ENTRY_WAYS ? (unsigned)i : all->hand++ % ENTRY_WAYS;
    }
    *place = (struct entry){.parent = parent, .ino = ino, .length = (uint8_t)name.length};
    memcpy(place->name, name.start, name.length);
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
    if (asked->changes == all->changes)
        put_entry_of(all, asked->entry.parent, name, ino);
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
    if (known != NULL)
        known->parent = 0;
}

#endif
