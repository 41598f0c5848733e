"""What is told of a grouped write: amounts, times and the plan."""

from dataclasses import asdict, dataclass, field
from typing import Any

_AMOUNTS = (
    "bytes",
    "zero_bytes",
    "duplicate_bytes",
    "found_bytes",
    "distinct_bytes",
    "inline_bytes",
    "chunks",
)


@dataclass
class GroupReport:
    """Filled in while a group is stored.

    ``bytes`` of all members are zeros, duplicates of other chunks of the group, found in the store,
    or new (``distinct_bytes``), or lie in their inodes (``inline_bytes``). ``stored_bytes`` is what
    the new ones take, compressed, each counted once. ``chunks`` are new ones; ``verified_chunks``
    were read back before more files lean on them, ``replaced_chunks`` were bad or not protected
    enough, and stored anew for all. ``hashed_bytes`` were hashed, ``compared_bytes`` were equal to
    these, byte by byte. ``servers``: bytes by data server, redundancy included. ``hash_s``,
    ``plan_s``, ``store_s``: how long it took; ``planned_s`` and ``lower_bound_s``: how long storing
    takes by the plan, and at least, by any.
    """

    bytes: int = 0
    zero_bytes: int = 0
    duplicate_bytes: int = 0
    found_bytes: int = 0
    distinct_bytes: int = 0
    inline_bytes: int = 0
    stored_bytes: int = 0
    hashed_bytes: int = 0
    compared_bytes: int = 0
    chunks: int = 0
    verified_chunks: int = 0
    replaced_chunks: int = 0
    hash_s: float = 0.0
    plan_s: float = 0.0
    store_s: float = 0.0
    planned_s: float = 0.0
    lower_bound_s: float = 0.0
    servers: dict[int, int] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> int:
        """What needs not be stored: zeros, duplicates, and what the store has."""
        return self.zero_bytes + self.duplicate_bytes + self.found_bytes

    def take_amounts(self, other: "GroupReport") -> None:
        """What was to be stored is as ``other`` says: after a try that stored nothing, since the
        next one counts it again.
        """
        for name in _AMOUNTS:
            setattr(self, name, getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        """As in ``user.aifs.group``."""
        found = asdict(self)
        return {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in found.items()
        }
