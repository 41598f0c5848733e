"""A cluster's database for commands: looked at, made, erased. Blocks; mounts use database.py."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from types import TracebackType
from typing import Any, NamedTuple

import psycopg

from aifs.core.errors import StoreBusy, StoreError
from aifs.core.secret import read_secret
from aifs.meta.replicated.database import (
    MIN_SERVER_VERSION,
    NO_STORE,
    require_version,
)
from aifs.meta.replicated.sessions import BEAT_S, LEASE_S

_CONNECT_S = 5
"""For each address of each server."""


class LiveHost(NamedTuple):
    """A host that has the store mounted, or a command of it that uses the store."""

    name: str
    address: str
    lease_left_s: float


class BlockingDatabase:
    """A connection. All methods raise StoreError, of one line, with the database's address."""

    def __init__(self, url: str, secret_file: str) -> None:
        self.url = url
        password = read_secret(secret_file)
        try:
            self.connection = psycopg.connect(
                url,
                password=password,
                connect_timeout=_CONNECT_S,
                target_session_attrs="read-write",  # a standby may be named, too
                application_name="aifs",
                autocommit=True,
            )
        except psycopg.Error as error:
            raise StoreError(f"{url}: {_why_not(error, secret_file)}") from None
        try:
            self.version = self.connection.info.server_version // 10000
            if self.connection.info.server_version < MIN_SERVER_VERSION:
                raise StoreError(
                    f"{url}: is PostgreSQL {self.version}; version {MIN_SERVER_VERSION // 10000} "
                    "or later is needed"
                )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> "BlockingDatabase":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Cursor[tuple]]:
        """All that is done with the cursor is done, durably, when the block ends; or nothing."""
        try:
            with self.connection.transaction(), self.connection.cursor() as cursor:
                yield cursor
        except psycopg.Error as error:
            raise StoreError(f"{self.url}: {_last_line(error)}") from None

    def holds_store(self) -> bool:
        """Raises StoreError if it is of another version of AIFS."""
        with self.transaction() as cursor:
            return _holds_store(cursor, self.url)

    def require_store(self) -> None:
        if not self.holds_store():
            raise StoreError(f"{self.url}: {NO_STORE}")

    def get(self, key: bytes) -> bytes | None:
        """A value of the map. There is a store."""
        with self.transaction() as cursor:
            found = cursor.execute("SELECT value FROM aifs.map WHERE key = %s", (key,)).fetchone()
        return found[0] if found is not None else None

    def put(self, key: bytes, value: bytes) -> None:
        """Change the map, behind the back of hosts: of a store that nobody uses any more."""
        with self.transaction() as cursor:
            cursor.execute("UPDATE aifs.map SET value = %s WHERE key = %s", (value, key))

    def values(self, start: bytes, end: bytes) -> dict[bytes, bytes]:
        """The records of the map in [start, end). There is a store."""
        with self.transaction() as cursor:
            cursor.execute(
                "SELECT key, value FROM aifs.map WHERE key >= %s AND key < %s", (start, end)
            )
            return {key: value for key, value in cursor.fetchall()}

    def require_unused(self) -> None:
        """No host uses the store just now. There is one. Raises StoreBusy."""
        self.watch_silent()
        with self.transaction() as cursor:
            require_unused(cursor, self.url)

    def watch_silent(self) -> None:
        """Let hosts whose lease ended, perhaps with the database away, have a lease's time to
        beat."""
        until_s = time.monotonic() + LEASE_S
        while time.monotonic() < until_s:
            with self.transaction() as cursor:
                cursor.execute("SELECT bool_or(lease_left_s <= 0) FROM aifs.members()")
                if not _one(cursor):
                    return
            time.sleep(BEAT_S / 2)

    def live_hosts(self) -> list[LiveHost]:
        """There is a store."""
        with self.transaction() as cursor:
            return _live_hosts(cursor)

    def clock_s(self) -> float:
        """Its time, in seconds since the epoch."""
        with self.transaction() as cursor:
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            return _one(cursor)

    def map_bytes(self) -> int:
        """The bytes that the map takes. There is a store."""
        with self.transaction() as cursor:
            cursor.execute("SELECT pg_total_relation_size('aifs.map')")
            return _one(cursor)


class Numbering(NamedTuple):
    """The last number given. Stores new to a database go on behind it: replicas and hung hosts may
    know the numbers."""

    session: int = 0
    feed: int = 0


