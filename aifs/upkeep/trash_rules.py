"""How long directories keep removed names (``user.aifs.trash``), known to every host: removals cost
nothing without trash."""

from aifs.core.errors import Invalid
from aifs.core.units import format_duration, parse_duration
from aifs.core.upkeep import Upkeep, Work
from aifs.files import rights
from aifs.files.asks import DIRECTORY, Hint
from aifs.files.types import CallerLike
from aifs.meta import namespace, trash
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine, Transaction
from aifs.meta.trash import Remover

OFF = "off"
MAX_S = 3650 * 86400.0


class TrashRules:
    """All rules, by directory. Used from one trio thread."""

    def __init__(self, engine: Engine, upkeep: Upkeep, at_root_s: float) -> None:
        """``at_root_s``: the configuration's rule for the root; 0: none."""
        self._engine = engine
        self._upkeep = upkeep
        self._at_root_ns = int(at_root_s * 1e9)
        self._periods_ns: dict[int, int] = {}

    async def load(self, read_only: bool) -> None:
        """Those on record; and the configuration's, which goes there, too."""
        self._periods_ns |= await self._engine.view(trash.read_rules)
        if self._at_root_ns not in (0, self._periods_ns.get(ROOT_INO)) and not read_only:
            await self._put(ROOT_INO, self._at_root_ns)

    async def set(self, ino: int, text: str) -> None:
        """Set the rule of a directory, '' to remove it, for later removals. Raises Invalid,
        NotFound, NotADirectory."""
        try:
            period_ns = _parse(text) if text else None
        except ValueError as error:
            raise Invalid(f"trash: {error}") from None
        await self._put(ino, period_ns)
        await self._engine.shown()

    async def _put(self, ino: int, period_ns: int | None) -> None:
        await self._engine.transact(_put_rule, ino, period_ns)
        self.follow(ino, period_ns)

    def follow(self, ino: int, period_ns: int | None) -> None:
        """This is the rule of a directory now; None: it has none."""
        if period_ns is None:
            self._periods_ns.pop(ino, None)
        else:
            self._periods_ns[ino] = period_ns
            self._upkeep.wake(Work.TRASH)

    def text_of(self, ino: int) -> str:
        """The rule of the directory itself, '' if it has none."""
        period_ns = self._periods_ns.get(ino)
        if period_ns is None:
            return ""
        return format_duration(period_ns / 1e9) if period_ns else OFF

    HINTS = (
        Hint(
            "trash",
            DIRECTORY,
            "how long what is removed below is kept, to be restored: 7d, or off",
            rights.reader,
            rights.owner,
            get=lambda rules, ask: rules.text_of(ask.ino),
            set=lambda rules, ask: rules.set(ask.ino, ask.text),
            remove="",
        ),
    )

    @property
    def are_some(self) -> bool:
        """Whether something that is removed may be kept."""
        return any(self._periods_ns.values())

    def remover(self, caller: CallerLike | None) -> Remover | None:
        """The remover of ``caller``'s names; None if they go at once, like the store's own."""
        return Remover(self._periods_ns, caller.uid) if self._periods_ns and caller else None


def _parse(text: str) -> int:
    """The period in ns. Raises ValueError."""
    if text == OFF:
        return 0
    seconds = parse_duration(text)
    if not 0 < seconds <= MAX_S:
        raise ValueError(f"{text!r} is neither {OFF} nor a duration up to {format_duration(MAX_S)}")
    return int(seconds * 1e9)


def _put_rule(tx: Transaction, ino: int, period_ns: int | None) -> None:
    namespace.get_directory(tx, ino)
    trash.put_rule(tx, ino, period_ns)
