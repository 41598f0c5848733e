"""The user that has asked for something that the daemon does later.

asker   u32 uid, u16 count of groups, for each u32 gid; a part of other records, little-endian
"""

import struct
from typing import NamedTuple

_ASKER = struct.Struct("<IH")
_GROUPS_MAX = 1024  # of an asker's groups, the first


class Asker(NamedTuple):
    """A user for whom, and with whose rights, the daemon acts later, as a caller
    (files/types.py)."""

    uid: int
    gids: tuple[int, ...]
    pid: int = 0
    umask: int = 0

    @property
    def gid(self) -> int:
        return self.gids[0]

    def encode(self) -> bytes:
        gids = self.gids[:_GROUPS_MAX]
        return struct.pack(f"<IH{len(gids)}I", self.uid, len(gids), *gids)


def decode_asker(record: bytes, offset: int) -> tuple[Asker, int]:
    """The asker, and where it ends. Raises struct.error."""
    uid, count = _ASKER.unpack_from(record, offset)
    gids = struct.unpack_from(f"<{count}I", record, offset + _ASKER.size)
    return Asker(uid, gids or (uid,)), offset + _ASKER.size + 4 * count
