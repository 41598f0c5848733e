"""What a file may be called."""

NAME_MAX = 255
"""In bytes."""

VIRTUAL = b".aifs-data"
"""The directory of virtual files, in each directory. It is another name than that of a data
server's marker: a server may lie in a mount. Stores of earlier versions may have it on record."""


def is_name(name: bytes) -> bool:
    """Whether a file can have this name."""
    is_one = name not in (b"", b".", b"..") and b"/" not in name and b"\0" not in name
    return is_one and len(name) <= NAME_MAX
