"""The state of a mount for the daemon that follows one that was killed: the files that programs
have open, and the requests that are done though the kernel may not have their answers.

Nothing is, unless the edge keeps it (``fuse/kept.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class KeptHandle(NamedTuple):
    """An open file of programs."""

    handle: int
    """Its number, as the kernel has it."""
    ino: int
    """The inode."""
    flags: int
    """Of open(2)."""
    opens: int
    """How many open files have it."""
    backing: int
    """The backing id that it is passed through to; 0: it is not."""
    direct: bool
    """The kernel caches nothing that is read and written by it."""


class Done(NamedTuple):
    """The result of a request that an earlier daemon has done, and the kernel sends again."""

    handle: int
    """The handle that it has made, or closed, or the inode that it was about; 0: none."""
    opens: int
    """How many open files have the handle with that."""


class KeptState:
    """Nothing is kept. No method blocks."""

    is_on = False
    """Whether anything is."""
    is_taken = False
    """Whether the mount was another daemon's before, of which ``handles`` and ``backings`` tell."""

    def add(self, handle: KeptHandle) -> None:
        """The current request has made a handle, and is done."""

    def know(self, handle: KeptHandle) -> None:
        """A handle that programs have is as this from now on."""

    def set_opens(self, handle: int, opens: int) -> None:
        """So many open files have the handle now; 0: it is closed."""

    def attach(self, backing: int, place: tuple[int, int]) -> None:
        """A backing id is in use for a local file: the number of its server, and its id."""

    def detach(self, backing: int) -> None:
        """It is not any more."""

    def closing(self, handle: int, opens: int) -> None:
        """The current request closes a handle, which so many open files will have then: it has been
        done when ``set_opens`` says so, too."""

    def commits(self, unique: int, number: int) -> None:
        """The request is done if the metadata have the transaction with this number; 0: it is not
        going to be."""

    def about(self, ino: int) -> None:
        """The current request will be done by the next transaction with ``answers``, and this inode
        is in its answer: ``handle`` of ``repeated``."""

    def appends(self, offset: int) -> None:
        """The current request appends to a file that ends here: ``handle`` of ``repeated``, whether
        that is done or not."""

    def repeated(self) -> Done | None:
        """The outcome of the current request, if another daemon has done it; else None."""
        return None

    def note(self, key: bytes, value: bytes) -> None:
        """The next daemon finds this in ``notes``; b"": it does not. Together some 490 bytes: a
        longer note is not kept."""

    @property
    def notes(self) -> Mapping[bytes, bytes]:
        """By key, also those of another daemon."""
        return {}

    def status(self) -> dict[str, Any]:
        """For ``aifs status``."""
        return {}

    # --- of a mount that was another daemon's before ---

    @property
    def handles(self) -> Sequence[KeptHandle]:
        """The handles that the kernel may know."""
        return ()

    @property
    def backings(self) -> Mapping[int, tuple[int, int]]:
        """The local files behind the backing ids that the kernel may know."""
        return {}

    def give_back(self, backing: int) -> None:
        """A backing id of ``backings`` that no handle has is of no use any more."""

    def settle(self, is_done: Callable[[int], bool]) -> None:
        """The metadata are open: these of the transactions of which ``commits`` has told are done,
        and the requests of others are not."""
