"""What each Python process imports that finds it among its modules: milliseconds, SERVER_DELAY_MS
(environment), are added to every request to a data server, through the tests' hook.
"""

import os
import time

from aifs.core import files

DELAY_S = float(os.environ.get("SERVER_DELAY_MS", 1)) / 1000


class Delay:
    def before(self, op: str, path: str) -> None:
        if op in ("read_into", "write_at") and "/objects/" in path:
            time.sleep(DELAY_S)

    def after(self, op: str, path: str, *args: object) -> None:
        pass


files.set_hook(Delay())
