"""The configuration of a mount as it is in force (``user.aifs.config``), and which keys can change
while it is mounted. A change holds until the next mount.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from aifs.core.config import Config
from aifs.core.errors import Invalid
from aifs.core.log import logger
from aifs.data.servers import Servers
from aifs.files import rights
from aifs.files.asks import ROOT, Hint
from aifs.files.types import CallerLike

_log = logger(__name__)

Setter = Callable[[Any], None]
"""Has a part use another value from now on."""


def set_log_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


class Settings:
    """Used from one trio thread."""

    def __init__(self, config: Config, servers: Servers, setters: Mapping[str, Setter]) -> None:
        """``setters``: of the keys that can change."""
        self._config = config
        self._servers = servers
        self._setters = setters

    def tell(self) -> dict[str, Any]:
        """By key: ``value`` as one would write it, ``from`` where it is, and whether it
        ``can_change`` now."""
        return {
            key: {"value": value, "from": origin, "can_change": key in self._setters}
            for key, value, origin in self._config.with_servers(self._servers.rows()).settings()
        }

    HINTS = (
        Hint(
            "config",
            ROOT,
            "the configuration; set KEY=VALUE, until the next mount",
            rights.overseer,
            rights.mounter,
            get=lambda settings, ask: settings.tell(),
            set=lambda settings, ask: settings.put(ask.text, ask.caller),
        ),
    )

    def put(self, text: str, caller: CallerLike) -> None:
        """KEY=VALUE. Raises Invalid."""
        key, equals, value = text.partition("=")
        if not equals:
            raise Invalid("it takes KEY=VALUE")
        known = self.tell()
        if key not in known:
            raise Invalid(f"{key} is no key of the configuration")
        if key not in self._setters:
            raise Invalid(
                f"{key} is read when the store is mounted: mount again with -o {key}={value}, or "
                f"with that in {self._config.file}"
            )
        try:
            changed, parsed = self._config.changed(key, value, "aifs config set")
        except ValueError as error:
            raise Invalid(f"{key}: {error}") from None
        self._setters[key](parsed)
        self._config = changed
        was, now = known[key]["value"], self.tell()[key]["value"]
        _log.info("%s is %s from now on, and was %s (user %d)", key, now, was, caller.uid)
