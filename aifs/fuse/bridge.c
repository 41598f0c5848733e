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
#include <linux/ioctl.h>
#include <poll.h>
#include <sys/ioctl.h>
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

struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define DEVICE_BACKING_OPEN _IOW(229, 1, struct backing_map)
#define DEVICE_BACKING_CLOSE _IOW(229, 2, uint32_t)

/* How long requests are answered here before others of this thread get a turn, and how long the next one is waited for
 * meanwhile: about the time that a client needs from an answer to its next request. */
#define TURN_NS 1000000
#define BUSY_POLL_NS 40000

static struct bridge bridge;
static PyObject *on_request; /* NULL: switched off */
static int device = -1;      /* /dev/fuse, while the bridge is in use */
static size_t handed_over;   /* requests that Python has not yet answered */
static bool busy_polls;      /* clients have another processor */

/* --- messages --- */

static int send_reply(uint64_t unique, int error, const void *data, size_t size)
{
    struct out_header header = {.len = (uint32_t)(sizeof header + size), .error = -error, .unique = unique};
    struct iovec parts[] = {{&header, sizeof header}, {(void *)data, size}};
    return writev(device, parts, size ? 2 : 1) < 0 ? -1 : 0;
}

/* Whether Python has taken the request. A callable that raises takes none; what it hands back then is EIO. */
static bool hand_over(const struct in_header *header)
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

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static bool is_readable(int fd, uint64_t until_ns)
{
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    int ready;
    while ((ready = poll(&waiting, 1, 0)) == 0 && clock_ns(CLOCK_MONOTONIC) < until_ns)
        ;
    return ready > 0;
}

/*
 * libfuse's read(): the next request that is for libfuse; EINTR, which makes pyfuse3 come again, if there is none.
 *
 * Who has got an answer from here soon asks again, so the next request is waited for a moment. Python's other threads
 * run meanwhile: what is answered here needs no interpreter.
 */
static ssize_t bridge_read(int fd, void *buffer, size_t capacity, void *userdata)
{
    (void)userdata;
    uint64_t end_ns = 0;
    PyThreadState *released = NULL;
    ssize_t size, passed = -1;
    for (;;) {
        size = read(fd, buffer, capacity);
        if (size < 0) {
            if (errno == ENOENT || errno == EAGAIN) /* it was withdrawn; libfuse would wait, or pyfuse3 give up */
                errno = EINTR;
            break;
        }
        const struct in_header *header = buffer;
        struct answer answer = {0};
        enum verdict verdict = examine_request(&bridge, buffer, (size_t)size, clock_ns(CLOCK_REALTIME), &answer);
        if (verdict == PASS || (verdict == OFFER && (handed_over == 0 || !hand_over(header)))) {
            passed = size;
            break;
        }
        if (verdict == ANSWER) {
            bridge.answered[header->opcode % OPCODES]++;
            send_reply(header->unique, answer.error, &answer.open, answer.size);
        } else if (verdict == TELL) {
            bridge.answered[header->opcode % OPCODES]++;
            send_reply(header->unique, 0, &bridge.told, sizeof bridge.told);
        } else if (verdict == HAND_OVER) {
            if (hand_over(header))
                handed_over++;
            else
                send_reply(header->unique, EIO, NULL, 0);
        }
        uint64_t now_ns = clock_ns(CLOCK_MONOTONIC);
        bool waits = busy_polls && handed_over == 0;
        end_ns = end_ns ? end_ns : now_ns + TURN_NS;
        if (waits && released == NULL)
            released = PyEval_SaveThread();
        if (now_ns >= end_ns || !is_readable(fd, waits ? now_ns + BUSY_POLL_NS : 0)) {
            errno = EINTR;
            break;
        }
    }
    if (released != NULL)
        PyEval_RestoreThread(released);
    return passed;
}

/* libfuse's writev(): a reply, or a notification. */
static ssize_t bridge_writev(int fd, struct iovec *parts, int count, void *userdata)
{
    (void)userdata;
    const struct out_header *header = parts[0].iov_base;
    if (header->unique != 0 && bridge.expected_count != 0)
        edit_reply(&bridge, header, count > 1 ? parts[1].iov_base : NULL, count > 1 ? parts[1].iov_len : 0);
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
        device = fd;
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
    if (mount != NULL && mount != fuse_session_mount)
        failed = mount(session, mountpoint);
    if (!failed && on_request != NULL)
        take_over(library, session);
    if (library != NULL)
        dlclose(library); /* it stays loaded: the caller runs in it */
    return failed;
}

/* --- the Python module --- */

