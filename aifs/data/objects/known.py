"""What is known of an object without asking its server."""

from dataclasses import dataclass

_PAGE = 4096  # what filesystems allocate by


@dataclass(slots=True)
class Known:
    """Length and space of one object. They can be known, since this process is the only one that
    changes them.
    """

    length: int | None = None  # None: nothing is known
    blocks: int = 0  # of 512 bytes
    exact: bool = True  # ``blocks`` is counted, not estimated

    def written(self, offset: int, length: int) -> None:
        """``length`` bytes have been written at ``offset``."""
        if self.length is None:
            return
        end = offset + length
        if offset == self.length and self.blocks == _blocks(offset):
            self.blocks = _blocks(end)
        else:
            self.exact = False
            self.blocks = min(
                self.blocks + _blocks(length) + _blocks(1), _blocks(max(end, self.length))
            )
        self.length = max(end, self.length)


def _blocks(length: int) -> int:
    return -(-length // _PAGE) * (_PAGE // 512)
