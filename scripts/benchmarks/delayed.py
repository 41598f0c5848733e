"""The command ``aifs`` with 1 ms added to every request to a data server, or with as many as
SERVER_DELAY_MS (environment) says; also to those of the processes that move bytes for it: they look
for modules where it does (delays/sitecustomize.py).
"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
DELAYS = HERE / "delays"
sys.path[:0] = [str(DELAYS), str(HERE.parents[1])]

from aifs.cli.main import main  # noqa: E402 (found there)

runpy.run_path(str(DELAYS / "sitecustomize.py"))
sys.exit(main())
