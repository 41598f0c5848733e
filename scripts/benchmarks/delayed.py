"""The command ``aifs`` with 1 ms added to every request to a data server, through the tests' hook;
with as many as SERVER_DELAY_MS (environment) says.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aifs.cli.main import main
from aifs.core import files

DELAY_S = float(os.environ.get("SERVER_DELAY_MS", 1)) / 1000


class Delay:
    def before(self, op: str, path: str) -> None:
        if op in ("read_into", "write_at") and "/objects/" in path:
            time.sleep(DELAY_S)

    def after(self, op: str, path: str, *args: object) -> None:
        pass


files.set_hook(Delay())
sys.exit(main())
