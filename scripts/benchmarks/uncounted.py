"""The command ``aifs``, whose daemon counts no requests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aifs.cli.main import main
from aifs.core.served import Served

Served.add = lambda *_: None  # type: ignore[method-assign]

sys.exit(main())
