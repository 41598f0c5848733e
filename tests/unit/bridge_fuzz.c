/*
 * Feeds the bridge's code for messages (aifs/fuse/messages.h, opens.h, places.h, entries.h,
 * directories.h) with random, truncated and damaged
 * messages, and that for records (records.h) with such records. Each lies in a heap block of exactly its length, so that
 * the address sanitizer sees the first byte read beyond it.
 *
 *     bridge_fuzz ROUNDS SEED
 */
#include <stdio.h>
#include <stdlib.h>

#include "messages.h"

static uint64_t seed;

static uint64_t random_bits(void) /* xorshift64* (Vigna, 2016) */
{
    seed ^= seed >> 12;
    seed ^= seed << 25;
    seed ^= seed >> 27;
    return seed * UINT64_C(0x2545F4914F6CDD1D);
}

static uint64_t below(uint64_t limit)
{
    return random_bits() % limit;
}

static const uint32_t interesting[] = {
    FUSE_LOOKUP, FUSE_FORGET, FUSE_GETATTR, FUSE_SETATTR, FUSE_OPEN, FUSE_READ, FUSE_WRITE, FUSE_SETXATTR, FUSE_GETXATTR, FUSE_INIT, FUSE_OPENDIR, FUSE_FSYNCDIR, FUSE_CREATE, FUSE_INTERRUPT,
    FUSE_RELEASE, FUSE_FLUSH, FUSE_GETLK, FUSE_SETLK, FUSE_SETLKW, FUSE_IOCTL, FUSE_FALLOCATE, FUSE_READDIRPLUS, FUSE_LSEEK, FUSE_COPY_FILE_RANGE, FUSE_SYNCFS, FUSE_TMPFILE, FUSE_MKNOD, FUSE_MKDIR, FUSE_SYMLINK, FUSE_LINK, FUSE_RENAME, FUSE_RENAME2, STATX, COPY_FILE_RANGE_64, OPCODES, UINT32_MAX,
};

static char *message_of(size_t size)
{
    char *message = malloc(size ? size : 1);
    for (size_t i = 0; i < size; i++)
        message[i] = (char)random_bits();
    return message;
}

