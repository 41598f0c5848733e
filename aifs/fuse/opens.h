/*
 * Inodes that the filesystem has lent to the bridge: their OPEN for reading needs no decision, and is answered in C,
 * as is the RELEASE of what was opened so. Pure: no I/O, no Python.
 *
 * The filesystem takes an inode back before it uses it in another way; handles that are open then become its own. So
 * a handle of ours names the inode, and means the same on both sides.
 *
 * While a recording watches which files programs open, opens that are answered here are noted.
 */
#ifndef AIFS_OPENS_H
#define AIFS_OPENS_H

#include "records.h"

#define LENT_HANDLE (UINT64_C(1) << 63) /* of a handle of ours: this, and the inode number */
#define LENT_SETS 2048u                 /* an inode has its place in one of these, by a hash of its number */
#define LENT_WAYS 8
#define LENT_DAY_NS (UINT64_C(86400) * 1000000000) /* relatime */
#define NOTED_MAX 4096u                 /* opens that have been noted and not told; then the filesystem is asked */

struct lent {
    uint64_t ino;         /* 0: a free place */
    uint64_t copy;        /* what the filesystem calls its bytes; nothing to us */
    uint64_t due_ns;      /* an open from then on counts as access, and then none for a day; 0: each one counts */
    uint64_t accessed_ns; /* the last one that counts and has not been told; 0: none */
    uint32_t opens;       /* handles that are open */
    int32_t backing;      /* what they are passed through to; 0: the kernel keeps the pages itself */
    bool used;            /* opened since that was told */
    bool recalled;        /* the filesystem wants it back: it gets the next requests */
    bool asks;            /* a watcher wants to be asked, to see it before it is open */
    bool noted;           /* an open by `noted_by` is noted, which is enough */
    uint32_t noted_by;    /* a uid */
};
static_assert(sizeof(struct lent) == 48, "layout"); /* _LENT of aifs/fuse/bridge.py */

struct noted { /* a program has opened it to read */
    uint64_t ino;
    uint32_t uid, rest;
};
static_assert(sizeof(struct noted) == 16, "layout"); /* _NOTED of aifs/fuse/bridge.py */

/* The last request about an inode that is lent which was answered here. If the daemon is killed before the kernel has
 * the answer, it sends the request again, to the next daemon: that must not count it once more. */
struct counted {
    uint64_t unique; /* written last; 0: there is none */
    uint64_t ino;
    uint32_t opens; /* of the inode, with it */
    int32_t backing;
    uint32_t open_flags, rest; /* of an OPEN, as its reply has them */
};
static_assert(sizeof(struct counted) == 32, "layout");

#define KEPT_PAGE 4096

/* What a daemon that follows a killed one has to know: keep() of bridge.c puts it into memory that outlives both. */
struct kept {
    uint64_t granted;   /* flags of INIT */
    uint32_t init_size; /* 0: it has not come yet */
    char init[252];     /* the request */
    struct counted counted;
    char rest[KEPT_PAGE - 8 - 256 - sizeof(struct counted)];
};
static_assert(sizeof(struct kept) == KEPT_PAGE, "layout"); /* aifs/fuse/kept.py */

struct opens {
    struct {
        struct kept kept;
        struct lent lent[LENT_SETS * LENT_WAYS];
    } __attribute__((aligned(KEPT_PAGE)));
    uint32_t hand;
    bool watched;
    size_t noted_count;
    struct noted noted[NOTED_MAX];
    struct fuse_attr attributes[LENT_SETS * LENT_WAYS]; /* of these; ino 0: they are not known */
};

struct opener {
    uint32_t uid;
    bool counts; /* it is access, if that is due */
    bool ahead;  /* it reads ahead for other programs, and is not noted */
};

static inline struct lent *lent_set(struct opens *opens, uint64_t ino)
{
    return opens->lent + LENT_WAYS * (ino * UINT64_C(0x9E3779B97F4A7C15) >> 53); /* 11 bits */
}

static inline struct lent *find_lent(struct opens *opens, uint64_t ino)
{
    struct lent *set = lent_set(opens, ino);
    for (int i = 0; ino != 0 && i < LENT_WAYS; i++)
        if (set[i].ino == ino)
            return set + i;
    return NULL;
}

static inline int lent_worth(const struct lent *place)
{
    return place->ino == 0 ? 0 : place->used ? 2 : 1;
}

/* What there is no place for: nothing (ino 0), an inode that was not used lately, or the new one itself. One that is
 * lent already, as the same, stays so; an open counts as access from the new time on, and asks if that is new. */
static inline struct lent lend(struct opens *opens, struct lent new)
{
    struct lent *set = lent_set(opens, new.ino), *best = NULL;
    opens->hand++;
    opens->kept.counted.unique = 0; /* it has been answered long ago, and its inode may be counted anew */
    for (unsigned i = 0; i < LENT_WAYS; i++) {
        struct lent *place = set + (opens->hand + i) % LENT_WAYS;
        if (place->ino == new.ino && place->backing != new.backing)
            return new;
        if (place->ino == new.ino) {
            place->due_ns = new.due_ns;
            place->asks = new.asks;
            return (struct lent){0};
        }
        if (place->opens == 0 && (best == NULL || lent_worth(place) < lent_worth(best)))
            best = place;
    }
    if (best == NULL)
        return new;
    struct lent old = *best;
    *best = new;
    opens->attributes[best - opens->lent].ino = 0;
    return old;
}

