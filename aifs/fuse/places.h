/*
 * Where the bytes of files lie that nobody changes, as the filesystem has told: their READ is answered in C, from local
 * files that the filesystem has open for that. Pure: no I/O, no Python.
 *
 * A *source* is an object set, or a container: one local file, or several that a file is striped over. A *place* is a
 * range of a file in a source. The filesystem takes the places of a file back before its bytes change.
 */
#ifndef AIFS_PLACES_H
#define AIFS_PLACES_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PLACED_SETS 2048u /* a file has its place in one of these, by a hash of its number */
#define PLACED_WAYS 8
#define SOURCES_MAX 16384u
#define COLUMNS_MAX 16
#define PLACES_MAX 64u /* of a file */
#define PARTS_MAX 512u /* of an answer */

struct source { /* stripe unit u is in file u mod width, at (u div width) * unit */
    uint32_t users; /* places */
    uint32_t unit, width; /* width 0: there is no such source */
    uint32_t in_memory;   /* reads never wait; else what has to be waited for is not read here */
    uint64_t read;        /* parts that began in unit u were read since that was asked: bit u mod 64 */
    int32_t fds[COLUMNS_MAX];
};

struct place { /* bytes start to end - 1 of the file are those of the source from `offset` on */
    uint64_t start, end, offset;
    uint32_t source, rest;
};
static_assert(sizeof(struct place) == 32, "layout"); /* _PLACE of aifs/fuse/bridge.py */

/* A source, and which units of it were read: struct source. */
struct read_units {
    uint64_t units;
    uint32_t source, rest;
};
static_assert(sizeof(struct read_units) == 16, "layout"); /* _READ of aifs/fuse/bridge.py */

struct placed {
    uint64_t ino; /* 0: a free entry */
    uint64_t size;
    uint32_t count;
    bool used;            /* read since that was asked */
    struct place *places; /* in their order; malloc's */
};

struct places {
    uint32_t hand;
    size_t idle_count;
    uint32_t idle[SOURCES_MAX]; /* sources without a place, which are no more; the filesystem closes them */
    struct source sources[SOURCES_MAX];
    struct placed placed[PLACED_SETS * PLACED_WAYS];
};

/* What is to be read: so many bytes of a local file. */
struct part {
    int32_t fd;
    bool in_memory;
    uint64_t offset;
    size_t length;
};

static inline struct placed *placed_set(struct places *all, uint64_t ino)
{
    return all->placed + PLACED_WAYS * (ino * UINT64_C(0x9E3779B97F4A7C15) >> 53); /* 11 bits */
}

static inline struct placed *find_placed(struct places *all, uint64_t ino)
{
    struct placed *set = placed_set(all, ino);
    for (int i = 0; ino != 0 && i < PLACED_WAYS; i++)
        if (set[i].ino == ino)
            return set + i;
    return NULL;
}

static inline void drop_placed(struct places *all, struct placed *file)
{
    for (uint32_t i = 0; i < file->count; i++) {
        struct source *source = all->sources + file->places[i].source;
        if (--source->users == 0) {
            source->width = 0;
            all->idle[all->idle_count++] = file->places[i].source;
        }
    }
    free(file->places);
    *file = (struct placed){0};
}

/* A source, which is there from its first place on. False: it is none. */
static inline bool put_source(struct places *all, uint32_t number, struct source source)
{
    bool is_one = number < SOURCES_MAX && source.unit > 0 && source.width > 0 && source.width <= COLUMNS_MAX;
    if (is_one && all->sources[number].users == 0) {
        source.users = 0;
        source.read = 0;
        all->sources[number] = source;
    }
    return is_one;
}

static inline bool are_places(const struct places *all, uint64_t size, const struct place *places, size_t count)
{
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        if (places[i].source >= SOURCES_MAX || all->sources[places[i].source].width == 0)
            return false;
        if (places[i].start < end || places[i].end <= places[i].start || places[i].end > size)
            return false;
        if (places[i].offset > INT64_MAX || size > INT64_MAX)
            return false;
        end = places[i].end;
    }
    return count > 0 && count <= PLACES_MAX;
}

