"""The command ``aifs`` with data servers that take so many bytes per second, through the tests'
hook.

SERVER_BANDWIDTHS (environment) has them in MiB/s, by the number that is a server's directory's
name: 200,200,200,50. Writes to one server queue up behind each other as behind a network link.
"""

import os
import re
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aifs.cli.main import main
from aifs.core import files

BANDWIDTHS = [float(word) * (1 << 20) for word in os.environ["SERVER_BANDWIDTHS"].split(",")]
SERVER = re.compile(r".*/store/data/(\d+)/")


class Links:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = [0.0] * len(BANDWIDTHS)

    def before(self, op: str, path: str) -> None:
        pass

    def after(self, op: str, path: str, *args: object) -> None:
        found = SERVER.match(path) if op == "write_at" else None
        if found is None:
            return
        server = int(found[1])
        with self._lock:
            now = time.monotonic()
            self._free_s[server] = (
                max(now, self._free_s[server]) + len(args[0]) / BANDWIDTHS[server]
            )
            wait_s = self._free_s[server] - now
        time.sleep(wait_s)


files.set_hook(Links())
sys.exit(main())
