/* The ioctl of AIFS. Made by scripts/reference from the rows of hints. */
#ifndef AIFS_IOCTL_H
#define AIFS_IOCTL_H

#include <errno.h>
#include <linux/ioctl.h>
#include <linux/types.h>
#include <string.h>
#include <sys/ioctl.h>

#define AIFS_CALL_VERSION 3

/* A call by its name, with a JSON object of that length (0: no fields), then with the answer. */
struct aifs_call {
	__u32 version; /* AIFS_CALL_VERSION */
	__u32 length;
	char name[56];
	char json[960];
};
struct aifs_large_call {
	__u32 version;
	__u32 length;
	char name[56];
	char json[16256];
};
#define AIFS_IOC_CALL _IOWR(0xaf, 16, struct aifs_call)
#define AIFS_IOC_LARGE_CALL _IOWR(0xaf, 16, struct aifs_large_call)

/*
 * Make the call on an open file or directory. 0, and the answer in call->json, which ends with a
 * zero byte; or -1 and errno: ENOTTY: there is no such call; EINVAL: wrong fields, or another
 * version; E2BIG. Then the attribute user.aifs.refused of the file or directory says why.
 */
static inline int aifs_do_call(int fd, struct aifs_call *call, const char *name, const char *json)
{
	size_t length = strlen(json);
	if (length >= sizeof call->json || strlen(name) >= sizeof call->name) {
		errno = E2BIG;
		return -1;
	}
	memset(call, 0, sizeof *call);
	call->version = AIFS_CALL_VERSION;
	call->length = (__u32)length;
	memcpy(call->name, name, strlen(name));
	memcpy(call->json, json, length);
	if (ioctl(fd, AIFS_IOC_CALL, call) < 0)
		return -1;
	call->json[call->length < sizeof call->json ? call->length : sizeof call->json - 1] = 0;
	return 0;
}

