"""Environments: directories with installed packages, made once for their key."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from aifs.client.startup.keys import name_of, platform_key
from aifs.client.startup.once import MadeDirectory, make_once


def environment(
    directory: str | os.PathLike[str],
    *,
    key: Mapping[str, Any],
    make: Callable[[str], object],
    expire_s: float | None = None,
) -> MadeDirectory:
    """The environment for ``key`` and this platform (``platform_key``, which ``key`` may override),
    below ``directory``; made by ``make(path)`` if it is not there.

    As ``make_once``; and where files in ``path`` say its name, they say the environment's name
    afterwards. Raises what ``make`` raises, MakingFailed, OSError, TypeError for a key that JSON
    does not have.
    """
    whole = {**platform_key(), **key}
    name = name_of(whole)

    def fill(path: str) -> None:
        from aifs.client.startup.relocate import relocate  # who finds it there needs none of this

        make(path)
        relocate(path, os.path.basename(path), name)

    return make_once(directory, name, key=whole, make=fill, expire_s=expire_s)