def make(
    cursor: psycopg.Cursor[tuple], url: str, erase: bool, after: Numbering = Numbering()
) -> None:
    """Make a store with an empty map, numbered behind ``after``. ``erase``: in place of an unused
    one. Raises StoreError if there is one, StoreBusy if a host uses it."""
    if _holds_schema(cursor):
        if not erase:
            raise StoreError(f"{url}: holds a store already; --force erases it and all files in it")
        require_unused(cursor, url)
        after = Numbering(*map(max, after, find_numbering(cursor)))
        cursor.execute("DROP SCHEMA aifs CASCADE")
    cursor.execute(resources.files(__package__).joinpath("schema.sql").read_bytes())
    # A host that hangs with a session of the old store, which nobody has ended, must not find one
    # of that number.
    cursor.execute(f"ALTER TABLE aifs.session ALTER id RESTART WITH {after.session + 1}".encode())
    if after.feed:
        # Nobody's change set that changes nothing, from which a crash of the database counts on.
        first = after.feed + 1
        cursor.execute("INSERT INTO aifs.feed VALUES (%s, 0, 0, 0, '{}', '{}')", (first,))
        cursor.execute("UPDATE aifs.head SET seq = %s", (first,))


def find_numbering(cursor: psycopg.Cursor[tuple]) -> Numbering:
    """There is a store."""
    cursor.execute(
        "SELECT (SELECT coalesce(max(id), 0) FROM aifs.session), greatest(aifs.last(),"
        " (SELECT seq FROM aifs.head))"
    )
    return Numbering(*(cursor.fetchone() or ()))


def put_host(cursor: psycopg.Cursor[tuple], name: str) -> None:
    """The first host of a store that was just made has this name, though it is not there yet."""
    cursor.execute(
        "INSERT INTO aifs.session (asking, name, host, address, lease_end, cursor, ended)"
        " VALUES ('', %s, 1, '', clock_timestamp(), 0, 'the store was copied here')",
        (name,),
    )


def all_pairs(cursor: psycopg.Cursor[tuple]) -> Iterator[tuple[bytes, bytes]]:
    """The whole map, in order."""
    query = "COPY (SELECT key, value FROM aifs.map ORDER BY key) TO STDOUT (FORMAT BINARY)"
    with cursor.copy(query) as copy:
        copy.set_types(("bytea", "bytea"))
        yield from copy.rows()


def put_pairs(cursor: psycopg.Cursor[tuple], pairs: Iterable[tuple[bytes, bytes]]) -> None:
    """Fill the empty map."""
    with cursor.copy("COPY aifs.map (key, value) FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(("bytea", "bytea"))
        for pair in pairs:
            copy.write_row(pair)


def require_unused(cursor: psycopg.Cursor[tuple], url: str) -> None:
    """No host uses the store, and none begins to before the transaction ends. Raises StoreBusy."""
    cursor.execute("LOCK TABLE aifs.session IN SHARE ROW EXCLUSIVE MODE")
    if hosts := _live_hosts(cursor):
        names = ", ".join(host.name for host in hosts)
        raise StoreBusy(f"{url}: the store is in use by {names}; unmount it there first")


def _holds_schema(cursor: psycopg.Cursor[tuple]) -> bool:
    cursor.execute("SELECT to_regnamespace('aifs') IS NOT NULL")
    return _one(cursor)


def _holds_store(cursor: psycopg.Cursor[tuple], url: str) -> bool:
    if not _holds_schema(cursor):
        return False
    cursor.execute("SELECT number FROM aifs.version")
    require_version(_one(cursor), url)
    return True


def _live_hosts(cursor: psycopg.Cursor[tuple]) -> list[LiveHost]:
    cursor.execute(
        "SELECT name, address, lease_left_s FROM aifs.members() WHERE lease_left_s > 0 ORDER BY id"
    )
    return [LiveHost(*row) for row in cursor.fetchall()]


def _one(cursor: psycopg.Cursor[tuple]) -> Any:
    row = cursor.fetchone()
    assert row is not None
    return row[0]


def _last_line(error: psycopg.Error) -> str:
    said = error.diag.message_primary or str(error).strip().splitlines()[-1]
    return said.strip()


def _why_not(error: psycopg.Error, secret_file: str) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]  # no guesses
    said = " ".join(" ".join(lines).split())
    if "authentication failed" in said or "no password supplied" in said:
        return f"refuses the secret in {secret_file}; copy it again from the host that serves it"
    if "FATAL:" in said:
        return f"refuses: {said.rpartition('FATAL:')[2].strip()}"
    why = said.rpartition("failed: ")[2] or said
    if why.startswith("server closed"):  # so libpq says of an address that nothing comes from
        why = "no answer from there"
    return f"the database cannot be reached: {why}; is it running, and does meta.url name it?"
