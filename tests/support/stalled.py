"""The command line of a daemon that never answers the creation of a file called ``stall``."""

import sys
from typing import Any

import trio

from aifs.cli.main import main
from aifs.vfs.names import Names

NAME = b"stall"
_create = Names.create


async def _stall(self: Names, parent: int, name: bytes, *args: Any) -> Any:
    if name == NAME:
        await trio.sleep_forever()
    return await _create(self, parent, name, *args)


if __name__ == "__main__":
    Names.create = _stall
    sys.exit(main())
