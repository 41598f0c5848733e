/*
 * aifs.fuse._bridge: the bridge between libfuse and /dev/fuse, below an unmodified pyfuse3.
 *
 * pyfuse3 speaks the FUSE protocol through libfuse, and both are older than what the kernel offers. This module is
 * loaded with RTLD_GLOBAL before pyfuse3, so that its fuse_session_mount() is the one that pyfuse3 calls. It calls
 * the real one and then gives the session its own read() and writev() (fuse_session_custom_io, public since
 * libfuse 3.14). There every message passes by, and messages.h decides what happens to it:
 *
 *   - the reply to INIT asks for more features;
 *   - replies to OPEN and CREATE pass a file through to a backing file (aifs/fuse/bridge.py);
 *   - requests that libfuse or pyfuse3 do not know are handed to a Python callable, which answers them later;
 *   - requests whose answer is always the same are answered here.
 *
 * All state is that of the thread that reads requests, which has the GIL but where it waits: nothing else is called
 * from another thread than writev() for notifications (unique 0), which touches no state. One mount per process, as in
 * pyfuse3.
 */
#define _GNU_SOURCE /* dladdr */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "messages.h"

struct fuse_session; /* libfuse's */

/* libfuse's struct fuse_custom_io; clone_fd is read by libfuse 3.17 and later alone. */
struct custom_io {
    ssize_t (*writev)(int, struct iovec *, int, void *);
    ssize_t (*read)(int, void *, size_t, void *);
    void *splice_receive, *splice_send, *clone_fd;
};

/* How long requests are answered here before others of this thread get a turn, and how long the next one is waited for
 * meanwhile: about the time that a client needs from an answer to its next request. */
#define TURN_NS 1000000
#define BUSY_POLL_NS 40000

#define LONG_READ ((size_t)64 << 10) /* others have the interpreter while so much is copied */

#define KEPT_BYTES (offsetof(struct opens, lent) + sizeof(bridge.opens.lent))

static struct bridge bridge = {.state.device = -1};
static PyObject *on_request; /* NULL: switched off */
static size_t handed_over;   /* requests that Python has not yet answered */
static int taken_fd = -1;    /* the device of a mount that another daemon has begun; -1: the mount begins here */
static bool is_kept;         /* by keep() */
static uint64_t replayed;    /* the unique number of its INIT, while libfuse has not answered that */

/* --- messages --- */

static int send_reply(uint64_t unique, int error, const void *data, size_t size)
{
    struct fuse_out_header header = {(uint32_t)(sizeof header + size), -error, unique};
    struct iovec parts[] = {{&header, sizeof header}, {(void *)data, size}};
    return writev(bridge.state.device, parts, size ? 2 : 1) < 0 ? -1 : 0;
}

/* Have the kernel ask again for the attributes of an inode. It waits for an answer about it, so this does not block; if
 * it does not know the inode any more, this fails, and nothing is to be done. */
static void drop_attributes(uint64_t nodeid)
{
    const struct fuse_notify_inval_inode_out notice = {.ino = nodeid, .off = -1}; /* of the attributes alone */
    send_reply(0, -FUSE_NOTIFY_INVAL_INODE, &notice, sizeof notice);
}

/* Whether Python has taken the request. A callable that raises takes none; the answer is then EIO. */
static bool hand_over(const struct fuse_in_header *header)
{
    const char *body = (const char *)(header + 1);
    Py_ssize_t size = (Py_ssize_t)(header->len - sizeof *header);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *taken = PyObject_CallFunction(
        on_request, "IKK(III)y#", header->opcode, (unsigned long long)header->unique,
        (unsigned long long)header->nodeid, header->uid, header->gid, header->pid, body, size);
    int result = taken == NULL ? -1 : PyObject_IsTrue(taken);
    if (result < 0)
        PyErr_WriteUnraisable(on_request);
    Py_XDECREF(taken);
    PyGILState_Release(state);
    return result > 0;
}

