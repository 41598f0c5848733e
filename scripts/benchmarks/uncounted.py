"""The command ``aifs``, whose daemon counts no requests, and notes nothing of what they wait
for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aifs.cli.main import main
from aifs.core import waiting
from aifs.core.served import Served

waiting.begin = lambda _: None  # type: ignore[assignment]  # before any handler is made
Served.add = lambda *_: None  # type: ignore[method-assign]

sys.exit(main())