static void one_request(struct bridge *bridge)
{
    static const char capability[] = "security.capability";
    size_t size = below(4) ? below(200) : below(48);
    char *message = message_of(size);
    struct fuse_in_header header = {
        .len = below(8) ? (uint32_t)size : (uint32_t)random_bits(),
        .opcode = interesting[below(sizeof interesting / sizeof *interesting)],
        .unique = below(40),
        .nodeid = below(20),
    };
    memcpy(message, &header, size < sizeof header ? size : sizeof header);
    if (header.opcode == FUSE_GETXATTR && below(2) && size >= sizeof header + 8 + sizeof capability)
        memcpy(message + sizeof header + 8, capability, sizeof capability);
    if (header.opcode == FUSE_IOCTL && below(2) && size >= sizeof header + sizeof(struct fuse_ioctl_in)) {
        struct fuse_ioctl_in in = {.cmd = (uint32_t)bridge->state.ioctl_type << 8,
                              .in_size = (uint32_t)(size - sizeof header - sizeof in)};
        memcpy(message + sizeof header, &in, sizeof in);
    }
    if (header.opcode == FUSE_OPEN && below(2) && size >= sizeof header + sizeof(struct fuse_open_in)) {
        struct fuse_open_in in = {.flags = below(4) ? 0 : (uint32_t)below(1 << 12)};
        memcpy(message + sizeof header, &in, sizeof in);
    }
    if (header.opcode == FUSE_READ && below(4) && size >= sizeof header + sizeof(struct fuse_read_in)) {
        struct fuse_read_in in = {.offset = below(3) ? below(20000) : random_bits(), .size = (uint32_t)below(1 << 16)};
        memcpy(message + sizeof header, &in, sizeof in);
    }
    if (header.opcode == FUSE_RELEASE && below(2) && size >= sizeof header + sizeof(uint64_t)) {
        uint64_t handle = LENT_HANDLE | header.nodeid;
        memcpy(message + sizeof header, &handle, sizeof handle);
    }
    struct answer answer;
    bool is_sure = below(50) != 0;
    enum verdict verdict = examine_request(bridge, message, size, random_bits(), is_sure, &answer);
    if (verdict != PASS && size < sizeof header)
        abort(); /* whoever acts on a verdict reads the header */
    if (verdict == ANSWER && (answer.error < 0 || answer.error >= 512))
        abort();
    if (verdict == ANSWER && answer.size > (header.opcode == FUSE_READ ? READ_MAX : sizeof answer.entry))
        abort();
    size_t in_parts = 0;
    for (size_t i = 0; i < answer.parts; i++)
        in_parts += bridge->parts[i].length;
    if (answer.parts != 0 && (header.opcode != FUSE_READ || in_parts != answer.size))
        abort();
    if (verdict == ANSWER && answer.error == 0 && header.opcode != FUSE_OPEN && header.opcode != FUSE_READ && header.opcode != FUSE_RELEASE
        && header.opcode != FUSE_FLUSH && header.opcode != FUSE_GETATTR && header.opcode != FUSE_LOOKUP && header.opcode != FUSE_READDIRPLUS)
        abort(); /* of all others an error alone is an answer */
    if (verdict == ANSWER && header.opcode == FUSE_LOOKUP && answer.error == 0
        && (answer.size != sizeof answer.entry || answer.entry.nodeid != answer.entry.attr.ino))
        abort();
    if (verdict == ANSWER && header.opcode == FUSE_OPEN && answer.error == 0 && answer.open.fh != (LENT_HANDLE | header.nodeid))
        abort();
    if (verdict == ANSWER && header.opcode == FUSE_GETATTR
        && (answer.size != sizeof answer.attr || answer.attr.attr.ino != header.nodeid))
        abort();
    if (verdict == ANSWER && answer.error == 0 && header.opcode != FUSE_RELEASE && header.opcode != FUSE_FLUSH
        && (bridge->state.sees_all || !is_sure))
        abort(); /* somebody wants to see it, or it may be old */
    if (bridge->forgotten.header.len > offsetof(struct forgotten, due_ns))
        abort();
    if (below(500) == 0)
        bridge->forgotten.header.len = 0; /* as bridge.c does when Python has heard of them */
    bridge->state.sees_all = below(50) == 0;
    bridge->state.fresh[header.nodeid] = below(2) ? header.nodeid : 0;
    free(message);
}

static void one_reply(struct bridge *bridge)
{
    size_t size = below(200);
    char *body = size ? message_of(size) : NULL;
    struct fuse_out_header header = {.unique = below(40), .error = below(2) ? 0 : -(int)below(200)};
    edit_reply(bridge, &header, body, size);
    free(body);
}

static struct span some_record(size_t usual)
{
    size_t length = below(3) ? usual + below(3) : below(300);
    return (struct span){message_of(length), length};
}

static void one_entry(struct bridge *bridge)
{
    struct span key = some_record(ENTRY_KEY_SIZE), entry = some_record(20), inode = some_record(sizeof(struct inode_record));
    const struct keeping keeping = {.entry_ns = random_bits(), .attr_ns = random_bits()};
    if (inode.length && below(4))
        *(char *)inode.start = RECORD_FORMAT;
    size_t room = below(2) ? below(600) : below(160);
    char *out = message_of(room);
    if (is_entry(key, entry, inode)) {
        has_acl(inode);
        if (put_entry(out, room, key, entry, inode, &keeping) > room)
            abort();
    }
    struct span changed = some_record(9);
    if (changed.length == 9 && below(4)) {
        memset((char *)changed.start, 0, 8);
        *(char *)changed.start = 'i';
    }
    note_change(bridge, changed, inode);
    free((char *)changed.start);
    free((char *)key.start);
    free((char *)entry.start);
    free((char *)inode.start);
    free(out);
}