/* From now on the file is read there. Another file may have to give way, one that was not read lately first. False: it
 * is read elsewhere, and its sources are idle if they have no other place. */
static inline bool put_places(struct places *all, uint64_t ino, uint64_t size, const struct place *places, size_t count)
{
    struct placed *set = placed_set(all, ino), *entry = find_placed(all, ino);
    bool is_right = ino != 0 && are_places(all, size, places, count);
    struct place *copy = is_right ? malloc(count * sizeof *places) : NULL;
    for (size_t i = 0; copy != NULL && i < count; i++)
        all->sources[places[i].source].users++; /* before others lose theirs */
    if (entry != NULL)
        drop_placed(all, entry);
    if (copy == NULL)
        return false;
    for (int i = 0; entry == NULL && i < PLACED_WAYS; i++)
        entry = set[i].ino == 0 ? set + i : NULL;
    while (entry == NULL) {
        struct placed *each = set + all->hand++ % PLACED_WAYS;
        entry = each->used ? NULL : each;
        each->used = false;
    }
    if (entry->ino != 0)
        drop_placed(all, entry);
    memcpy(copy, places, count * sizeof *places);
    *entry = (struct placed){.ino = ino, .size = size, .count = (uint32_t)count, .places = copy, .used = true};
    return true;
}

/* The file is not read here any more. */
static inline void take_places(struct places *all, uint64_t ino)
{
    struct placed *found = find_placed(all, ino);
    if (found != NULL)
        drop_placed(all, found);
}

/* Nor are files that have a place in this source; SOURCES_MAX: that were not read since that was asked last. */
static inline void take_source(struct places *all, uint32_t number)
{
    for (struct placed *file = all->placed; file < all->placed + PLACED_SETS * PLACED_WAYS; file++) {
        bool goes = number == SOURCES_MAX && !file->used;
        for (uint32_t i = 0; !goes && i < file->count; i++)
            goes = file->places[i].source == number;
        if (number == SOURCES_MAX)
            file->used = false;
        if (goes && file->ino != 0)
            drop_placed(all, file);
    }
    for (uint32_t i = 0; i < SOURCES_MAX; i++) /* those that never got a place */
        if ((i == number || number == SOURCES_MAX) && all->sources[i].width != 0 && all->sources[i].users == 0) {
            all->sources[i].width = 0;
            all->idle[all->idle_count++] = i;
        }
}

/* Puts at `parts` where up to PARTS_MAX ranges lie that together are these bytes of the file, which it has; how many
 * there are. 0: it is not known of all of them. */
static inline size_t parts_of(struct places *all, const struct placed *file, uint64_t offset, size_t length,
                              struct part *parts)
{
    size_t count = 0;
    const struct place *place = file->places, *behind = place + file->count;
    for (uint64_t end = offset + length; offset < end; count++) {
        while (place < behind && place->end <= offset)
            place++;
        if (count == PARTS_MAX || place == behind || place->start > offset)
            return 0;
        struct source *source = all->sources + place->source;
        uint64_t at = place->offset + (offset - place->start), step = place->end - offset;
        uint64_t unit = at / source->unit, within = at % source->unit;
        if (source->width > 1) {
            at = unit / source->width * source->unit + within;
            step = step < source->unit - within ? step : source->unit - within;
        }
        step = step < end - offset ? step : end - offset;
        parts[count] = (struct part){source->fds[unit % source->width], source->in_memory, at, (size_t)step};
        if (parts[count].fd < 0)
            return 0;
        source->read |= UINT64_C(1) << unit % 64;
        offset += step;
    }
    return count;
}

/* Puts at `found` the sources that were read since this was asked last, and their units; how many. */
static inline size_t take_read(struct places *all, struct read_units found[SOURCES_MAX])
{
    size_t count = 0;
    for (uint32_t i = 0; i < SOURCES_MAX; i++) {
        if (all->sources[i].read != 0 && all->sources[i].users != 0)
            found[count++] = (struct read_units){all->sources[i].read, i, 0};
        all->sources[i].read = 0;
    }
    return count;
}

#endif
