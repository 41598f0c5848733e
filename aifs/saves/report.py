"""What is told of a grouped write: amounts, times and the plan."""

from collections.abc import Mapping
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
    """Filled in while a group is stored."""

    bytes: int = 0
    """Of all members."""
    zero_bytes: int = 0
    """Those of them that are zeros."""
    duplicate_bytes: int = 0
    """In chunks that the group has more than once, but for the first."""
    found_bytes: int = 0
    """In chunks that the store had."""
    distinct_bytes: int = 0
    """In new chunks."""
    inline_bytes: int = 0
    """In the inodes of tiny files."""
    stored_bytes: int = 0
    """What the new chunks take, compressed, each counted once."""
    hashed_bytes: int = 0
    """Those that were hashed."""
    compared_bytes: int = 0
    """Those that were equal to these, byte by byte."""
    chunks: int = 0
    """New ones."""
    verified_chunks: int = 0
    """Read back before more files lean on them."""
    replaced_chunks: int = 0
    """Bad or not protected enough, and stored anew for all."""
    hash_s: float = 0.0
    """How long hashing took."""
    plan_s: float = 0.0
    """How long planning took."""
    store_s: float = 0.0
    """How long storing took."""
    planned_s: float = 0.0
    """How long storing takes by the plan."""
    lower_bound_s: float = 0.0
    """How long it takes at least, by any plan."""
    servers: dict[int, int] = field(default_factory=dict)
    """By data server, the bytes that it got, redundancy included."""

    @property
    def saved_bytes(self) -> int:
        """What needs not be stored: zeros, duplicates, and what the store has."""
        return self.zero_bytes + self.duplicate_bytes + self.found_bytes

    def take_amounts(self, other: "GroupReport") -> None:
        """Take over ``other``'s amounts to store: a try that stored nothing is counted again."""
        for name in _AMOUNTS:
            setattr(self, name, getattr(other, name))

    def add(self, told: Mapping[str, Any]) -> None:
        """Add another host's report, as of ``to_json``. Amounts add up; times are parallel."""
        for name, value in told.items():
            if name == "servers":
                for server, size in value.items():
                    self.servers[int(server)] = self.servers.get(int(server), 0) + size
            elif name.endswith("_s"):
                setattr(self, name, max(getattr(self, name), value))
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_json(self) -> dict[str, Any]:
        """As in ``user.aifs.group``."""
        found = asdict(self)
        return {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in found.items()
        }