/* --- inodes that are lent, against a list of what they should be --- */

enum { INODES = 40 };
static struct lent expected[INODES];

static void must_be(bool right)
{
    if (!right)
        abort();
}

static void some_attributes(struct opens *opens, uint64_t ino, bool is_new);

static uint64_t crowd(uint64_t number) /* inodes that fall into few sets */
{
    static uint64_t found[INODES];
    static uint64_t next = 1;
    static struct opens table;
    for (uint64_t i = 0; found[INODES - 1] == 0; next++)
        if (lent_set(&table, next) < table.lent + 2 * LENT_WAYS)
            found[i++] = next;
    return found[number];
}

static void one_use(struct opens *opens)
{
    uint64_t number = below(INODES), ino = crowd(number), now = random_bits() >> 1;
    struct lent *known = expected + number, was;
    if (below(50000) == 0)
        opens->noted_count = 0; /* told */
    if (below(500) == 0) {
        watch_opens(opens, below(4) != 0);
        for (unsigned i = 0; i < INODES; i++)
            expected[i].noted = false;
    }
    if (below(4) == 0)
        some_attributes(opens, ino, below(2));
    must_be(find_attributes(opens, ino) == NULL || (known->ino != 0 && !known->recalled));
    switch (below(8)) {
    case 0:
    case 1:
        was = lend(opens, (struct lent){.ino = ino,
                                        .backing = (int32_t)below(3),
                                        .due_ns = below(3) ? below(3) : now,
                                        .asks = below(4) == 0});
        if (was.ino != ino)
            *known = *find_lent(opens, ino);
        for (unsigned i = 0; was.ino != 0 && was.ino != ino && i < INODES; i++)
            if (expected[i].ino == was.ino) {
                must_be(expected[i].opens == 0);
                expected[i] = (struct lent){0};
            }
        break;
    case 2:
    case 3:
    case 4: {
        const struct opener by = {(uint32_t)below(2), below(2), below(4) == 0};
        bool is_new = opens->watched && !by.ahead && !(known->noted && known->noted_by == by.uid);
        size_t before = opens->noted_count;
        bool asks = opens->watched && (known->asks || (is_new && before == NOTED_MAX));
        const struct lent *found = open_lent(opens, ino, now, by, 2);
        must_be((found != NULL) == (known->ino != 0 && !known->recalled && !asks));
        must_be(opens->noted_count == before + (found != NULL && is_new));
        if (opens->noted_count != before) {
            must_be(opens->noted[before].ino == ino && opens->noted[before].uid == by.uid);
            known->noted = true;
            known->noted_by = by.uid;
        }
        known->opens += found != NULL;
        must_be(found == NULL || (found->backing == known->backing && found->used && found->opens == known->opens));
        break;
    }
    case 5:
        if (known->opens != 0) {
            must_be(close_lent(opens, LENT_HANDLE | ino, 4) == !known->recalled);
            known->opens -= !known->recalled;
        } else {
            must_be(!close_lent(opens, LENT_HANDLE | ino, 4) && !close_lent(opens, ino, 4));
        }
        break;
    default: {
        bool idle = below(4) != 0;
        was = take_back(opens, ino, idle);
        must_be(was.ino == known->ino && was.opens == known->opens && was.backing == known->backing);
        known->recalled = known->ino != 0;
        if (!idle || known->opens == 0)
            *known = (struct lent){0};
        must_be((find_lent(opens, ino) != NULL) == (known->ino != 0));
    }
    }
}

/* --- places, against a copy of each file's, byte by byte --- */

enum { PLACED = 40, SOURCES = 12 };

static struct model {
    uint64_t size;
    size_t count; /* 0: it has none */
    struct place places[PLACES_MAX];
} model[PLACED];
static struct source sources[SOURCES]; /* users: 0 with a width: offered, and not used yet */

