"""Connections to the database of a cluster, driven by trio. What the functions mean is in
schema.sql.

libpq is used without psycopg's cursors: a commit is one prepared statement with binary parameters,
so that it costs this process little. A connection is made anew when it is lost, as long as somebody
asks.
"""

import logging
import struct
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import psycopg
import trio
from psycopg import OperationalError, generators, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.waiting import Ready, Wait

from aifs.core.errors import StoreError, Unavailable

log = logging.getLogger(__name__)

DONE, CONFLICT, LAPSED, ENDED, RECOVERING, TRIMMED, TAKEN = range(7)
"""Answers of functions of the schema."""

SCHEMA_VERSION = 2
NO_STORE = "holds no store; make one with aifs format"
MIN_SERVER_VERSION = 140000

ANSWER_S = 5.0
"""A connection that has not answered for so long is given up."""
_CONNECT_MIN_S, _CONNECT_MAX_S = 1.5, 5.0
"""Connecting to one address, resolving a name: doubled each round of attempts."""
_AGAIN_MIN_S, _AGAIN_MAX_S = 0.02, 0.5
"""Between two rounds: doubled from one to the next."""

_SETTINGS = (
    "-c synchronous_commit={} -c enable_seqscan=off -c jit=off"
    r" -c default_transaction_isolation=read\ committed"
    " -c plan_cache_mode=force_generic_plan -c statement_timeout=60s -c client_min_messages=warning"
    # A question that is stuck in the database ends when its connection is given up.
    " -c client_connection_check_interval=1s"
)
_KEPT_ALIVE: dict[str, Any] = {
    "application_name": "aifs",
    "target_session_attrs": "read-write",  # a standby, or a primary that was one, may be named, too
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}

_INT4, _INT8, _FLOAT8 = struct.Struct(">i").pack, struct.Struct(">q").pack, struct.Struct(">d").pack
_ARRAY = struct.Struct(">iiIii")
_LENGTH = struct.Struct(">i")
_BYTEA, _BYTEA_ARRAY = 17, 1001
_EMPTY = struct.pack(">iiI", 0, 0, _BYTEA)
_NULL = _LENGTH.pack(-1)
_BINARY = pq.Format.BINARY
_TUPLES, _COMMAND_OK = pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK
_COPY_OUT = pq.ExecStatus.COPY_OUT
_COPY_HEADER_BYTES, _COPY_END_BYTES = 19, 2

_CONNECTION_STATES = ("08", "57P", "25P03", "25006")
"""SQLSTATEs of useless connections: ended, server ended, or not the primary."""
_PASSING_STATES = ("53", "55P03", "57014")
"""Of what is asked for again: a server that is short of something."""
_UNDONE_STATES = ("40001", "40P01")
"""Of what is asked for again, on the same connection: serialization, deadlocks."""


class AnswerLost(Exception):
    """The connection was lost before the answer: what was asked for has been done, or not."""


class Undone(AnswerLost):
    """It has not been done, because of what others did; the connection is as it was."""


class Row(NamedTuple):
    """A change set of the feed, as it is there."""

    seq: int
    """Its number in the feed."""
    session: int
    """Whose change it is."""
    number: int
    """Of the commit in its session."""
    absolute: int
    """How many keys, the first ones, were put or deleted; the others were added to or patched."""
    keys: list[bytes | None]
    """The keys that are changed."""
    values: list[bytes | None]
    """The values of these keys now; None: deleted."""


class Statement(NamedTuple):
    """A call of a function, with the types of its parameters."""

    name: bytes
    sql: bytes
    types: tuple[int, ...]
    formats: tuple[pq.Format, ...]


_TYPES = {"int": 23, "bigint": 20, "float": 701, "text": 25, "bytea[]": 1001, "bigint[]": 1016}
_TYPES["int[]"] = 1007


def _call(name: str, *types: str) -> Statement:
    arguments = ", ".join(f"${at}" for at in range(1, len(types) + 1))
    return Statement(
        name.encode(),
        f"select * from aifs.{name}({arguments})".encode(),
        tuple(_TYPES[type_] for type_ in types),
        (_BINARY,) * len(types),
    )


COMMIT = _call(
    "commit",
    *("int", "bigint", "bigint", "bytea[]", "bytea[]", "bytea[]", "bytea[]", "int", "bytea[]"),
    *("bytea[]", "bytea[]", "bigint[]", "bytea[]", "int[]", "bytea[]"),
)
FETCH = _call("fetch", "bigint", "int")
BEGIN = _call("begin", "text", "text", "text", "int", "bigint", "float")
BEAT = _call("beat", "int", "bigint", "bigint", "float")
END = _call("end_session", "int", "text")
END_SILENT = _call("end_silent", "int", "float")
MEMBERS = _call("members")
BEHIND = _call("behind", "bigint")
TRIM = _call("trim", "int")
LAST = _call("last")
RESTORE = _call("restore", "int", "bigint", "int", "bigint", "int", "bytea[]", "bytea[]")
REOPEN = _call("reopen", "int", "float")


