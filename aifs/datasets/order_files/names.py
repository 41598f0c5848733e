"""What order files are called: ``seed=7,epoch=0,rank=0-of-8.tar``."""

import re
from typing import NamedTuple

from aifs.core.errors import DatasetError

FORMATS = {
    b".tar": "tar",
    b".jsonl": "jsonl",
    b".txt": "text",
    b".bin": "megatron",
    b".idx": "megatron",
    b".rec": "records",
}
"""By suffix."""

_BY_READER = (b".parquet", b".arrow", b".arrows")
_EXAMPLE = "seed=7,epoch=0,rank=0-of-8.tar"
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,17})")
_WORLD_MAX = 1 << 20


class OrderName(NamedTuple):
    """What a name asks for."""

    seed: int  # of all epochs
    epoch: int  # from 0
    rank: int  # from 0
    world: int  # how many ranks there are
    record_bytes: int
    """Of fixed-size records; 0 of other formats."""
    suffix: bytes
    """With its dot: a key of ``FORMATS``."""

    @property
    def format(self) -> str:
        return FORMATS[self.suffix]


def parsed(name: bytes) -> OrderName:
    """What ``name`` asks for: ``seed``; perhaps ``epoch`` (else 0), ``rank`` (else 0-of-1);
    ``record_bytes`` of records. Raises DatasetError for what is no name of an order."""
    stem, dot, suffix = name.rpartition(b".")
    if dot + suffix in _BY_READER:
        raise DatasetError(
            "Parquet and Arrow have no order files: read the dataset with aifs.client.data"
        )
    if dot + suffix not in FORMATS:
        known = " ".join(map(bytes.decode, FORMATS))
        raise DatasetError(f"an order file's name ends with one of {known}, as {_EXAMPLE}")
    given: dict[str, str] = {}
    for field in stem.decode(errors="replace").split(","):
        key, equals, value = field.partition("=")
        if not equals or key in given or key not in ("seed", "epoch", "rank", "record_bytes"):
            raise DatasetError(f"{field!r} in the name of an order file, which is as {_EXAMPLE}")
        given[key] = value
    rank, _, world = given.pop("rank", "0-of-1").partition("-of-")
    found = OrderName(
        _number(given.get("seed", "")),
        _number(given.get("epoch", "0")),
        _number(rank),
        _number(world),
        _number(given.get("record_bytes", "0")),
        dot + suffix,
    )
    if not found.rank < found.world <= _WORLD_MAX:
        raise DatasetError(f"rank={rank}-of-{world}: ranks count from 0, and are below the world")
    if (found.format == "records") != bool(found.record_bytes):
        raise DatasetError("a name with .rec, and no other, has record_bytes=, the size of a row")
    return found


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise DatasetError(f"{text!r} is no number, in the name of an order file as {_EXAMPLE}")
    return int(text)