/* The attributes of an inode that is lent, as long as no record of it changes; NULL: the filesystem has to be asked. */
static inline struct fuse_attr *find_attributes(struct opens *opens, uint64_t ino)
{
    const struct lent *found = find_lent(opens, ino);
    struct fuse_attr *known = found ? opens->attributes + (found - opens->lent) : NULL;
    return known && known->ino == ino && !found->recalled ? known : NULL;
}

/* The record of an inode that is lent, as it is. */
static inline void note_attributes(struct opens *opens, uint64_t ino, struct span inode, uint32_t block_size)
{
    const struct lent *found = find_lent(opens, ino);
    if (found != NULL && is_inode(inode) && !has_acl(inode))
        opens->attributes[found - opens->lent] = attributes_of(ino, decoded(inode), block_size);
}

/* It has changed. An access may not be on record yet: then the filesystem knows the time. */
static inline void note_new_attributes(struct opens *opens, uint64_t ino, struct span inode, uint32_t block_size)
{
    struct fuse_attr *known = find_attributes(opens, ino), before;
    if (known == NULL)
        return;
    before = *known;
    known->ino = 0;
    note_attributes(opens, ino, inode, block_size);
    if (known->atime < before.atime || (known->atime == before.atime && known->atimensec < before.atimensec))
        known->ino = 0;
}

/* An open that counts as access was at that time. */
static inline void note_access(struct opens *opens, struct lent *lent, uint64_t accessed_ns)
{
    struct fuse_attr *known = opens->attributes + (lent - opens->lent);
    lent->accessed_ns = accessed_ns;
    put_time((int64_t)accessed_ns, &known->atime, &known->atimensec);
}

/* The watcher will hear of this open; false: it has to be asked. */
static inline bool note_open(struct opens *opens, struct lent *lent, struct opener by)
{
    bool is_known = by.ahead || (lent->noted && lent->noted_by == by.uid);
    if (lent->asks || (!is_known && opens->noted_count == NOTED_MAX))
        return false;
    if (!is_known) {
        opens->noted[opens->noted_count++] = (struct noted){lent->ino, by.uid, 0};
        lent->noted = true;
        lent->noted_by = by.uid;
    }
    return true;
}

/* Whether opens are noted from now on, each anew. */
static inline void watch_opens(struct opens *opens, bool on)
{
    opens->watched = on;
    for (struct lent *lent = opens->lent; lent < opens->lent + LENT_SETS * LENT_WAYS; lent++)
        lent->noted = false;
}

/* The inode has so many handles now. A kill at any moment leaves both this count and the request, or neither. */
static inline void count_opens(struct opens *opens, struct lent *lent, uint32_t count, uint64_t unique)
{
    struct counted *counted = &opens->kept.counted;
    __atomic_store_n(&counted->unique, 0, __ATOMIC_SEQ_CST);
    counted->ino = lent->ino;
    counted->opens = count;
    counted->backing = lent->backing;
    __atomic_store_n(&counted->unique, unique, __ATOMIC_SEQ_CST);
    lent->opens = count;
}

/* The inode, with one more handle; NULL: the filesystem has to be asked. `unique`: of the request. */
static inline struct lent *open_lent(struct opens *opens, uint64_t ino, uint64_t now_ns, struct opener by,
                                     uint64_t unique)
{
    struct lent *found = find_lent(opens, ino);
    if (found == NULL || found->recalled || found->opens == UINT32_MAX)
        return NULL;
    if (opens->watched && !note_open(opens, found, by))
        return NULL;
    count_opens(opens, found, found->opens + 1, unique);
    found->used = true;
    if (by.counts && now_ns >= found->due_ns) {
        found->accessed_ns = now_ns;
        found->due_ns += found->due_ns ? now_ns + LENT_DAY_NS - found->due_ns : 0;
    }
    return found;
}

/* Whether the handle that is closed was one of an inode that is lent, and not wanted back. */
static inline bool close_lent(struct opens *opens, uint64_t handle, uint64_t unique)
{
    struct lent *found = handle & LENT_HANDLE ? find_lent(opens, handle & ~LENT_HANDLE) : NULL;
    if (found == NULL || found->recalled || found->opens == 0)
        return false;
    count_opens(opens, found, found->opens - 1, unique);
    return true;
}

/* The inode is lent no more; as it was (ino 0: it was not). ``idle``: only if it has no handles, else it is recalled. */
static inline struct lent take_back(struct opens *opens, uint64_t ino, bool idle)
{
    struct lent *found = find_lent(opens, ino), was = {0};
    if (found == NULL)
        return was;
    found->recalled = true;
    was = *found;
    opens->kept.counted.unique = 0; /* as in lend() */
    if (!idle || was.opens == 0)
        memset(found, 0, sizeof *found);
    return was;
}

/* Puts those at `out` that are open ('o'), or all ('a'), or that were used since that was asked last ('u'); how many. */
static inline size_t list_lent(struct opens *opens, char which, struct lent *out)
{
    size_t count = 0;
    for (struct lent *lent = opens->lent; lent < opens->lent + LENT_SETS * LENT_WAYS; lent++) {
        if (lent->ino == 0 || (which == 'o' && lent->opens == 0) || (which == 'u' && !lent->used))
            continue;
        out[count++] = *lent;
        if (which == 'u') {
            lent->used = false;
            lent->accessed_ns = 0;
        }
    }
    return count;
}

#endif