NULL: bytes | None = None


def of_int(number: int) -> bytes:
    return _INT4(number)


def of_bigint(number: int) -> bytes:
    return _INT8(number)


def of_float(number: float) -> bytes:
    return _FLOAT8(number)


def of_keys(items: Sequence[bytes | None]) -> bytes:
    """A bytea[]."""
    if not items:
        return _EMPTY
    pack = _LENGTH.pack
    parts = [_ARRAY.pack(1, None in items, _BYTEA, len(items), 1)]
    for item in items:
        if item is None:
            parts.append(_NULL)
        else:
            parts += (pack(len(item)), item)
    return b"".join(parts)


def of_bigints(numbers: Sequence[int]) -> bytes:
    """A bigint[]."""
    return _of_numbers(numbers, 20, ">iq")


def of_ints(numbers: Sequence[int]) -> bytes:
    """An int[]."""
    return _of_numbers(numbers, 23, ">ii")


def _of_numbers(numbers: Sequence[int], type_: int, form: str) -> bytes:
    if not numbers:
        return struct.pack(">iiI", 0, 0, type_)
    size = struct.calcsize(form) - _LENGTH.size
    head = _ARRAY.pack(1, 0, type_, len(numbers), 1)
    return head + b"".join([struct.pack(form, size, number) for number in numbers])


def to_int(field: bytes | None) -> int:
    """An int or a bigint; 0 for null."""
    return int.from_bytes(field or b"", "big", signed=True)


def to_float(field: bytes | None) -> float:
    return struct.unpack(">d", field)[0] if field else 0.0


def to_keys(field: bytes | None) -> list[bytes | None]:
    """The items of a bytea[]."""
    if field is None or len(field) < _ARRAY.size:
        return []
    (count,) = _LENGTH.unpack_from(field, 12)
    items: list[bytes | None] = []
    at, length_at = _ARRAY.size, _LENGTH.unpack_from
    for _ in range(count):
        (length,) = length_at(field, at)
        at += 4
        if length < 0:
            items.append(None)
        else:
            items.append(field[at : at + length])
            at += length
    return items


Fields = tuple[bytes | None, ...]
Place = dict[str, str]
"""Of a server: what of a conninfo says where it is, with one address."""


def to_row(fields: Fields) -> Row:
    """A row of the feed, behind the column of the status."""
    _, seq, session, number, absolute, keys, values = fields
    return Row(
        to_int(seq),
        to_int(session),
        to_int(number),
        to_int(absolute),
        to_keys(keys),
        to_keys(values),
    )


def require_version(number: int, where: str) -> None:
    """Of the tables. Raises StoreError if they are another AIFS's."""
    if number != SCHEMA_VERSION:
        raise StoreError(
            f"{where}: its tables have version {number}; this version of AIFS knows "
            f"{SCHEMA_VERSION} alone. Copy the store to one of a single host with the version that "
            "made it, and back with this one: aifs meta copy"
        )


class MapDatabase:
    """The database at ``url``, as one host uses it. Nothing is connected before it is asked."""

    def __init__(self, url: str, password: str | None = None) -> None:
        self._url = url
        self._password = password
        self._places: list[Place] = []
        """Where it may be, the most promising first."""
        self.commits = Link(self, synchronous=False)
        """For commits and what they need; answers come in the order of asking."""
        self.settles = Link(self, synchronous=True)
        """For what is durable when it has been answered."""

    def conninfo(self, settings: str) -> str:
        secret = {} if self._password is None else {"password": self._password}
        return make_conninfo(self._url, options=settings, **secret, **_KEPT_ALIVE)

    async def connect(
        self, synchronous: bool = True, limit_s: float = _CONNECT_MAX_S
    ) -> "Connection":
        """A new connection to the first server that takes changes. ``limit_s``: for each address.
        Raises Unavailable."""
        conninfo = self.conninfo(_SETTINGS.format("on" if synchronous else "off"))
        places, faults = await _places(conninfo, limit_s)
        known = [place for place in self._places if place in places]
        self._places = known + [place for place in places if place not in known]
        for place in list(self._places):
            try:
                connection = await Connection.open(make_conninfo(conninfo, **place), limit_s)
            except Unavailable as error:
                faults.append(str(error))
                self.leave(place)
            else:
                connection.place = place
                return connection
        raise Unavailable("; ".join(dict.fromkeys(faults)))

    def leave(self, place: Place) -> None:
        """A connection to it was lost, or failed: others are tried first."""
        if place in self._places:
            self._places.remove(place)
            self._places.append(place)

    async def require_schema(self) -> None:
        """Raises StoreError if there is no schema, or another version of it; Unavailable."""
        connection = await self.connect()
        try:
            await _require_version(connection)
            if await connection.value("select to_regclass('aifs.version') is not null") != "t":
                raise StoreError(f"the database {NO_STORE}")
            version = await connection.value("select number from aifs.version")
            require_version(int(version), "the database")
        finally:
            connection.close()

    def end_now(self, session: int, reason: str) -> None:
        """End a session; its earlier commits are durable on return. Blocks, without a scheduler.
        Raises Unavailable."""
        own = self.conninfo(f"{_SETTINGS.format('on')} -c statement_timeout={ANSWER_S:g}s")
        place = self._places[0] if self._places else {}  # the server that was used last
        try:
            with psycopg.connect(
                make_conninfo(own, **place), connect_timeout=int(ANSWER_S)
            ) as connection:
                connection.execute("select aifs.end_session(%s, %s)", (session, reason))
        except psycopg.Error as error:
            raise Unavailable(f"the database cannot be reached: {error}") from error

    def close(self) -> None:
        self.commits.close()
        self.settles.close()


