"""Claims: the file ``owner`` in each data server and burst directory, which says who has the store
it belongs to.

The metadata directory has a lock (store/owner.py), but metadata can be copied, or restored, and used
elsewhere with the same data servers. So whoever opens a store claims each of its directories, with
an *epoch* that is larger than all before; of two claims the one with the larger epoch counts, and
who finds one that has ended the own must not touch the store any more. What is compared are epochs
and counts of renewals, never the clocks of two hosts.

Format: two slots, at 0 and 65536, each an 8-digit hexadecimal CRC-32, a space, a JSON object with
the fields of ``Claim``, and a newline; what stands behind that means nothing. The slot with the
larger (epoch, renewals) counts, and the other one is written next, in place: a torn write leaves
the older one, and a full disk is no obstacle. A slot that is not whole counts as empty.
"""

import json
import os
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass

from aifs.core import files

NAME = "owner"

_SLOT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Claim:
    """Of a mount, or of a command such as fsck, whose ``mountpoint`` is empty."""

    epoch: int
    token: str
    """Different for each claim that was ever made."""
    host: str
    pid: int
    mountpoint: str
    metadata: str
    """Path of the metadata directory."""
    place: tuple[int, int, int]
    """Which directory that is, told apart from a copy: device, inode and change time (ns) of its
    marker.
    """
    boot: str
    """Of the kernel that the owner runs under."""
    held: bool = True
    """False: the owner has closed the store in order."""
    renewals: int = 0
    time_s: float = 0.0
    """Of the last renewal, by the owner's clock: for people."""

    @property
    def age(self) -> tuple[int, int]:
        return self.epoch, self.renewals

    def ends(self, other: "Claim") -> bool:
        """Whether the other one counts no more where this one is."""
        return self.token != other.token and self.epoch >= other.epoch


def read_claim(directory: str) -> Claim | None:
    """The claim that counts in a data server or burst directory, None if there is none. Blocks.
    Raises OSError.
    """
    content = files.read_file(os.path.join(directory, NAME)) or b""
    return _newest(content)[0]


def put_claim(directory: str, claim: Claim, durable: bool) -> Claim | None:
    """Put the claim into the directory, unless there is one that ends it, which is returned, or a
    later one of ours. One at a time. Blocks. Raises OSError.

    ``durable``: on return it is on stable storage.
    """
    fd = files.open_file(os.path.join(directory, NAME), create=True)
    try:
        theirs, slot = _newest(files.read_at(fd, 2 * _SLOT_BYTES, 0))
        if theirs is not None and theirs.ends(claim):
            return theirs
        if theirs is not None and theirs.token == claim.token and theirs.age > claim.age:
            return None  # a renewal that has been overtaken
        files.write_at(fd, _encode(claim), (1 - slot) * _SLOT_BYTES)
        if theirs is None:
            _give_to_owner_of(directory, fd)
            files.write_at(fd, _encode(claim), slot * _SLOT_BYTES)  # has its space from now on, too
        if durable:
            files.sync_file(fd)
    finally:
        files.close_file(fd)
    if durable:
        files.sync_dir(directory)
    return None


def _give_to_owner_of(directory: str, fd: int) -> None:
    """If root has made the file, by fsck perhaps, in the store of another user, who has to read and
    write it.
    """
    status = os.stat(directory)
    if status.st_uid != os.geteuid():
        with suppress(OSError):
            files.set_owner(fd, status.st_uid, status.st_gid)


def _encode(claim: Claim) -> bytes:
    text = json.dumps(asdict(claim)).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _newest(content: bytes) -> tuple[Claim | None, int]:
    """The claim that counts, and the slot that it is in; any slot if there is none."""
    slots = [content[start : start + _SLOT_BYTES] for start in (0, _SLOT_BYTES)]
    found = [(claim, slot) for slot, text in enumerate(slots) if (claim := _decode(text))]
    return max(found, key=lambda each: each[0].age, default=(None, 0))


def _decode(slot: bytes) -> Claim | None:
    check, _, text = slot.partition(b"\n")[0].partition(b" ")
    if check != b"%08x" % zlib.crc32(text):
        return None
    fields = json.loads(text)
    return Claim(**(fields | {"place": tuple(fields["place"])}))
