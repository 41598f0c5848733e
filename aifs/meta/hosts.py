"""The hosts of a store that several may have mounted, as transaction functions (see kv.py).

``p host`` is a JSON object: ``name``, ``clean`` (whether the host has closed the store in order)
and ``boot`` (names the kernel that ran when it used the store last). A host keeps its number for
ever: what it has left when it died is recorded under it. The host of a store that has one has no
record, and the number 0; what would be in it is in the superblock.
"""

import json
from dataclasses import asdict, dataclass, replace

from aifs.core.errors import Unavailable
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A host that has had the store mounted."""

    name: str
    clean: bool = True
    boot: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decode_host(value: bytes) -> HostRecord:
    """Raises Unavailable if the record is damaged."""
    try:
        record = HostRecord(**json.loads(value))
    except (ValueError, TypeError) as error:
        raise Unavailable("the record of a host is damaged") from error
    if (type(record.name), type(record.clean), type(record.boot)) != (str, bool, str):
        raise Unavailable("the record of a host is damaged")
    return record


def put_host(tx: Transaction, number: int, record: HostRecord) -> None:
    tx.put(keys.host(number), record.encode())


def put_name(tx: Transaction, name: str) -> None:
    """This host has this name."""
    record = find_host(tx, tx.host)
    if record is None or record.name != name:
        put_host(tx, tx.host, replace(record, name=name) if record else HostRecord(name))


def find_host(tx: ReadTransaction, number: int) -> HostRecord | None:
    """None: it has never had the store mounted. Raises Unavailable."""
    value = tx.get(keys.host(number))
    return None if value is None else decode_host(value)


def read_hosts(tx: ReadTransaction) -> dict[int, str]:
    """The names of all hosts, by their numbers. Raises Unavailable."""
    return {
        keys.number(key): decode_host(value).name for key, value in tx.range(*keys.all_of(b"p"))
    }


def name_of(tx: ReadTransaction, number: int) -> str:
    """The name of a host, for people and for calls."""
    record = find_host(tx, number)
    return f"number {number}" if record is None else record.name
