"""The caches of the kernel, which all programs of a machine share."""

import fcntl

DROP = "/proc/sys/vm/drop_caches"
NAMES, ALL = "2", "3"
"""Names and attributes; these and the pages of files."""


def drop(what: str = ALL) -> None:
    """Have the kernel forget *what* no program uses. A program that counts on the caches holds a
    shared lock of ``DROP`` meanwhile; this waits for it."""
    with open(DROP, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(what)