PyDoc_STRVAR(configure_doc,
             "configure(on_request, wanted, max_background, ioctl_type, busy_polls)\n--\n\n"
             "Use the bridge for the next mount. on_request None: do not.\n\n"
             "on_request(opcode, unique, nodeid, (uid, gid, pid), body) is called for each request that only Python\n"
             "can answer, on the thread that reads requests; it returns at once, true if reply() will be called.\n"
             "For INTERRUPT it returns whether the body names one of its own requests, and owes no reply.\n"
             "wanted: flags of INIT, used where the kernel offers them. max_background: requests without a waiting\n"
             "process that the kernel sends at once, 0 for its default. ioctl_type: of the ioctls handed over.\n"
             "busy_polls: clients have another processor.");

static PyObject *configure(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *callable;
    unsigned long long wanted;
    unsigned short max_background;
    unsigned char ioctl_type;
    int polls;
    if (!PyArg_ParseTuple(args, "OKHbp", &callable, &wanted, &max_background, &ioctl_type, &polls))
        return NULL;
    busy_polls = polls;
    memset(&bridge, 0, sizeof bridge);
    bridge.wanted = wanted;
    bridge.max_background = max_background;
    bridge.ioctl_type = ioctl_type;
    handed_over = 0;
    device = -1;
    Py_XSETREF(on_request, callable == Py_None ? NULL : Py_NewRef(callable));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(disconnect_doc, "disconnect()\n--\n\nThe mount ends: no descriptor of it is used from now on.");

static PyObject *disconnect(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    device = -1;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(is_connected_doc, "is_connected()\n--\n\nWhether a mount uses the bridge.");

static PyObject *is_connected(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyBool_FromLong(device >= 0);
}

PyDoc_STRVAR(reply_doc, "reply(unique, errno, data)\n--\n\n"
                        "Answer a request that on_request has taken. Raises OSError if the kernel refuses it (ENOENT:\n"
                        "nobody waits for it any more).");

static PyObject *reply(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long unique;
    int error;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "Kiy*", &unique, &error, &data))
        return NULL;
    handed_over -= handed_over > 0;
    int failed = send_reply(unique, error, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return failed ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static struct span span_of(PyObject *bytes)
{
    if (!PyBytes_Check(bytes))
        return (struct span){NULL, 0};
    return (struct span){PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)};
}

/* Puts the entry at place `i` of a listing as put_entry() does; -1 with an exception if it is none. */
static Py_ssize_t put_listed(char *out, size_t room, PyObject *entries, PyObject *inodes, Py_ssize_t i,
                             const struct keeping *keeping, PyObject *unkept)
{
    PyObject *pair = PyList_GET_ITEM(entries, i);
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "an entry is a pair");
        return -1;
    }
    struct span key = span_of(PyTuple_GET_ITEM(pair, 0)), entry = span_of(PyTuple_GET_ITEM(pair, 1));
    struct span inode = span_of(PyList_GET_ITEM(inodes, i));
    if (!is_entry(key, entry, inode)) {
        PyErr_SetString(PyExc_ValueError, "a directory's entry, or the inode's record, cannot be read");
        return -1;
    }
    int is_unkept = 0;
    if (PySet_GET_SIZE(unkept) != 0) {
        PyObject *name =
            PyBytes_FromStringAndSize(entry.start + ENTRY_NAME_AT, (Py_ssize_t)(entry.length - ENTRY_NAME_AT));
        is_unkept = name == NULL ? -1 : PySet_Contains(unkept, name);
        Py_XDECREF(name);
        if (is_unkept < 0)
            return -1;
    }
    if (has_acl(inode))
        note_acl(&bridge, big_endian(entry.start));
    return (Py_ssize_t)put_entry(out, room, key, entry, inode, keeping, !is_unkept);
}

PyDoc_STRVAR(listing_doc,
             "listing(entries, inodes, size, entry_ns, attr_ns, block_size, unkept)\n--\n\n"
             "The reply to READDIRPLUS with as many entries as fit into size: entries as the list of (key, record),\n"
             "inodes as that of the records they lead to. entry_ns, attr_ns: how long the kernel may keep what it is\n"
             "told; unkept: a set of names that it may not keep. Raises ValueError for records that cannot be read.");