static uint64_t users_of(uint32_t source)
{
    uint64_t users = 0;
    for (unsigned i = 0; i < PLACED; i++)
        for (size_t j = 0; j < model[i].count; j++)
            users += model[i].places[j].source == source;
    return users;
}

/* What the table lacks has given way; those that it has must be what they were. Sources without users are idle, once. */
static void one_comparison(struct places *all, bool may_give_way, const bool *had_users)
{
    bool is_idle[SOURCES] = {false};
    for (size_t i = 0; i < all->idle_count; i++) {
        must_be(all->idle[i] < SOURCES && !is_idle[all->idle[i]]);
        is_idle[all->idle[i]] = true;
    }
    all->idle_count = 0;
    for (unsigned i = 0; i < PLACED; i++) {
        const struct placed *found = find_placed(all, crowd(i));
        must_be(found != NULL || may_give_way || model[i].count == 0);
        if (found == NULL)
            model[i].count = 0;
        else
            must_be(found->count == model[i].count && found->size == model[i].size &&
                    memcmp(found->places, model[i].places, found->count * sizeof *found->places) == 0);
    }
    for (uint32_t i = 0; i < SOURCES; i++) {
        uint64_t users = users_of(i);
        must_be(is_idle[i] == (had_users[i] && users == 0));
        must_be(all->sources[i].users == users && (users == 0 || all->sources[i].width == sources[i].width));
        if (is_idle[i])
            sources[i].width = 0;
        must_be(all->sources[i].width == sources[i].width);
    }
}

static void one_read(struct places *all, uint64_t number)
{
    static struct part parts[PARTS_MAX];
    static struct read_units found[SOURCES_MAX];
    uint64_t read[SOURCES] = {0};
    const struct model *known = model + number;
    struct placed *file = find_placed(all, crowd(number));
    must_be((file != NULL) == (known->count != 0));
    if (file == NULL || known->size == 0)
        return;
    uint64_t offset = below(known->size), length = 1 + below(known->size - offset);
    take_read(all, found);
    size_t count = parts_of(all, file, offset, length, parts), part = 0, within = 0, units = 0;
    bool is_known = true;
    file->used |= below(2);
    for (uint64_t at = offset; at < offset + length; at++) {
        const struct place *place = NULL;
        for (size_t i = 0; i < known->count; i++)
            if (known->places[i].start <= at && at < known->places[i].end)
                place = known->places + i;
        is_known = is_known && place != NULL;
        if (!is_known)
            break;
        const struct source *source = sources + place->source;
        uint64_t in = place->offset + at - place->start, unit = in / source->unit;
        int32_t fd = source->fds[unit % source->width];
        units += at == offset || in % source->unit == 0 || at == place->start;
        is_known = is_known && fd >= 0;
        if (count == 0)
            continue;
        must_be(part < count && parts[part].fd == fd && parts[part].in_memory == source->in_memory);
        must_be(parts[part].offset + within == unit / source->width * source->unit + in % source->unit);
        if (within == 0)
            read[place->source] |= UINT64_C(1) << unit % 64;
        if (++within == parts[part].length)
            part++, within = 0;
    }
    must_be(count == 0 ? !is_known || units > PARTS_MAX : is_known && part == count && within == 0);
    for (size_t left = take_read(all, found); count != 0 && left-- > 0; read[found[left].source] = 0)
        must_be(found[left].units != 0 && found[left].units == read[found[left].source]);
    for (uint32_t i = 0; count != 0 && i < SOURCES; i++)
        must_be(read[i] == 0);
}

