"""Lists in which something may be lacking."""

from collections.abc import Sequence
from typing import TypeGuard, TypeVar

Item = TypeVar("Item")


def is_complete(items: Sequence[Item | None]) -> TypeGuard[Sequence[Item]]:
    """Whether no item is None."""
    return None not in items
