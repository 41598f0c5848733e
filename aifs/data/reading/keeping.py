"""How much of what has been read is kept in memory.

What has been read is kept for those who follow the first reader and do not get it from a page
cache. What was read first goes first: that a piece is read again says that a reader has passed it,
not that more will come. Little is kept while nobody follows: an eighth of the budget. Once a piece
is read that is half way out, or was dropped not long ago, half of the budget is kept, until as much
as the whole budget has been fetched without that happening again. So readers of the same bytes that
are no further apart have them fetched once.
"""

_FOLLOWED_SHARE, _SHARE = 2, 8


class Keeping:
    """``fetched``: bytes that have been fetched so far, as they count in the budget, which is the
    clock of all this.
    """

    __slots__ = ("_followed_at", "_total", "fetched")

    def __init__(self, total: int) -> None:
        """``total``: bytes of the budget."""
        self.fetched = 0
        self._total = total
        self._followed_at = -total  # when somebody last read what others had read long before

    @property
    def limit(self) -> int:
        """Bytes that may be kept now."""
        is_followed = self.fetched - self._followed_at < self._total
        return self._total // (_FOLLOWED_SHARE if is_followed else _SHARE)

    def read_again(self, first_at: int) -> None:
        """Somebody reads what is kept, and was first read when ``first_at`` had been fetched."""
        if self.fetched - first_at > self._total // _SHARE // 2:
            self.follow()

    def follow(self) -> None:
        """Somebody reads what others have read long before."""
        self._followed_at = self.fetched

    def is_long_ago(self, first_at: int) -> bool:
        """Whether a follower so far behind would not be helped."""
        return self.fetched - first_at > self._total // _FOLLOWED_SHARE
