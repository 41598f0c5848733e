"""The role of a host: one of those that have a store mounted does the work of the whole store."""

from collections.abc import Awaitable, Callable

import trio


class Role:
    """Whether this host has the role. Made before the parts that ask; on a store of one host it is
    always held.

    Of the live sessions the one that was the first to join has it. So nobody loses the role but
    with its session; then it uses no server any more (Ownership.over), and need not be told to
    stop. Used from one trio thread.
    """

    def __init__(self, ask_live: Callable[[], Awaitable[frozenset[int]]] | None = None) -> None:
        """``ask_live``: asks the table of sessions which hosts have one now, by their numbers;
        None: the store has one host. Until ``tell`` the role is held there alone."""
        self.is_shared = ask_live is not None
        """Whether several hosts may have the store mounted."""
        self.held = not self.is_shared
        self.live = frozenset[int]()
        """The hosts that had a session when that was last heard of."""
        self._ask_live = ask_live
        self._changed = trio.Event()

    def tell(self, held: bool, live: frozenset[int]) -> None:
        """Take over the contents of the table of sessions. Does not block."""
        if (held, live) != (self.held, self.live):
            self.held, self.live = held, live
            self._changed.set()
            self._changed = trio.Event()

    async def change(self) -> None:
        """Wait until ``held`` or ``live`` is another one."""
        await self._changed.wait()

    async def ask_live(self) -> frozenset[int]:
        """The hosts that have a session now. Records from before of a host that has none
        are nobody's: a session begins before its first change. Raises Unavailable.
        """
        assert self._ask_live is not None
        return await self._ask_live()
