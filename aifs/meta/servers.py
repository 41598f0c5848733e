"""The table of a store's data servers and burst directories: its records, and transaction functions
(see kv.py).

``s server`` is a JSON object: ``path`` (relative for what lies below a SOURCE directory), ``state``
(one of SERVER_STATES), ``domain`` (what fails together has the same; "": the server alone),
``storage_class`` ("": for new files; other ones are for files that have aged, upkeep/aging.py),
``successor`` (the number of the server that takes over its objects, or null) and ``host`` (the host
that has the burst directory; 0: where the store has one host, and of a data server). Numbers are
never used again: the counters ``cservers`` and ``cburst`` say which come next.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from aifs.core.errors import Unavailable
from aifs.layout.placement import ACTIVE, BURST_FIRST, SERVER_STATES
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """A row of the table."""

    path: str
    state: str = ACTIVE
    domain: str = ""
    successor: int | None = None
    host: int = 0
    storage_class: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decode_server(value: bytes) -> ServerRecord:
    """Raises Unavailable if the record is damaged."""
    try:
        record = ServerRecord(**json.loads(value))
        texts = record.path, record.domain, record.storage_class
    except (ValueError, TypeError) as error:
        raise Unavailable("a record of the table of servers is damaged") from error
    if (
        record.state not in SERVER_STATES
        or not all(isinstance(text, str) for text in texts)
        or type(record.host) is not int
        or type(record.successor) not in (int, type(None))
    ):
        raise Unavailable("a record of the table of servers is damaged")
    return record


def read_table(tx: ReadTransaction) -> dict[int, ServerRecord]:
    """All rows by number, ascending. Raises Unavailable."""
    return {keys.number(key): decode_server(value) for key, value in tx.range(*keys.all_of(b"s"))}


def get_server(tx: ReadTransaction, number: int) -> ServerRecord | None:
    value = tx.get(keys.server(number))
    return None if value is None else decode_server(value)


def next_number(tx: ReadTransaction, role: str) -> int:
    """The number of the next server of the role; none had it before."""
    counter, first = _counter_of(role)
    used = (
        keys.number(key)
        for key, _ in tx.range(keys.server(first), keys.server(first | BURST_FIRST - 1))
    )
    return max(first + tx.counter(counter), max(used, default=first - 1) + 1)


def take_number(tx: Transaction, role: str) -> int:
    """The same; nobody else gets it."""
    number = next_number(tx, role)
    reserve_number(tx, number)
    return number


def _counter_of(role: str) -> tuple[bytes, int]:
    return (keys.COUNTER_BURST, BURST_FIRST) if role == "burst" else (keys.COUNTER_SERVERS, 0)


def put_server(tx: Transaction, number: int, record: ServerRecord) -> None:
    """Record a server, new or not."""
    reserve_number(tx, number)
    tx.put(keys.server(number), record.encode())


def reserve_number(tx: Transaction, number: int) -> None:
    """It is in use, or has been: no new server gets it, nor one below."""
    counter, first = _counter_of("burst" if number >= BURST_FIRST else "data")
    missing = number + 1 - first - tx.counter(counter)
    if missing > 0:
        tx.add(counter, missing)


def put_servers(tx: Transaction, records: Mapping[int, ServerRecord]) -> None:
    for number, record in records.items():
        put_server(tx, number, record)


def remove_server(tx: Transaction, number: int) -> None:
    """Take a server out of the table, and its mark. Nothing refers to it any more."""
    tx.delete(keys.server(number))
    tx.delete(keys.unprotected(number))


def mark_unprotected(tx: Transaction, servers: Iterable[int]) -> None:
    """Note that unprotected bytes are going to lie on these servers: a store without one is
    incomplete. Raises Unavailable if one was removed from the table."""
    for number in servers:
        if tx.get(keys.unprotected(number)) is None:
            if tx.get(keys.server(number)) is None:
                raise Unavailable(f"data server {number} has been removed from the store")
            tx.put(keys.unprotected(number), b"")


def find_unprotected(tx: ReadTransaction) -> set[int]:
    """The servers that unprotected bytes may lie on."""
    return {keys.number(key) for key, _ in tx.range(*keys.all_of(b"u"))}
