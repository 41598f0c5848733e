/*
 * What the kernel may keep of names, where other hosts may change them: what it was told that they lead to, and until
 * when it keeps that. So it need not forget what it does not know, or knows as it is; and what it cannot forget, because
 * a program holds the lock of the directory, is over at a time that is known. Pure: no I/O, no Python.
 */
#ifndef AIFS_NAMES_H
#define AIFS_NAMES_H

#include <stddef.h>
#include <stdint.h>

#define UNKNOWN_INO UINT64_MAX /* the kernel may believe that the name leads to any inode */

enum {
    ANY_NAME = 1,        /* in place of the hash of a name: several names share the place */
    NAMES_MAX = 1 << 16, /* names that are known, each in its place by its hash */
};

struct told_name {
    uint64_t hash; /* 0: a free place */
    uint64_t ino;  /* 0: that there is none */
    uint64_t until_ns;
};

/* The kernel is told what a name leads to, and keeps that from now until then. */
static inline void note_told_name(struct told_name *names, struct told_name told, uint64_t now_ns)
{
    struct told_name *place = names + told.hash % NAMES_MAX;
    if (told.until_ns <= now_ns)
        return;
    if (place->until_ns > now_ns) { /* else what was told before is over */
        if (place->hash != told.hash)
            told.hash = ANY_NAME;
        if (place->hash != told.hash || place->ino != told.ino)
            told.ino = UNKNOWN_INO;
        if (place->until_ns > told.until_ns)
            told.until_ns = place->until_ns;
    }
    *place = told;
}

/* What the kernel may keep of a name, until when; until_ns 0: nothing. */
static inline struct told_name find_told_name(const struct told_name *names, uint64_t hash, uint64_t now_ns)
{
    const struct told_name *place = names + hash % NAMES_MAX;
    if (place->until_ns <= now_ns || (place->hash != hash && place->hash != ANY_NAME))
        return (struct told_name){hash, 0, 0};
    return *place;
}

/* The kernel has forgotten what it kept of a name, when that was until then. */
static inline void note_dropped_name(struct told_name *names, uint64_t hash, uint64_t until_ns)
{
    struct told_name *place = names + hash % NAMES_MAX;
    if (place->hash == hash && place->until_ns == until_ns)
        place->until_ns = 0;
}

#endif
