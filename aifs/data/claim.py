"""Claims: the blob ``owner`` of each data server and burst directory, which names its owner.

The metadata directory has a lock (store/owner.py), but copied or restored metadata can be used
elsewhere with the same servers. So a process that opens a store claims each directory, with an
*epoch* larger than all before. The larger epoch counts; a process whose claim has ended must not
touch the store any more. Epochs and counts of renewals are compared, never clocks of hosts.

Format: a JSON object with the fields of ``Claim``.
"""

import json
from dataclasses import asdict, dataclass

from aifs.data.storage import CLAIM, Storage


@dataclass(frozen=True, slots=True)
class Claim:
    """Of a mount, or of a command such as fsck, whose ``mountpoint`` is empty."""

    epoch: int
    """Of two claims the one with the larger epoch counts."""
    token: str
    """Different for each claim that was ever made."""
    host: str
    """Name of the owner's host, for people."""
    pid: int
    """Of the owner there, for people."""
    mountpoint: str
    """For people."""
    metadata: str
    """Path of the metadata directory."""
    place: tuple[int, int, int]
    """The directory, distinct from copies: device, inode and change time (ns) of its marker."""
    boot: str
    """Of the kernel that the owner runs under."""
    held: bool = True
    """False: the owner has closed the store in order."""
    renewals: int = 0
    """How often the owner has renewed it."""
    time_s: float = 0.0
    """Of the last renewal, by the owner's clock: for people."""

    @property
    def age(self) -> tuple[int, int]:
        return self.epoch, self.renewals

    def ends(self, other: "Claim") -> bool:
        """Whether the other one counts no more where this one is."""
        return self.token != other.token and self.epoch >= other.epoch


def read_claim(storage: Storage) -> Claim | None:
    """The claim that counts in a storage, or None. Blocks. Raises OSError, StoreError."""
    return _decode(storage.get_blob(CLAIM))


def _decode(content: bytes | None) -> Claim | None:
    if content is None:
        return None
    fields = json.loads(content)
    return Claim(**(fields | {"place": tuple(fields["place"])}))


def put_claim(storage: Storage, claim: Claim, durable: bool) -> Claim | None:
    """Put the claim, unless one that ends it, or a later one of ours, is there and is returned. Of
    two at once the second finds the first. Blocks. Raises OSError, StoreError. ``durable``: on
    stable storage on return."""
    packed = json.dumps(asdict(claim)).encode()
    while True:
        before = storage.get_blob(CLAIM)
        theirs = _decode(before)
        if theirs is not None and theirs.ends(claim):
            return theirs
        if theirs is not None and theirs.token == claim.token and theirs.age > claim.age:
            return None  # overtaken
        if storage.put_blob(CLAIM, packed, durable, before):
            return None  # else another claim came between, which may have ended this one