static PyObject *listing(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *entries, *inodes, *unkept;
    unsigned int size, block_size;
    unsigned long long entry_ns, attr_ns;
    if (!PyArg_ParseTuple(args, "O!O!IKKIO!", &PyList_Type, &entries, &PyList_Type, &inodes, &size, &entry_ns,
                          &attr_ns, &block_size, &PySet_Type, &unkept))
        return NULL;
    const struct keeping keeping = {.entry_ns = entry_ns, .attr_ns = attr_ns, .block_size = block_size};
    PyObject *reply = PyBytes_FromStringAndSize(NULL, size);
    size_t used = 0;
    for (Py_ssize_t i = 0; reply != NULL && i < PyList_GET_SIZE(entries) && i < PyList_GET_SIZE(inodes); i++) {
        Py_ssize_t length =
            put_listed(PyBytes_AS_STRING(reply) + used, size - used, entries, inodes, i, &keeping, unkept);
        if (length < 0)
            Py_CLEAR(reply);
        if (length <= 0)
            break;
        used += (size_t)length;
    }
    if (reply != NULL)
        _PyBytes_Resize(&reply, (Py_ssize_t)used);
    return reply;
}

PyDoc_STRVAR(note_records_doc, "note_records(writes, attr_ns, block_size)\n--\n\n"
                               "Records have changed: a dict of keys and records, None: erased. GETATTR of directories\n"
                               "among them is answered from now on; the kernel may keep it for attr_ns.");

