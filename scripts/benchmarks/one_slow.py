"""The command ``aifs`` with 200 ms added to every read of one data server, through the tests' hook.

The server is the one whose directory the file that SLOW_FLAG (environment) names has in it, as soon
as it is there.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aifs.cli.main import main
from aifs.core import files

DELAY_S = 0.2
FLAG = Path(os.environ["SLOW_FLAG"])


class Delay:
    def before(self, op: str, path: str) -> None:
        if op == "read_into" and FLAG.exists() and path.startswith(FLAG.read_text()):
            time.sleep(DELAY_S)

    def after(self, op: str, path: str, *args: object) -> None:
        pass


files.set_hook(Delay())
sys.exit(main())
