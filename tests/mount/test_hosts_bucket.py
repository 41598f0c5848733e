"""Hosts of a store whose only data server is a bucket, of moto's S3; and what they import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import many_hosts
from tests.support.mounts import aifs
from tests.support.object_stores import KEYS, make_bucket, moto
from tests.support.postgres import Postgres

pytest.importorskip("obstore", reason="needs obstore: pip install '.[objects]'")

LARGE = 9 << 20

_PUT = """
import sys
from aifs.data.bucket import Bucket

Bucket(sys.argv[1]).put(sys.argv[2], sys.argv[3].encode())
"""
"""In a process of its own: obstore's threads do not survive a fork, and mounts are forked off."""


def test_two_hosts_share_a_bucket(
    tmp_path: Path, a_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with moto(listens="0.0.0.0") as endpoint:
        make_bucket(endpoint, "bucket")

        def put(key: str, content: str) -> None:
            command = [sys.executable, "-c", _PUT, f"s3://bucket?endpoint={endpoint}", key, content]
            subprocess.run(command, check=True)

        there = "http://{}:" + endpoint.rpartition(":")[2]
        servers = {"servers": {"at": [f"s3://bucket/store?endpoint={there}"]}}
        with many_hosts(tmp_path, a_postgres, settings=servers) as cluster:
            a, b = cluster
            files = {f"small{number}": os.urandom(5000) for number in range(20)}
            files["large"] = os.urandom(LARGE)
            for name, content in files.items():
                (a.path / name).write_bytes(content)
            assert {name: (b.path / name).read_bytes() for name in files} == files
            aifs("drain", a.path)
            aifs("evict", a.path)
            for name in ("large", "small3"):
                files[name] = os.urandom(len(files[name]) + 1)
                (b.path / name).write_bytes(files[name])
            (b.path / "small4").unlink()
            del files["small4"]
            aifs("drain", b.path)
            for host in (a, b):
                aifs("evict", host.path)
                assert {each.name: each.read_bytes() for each in host.path.iterdir()} == files

            put("data/one", "1" * 5000)
            put("data/more/two", "2" * 100_000)
            url = f"s3://bucket/data?endpoint={there.format(cluster.network.address)}"
            aifs("import", url, a.path / "data")
            assert (b.path / "data/more/two").read_bytes() == b"2" * 100_000
            put("data/one", "3" * 6000)
            with pytest.raises(OSError, match="Input/output error"):
                (b.path / "data/one").read_bytes()
            aifs("import", url, b.path / "data", "--refresh")
            assert (a.path / "data/one").read_bytes() == b"3" * 6000
            for host in cluster:
                host.expected.append("is not what was imported any more")
