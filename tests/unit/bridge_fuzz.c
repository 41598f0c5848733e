/*
 * Feeds the bridge's message code (aifs/fuse/messages.h) with random, truncated and damaged messages, and that for
 * records (aifs/fuse/records.h) with such records. Each lies in a heap block of exactly its length, so that the address sanitizer sees the first byte read beyond it.
 *
 *     bridge_fuzz ROUNDS SEED
 */
#include <stdio.h>
#include <stdlib.h>

#include "messages.h"

static uint64_t state;

static uint64_t random_bits(void) /* xorshift64* (Vigna, 2016) */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * UINT64_C(0x2545F4914F6CDD1D);
}

static uint64_t below(uint64_t limit)
{
    return random_bits() % limit;
}

static const uint32_t interesting[] = {
    GETATTR, SETATTR, OPEN, WRITE, SETXATTR, GETXATTR, INIT, OPENDIR, FSYNCDIR, CREATE, INTERRUPT,
    IOCTL, FALLOCATE, READDIRPLUS, LSEEK, COPY_FILE_RANGE, SYNCFS, TMPFILE, STATX, COPY_FILE_RANGE_64, OPCODES, UINT32_MAX,
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
    struct in_header header = {
        .len = below(8) ? (uint32_t)size : (uint32_t)random_bits(),
        .opcode = interesting[below(sizeof interesting / sizeof *interesting)],
        .unique = below(40),
        .nodeid = below(20),
    };
    memcpy(message, &header, size < sizeof header ? size : sizeof header);
    if (header.opcode == GETXATTR && below(2) && size >= sizeof header + 8 + sizeof capability)
        memcpy(message + sizeof header + 8, capability, sizeof capability);
    if (header.opcode == IOCTL && below(2) && size >= sizeof header + sizeof(struct ioctl_in)) {
        struct ioctl_in in = {.command = (uint32_t)bridge->ioctl_type << 8,
                              .in_size = (uint32_t)(size - sizeof header - sizeof in)};
        memcpy(message + sizeof header, &in, sizeof in);
    }
    int error = 0;
    enum verdict verdict = examine_request(bridge, message, size, &error);
    if (verdict != PASS && size < sizeof header)
        abort(); /* whoever acts on a verdict reads the header */
    if (verdict == ANSWER && (error <= 0 || error >= 512))
        abort();
    free(message);
}

static void one_reply(struct bridge *bridge)
{
    size_t size = below(200);
    char *body = size ? message_of(size) : NULL;
    struct out_header header = {.unique = below(40), .error = below(2) ? 0 : -(int)below(200)};
    edit_reply(bridge, &header, body, size);
    free(body);
}

static struct span record_of(size_t usual)
{
    size_t length = below(3) ? usual + below(3) : below(300);
    return (struct span){message_of(length), length};
}

static void one_entry(struct bridge *bridge)
{
    struct span key = record_of(ENTRY_KEY_SIZE), entry = record_of(20), inode = record_of(sizeof(struct inode_record));
    const struct keeping keeping = {.entry_ns = random_bits(), .attr_ns = random_bits()};
    if (inode.length && below(4))
        *(char *)inode.start = RECORD_FORMAT;
    size_t room = below(2) ? below(600) : below(160);
    char *out = message_of(room);
    if (is_entry(key, entry, inode)) {
        has_acl(inode);
        if (put_entry(out, room, key, entry, inode, &keeping, below(2)) > room)
            abort();
    }
    struct span changed = record_of(9);
    if (changed.length == 9 && below(4)) {
        memset((char *)changed.start, 0, 8);
        *(char *)changed.start = 'i';
    }
    note_record(&bridge->directories, changed, inode);
    free((char *)changed.start);
    free((char *)key.start);
    free((char *)entry.start);
    free((char *)inode.start);
    free(out);
}

int main(int count, char **arguments)
{
    long rounds = count > 1 ? atol(arguments[1]) : 100000;
    state = (count > 2 ? strtoull(arguments[2], NULL, 10) : 1) | 1;
    struct bridge *bridge = calloc(1, sizeof *bridge);
    bridge->ioctl_type = 0xaf;
    for (long i = 0; i < rounds; i++) {
        if (below(20000) == 0) {
            bridge->wanted = random_bits();
            bridge->max_background = (uint16_t)random_bits();
            bridge->expected_count = 0;
        }
        bool silent = i / 20000 % 2; /* nobody answers, until no more answers can be expected */
        silent || below(100) < 60 ? one_request(bridge) : one_reply(bridge);
        if (bridge->expected_count > EXPECTED_MAX)
            abort();
        one_entry(bridge);
    }
    uint64_t seen = 0;
    for (unsigned i = 0; i < OPCODES; i++)
        seen += bridge->counts[i];
    printf("%llu\n", (unsigned long long)seen);
    free(bridge);
    return 0;
}
