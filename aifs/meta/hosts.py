"""The hosts of a store that several may have mounted: their numbers, as transaction functions (see
kv.py).

``p host`` is the name of a host, as UTF-8. A host keeps its number for ever: what it has left when
it died is recorded under it. The host of a store that has one has no record, and the number 0.
"""

from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction


def register(tx: Transaction, name: str) -> int:
    """The number of the host of this name, which gets one if it is new."""
    table = read_table(tx)
    for number, known in table.items():
        if known == name:
            return number
    number = max(table, default=0) + 1
    tx.put(keys.host(number), name.encode())
    return number


def read_table(tx: ReadTransaction) -> dict[int, str]:
    """The names of all hosts, by number."""
    return {
        keys.number(key): value.decode(errors="backslashreplace")
        for key, value in tx.range(*keys.all_of(b"p"))
    }


def name_of(tx: ReadTransaction, number: int) -> str:
    """The name of a host, for people and for calls."""
    record = tx.get(keys.host(number))
    return f"number {number}" if record is None else record.decode(errors="backslashreplace")