async def _places(conninfo: str, limit_s: float) -> tuple[list[Place], list[str]]:
    """Each address of each named server, and errors of names; libpq would block, without limit.
    Raises Unavailable if there is none."""
    known = conninfo_to_dict(conninfo)
    names, addresses, ports = (
        str(known.get(key) or "").split(",") for key in ("host", "hostaddr", "port")
    )
    count = max(len(names), len(addresses))
    columns = [
        column * count if len(column) == 1 else column for column in (names, addresses, ports)
    ]
    found: dict[int, list[Place]] = {}
    faults: list[str] = []

    async def resolve(at: int, name: str, address: str, port: str) -> None:
        place = {"host": name, "hostaddr": address, "port": port}
        found[at] = [place]
        if address or not name or name.startswith("/"):
            return
        found[at] = []
        try:
            with trio.fail_after(limit_s):
                answer = await trio.socket.getaddrinfo(name, None, type=trio.socket.SOCK_STREAM)
        except (OSError, trio.TooSlowError) as error:
            faults.append(f"the database's host {name} is not known: {error}")
        else:
            found[at] = [{**place, "hostaddr": str(one[4][0])} for one in answer]

    async with trio.open_nursery() as nursery:
        for at, columns_at in enumerate(zip(*columns, strict=True)):
            nursery.start_soon(resolve, at, *columns_at)
    places = [place for at in range(count) for place in found[at]]
    if not places:
        raise Unavailable("; ".join(faults))
    return places, faults


async def _require_version(connection: "Connection") -> None:
    version = await connection.value("show server_version_num")
    if int(version) < MIN_SERVER_VERSION:
        raise StoreError(
            f"the database is PostgreSQL {int(version) // 10000}; aifs needs "
            f"{MIN_SERVER_VERSION // 10000} or later"
        )