static PyObject *note_records(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *writes, *key, *record;
    unsigned long long attr_ns;
    unsigned int block_size;
    if (!PyArg_ParseTuple(args, "O!KI", &PyDict_Type, &writes, &attr_ns, &block_size))
        return NULL;
    bridge.directories.keeping = (struct keeping){.attr_ns = attr_ns, .block_size = block_size};
    for (Py_ssize_t at = 0; PyDict_Next(writes, &at, &key, &record);)
        note_record(&bridge.directories, span_of(key), span_of(record));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(backing_open_doc, "backing_open(fd)\n--\n\n"
                               "Register an open file with the mount: its backing id. Raises OSError.");

static PyObject *backing_open(PyObject *self, PyObject *args)
{
    (void)self;
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    struct backing_map map = {.fd = fd};
    int id = ioctl(device, DEVICE_BACKING_OPEN, &map);
    return id < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(id);
}

PyDoc_STRVAR(backing_close_doc, "backing_close(id)\n--\n\nForget a backing id; open files keep it. Raises OSError.");

static PyObject *backing_close(PyObject *self, PyObject *args)
{
    (void)self;
    uint32_t id;
    if (!PyArg_ParseTuple(args, "I", &id))
        return NULL;
    return ioctl(device, DEVICE_BACKING_CLOSE, &id) < 0 ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(kill_privileges_doc, "kill_privileges()\n--\n\n"
                                  "Whether the request read last (WRITE, SETATTR, OPEN, CREATE) asks to clear the\n"
                                  "set-user-id and set-group-id bits. Ask before anything is awaited.");

static PyObject *kill_privileges(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyBool_FromLong(bridge.kill_privileges);
}

PyDoc_STRVAR(last_request_doc, "last_request()\n--\n\n"
                               "Inode, uid and pid of the request read last. Ask before anything is awaited.");

static PyObject *last_request(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return Py_BuildValue("KII", (unsigned long long)bridge.nodeid, bridge.uid, bridge.pid);
}

PyDoc_STRVAR(note_acl_doc, "note_acl(nodeid)\n--\n\n"
                           "The inode has, or will have, an ACL: requests for it are passed on.");

static PyObject *note_acl_method(PyObject *self, PyObject *nodeid)
{
    (void)self;
    unsigned long long number = PyLong_AsUnsignedLongLong(nodeid);
    if (PyErr_Occurred())
        return NULL;
    note_acl(&bridge, number);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(negotiated_doc, "negotiated()\n--\n\n"
                             "Flags of INIT as (offered by the kernel, in use); (0, 0) before INIT.");

static PyObject *negotiated(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return Py_BuildValue("KK", (unsigned long long)bridge.offered, (unsigned long long)bridge.granted);
}

/* --- inodes that are lent --- */

static PyObject *describe_lent(struct lent lent)
{
    if (lent.ino == 0)
        Py_RETURN_NONE;
    return Py_BuildValue("KiKIK", (unsigned long long)lent.ino, (int)lent.backing, (unsigned long long)lent.copy,
                         (unsigned)lent.opens, (unsigned long long)lent.accessed_ns);
}

PyDoc_STRVAR(lend_doc, "lend(ino, backing, copy, due_ns)\n--\n\n"
                       "Answer OPEN of an inode for reading from now on; see opens.h. What there is no place for, as\n"
                       "(ino, backing, copy, opens, accessed_ns): another inode, this one, or None.");

static PyObject *lend_method(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long ino, copy, due_ns;
    int backing;
    if (!PyArg_ParseTuple(args, "KiKK", &ino, &backing, &copy, &due_ns))
        return NULL;
    return describe_lent(lend(&bridge.opens, (struct lent){.ino = ino, .copy = copy, .due_ns = due_ns, .backing = backing}));
}

PyDoc_STRVAR(take_back_doc, "take_back(ino, idle)\n--\n\n"
                            "The inode is lent no more, and its handles are the caller's; as it was, as in lend(), or\n"
                            "None. idle: only if it has no handles; else the next request for it goes to the caller.");

static PyObject *take_back_method(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned long long ino;
    int idle;
    return PyArg_ParseTuple(args, "Kp", &ino, &idle) ? describe_lent(take_back(&bridge.opens, ino, idle)) : NULL;
}

PyDoc_STRVAR(find_lent_doc, "find_lent(ino)\n--\n\nAn inode that is lent, as in lend(), or None.");

static PyObject *find_lent_method(PyObject *self, PyObject *ino)
{
    (void)self;
    const struct lent *found = find_lent(&bridge.opens, PyLong_AsUnsignedLongLongMask(ino));
    return describe_lent(found ? *found : (struct lent){0});
}

PyDoc_STRVAR(all_lent_doc, "all_lent(which)\n--\n\n"
                           "A list, as in lend(), of the inodes that are lent: 'open', those that have handles; 'used',\n"
                           "those that were used since that was asked last; 'all'.");

static PyObject *all_lent(PyObject *self, PyObject *which)
{
    (void)self;
    bool of_used = PyUnicode_CompareWithASCIIString(which, "used") == 0;
    bool of_all = PyUnicode_CompareWithASCIIString(which, "all") == 0;
    PyObject *result = PyList_New(0);
    struct lent *end = bridge.opens.lent + LENT_SETS * LENT_WAYS;
    for (struct lent *lent = bridge.opens.lent; result != NULL && lent < end; lent++) {
        if (lent->ino == 0 || !(of_all || (of_used ? lent->used : lent->opens > 0)))
            continue;
        PyObject *found = describe_lent(*lent);
        if (of_used) {
            lent->used = false;
            lent->accessed_ns = 0;
        }
        if (found == NULL || PyList_Append(result, found) < 0)
            Py_CLEAR(result);
        Py_XDECREF(found);
    }
    return result;
}

PyDoc_STRVAR(answer_opens_doc, "answer_opens(on)\n--\n\nWhether OPEN of inodes that are lent is answered.");

static PyObject *answer_opens(PyObject *self, PyObject *on)
{
    (void)self;
    bridge.opens.off = PyObject_IsTrue(on) != 1;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(counts_doc, "counts()\n--\n\n"
                         "By opcode, (requests read from the kernel, those of them answered by the bridge); what is 0\n"
                         "is left out.");

static PyObject *counts(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    PyObject *result = PyDict_New();
    for (unsigned opcode = 0; result != NULL && opcode < OPCODES; opcode++) {
        if (bridge.counts[opcode] == 0)
            continue;
        PyObject *key = PyLong_FromUnsignedLong(opcode);
        PyObject *value = Py_BuildValue("KK", (unsigned long long)bridge.counts[opcode],
                                        (unsigned long long)bridge.answered[opcode]);
        if (key == NULL || value == NULL || PyDict_SetItem(result, key, value) < 0)
            Py_CLEAR(result);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return result;
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_VARARGS, configure_doc},
    {"disconnect", disconnect, METH_NOARGS, disconnect_doc},
    {"is_connected", is_connected, METH_NOARGS, is_connected_doc},
    {"reply", reply, METH_VARARGS, reply_doc},
    {"listing", listing, METH_VARARGS, listing_doc},
    {"note_records", note_records, METH_VARARGS, note_records_doc},
    {"backing_open", backing_open, METH_VARARGS, backing_open_doc},
    {"backing_close", backing_close, METH_VARARGS, backing_close_doc},
    {"kill_privileges", kill_privileges, METH_NOARGS, kill_privileges_doc},
    {"last_request", last_request, METH_NOARGS, last_request_doc},
    {"note_acl", note_acl_method, METH_O, note_acl_doc},
    {"negotiated", negotiated, METH_NOARGS, negotiated_doc},
    {"lend", lend_method, METH_VARARGS, lend_doc},
    {"take_back", take_back_method, METH_VARARGS, take_back_doc},
    {"find_lent", find_lent_method, METH_O, find_lent_doc},
    {"all_lent", all_lent, METH_O, all_lent_doc},
    {"answer_opens", answer_opens, METH_O, answer_opens_doc},
    {"counts", counts, METH_NOARGS, counts_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aifs.fuse._bridge",
    .m_doc = "The bridge between libfuse and /dev/fuse; see bridge.c.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__bridge(void)
{
    return PyModule_Create(&module);
}
