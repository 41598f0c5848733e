"""The names of the hosts of a store that several may have mounted, as transaction functions (see
kv.py).

``p host`` is the name of a host, as UTF-8; its number is that of kv.Engine.host, which it keeps for
ever: what it has left when it died is recorded under it.
"""

from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction


def put_name(tx: Transaction, name: str) -> None:
    """This host has this name."""
    if tx.get(keys.host(tx.host)) != name.encode():
        tx.put(keys.host(tx.host), name.encode())


def name_of(tx: ReadTransaction, number: int) -> str:
    """The name of a host, for people and for calls."""
    record = tx.get(keys.host(number))
    return f"number {number}" if record is None else record.decode(errors="backslashreplace")