/* Tell Python which inodes the kernel has forgotten: if they are due or many, or nothing else is to be done. */
static void hand_over_forgotten(bool is_idle)
{
    struct fuse_in_header *header = &bridge.forgotten.header;
    bool is_full = header->len == offsetof(struct forgotten, due_ns);
    if (header->len == 0 || !(is_idle || is_full || bridge.now_ns >= bridge.forgotten.due_ns))
        return;
    int read_error = errno;
    hand_over(header);
    header->len = 0;
    errno = read_error;
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* As kernel_ns() of aifs/core/clock.py. */
static uint64_t kernel_ns(void)
{
    struct stat stamped;
    if (futimens(bridge.state.clock, NULL) < 0 || fstat(bridge.state.clock, &stamped) < 0)
        return clock_ns(CLOCK_REALTIME);
    return (uint64_t)stamped.st_mtim.tv_sec * 1000000000 + (uint64_t)stamped.st_mtim.tv_nsec;
}

static char read_bytes[READ_MAX] __attribute__((aligned(4096)));

/* Whether read_bytes is all of these parts; not if one would have to be waited for, or is not there. */
static bool read_parts(const struct part *parts, size_t count)
{
    char *at = read_bytes;
    for (size_t i = 0; i < count; i++) {
        const struct iovec target = {at, parts[i].length};
        const int flags = parts[i].in_memory ? 0 : RWF_NOWAIT;
        if (preadv2(parts[i].fd, &target, 1, (off_t)parts[i].offset, flags) != (ssize_t)target.iov_len)
            return false;
        at += target.iov_len;
    }
    return true;
}

/* read(), which waits until then for a request. Python's other threads run meanwhile, and afterwards: *released. */
static ssize_t read_request(int fd, void *buffer, size_t capacity, uint64_t until_ns, PyThreadState **released)
{
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    ssize_t size = read(fd, buffer, capacity);
    if (size >= 0 || errno != EAGAIN || until_ns == 0)
        return size;
    if (*released == NULL)
        *released = PyEval_SaveThread();
    do {
        errno = EAGAIN;
        if (poll(&waiting, 1, 0) != 0)
            size = read(fd, buffer, capacity);
    } while (size < 0 && errno == EAGAIN && clock_ns(CLOCK_MONOTONIC) < until_ns);
    return size;
}

/* The INIT of a mount that another daemon has begun, as libfuse has to have it, too; 0: it has got it, or gets its own. */
static ssize_t replay_init(void *buffer, size_t capacity)
{
    const struct kept *kept = &bridge.opens.kept;
    if (taken_fd < 0 || bridge.state.offered != 0 || kept->init_size > capacity)
        return 0;
    memcpy(buffer, kept->init, kept->init_size);
    replayed = ((struct fuse_in_header *)buffer)->unique;
    return kept->init_size;
}

/*
 * libfuse's read(): the next request that is for libfuse; EINTR, which makes pyfuse3 come again, if there is none.
 *
 * A program that has got an answer from here soon asks again, so the next request is waited for a moment. Python's
 * other threads run meanwhile: answers from here need no interpreter.
 */
static ssize_t bridge_read(int fd, void *buffer, size_t capacity, void *userdata)
{
    uint64_t end_ns = 0, until_ns = 0;
    PyThreadState *released = NULL;
    ssize_t size, passed = replay_init(buffer, capacity);
    struct answer init;
    if (passed > 0) {
        examine_request(&bridge, buffer, (size_t)passed, 0, true, &init);
        return passed;
    }
    passed = -1;
    for (;;) {
        size = read_request(fd, buffer, capacity, until_ns, &released);
        if (size < 0) {
            if (errno == ENOENT || errno == EAGAIN) /* it was withdrawn; libfuse would wait, or pyfuse3 give up */
                errno = EINTR;
            break;
        }
        const struct fuse_in_header *header = buffer;
        struct answer answer;
        bridge.now_ns = clock_ns(CLOCK_MONOTONIC);
        uint64_t sure_until_ns = bridge.state.sure_until_ns;
        bool is_sure = sure_until_ns == 0 || clock_ns(CLOCK_BOOTTIME) < sure_until_ns;
        enum verdict verdict =
            examine_request(&bridge, buffer, (size_t)size, clock_ns(CLOCK_REALTIME), is_sure, &answer);
        if (answer.size >= LONG_READ && released == NULL)
            released = PyEval_SaveThread();
        if (answer.parts != 0 && !read_parts(bridge.parts, answer.parts))
            verdict = PASS;
        if (verdict == PASS || (verdict == OFFER && (handed_over == 0 || !hand_over(header))) ||
            (verdict == TRY && !hand_over(header))) {
            passed = size;
            break;
        }
        if (verdict == ANSWER) {
            bridge.state.counts[header->opcode][1]++;
            if (answer.accessed != NULL) {
                note_access(&bridge.opens, answer.accessed, kernel_ns());
                if (answer.accessed->backing == 0) /* the kernel does not know */
                    drop_attributes(header->nodeid);
            }
            bool is_read = header->opcode == FUSE_READ && answer.error == 0;
            bridge.state.read_bytes += is_read ? answer.size : 0;
            send_reply(header->unique, answer.error, is_read ? (void *)read_bytes : &answer.open, answer.size);
        } else if (verdict == HAND_OVER) {
            handed_over++; /* before it: it may be answered at once */
            if (!hand_over(header)) {
                handed_over--;
                send_reply(header->unique, EIO, NULL, 0);
            }
        }
        uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
        bool waits = bridge.state.busy_polls && handed_over == 0;
        end_ns = end_ns ? end_ns : now_ns + TURN_NS;
        if (waits && verdict == ANSWER && released == NULL)
            released = PyEval_SaveThread();
        if (now_ns >= end_ns) {
            errno = EINTR;
            break;
        }
        until_ns = waits ? now_ns + BUSY_POLL_NS : 0;
    }
    if (released != NULL)
        PyEval_RestoreThread(released);
    hand_over_forgotten(passed < 0);
    return passed;
}

/* libfuse's writev(): a reply, or a notification. */
static ssize_t bridge_writev(int fd, struct iovec *parts, int count, void *userdata)
{
    const struct fuse_out_header *header = parts[0].iov_base;
    void *body = count > 1 ? parts[1].iov_base : NULL;
    size_t size = count > 1 ? parts[1].iov_len : 0;
    bridge.now_ns = clock_ns(CLOCK_MONOTONIC);
    if (header->unique != 0 && bridge.expected_count != 0)
        edit_reply(&bridge, header, body, size);
    if (header->unique != 0)
        note_reply(&bridge, header, body, size);
    if (replayed != 0 && header->unique == replayed) { /* the kernel has had it */
        replayed = 0;
        return header->len;
    }
    return writev(fd, parts, count);
}

/* --- taking the place of libfuse's function --- */

static void take_over(void *libfuse, struct fuse_session *session)
{
    const struct custom_io io = {.writev = bridge_writev, .read = bridge_read};
    int (*session_fd)(struct fuse_session *) = dlsym(libfuse, "fuse_session_fd");
    int (*custom_io)(struct fuse_session *, const struct custom_io *, int) = dlsym(libfuse, "fuse_session_custom_io");
    int (*custom_io_317)(struct fuse_session *, const struct custom_io *, size_t, int) =
        dlsym(libfuse, "fuse_session_custom_io_317");
    if (session_fd == NULL)
        return;
    int fd = session_fd(session), failed = -1;
    if (custom_io_317 != NULL)
        failed = custom_io_317(session, &io, sizeof io, fd);
    else if (custom_io != NULL)
        failed = custom_io(session, &io, fd);
    if (!failed) {
        bridge.state.device = fd;
        /* A request may be withdrawn after it was announced: then read() would wait for another one, with the GIL. */
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    }
}

/* Not static: this is the name that pyfuse3 finds. */
__attribute__((visibility("default"))) int fuse_session_mount(struct fuse_session *session, const char *mountpoint)
{
    /* The libfuse that the caller is linked with, whichever others there are. */
    Dl_info caller;
    void *library = NULL;
    if (dladdr(__builtin_return_address(0), &caller) != 0)
        library = dlopen(caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    int (*mount)(struct fuse_session *, const char *) = library ? dlsym(library, "fuse_session_mount") : NULL;
    int failed = -1;
    char taken[32];
    snprintf(taken, sizeof taken, "/dev/fd/%d", taken_fd); /* libfuse's name for what is mounted already */
    if (mount != NULL && mount != fuse_session_mount)
        failed = mount(session, taken_fd < 0 ? mountpoint : taken);
    if (!failed && on_request != NULL)
        take_over(library, session);
    if (library != NULL)
        dlclose(library); /* it stays loaded: the caller runs in it */
    return failed;
}

/* --- the Python module; aifs/fuse/bridge.py explains its functions --- */

/*
 * configure(on_request): use the bridge for the next mount, as `state` says from then on. None: do not.
 *
 * on_request(opcode, unique, nodeid, (uid, gid, pid), body) is called for each request that only Python can answer, on
 * the thread that reads requests; it returns at once, true if reply() will be called. For INTERRUPT it returns whether
 * the body names one of its own requests, and owes no reply.
 */
static PyObject *configure(PyObject *self, PyObject *callable)
{
    for (struct placed *file = bridge.places.placed; file < bridge.places.placed + PLACED_SETS * PLACED_WAYS; file++)
        free(file->places);
    if (is_kept)
        mmap(&bridge.opens, KEPT_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    is_kept = false;
    memset(&bridge, 0, sizeof bridge);
    bridge.state.device = -1;
    handed_over = 0;
    taken_fd = -1;
    replayed = 0;
    Py_XSETREF(on_request, callable == Py_None ? NULL : Py_NewRef(callable));
    Py_RETURN_NONE;
}

/*
 * keep(table, device): what the next daemon has to know of the next mount is in the first KEPT_BYTES of the file
 * `table` from now on. device: that of a mount that another daemon has begun, which is gone on with; -1: there is none.
 */
static PyObject *keep(PyObject *self, PyObject *args)
{
    int table;
    if (!PyArg_ParseTuple(args, "ii", &table, &taken_fd))
        return NULL;
    if (mmap(&bridge.opens, KEPT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, table, 0) == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    is_kept = true;
    if (taken_fd >= 0) {
        bridge.earlier = bridge.opens.kept.counted;
        bridge.state.granted = bridge.opens.kept.granted; /* until INIT has been replayed */
        memset(bridge.state.acls, 0xff, sizeof bridge.state.acls); /* nobody knows them any more */
        if (has_locks(&bridge.state))
            memset(bridge.locked, 0xff, sizeof bridge.locked);
    }
    Py_RETURN_NONE;
}

/* reply(unique, errno, data): answer a request that on_request has taken. Raises OSError if the kernel refuses it. */
static PyObject *reply(PyObject *self, PyObject *args)
{
    unsigned long long unique;
    int error;
    const char *data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Kiy#", &unique, &error, &data, &size))
        return NULL;
    handed_over -= handed_over > 0;
    if (send_reply(unique, error, data, (size_t)size) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static struct span span_of(PyObject *bytes)
{
    if (!PyBytes_Check(bytes))
        return (struct span){NULL, 0};
    return (struct span){PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)};
}

/* reply_entry(unique, ino, record): answer a LOOKUP that on_request is asked about. False: the record cannot be read. */
static PyObject *reply_entry(PyObject *self, PyObject *args)
{
    unsigned long long unique, ino;
    PyObject *record;
    if (!PyArg_ParseTuple(args, "KKO", &unique, &ino, &record))
        return NULL;
    const struct keeping *keeping = &bridge.state.keeping;
    struct span inode = span_of(record);
    if (!is_inode(inode))
        Py_RETURN_FALSE;
    struct inode_record found = decoded(inode);
    const struct lent *lent = find_lent(&bridge.opens, ino);
    if (lent != NULL && (int64_t)lent->accessed_ns > found.atime_ns)
        found.atime_ns = (int64_t)lent->accessed_ns;
    if (has_acl(inode))
        note_in(bridge.state.acls, ino);
    note_found(&bridge.entries, unique, ino);
    struct fuse_entry_out entry = entry_out(ino, attributes_of(ino, found, keeping->block_size), keeping);
    send_reply(unique, 0, &entry, sizeof entry); /* it fails if nobody waits for it any more */
    Py_RETURN_TRUE;
}

static bool is_place_in(PyObject *places, Py_ssize_t place)
{
    if (PySet_GET_SIZE(places) == 0)
        return false;
    PyObject *number = PyLong_FromSsize_t(place);
    bool found = number != NULL && PySet_Contains(places, number) == 1;
    Py_XDECREF(number);
    return found;
}

/*
 * listing(entries, inodes, unkept, size, are_kept, is_last): the reply to READDIRPLUS with as many entries as fit into
 * size, and how many these are; entries as the list of (key, record), inodes as that of the records they lead to,
 * unkept as the set of the places of those whose attributes the kernel may not keep. are_kept: it may keep the names.
 * is_last: there are no more. Raises ValueError for records that cannot be read.
 */
static PyObject *listing(PyObject *self, PyObject *args)
{
    PyObject *entries, *inodes, *unkept;
    unsigned int size;
    int are_kept, is_last;
    if (!PyArg_ParseTuple(args, "O!O!O!Ipp", &PyList_Type, &entries, &PyList_Type, &inodes, &PySet_Type, &unkept, &size,
                          &are_kept, &is_last))
        return NULL;
    struct keeping keeping = bridge.state.keeping;
    keeping.entry_ns = are_kept ? keeping.entry_ns : 0;
    struct keeping name_alone = keeping;
    name_alone.attr_ns = 0;
    bridge.now_ns = clock_ns(CLOCK_MONOTONIC);
    PyObject *reply = PyBytes_FromStringAndSize(NULL, size);
    size_t used = 0;
    Py_ssize_t i = 0;
    for (; reply && i < PyList_GET_SIZE(entries) && i < PyList_GET_SIZE(inodes); i++) {
        PyObject *pair = PyList_GET_ITEM(entries, i);
        bool is_pair = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2;
        struct span key = span_of(is_pair ? PyTuple_GET_ITEM(pair, 0) : Py_None);
        struct span entry = span_of(is_pair ? PyTuple_GET_ITEM(pair, 1) : Py_None);
        struct span inode = span_of(PyList_GET_ITEM(inodes, i));
        if (!is_entry(key, entry, inode)) {
            PyErr_SetString(PyExc_ValueError, "a directory's entry, or the inode's record, cannot be read");
            Py_CLEAR(reply);
            break;
        }
        if (has_acl(inode))
            note_in(bridge.state.acls, big_endian(entry.start));
        const struct keeping *kept = is_place_in(unkept, i) ? &name_alone : &keeping;
        size_t length = put_entry(PyBytes_AS_STRING(reply) + used, size - used, key, entry, inode, kept);
        if (length == 0)
            break;
        note_told(&bridge.state, big_endian(entry.start));
        if (has_locks(&bridge.state)) {
            struct span name = {entry.start + ENTRY_NAME_AT, entry.length - ENTRY_NAME_AT};
            uint64_t hash = name_hash(big_endian(key.start + 1), name);
            note_name_told(&bridge, hash, big_endian(entry.start), keeping.entry_ns);
        }
        used += length;
        if (is_last && i + 1 == PyList_GET_SIZE(entries))
            note_end(&bridge.directories, key);
    }
    if (reply == NULL || _PyBytes_Resize(&reply, (Py_ssize_t)used) < 0)
        return NULL;
    return Py_BuildValue("Nn", reply, i);
}

/* note_entries(entries): entries of directories, as their records are now, as the list of (key, record). */
static PyObject *note_entries(PyObject *self, PyObject *entries)
{
    for (Py_ssize_t i = 0; PyList_Check(entries) && i < PyList_GET_SIZE(entries); i++) {
        PyObject *pair = PyList_GET_ITEM(entries, i);
        bool is_pair = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2;
        struct span key = span_of(is_pair ? PyTuple_GET_ITEM(pair, 0) : Py_None);
        struct span entry = span_of(is_pair ? PyTuple_GET_ITEM(pair, 1) : Py_None);
        if (key.length == ENTRY_KEY_SIZE && entry.length > ENTRY_NAME_AT)
            put_entry_of(&bridge.entries, big_endian(key.start + 1),
                         (struct span){entry.start + ENTRY_NAME_AT, entry.length - ENTRY_NAME_AT},
                         big_endian(entry.start));
    }
    Py_RETURN_NONE;
}

/* note_records(writes): records have changed, as a dict of keys and records; None: erased. */
static PyObject *note_records(PyObject *self, PyObject *writes)
{
    PyObject *key, *record;
    for (Py_ssize_t at = 0; PyDict_Next(writes, &at, &key, &record);)
        note_change(&bridge, span_of(key), span_of(record));
    Py_RETURN_NONE;
}

/* kept_name(parent, name): what the kernel may keep of a name, as (inode, until_ns): by CLOCK_MONOTONIC, 0: nothing. */
static PyObject *kept_name(PyObject *self, PyObject *args)
{
    unsigned long long parent;
    const char *name;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Ky#", &parent, &name, &length))
        return NULL;
    bridge.now_ns = clock_ns(CLOCK_MONOTONIC);
    struct told_name kept = find_kept_name(&bridge, parent, (struct span){name, (size_t)length});
    return Py_BuildValue("KK", (unsigned long long)kept.ino, (unsigned long long)kept.until_ns);
}

/* drop_name(parent, name, until_ns): the kernel has forgotten it as kept_name has told it. */
static PyObject *drop_name(PyObject *self, PyObject *args)
{
    unsigned long long parent, until_ns;
    const char *name;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Ky#K", &parent, &name, &length, &until_ns))
        return NULL;
    note_dropped_name(bridge.names, name_hash(parent, (struct span){name, (size_t)length}), until_ns);
    Py_RETURN_NONE;
}

/* --- inodes that are lent (opens.h), each as the bytes of its struct --- */

static PyObject *bytes_of(const struct lent *lent, size_t count)
{
    return PyBytes_FromStringAndSize((const char *)lent, (Py_ssize_t)(count * sizeof *lent));
}

/* lend(ino, backing, copy, due_ns, asks): what there is no place for any more. */
static PyObject *lend_method(PyObject *self, PyObject *args)
{
    struct lent lent = {0};
    int asks;
    if (!PyArg_ParseTuple(args, "KiKKp", &lent.ino, &lent.backing, &lent.copy, &lent.due_ns, &asks))
        return NULL;
    lent.asks = asks;
    lent = lend(&bridge.opens, lent);
    return bytes_of(&lent, lent.ino != 0);
}

/* note_attributes(ino, record): of an inode that is lent. */
static PyObject *note_attributes_method(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    PyObject *record;
    if (!PyArg_ParseTuple(args, "KO", &ino, &record))
        return NULL;
    note_attributes(&bridge.opens, ino, span_of(record), bridge.state.keeping.block_size);
    Py_RETURN_NONE;
}

/* take_back(ino, idle): the inode as it was. */
static PyObject *take_back_method(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    int idle;
    if (!PyArg_ParseTuple(args, "Kp", &ino, &idle))
        return NULL;
    struct lent lent = take_back(&bridge.opens, ino, idle);
    return bytes_of(&lent, lent.ino != 0);
}

static PyObject *find_lent_method(PyObject *self, PyObject *ino)
{
    const struct lent *found = find_lent(&bridge.opens, PyLong_AsUnsignedLongLongMask(ino));
    return bytes_of(found, found != NULL);
}

/* open_lent(ino, flags, uid): whether the open is as if it had been answered here, which its reply then says. */
static PyObject *open_lent_method(PyObject *self, PyObject *args)
{
    unsigned long long ino;
    unsigned int flags, uid;
    const uint64_t unique = 0; /* the answer comes later; see Kept */
    if (!PyArg_ParseTuple(args, "KII", &ino, &flags, &uid))
        return NULL;
    const struct fuse_open_in in = {.flags = flags};
    struct answer answer = {0};
    uint32_t last_uid = bridge.state.uid;
    bridge.state.uid = uid;
    bool is_open = opens_lent(&bridge, ino, &in, clock_ns(CLOCK_REALTIME), unique, &answer);
    bridge.state.uid = last_uid;
    if (answer.accessed != NULL) {
        note_access(&bridge.opens, answer.accessed, kernel_ns());
        drop_attributes(ino);
    }
    return PyBool_FromLong(is_open);
}

/* all_lent(which): of those that are 'open', of those 'used' since that was asked last, or of 'all'. */
static PyObject *all_lent(PyObject *self, PyObject *which)
{
    static struct lent found[LENT_SETS * LENT_WAYS];
    return bytes_of(found, list_lent(&bridge.opens, *span_of(which).start, found));
}

/* watch_opens(on): whether opens are noted from now on, each anew. */
static PyObject *watch_opens_method(PyObject *self, PyObject *on)
{
    watch_opens(&bridge.opens, PyObject_IsTrue(on));
    Py_RETURN_NONE;
}

/* noted_opens(): those that have been noted since that was asked last, as the bytes of their structs. */
static PyObject *noted_opens(PyObject *self, PyObject *Py_UNUSED(nothing))
{
    struct opens *opens = &bridge.opens;
    size_t count = opens->noted_count;
    opens->noted_count = 0;
    return PyBytes_FromStringAndSize((const char *)opens->noted, (Py_ssize_t)(count * sizeof *opens->noted));
}

/* --- places (places.h). Each of these returns the numbers of the sources that are no more, as bytes --- */

static PyObject *idle_sources(void)
{
    struct places *places = &bridge.places;
    size_t count = places->idle_count;
    places->idle_count = 0;
    return PyBytes_FromStringAndSize((const char *)places->idle, (Py_ssize_t)(count * sizeof *places->idle));
}

/* put_source(number, unit, in_memory, fds): nothing. Raises ValueError if it cannot be one. */
static PyObject *put_source_method(PyObject *self, PyObject *args)
{
    struct source source = {0};
    unsigned int number, in_memory;
    const char *fds;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "IIpy#", &number, &source.unit, &in_memory, &fds, &size))
        return NULL;
    source.in_memory = in_memory;
    source.width = (uint32_t)((size_t)size / sizeof *source.fds);
    if (source.width <= COLUMNS_MAX)
        memcpy(source.fds, fds, source.width * sizeof *source.fds);
    if (!put_source(&bridge.places, number, source)) {
        PyErr_SetString(PyExc_ValueError, "it cannot be a source");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* put_places(ino, size, places): with whether the file is read there, the places as the bytes of their structs. */
static PyObject *put_places_method(PyObject *self, PyObject *args)
{
    unsigned long long ino, file_size;
    const char *places;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "KKy#", &ino, &file_size, &places, &size))
        return NULL;
    struct place copy[PLACES_MAX];
    size_t count = (size_t)size / sizeof *copy;
    bool is_put = false;
    if (count <= PLACES_MAX) {
        memcpy(copy, places, count * sizeof *copy);
        is_put = put_places(&bridge.places, ino, file_size, copy, count);
    }
    return Py_BuildValue("NN", PyBool_FromLong(is_put), idle_sources());
}

static PyObject *take_places_method(PyObject *self, PyObject *ino)
{
    take_places(&bridge.places, PyLong_AsUnsignedLongLongMask(ino));
    return idle_sources();
}

/* take_source(number): of all files that have a place there; -1: of all that were not read since that was asked. */
static PyObject *take_source_method(PyObject *self, PyObject *number)
{
    long source = PyLong_AsLong(number);
    take_source(&bridge.places, source < 0 || source > SOURCES_MAX ? SOURCES_MAX : (uint32_t)source);
    return idle_sources();
}

/* read_units(): of the sources that were read since this was asked last, as the bytes of their structs. */
static PyObject *read_units(PyObject *self, PyObject *args)
{
    static struct read_units found[SOURCES_MAX];
    size_t count = take_read(&bridge.places, found);
    return PyBytes_FromStringAndSize((const char *)found, (Py_ssize_t)(count * sizeof *found));
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_O, NULL},
    {"keep", keep, METH_VARARGS, NULL},
    {"reply", reply, METH_VARARGS, NULL},
    {"reply_entry", reply_entry, METH_VARARGS, NULL},
    {"listing", listing, METH_VARARGS, NULL},
    {"note_entries", note_entries, METH_O, NULL},
    {"note_records", note_records, METH_O, NULL},
    {"kept_name", kept_name, METH_VARARGS, NULL},
    {"drop_name", drop_name, METH_VARARGS, NULL},
    {"lend", lend_method, METH_VARARGS, NULL},
    {"note_attributes", note_attributes_method, METH_VARARGS, NULL},
    {"take_back", take_back_method, METH_VARARGS, NULL},
    {"find_lent", find_lent_method, METH_O, NULL},
    {"open_lent", open_lent_method, METH_VARARGS, NULL},
    {"all_lent", all_lent, METH_O, NULL},
    {"watch_opens", watch_opens_method, METH_O, NULL},
    {"noted_opens", noted_opens, METH_NOARGS, NULL},
    {"put_source", put_source_method, METH_VARARGS, NULL},
    {"put_places", put_places_method, METH_VARARGS, NULL},
    {"take_places", take_places_method, METH_O, NULL},
    {"take_source", take_source_method, METH_O, NULL},
    {"read_units", read_units, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aifs.fuse._bridge",
    .m_doc = "The bridge between libfuse and /dev/fuse; see bridge.c.",
    .m_size = -1,
    .m_methods = methods,
};

/* Also `state`: the memory of struct state; and INTERFACE: of aifs/fuse/__init__.py. */
PyMODINIT_FUNC PyInit__bridge(void)
{
    PyObject *made = PyModule_Create(&module);
    PyObject *state = PyMemoryView_FromMemory((char *)&bridge.state, sizeof bridge.state, PyBUF_WRITE);
    if (made != NULL && PyModule_AddObjectRef(made, "state", state) < 0)
        Py_CLEAR(made);
    Py_XDECREF(state);
    if (made != NULL && PyModule_AddIntConstant(made, "INTERFACE", 8) < 0)
        Py_CLEAR(made);
    return made;
}