static void one_placing(struct places *all)
{
    uint64_t number = below(PLACED), ino = crowd(number);
    bool had_users[SOURCES], may_give_way = false;
    for (uint32_t i = 0; i < SOURCES; i++)
        had_users[i] = users_of(i) != 0;
    switch (below(12)) {
    case 0:
    case 1: {
        uint32_t which = (uint32_t)below(SOURCES);
        struct source source = {.unit = (uint32_t)below(40), .width = (uint32_t)below(COLUMNS_MAX + 2), .in_memory = below(2)};
        for (int i = 0; i < COLUMNS_MAX; i++)
            source.fds[i] = (int32_t)below(20) - (below(8) == 0 ? 20 : 0);
        bool is_one = source.unit != 0 && source.width != 0 && source.width <= COLUMNS_MAX;
        must_be(put_source(all, which, source) == is_one);
        if (is_one && !had_users[which])
            sources[which] = source;
        break;
    }
    case 2:
    case 3:
    case 4: {
        struct model new = {.size = below(3000)};
        uint64_t at = 0;
        bool is_right = true;
        size_t count = below(6) ? below(4) : below(PLACES_MAX + 1);
        for (size_t i = 0; i < count; i++) {
            uint64_t start = at + (below(3) ? 0 : below(50)), end = start + (below(50) ? 1 : 0) + below(400);
            uint32_t source = (uint32_t)(below(60) ? below(SOURCES) : SOURCES_MAX - below(2));
            new.places[i] = (struct place){start, end, below(500), source, 0};
            is_right = is_right && end > start && source < SOURCES && sources[source].width != 0;
            at = below(60) ? end : below(3000);
        }
        if (below(20))
            new.size += at;
        for (size_t i = 0; i < count; i++)
            is_right = is_right && new.places[i].end <= new.size && (i == 0 || new.places[i - 1].end <= new.places[i].start);
        new.count = count;
        bool is_put = put_places(all, ino, new.size, new.places, count);
        must_be(is_put == (is_right && count != 0));
        model[number] = is_put ? new : (struct model){0};
        may_give_way = is_put;
        break;
    }
    case 5:
        take_places(all, ino);
        model[number].count = 0;
        break;
    case 6: {
        uint32_t source = (uint32_t)below(SOURCES);
        if (below(4) == 0) {
            take_source(all, SOURCES_MAX);
            may_give_way = true;
            for (uint32_t i = 0; i < SOURCES; i++)
                had_users[i] = sources[i].width != 0; /* or never got any */
        } else {
            take_source(all, source);
            had_users[source] = sources[source].width != 0;
            for (unsigned i = 0; i < PLACED; i++)
                for (size_t j = 0; j < model[i].count; j++)
                    if (model[i].places[j].source == source)
                        model[i].count = 0;
        }
        break;
    }
    default:
        one_read(all, number);
    }
    one_comparison(all, may_give_way, had_users);
}

/* --- names that do not exist, against a table of those that do; and ends of listings --- */

enum { PARENTS = 5, NAMES = 300 };
static bool exists[PARENTS][NAMES], is_fresh[PARENTS];
static uint64_t ends[PARENTS];

static void one_name(struct bridge *bridge)
{
    uint64_t parent = below(PARENTS), number = below(NAMES), *fresh = bridge->state.fresh;
    struct directories *directories = &bridge->directories;
    const struct keeping keeping = {0};
    char key[DENTRY_NAME_AT + 20] = {0};
    key[8] = (char)(parent + 1);
    struct span name = {key + DENTRY_NAME_AT, (size_t)snprintf(key + DENTRY_NAME_AT, 20, "%llu", (unsigned long long)number)};
    struct span whole = {key, DENTRY_NAME_AT + name.length}, of_entry = {key, ENTRY_KEY_SIZE};
    switch (below(8)) {
    case 0:
    case 1:
        key[0] = 'd';
        exists[parent][number] = below(2);
        note_record(directories, fresh, whole, (struct span){"x", exists[parent][number]}, &keeping);
        break;
    case 2: /* the directory is another one, which is made now, or was there before */
        memset(exists[parent], 0, sizeof exists[parent]);
        is_fresh[parent] = below(2);
        fresh[parent + 1] = is_fresh[parent] ? parent + 1 : 0;
        break;
    case 3:
        if (below(100) == 0)
            directories->marked = MARKS_MAX / 2; /* full */
        break;
    case 4:
        key[0] = 'e';
        ends[parent] = 1 + below(4);
        memset(key + COOKIE_AT, 0, 8);
        key[COOKIE_AT + 7] = (char)ends[parent]++;
        note_end(directories, of_entry);
        break;
    case 5:
        key[0] = 'e';
        note_record(directories, fresh, of_entry, (struct span){"x", 1}, &keeping);
        ends[parent] = 0;
        break;
    default:
        if (is_absent(directories, fresh, parent + 1, name))
            must_be(is_fresh[parent] && !exists[parent][number]);
    }
    const struct end *end = end_of(directories, parent + 1);
    must_be(ends[parent] ? end->ino == parent + 1 && end->offset == ends[parent] : end->ino != parent + 1);
}