/*
 * The calls. Names and paths are strings; bytes that are not UTF-8 are \udc80 to \udcff.
 *
 * clone {"name": string, "parent": integer, "clone": string, "snapshot": boolean}, where:
 *   directory
 *   Makes a clone of what has the name in it (. is the directory itself), with all that lies
 *     below, under the name clone in the directory parent, by inode number. It appears when it is
 *     complete, and is durable on return; no bytes are copied except of files that are open for
 *     writing. snapshot, of a directory: it stays as it is, and can only be removed as a whole.
 *     EACCES: not all may be read, or no name made there; EEXIST; EBUSY: a single file is open
 *     for writing.
 *
 * commit {"rank": integer, "files": object, "list": string, "again": boolean}, where: any
 *   All that is unsynced below the pending directory is durable on return, and the rank has
 *     committed. files: {path: bytes}, what it has written, or list: path of a file below that
 *     says it; again: it may have committed before. EINVAL: not pending, no such rank, or it has
 *     committed.
 *
 * drain {"timeout_ms": integer}, where: directory or file
 *   Returns when the bytes of the file, or of all files below the directory, that have been
 *     acknowledged are on the capacity tier. timeout_ms 0: none. ETIMEDOUT.
 *
 * evict {"inos": array}, where: directory or file
 *   Gives up the clean copies, and the blocks of their own, of the files with these inode
 *     numbers, and of all files below such directories; without any, of that which it is called
 *     on. Answers {files, bytes, kept}: those that have given up theirs, and how many keep theirs
 *     by reason: dirty, open, pinned, needed (the data servers do not have all of it now), owner
 *     (it is not the caller's).
 *
 * group {"name": string, "ranks": integer, "dedup": string, "commit": string, "timeout": string,
 *   "grace": string, "publish": string, "same_size": string, "job": string, "pending": string,
 *   "step": integer, "anew": string}, where: directory
 *   Begins a group in the directory, or finds the open one that was begun so. The fields are the
 *     words of user.aifs.group, docs/design/commit.md. Answers {id}. EINVAL: another group is
 *     open, or a job whose ranks live is writing; EBUSY: it is not durable yet.
 *
 * group.cancel {"id": integer, "reason": string}, where: directory
 *   Ends the group; its files are drained as usual. Others read the reason, of up to 127
 *     characters.
 *
 * group.commit {"rank": integer, "id": integer, "file": string}, where: directory
 *   All that is unsynced below the directory is durable in the burst tier on return, and the rank
 *     has committed. file: path of a file below that the rank has written; its size is compared
 *     if all files have to have one. EINVAL: no such rank, it has committed, the group commits by
 *     closing, or the file has another size than that of the first rank to commit.
 *
 * group.join {"rank": integer, "id": integer}, where: directory
 *   The calling process is this rank from now on: if it ends before the rank has committed, the
 *     group fails, at once or when its grace is over. EINVAL: no such rank, a process that lives
 *     is it already, or the group commits by closing; EOPNOTSUPP: the daemon cannot see the
 *     process.
 *
 * group.state {"id": integer}, where: any
 *   Answers {id, state, ranks, joined, committed, files, dead, bytes, zero_bytes,
 *     duplicate_bytes, found_bytes, distinct_bytes, stored_bytes, created_ns, buffered_ns,
 *     durable_ns}. state: open, committed, draining, durable, failed, cancelled or expired;
 *     joined, committed: how many ranks; dead: a rank, or -1; times since the epoch, 0 if not
 *     yet.
 *
 * group.wait {"for": string, "id": integer, "timeout_ms": integer}, where: any
 *   Returns when all ranks have committed and their bytes are durable in the burst tier ("for":
 *     "buffered") or on the capacity tier ("durable"). timeout_ms 0: none. EINVAL: files have
 *     sizes that differ; EOWNERDEAD: a rank died; ECANCELED; ETIME: the group's own time was
 *     over; ETIMEDOUT: timeout_ms were.
 *
 * import {"bucket": string, "below": string, "names": string, "etags": string, "sizes": array,
 *   "mtimes": array, "mode": integer}, where: directory
 *   Makes files in it, unless they are there: names and ETags, a line for each, sizes in bytes,
 *     mtimes in ns. Their bytes stay in the bucket (a URL), in the objects whose keys are below
 *     and the name; reading fails with EIO once these have other ETags. mode: permission bits
 *     (0644). Answers {states}, a line for each: made, same, changed (it is there with another
 *     ETag) or other (another file has the name). Durable with the next fsync.
 *
 * order {"order": string}, where: directory
 *   An epoch of the dataset in the directory is read in this order, and what comes next is
 *     brought into the burst tier. order: as the attribute is set,
 *     'seed=7,epoch=1,world=8,rank=3,done=1000'. To be said again within a minute, with how far
 *     it is. EINVAL: no order, or no index of a dataset there; EBUSY: too many epochs are read;
 *     EOPNOTSUPP: there is no burst tier.
 *
 * publish-as {"final": string, "latest": string, "tracker": string, "content": string,
 *   "manifest": string, "replace": boolean, "exclusive": boolean, "parent": integer}, where:
 *   directory
 *   Shows the directory under its final name, with the pointers beside it, all at once; durable
 *     on return. final: a path from the directory that it lies in, or, with a slash before it,
 *     from the root of the mount, or from the directory with the inode number parent; latest: a
 *     symlink to it; tracker: a file with the content; manifest: a file that has to be in the
 *     directory; replace: a tree that has the final name is removed; exclusive: nothing may have
 *     it. EBUSY: members or files are missing; EEXIST, ENOTEMPTY: the name is taken.
 *
 * remove {"name": string}, where: directory
 *   Removes that directory in it with all that lies below. Returns at once; space comes back in
 *     the background. ENOTDIR, ENOENT, EACCES, EPERM as rmdir(2); EPERM also unless the caller
 *     owns the directory that is removed.
 *
 * restore {"path": string, "id": integer, "parent": integer, "name": string}, where: directory
 *   Restores from the trash what is the caller's: what had this path from there, the last of
 *     several that had; or, if id is not 0, the inode with that number. It goes to the directory
 *     with the inode number parent (0: where it lay, or the nearest directory above that is still
 *     there), under this name (empty: its own). Answers {id, parent}. Durable on return. ENOENT:
 *     there is none; EEXIST: the name is taken; EBUSY: programs are in a directory that rmdir(2)
 *     has removed; EACCES.
 *
 * stage {"inos": array, "limit": integer}, where: directory or file
 *   Brings the files with these inode numbers into the burst tier, of together limit bytes at
 *     most, and returns when that is done; without inos, that which it is called on. Answers
 *     {files, bytes, there, kept}: those that it has brought, how many were there, and how many
 *     are not by reason: owner (it is not the caller's), near (its data servers are as near, so
 *     there are no blocks), off (burst.blocks), capacity (user.aifs.tier), limit, room (no room,
 *     changed meanwhile, written to in place, or not told by the data servers). EOPNOTSUPP: no
 *     burst tier.
 *
 * trash.empty {"ids": array}, where: directory
 *   Has these inodes that are in the trash, and the caller's, go for good; without ids all.
 *     ENOENT: one of them is not there.
 *
 * version {}, where: any
 *   Answers {version}; for each version of the argument.
 */

#endif
