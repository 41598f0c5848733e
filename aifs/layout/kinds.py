"""The kinds of layouts of files: the one place where "which kind is it?" is asked."""

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from aifs.layout.imported import Pin
    from aifs.layout.interleaved import Interleaved
    from aifs.layout.striped import Striped


class Layout:
    """How a file's bytes lie: on data servers, in an object set or as chunks in containers; or as
    an object of a bucket (a pin)."""

    __slots__ = ()

    kind: ClassVar[str]
    """Its name in hints, and in what is shown."""

    @property
    def objects(self) -> "Striped | None":
        """How the file's own object set is laid out; None: it has none."""
        return None

    @property
    def chunks(self) -> "Interleaved | None":
        """How the file is cut into chunks that a list names; None: it is not."""
        return None

    @property
    def pin(self) -> "Pin | None":
        """The object of a bucket that has the file's bytes; None: data servers have them."""
        return None

    @property
    def read_as(self) -> "Striped | None":
        """The layout by which the file is read, unless it is cut into chunks."""
        return self.objects

    @property
    def is_protected(self) -> bool:
        """Whether the layout itself says that bytes survive the loss of a server."""
        return False

    @property
    def is_possible(self) -> bool:
        """Whether a file can be laid out so: what a damaged record says may be nonsense."""
        raise NotImplementedError


def objects_of(layout: Layout | None) -> "Striped | None":
    """As Layout.objects; a file without layout has none."""
    return None if layout is None else layout.objects


def chunks_of(layout: Layout | None) -> "Interleaved | None":
    """As Layout.chunks; a file without layout has none."""
    return None if layout is None else layout.chunks