class Link:
    """A connection that is made anew when it has been lost. One asks at a time; others wait."""

    def __init__(self, database: MapDatabase, synchronous: bool) -> None:
        self._database = database
        self._synchronous = synchronous
        self._connection: Connection | None = None
        self._turn = trio.Lock()
        self.fault = ""
        """Why there is no connection; empty: there is one, or nobody has asked."""

    async def ask(
        self, statement: Statement, *parameters: bytes | None, timeout_s: float = ANSWER_S
    ) -> list[Fields]:
        """The rows of the answer. Waits for a connection as long as needed. Raises AnswerLost, also
        after ``timeout_s``; Unavailable for a lasting error."""
        async with self._turn:
            connection = await self._connected()
            try:
                # Not cancelled: the answer would come when nobody expects it.
                with trio.move_on_after(timeout_s, shield=True):
                    return await connection.ask(statement, parameters)
                raise AnswerLost(f"no answer for {timeout_s:g} s")
            except Undone:
                raise
            except AnswerLost as error:
                self._give_up(str(error))
                raise

    async def repeat(self, statement: Statement, *parameters: bytes | None) -> list[Fields]:
        """As ``ask``, of what may be done twice: asks again until there is an answer."""
        while True:
            try:
                return await self.ask(statement, *parameters)
            except AnswerLost:
                continue

    async def _connected(self) -> "Connection":
        again_s, limit_s = _AGAIN_MIN_S, _CONNECT_MIN_S
        while self._connection is None:
            try:
                self._connection = await self._database.connect(self._synchronous, limit_s)
            except Unavailable as error:
                if not self.fault:
                    log.info("metadata: %s", error)
                self.fault = str(error)
                await trio.sleep(again_s)
                again_s = min(2 * again_s, _AGAIN_MAX_S)
                limit_s = min(2 * limit_s, _CONNECT_MAX_S)
        self.fault = ""
        return self._connection

    def _give_up(self, fault: str) -> None:
        self.fault = fault
        if self._connection is not None:
            self._database.leave(self._connection.place)
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Connection:
    """One connection, for one task at a time."""

    place: Place
    """Of its server."""

    def __init__(self, connection: Any) -> None:
        self._pg = connection
        self._prepared: set[bytes] = set()

    @classmethod
    async def open(cls, conninfo: str, limit_s: float) -> "Connection":
        """``conninfo``: with one address. Raises Unavailable."""
        try:
            with trio.fail_after(limit_s):
                return cls(await _connected(generators.connect(conninfo)))
        except trio.TooSlowError:
            raise Unavailable(f"the database does not answer for {limit_s:g} s") from None
        except (OperationalError, OSError) as error:
            raise Unavailable(f"the database cannot be reached: {error}") from error

    async def ask(self, statement: Statement, parameters: Sequence[bytes | None]) -> list[Fields]:
        """The rows of the answer. Raises AnswerLost, Unavailable."""
        try:
            if statement.name not in self._prepared:
                self._pg.send_prepare(statement.name, statement.sql, statement.types)
                _checked(await self._answer())
                self._prepared.add(statement.name)
            self._pg.send_query_prepared(statement.name, parameters, statement.formats, _BINARY)
            result = _checked(await self._answer())
        except (OperationalError, OSError) as error:
            raise AnswerLost(str(error)) from error
        columns = range(result.nfields)
        return [
            tuple([result.get_value(row, column) for column in columns])
            for row in range(result.ntuples)
        ]

    async def value(self, query: str) -> str:
        """The first field of a query's answer, as text. Raises AnswerLost, Unavailable."""
        result = await self._send(query)
        return (result.get_value(0, 0) or b"").decode()

    async def script(self, commands: str) -> None:
        """Raises AnswerLost, Unavailable."""
        await self._send(commands)

    async def _send(self, query: str) -> Any:
        try:
            self._pg.send_query(query.encode())
            return _checked(await self._answer())
        except (OperationalError, OSError) as error:
            raise AnswerLost(str(error)) from error

    async def copy_pairs(self, query: str) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """The rows of a query that has two columns of bytes. Raises AnswerLost, Unavailable."""
        await self._send(f"copy ({query}) to stdout (format binary)")
        at = _COPY_HEADER_BYTES
        try:
            while True:
                data = await self._driven(generators.copy_from(self._pg))
                if not isinstance(data, memoryview | bytes | bytearray):
                    return
                row, at = bytes(data)[at:], 0
                if len(row) > _COPY_END_BYTES:
                    (length,) = _LENGTH.unpack_from(row, 2)
                    yield row[6 : 6 + length], row[10 + length :]
        except (OperationalError, OSError) as error:
            raise AnswerLost(str(error)) from error

    def close(self) -> None:
        self._pg.finish()

    async def _answer(self) -> Any:
        return await self._driven(generators.execute(self._pg))

    async def _driven(self, generator: Generator[Any, Any, Any]) -> Any:
        fileno = self._pg.socket
        try:
            wanted = next(generator)
            while True:
                wanted = generator.send(await _ready(fileno, wanted))
        except StopIteration as end:
            return end.value


async def _connected(generator: Generator[Any, Any, Any]) -> Any:
    try:
        fileno, wanted = next(generator)
        while True:
            fileno, wanted = generator.send(await _ready(fileno, wanted))
    except StopIteration as end:
        return end.value


async def _ready(fileno: int, wanted: Wait) -> Ready:
    if wanted == Wait.R:
        await trio.lowlevel.wait_readable(fileno)
        return Ready.R
    if wanted == Wait.W:
        await trio.lowlevel.wait_writable(fileno)
        return Ready.W
    ready = []

    async def wait(function: Any, state: Ready) -> None:
        await function(fileno)
        ready.append(state)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, trio.lowlevel.wait_readable, Ready.R)
        nursery.start_soon(wait, trio.lowlevel.wait_writable, Ready.W)
    return Ready(sum(ready))


def _checked(results: Iterable[Any]) -> Any:
    """The last result. Raises AnswerLost, Unavailable."""
    result = None
    for result in results:
        if result.status in (_TUPLES, _COMMAND_OK, _COPY_OUT):
            continue
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        text = (result.get_error_message() or "no text").strip()
        if state in _UNDONE_STATES:
            raise Undone(text)
        if not state or state.startswith(_CONNECTION_STATES + _PASSING_STATES):
            raise AnswerLost(text)
        raise Unavailable(f"the metadata database: {text} ({state})")
    if result is None:
        raise AnswerLost("no answer")
    return result
