"""A store whose metadata are in a database: made, mounted, refused, looked at by the command line.

What hosts that have it mounted together see of one another is in other files.
"""

import json
import multiprocessing
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.hosts import until
from tests.support.mounts import TIMEOUT_S, aifs
from tests.support.postgres import BOTH, Postgres, TestDatabase, free_port

Host = Callable[..., Path]


@pytest.fixture
def host(scratch: Path, database: TestDatabase) -> Host:
    """Makes the SOURCE of a host of that name; all have the same servers and database. ``changes``
    replace parts of its text."""

    def make(name: str = "alpha", **changes: str) -> Path:
        place = {
            "url": database.url,
            "secret": database.secret_file,
            "replica": f"{scratch}/{name}/replica",
            "servers": f"{scratch}/servers/0, {scratch}/servers/1",
            "burst": f"{scratch}/{name}/burst",
        } | changes
        (scratch / name).mkdir(exist_ok=True)
        file = scratch / name / "aifs.yaml"
        file.write_text(
            f"meta:\n  engine: postgresql\n  url: {place['url']}\n  secret: {place['secret']}\n"
            f"  directory: {place['replica']}\n"
            f"host: {{name: {name}, listen: '127.0.0.1:{free_port()}'}}\n"
            f"servers: [{place['servers']}]\nburst: {{directories: [{place['burst']}]}}\n"
            "data: {movers: 0}\n"
        )
        return file

    return make


@pytest.fixture
def mounts(scratch: Path) -> Iterator[Callable[[Path], Path]]:
    """Mounts a SOURCE; all are unmounted at the end, and fsck finds nothing."""
    mounted: list[tuple[Path, Path]] = []

    def mount(source: Path) -> Path:
        path = source.parent / "mnt"
        path.mkdir(exist_ok=True)
        aifs("mount", source, path)
        mounted.append((source, path))
        return path

    yield mount
    for _, path in mounted:
        if os.path.ismount(path):
            aifs("umount", path)
    for source in {source for source, _ in mounted}:
        aifs("fsck", source)


