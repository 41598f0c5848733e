"""Sources of one store, with its metadata in directories, or in a database."""

from pathlib import Path

import yaml

from aifs.core import config as configuration
from aifs.core.config import Config
from aifs.data.marker import read_marker
from tests.support.postgres import TestDatabase, free_port


class Places:
    """Sources of one store below ``scratch``: in directories, and for hosts of the database."""

    def __init__(self, scratch: Path, database: TestDatabase) -> None:
        self._scratch = scratch
        self._database = database
        self.servers = [str(scratch / "servers" / name) for name in "01"]

    def directory(self, name: str = "one", **more: object) -> Config:
        meta = {"directory": str(self._scratch / name / "meta")}
        return self._load(name, {"meta": {**meta, "backup_interval": "0"}, **more})

    def host(self, name: str = "many", **more: object) -> Config:
        meta = {
            "engine": "postgresql",
            "url": self._database.url,
            "secret": self._database.secret_file,
            "directory": str(self._scratch / name / "replica"),
        }
        host = {"name": name, "listen": f"127.0.0.1:{free_port()}"}
        return self._load(name, {"meta": meta, "host": host, **more})

    def _load(self, name: str, tree: dict[str, object]) -> Config:
        file = self._scratch / name / "aifs.yaml"
        file.parent.mkdir(exist_ok=True)
        burst = {"directories": [str(self._scratch / "burst")], "drain_delay": "0s"}
        usual = {
            "servers": self.servers,
            "burst": burst,
            "data": {"movers": 0},
            "log": {"file": str(self._scratch / "log")},
        }
        file.write_text(yaml.safe_dump({**usual, **tree}))
        return configuration.load(str(file), {})

    def named(self) -> set[str]:
        """The databases that the data servers name."""
        return {read_marker(server).database for server in self.servers}