/* --- names that were looked up, against what they lead to; and attributes of what is lent --- */

enum { LOOKED_UP = 60, REQUESTS = 8 };

static uint64_t leads_to[LOOKED_UP], asked_of[REQUESTS], asked_unique[REQUESTS], then_led_to[REQUESTS];

static void one_entry_of(struct entries *all)
{
    static uint64_t unique = 1;
    uint64_t number = below(LOOKED_UP), request = below(REQUESTS), parent = 1 + number % 3;
    char text[SHORT_MAX + 20];
    struct span name = {text, (size_t)snprintf(text, sizeof text, "%0*llu", number % 7 ? 3 : SHORT_MAX + 5, (unsigned long long)number)};
    switch (below(4)) {
    case 0:
        note_asked(all, unique, parent, name);
        asked_of[request] = number;
        asked_unique[request] = unique;
        then_led_to[request] = leads_to[number];
        unique += below(3) ? 1 : ASKED_MAX;
        break;
    case 1: {
        uint64_t ino = below(2) ? then_led_to[request] : leads_to[asked_of[request]];
        if (asked_unique[request] != 0 && ino != 0)
            note_found(all, asked_unique[request], ino);
        asked_unique[request] = 0;
        break;
    }
    case 2:
        if (below(3) == 0) {
            leads_to[number] = below(4);
            note_entry(all, parent, name);
        } else if (leads_to[number] != 0 && below(3) == 0) {
            put_entry_of(all, parent, name, leads_to[number]);
        } else if (below(200) == 0) {
            forget_entries(all);
        }
        break;
    default: {
        uint64_t found = find_entry(all, parent, name);
        must_be(found == 0 || (found == leads_to[number] && name.length <= SHORT_MAX));
    }
    }
}

static void some_attributes(struct opens *opens, uint64_t ino, bool is_new)
{
    struct inode_record record = {.format = RECORD_FORMAT, .size = ino, .atime_ns = (int64_t)below(3) * SECOND_NS};
    const struct span inode = {(const char *)&record, sizeof record - (below(9) == 0)};
    const struct fuse_attr *known = find_attributes(opens, ino);
    uint64_t before = known ? known->atime : 0;
    bool was_known = known != NULL, is_whole = inode.length == sizeof record;
    if (is_new)
        note_new_attributes(opens, ino, inode, 4096);
    else
        note_attributes(opens, ino, inode, 4096);
    known = find_attributes(opens, ino);
    const struct lent *lent = find_lent(opens, ino);
    must_be(known == NULL || (lent != NULL && !lent->recalled && known->ino == ino && known->size == ino));
    if (is_new)
        must_be((known != NULL) == (was_known && is_whole && record.atime_ns / SECOND_NS >= (int64_t)before));
}

/* --- names that the kernel was told of (names.h); some share a place --- */

enum { TOLD_NAMES = 6 };

static struct told_name last_told[TOLD_NAMES];
static bool told_several[TOLD_NAMES];
static uint64_t told_now;