def refused(*command: object, code: int = 4) -> str:
    """What a command says that must fail with one line."""
    done = aifs(*map(str, command), check=False)
    assert done.returncode == code and done.stdout == "", done
    assert done.stderr.startswith("aifs: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def everything_in(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.sweep
@BOTH
def test_a_store_is_made_in_a_database_and_two_hosts_join(
    host: Host, mounts: Callable[[Path], Path]
) -> None:
    alpha, beta = host("alpha"), host("beta")
    assert aifs("format", alpha).stdout.startswith("uuid ")
    first = mounts(alpha)
    (first / "directory").mkdir()
    (first / "directory" / "file").write_text("of alpha")
    second = mounts(beta)
    assert os.listdir(second / "directory") == ["file"]
    (second / "directory" / "other").write_text("")
    os.rename(second / "directory", second / "renamed")
    assert "the store is in use by" in refused("fsck", alpha, code=8)
    aifs("umount", first)
    assert "in use by beta" in refused("fsck", alpha, code=8)
    aifs("umount", second)
    assert sorted(os.listdir(mounts(alpha) / "renamed")) == ["file", "other"]
    aifs("umount", first)
    # A replica can be lost.
    for path in (alpha.parent / "replica").iterdir():
        path.unlink()
    assert sorted(os.listdir(mounts(alpha) / "renamed")) == ["file", "other"]


@pytest.mark.sweep
def test_a_store_in_a_database_is_not_overwritten_by_mistake(
    host: Host, mounts: Callable[[Path], Path], scratch: Path
) -> None:
    alpha, other = host("alpha"), host("other", servers=f"{scratch}/elsewhere/0")
    aifs("format", alpha)
    before = everything_in(scratch)
    assert "holds a store already; --force" in refused("format", other)
    assert "holds a store already; --force" in refused("format", alpha)
    assert everything_in(scratch) == before
    path = mounts(alpha)
    assert "the store is in use by alpha" in refused("format", other, "--force", code=5)
    assert everything_in(scratch).keys() >= before.keys()
    (path / "kept").write_text("")
    aifs("umount", path)
    aifs("format", alpha, "--force")
    assert os.listdir(mounts(alpha)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("command", ["format", "mount"])
def test_wrong_input_is_one_line_and_nothing_is_written(
    host: Host,
    database: TestDatabase,
    a_postgres: Postgres,
    scratch: Path,
    command: str,
) -> None:
    (scratch / "mnt").mkdir()
    wrong = scratch / "wrong-secret"
    wrong.write_text("wrong\n")
    wrong.chmod(0o600)
    url = database.url
    for changes, expected in (
        ({"url": f"postgresql://aifs@127.0.0.1:{free_port()}/x"}, "cannot be reached: "),
        ({"secret": str(wrong)}, f"refuses the secret in {wrong}"),
        ({"secret": f"{scratch}/none"}, "cannot be read: No such file"),
        ({"url": url.replace("aifs@", "who@")}, "refuses"),
        ({"url": f"{url}-none"}, 'database "test'),
    ):
        source = host("alpha", **changes)
        before = sorted(scratch.rglob("*"))
        arguments = [source] if command == "format" else [source, scratch / "mnt"]
        said = refused(command, *arguments)
        assert expected in said and "Traceback" not in said
        assert sorted(scratch.rglob("*")) == before
    wrong.chmod(0o644)
    assert f"chmod 600 {wrong}" in refused(
        command, host("alpha", secret=str(wrong)), *arguments[1:]
    )
    if command == "mount":
        assert "holds no store" in refused("mount", host("alpha"), scratch / "mnt")
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA aifs CREATE TABLE version (number int)")
        connection.execute("INSERT INTO aifs.version VALUES (999)")
    said = refused(command, host("alpha"), *arguments[1:])
    assert ("have version 999" if command == "mount" else "holds a store already") in said
    assert sorted(scratch.rglob("*")) == before


@pytest.mark.sweep
def test_a_host_refuses_what_is_not_its_stores(
    host: Host, mounts: Callable[[Path], Path], a_postgres: Postgres, scratch: Path
) -> None:
    alpha = host("alpha")
    aifs("format", alpha)
    path = mounts(alpha)
    (path / "file").write_bytes(bytes(range(256)) * 8192)  # on both servers
    aifs("drain", path)
    (scratch / "mnt").mkdir()
    # Two hosts with one name.
    (scratch / "twin").mkdir()
    twin = scratch / "twin" / "aifs.yaml"
    text = alpha.read_text().replace(f"{scratch}/alpha/", f"{scratch}/twin/")
    listening = [line for line in text.splitlines() if line.startswith("host:")][0]
    twin.write_text(
        text.replace(listening, f"host: {{name: alpha, listen: '127.0.0.1:{free_port()}'}}")
    )
    assert "a host named alpha has the store mounted" in refused(
        "mount", twin, scratch / "mnt", code=5
    )
    # A server that is another one on this host, or of another store.
    aifs("umount", path)
    servers = [scratch / "servers" / "0", scratch / "servers" / "1"]
    for old, new in ((servers[0], scratch / "aside"), (servers[1], servers[0])):
        old.rename(new)
    (scratch / "aside").rename(servers[1])
    assert "its marker says data 1 of store" in refused("mount", alpha, scratch / "mnt")
    servers[0].rename(scratch / "aside")
    servers[1].rename(servers[0])
    (scratch / "aside").rename(servers[1])
    # The database of another store, in which this replica has no part.
    with a_postgres.new_database() as second:
        beta = host("beta", url=second.url, servers=f"{scratch}/beta/server")
        aifs("format", beta)
        text = alpha.read_text()
        alpha.write_text(
            "\n".join(
                f"  url: {second.url}" if line.startswith("  url:") else line
                for line in text.splitlines()
            )
        )
        said = refused("mount", alpha, scratch / "mnt")
        assert f"{scratch}/alpha/replica: is the replica of store" in said
        alpha.write_text(text)
    # A replica is no store of its own.
    local = scratch / "local.yaml"
    local.write_text(
        f"meta: {{directory: {scratch}/alpha/replica}}\nservers: [{servers[0]}, {servers[1]}]\n"
    )
    assert "is a replica of metadata in a database" in refused("mount", local, scratch / "mnt")


def test_doctor_says_what_is_wrong_with_a_host_of_many(
    host: Host, database: TestDatabase, a_postgres: Postgres, scratch: Path
) -> None:
    alpha = host("alpha")

    def checks(source: Path) -> dict[str, dict[str, object]]:
        done = aifs("doctor", source, "--json", check=False)
        assert "Traceback" not in done.stderr
        return {check["name"]: check for check in json.loads(done.stdout)}

    found = checks(alpha)
    assert found["secret"]["ok"] and found["clock"]["ok"]
    assert "directories and FIFOs" in str(found["locks of files"]["why"])
    assert "PostgreSQL" in str(found["database"]["why"])
    assert "holds no store" in str(found["store"]["why"]) and not found["store"]["ok"]
    aifs("format", alpha)
    found = checks(alpha)
    assert found["store"]["ok"] and "free in" in str(found["replica"]["why"])
    assert "host.name" not in found
    other = host("other", servers=f"{scratch}/nowhere")
    assert "there is no such directory" in str(checks(other)["store"]["why"])
    a_postgres.stop()
    found = checks(alpha)
    assert "cannot be reached" in str(found["database"]["why"]) and "store" not in found
    a_postgres.start()
    wrong = scratch / "secret"
    wrong.write_text("wrong\n")
    wrong.chmod(0o640)
    alpha = host("alpha", secret=str(wrong))
    assert "chmod 600" in str(checks(alpha)["secret"]["why"])
    wrong.chmod(0o600)
    assert "refuses the secret" in str(checks(alpha)["database"]["why"])


@pytest.mark.sweep
def test_a_cluster_is_not_restored_nor_erased_behind_its_hosts(
    host: Host, mounts: Callable[[Path], Path], a_postgres: Postgres, scratch: Path
) -> None:
    alpha = host("alpha")
    aifs("format", alpha)
    path = mounts(alpha)
    (path / "kept").write_bytes(bytes(range(256)) * 8192)
    aifs("drain", path)
    servers = f"[{scratch}/servers/0, {scratch}/servers/1]"
    local = scratch / "local.yaml"
    local.write_text(f"meta: {{directory: {scratch}/meta}}\nservers: {servers}\n")
    before = everything_in(scratch / "servers")
    for source in (local, alpha):
        for command in ("restore", "ls"):
            said = refused("meta", command, source)
            assert "the metadata of this store are in postgresql://" in said
    assert "which hosts share by postgresql://" in refused("format", local, "--force")
    with a_postgres.new_database() as second:
        other = host("other", url=second.url)
        assert "which hosts share by postgresql://" in refused("format", other, "--force")
    assert everything_in(scratch / "servers") == before and not (scratch / "meta").exists()
    assert (path / "kept").read_bytes() == bytes(range(256)) * 8192


@pytest.mark.sweep
def test_sessions_go_on_counting_where_a_store_is_made_anew(
    host: Host, mounts: Callable[[Path], Path], database: TestDatabase
) -> None:
    def session() -> int:
        with psycopg.connect(database.conninfo) as connection:
            found = connection.execute("SELECT max(id) FROM aifs.session").fetchone()
            assert found is not None
            return int(found[0])

    alpha = host("alpha")
    aifs("format", alpha)
    aifs("umount", mounts(alpha))
    last = session()
    aifs("format", alpha, "--force")
    aifs("umount", mounts(alpha))
    assert session() > last


@pytest.mark.sweep
def test_a_burst_directory_belongs_to_one_host(
    host: Host, mounts: Callable[[Path], Path], scratch: Path
) -> None:
    alpha = host("alpha")
    aifs("format", alpha)
    path = mounts(alpha)
    (path / "file").write_bytes(bytes(8192))
    (scratch / "mnt").mkdir()
    beta = host("beta", burst=f"{scratch}/alpha/burst")
    for _ in range(2):  # also if it is empty
        assert "is a burst directory of host alpha" in refused("mount", beta, scratch / "mnt")
        (path / "file").unlink(missing_ok=True)
    # The mount that was refused holds up nobody.
    said = json.loads(aifs("host", "ls", path, "--json").stdout)["hosts"]
    assert [one["name"] for one in said] == ["alpha"]


def test_a_mount_that_is_refused_has_written_nothing(
    host: Host, mounts: Callable[[Path], Path], database: TestDatabase, scratch: Path
) -> None:
    alpha = host("alpha")
    aifs("format", alpha)
    local = scratch / "local.yaml"
    local.write_text(f"meta: {{directory: {scratch}/meta}}\nservers: [{scratch}/of-another]\n")
    aifs("format", local)
    (scratch / "mnt").mkdir()
    path = mounts(alpha)
    (scratch / "twin").mkdir()
    twin = scratch / "twin" / "aifs.yaml"
    twin.write_text(alpha.read_text().replace(f"{scratch}/alpha/", f"{scratch}/twin/"))
    everywhere = host("everywhere")
    everywhere.write_text(everywhere.read_text().replace("'127.0.0.1:", "'0.0.0.0:"))
    one, two = scratch / "servers" / "0", scratch / "servers" / "1"
    for source, code, expected in (
        (twin, 5, "a host named alpha has the store mounted"),
        (host("beta", servers=f"{scratch}/of-another"), 4, "of-another: is of store"),
        (host("gamma", servers=f"{one}, {two}, {scratch}/no"), 4, "is not part of the store"),
        (everywhere, 3, "host.address is missing: the database is on this machine (127.0.0.1)"),
    ):
        before = sorted(source.parent.rglob("*"))
        with psycopg.connect(database.conninfo) as connection:
            rows = connection.execute("SELECT key FROM aifs.map WHERE key < 't'").fetchall()
            assert expected in refused("mount", source, scratch / "mnt", code=code)
            after = connection.execute("SELECT key FROM aifs.map WHERE key < 't'").fetchall()
        assert after == rows
        if source.parent.name != "gamma":  # which has got its replica
            assert sorted(source.parent.rglob("*")) == before
    aifs("umount", path)


@pytest.mark.sweep
@pytest.mark.parametrize("away", ["stopped", pytest.param("killed", marks=pytest.mark.long)])
def test_a_mount_can_be_left_while_its_database_is_away(
    host: Host, mounts: Callable[[Path], Path], a_postgres: Postgres, away: str
) -> None:
    """What waits is told why. A daemon that is unmounted waits for the database, since nobody but
    that knows what has become of the last commit; it can be killed."""
    alpha = host("alpha")
    aifs("format", alpha)
    path = mounts(alpha)
    (path / "before").write_text("acknowledged")
    pid = json.loads(os.getxattr(path, "user.aifs.status"))["pid"]
    daemon = os.pidfd_open(pid)
    making = multiprocessing.get_context("fork").Process(target=(path / "under-way").mkdir)
    try:
        a_postgres.pause() if away == "stopped" else a_postgres.kill()
        if away == "killed":
            making.start()
        told: dict[str, str] = {}

        def is_noticed() -> bool:
            told.update(json.loads(aifs("status", path, "--json").stdout))
            return "waits_for" in told

        until(is_noticed, "the daemon says what it waits for")
        assert told["pid"] == pid
        assert "does not answer since" in told["waits_for"]
        assert "lease of this host end" in told["waits_for"]
        assert "waits_for" in aifs("status", path).stdout
        assert "does not answer since" in refused("umount", "--drain", path, code=6)
        if away == "killed":
            aifs("umount", "--force", path)
            assert select.select([daemon], [], [], TIMEOUT_S)[0]
            assert not os.path.ismount(path)
            making.join()
            return
        done = aifs("umount", path, "--timeout", "2s", check=False)
        assert done.returncode == 7 and "does not answer since" in done.stderr, done
        assert not select.select([daemon], [], [], 0)[0]
        a_postgres.go_on()
        assert select.select([daemon], [], [], TIMEOUT_S)[0]
    finally:
        a_postgres.go_on() if a_postgres.is_running else a_postgres.restart()
        os.close(daemon)
    with open(alpha.parent / "replica" / "owner", "rb") as owner:
        assert not owner.read(1).strip(b"\0")  # closed in order
    assert (mounts(alpha) / "before").read_text() == "acknowledged"