static void one_told_name(struct told_name *names)
{
    uint64_t number = below(TOLD_NAMES), hash = 2 + number % 2 + number * NAMES_MAX;
    struct told_name *last = last_told + number, told = {hash, below(3), told_now + below(20)}, found;
    told_now += below(3);
    if (below(4) == 0) {
        found = find_told_name(names, hash, told_now);
        note_dropped_name(names, hash, found.until_ns);
        if (found.hash == hash)
            last->until_ns = 0;
    } else {
        note_told_name(names, told, told_now);
        bool goes_on = last->until_ns > told_now;
        if (told.until_ns > told_now) {
            told_several[number] = goes_on && (told_several[number] || told.ino != last->ino);
            told.until_ns = goes_on && last->until_ns > told.until_ns ? last->until_ns : told.until_ns;
            *last = told;
        }
    }
    for (uint64_t i = 0; i < TOLD_NAMES; i++) {
        found = find_told_name(names, 2 + i % 2 + i * NAMES_MAX, told_now);
        if (last_told[i].until_ns > told_now) {
            must_be(found.until_ns >= last_told[i].until_ns);
            must_be(found.ino == UNKNOWN_INO || (!told_several[i] && found.ino == last_told[i].ino));
        }
    }
}

/* A file of up to 20,000 bytes in one local file, or in three. */
static void some_places(struct places *all, uint64_t ino)
{
    struct source source = {.unit = 4096, .width = below(2) ? 1 : 3, .fds = {3, 4, below(9) ? 5 : -1}};
    const struct place place = {0, 1 + below(20000), below(100), (uint32_t)ino, 0};
    take_places(all, ino);
    all->idle_count = 0;
    put_source(all, (uint32_t)ino, source);
    put_places(all, ino, place.end, &place, 1);
}

/* Zeros, from the beginning of a page on, which is a multiple of pages. */
static void *pages(size_t size)
{
    return memset(aligned_alloc(KEPT_PAGE, size), 0, size);
}

int main(int count, char **arguments)
{
    long rounds = count > 1 ? atol(arguments[1]) : 100000;
    seed = (count > 2 ? strtoull(arguments[2], NULL, 10) : 1) | 1;
    struct bridge *bridge = pages(sizeof *bridge);
    bridge->state.ioctl_type = 0xaf;
    for (long i = 0; i < rounds; i++) {
        if (below(20000) == 0) {
            bridge->state.wanted = random_bits();
            bridge->state.max_background = (uint16_t)random_bits();
            bridge->expected_count = 0;
        }
        bool silent = i / 20000 % 2; /* nobody answers, until no more answers can be expected */
        if (below(20) == 0)
            lend(&bridge->opens, (struct lent){.ino = below(20), .backing = (int32_t)below(3)});
        if (below(50) == 0)
            some_places(&bridge->places, below(20));
        silent || below(100) < 60 ? one_request(bridge) : one_reply(bridge);
        if (bridge->expected_count > EXPECTED_MAX)
            abort();
        one_entry(bridge);
    }
    struct opens *opens = pages(sizeof *opens);
    for (long i = 0; i < rounds; i++)
        one_use(opens);
    free(opens);
    struct places *places = calloc(1, sizeof *places);
    for (long i = 0; i < rounds / 4; i++)
        one_placing(places);
    for (unsigned i = 0; i < PLACED; i++)
        take_places(places, crowd(i));
    free(places);
    struct bridge *empty = pages(sizeof *empty);
    for (long i = 0; i < rounds; i++)
        one_name(empty);
    free(empty);
    struct entries *entries = calloc(1, sizeof *entries);
    for (long i = 0; i < rounds; i++)
        one_entry_of(entries);
    free(entries);
    struct told_name *names = calloc(NAMES_MAX, sizeof *names);
    for (long i = 0; i < rounds; i++)
        one_told_name(names);
    free(names);
    uint64_t seen = 0;
    for (unsigned i = 0; i < OPCODES; i++)
        seen += bridge->state.counts[i][0];
    printf("%llu\n", (unsigned long long)seen);
    for (uint64_t ino = 0; ino < 20; ino++)
        take_places(&bridge->places, ino);
    free(bridge);
    return 0;
}
