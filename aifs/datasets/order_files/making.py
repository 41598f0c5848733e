"""The bytes of an order file, of any format."""

from aifs.datasets.index import Index
from aifs.datasets.order_files import megatron, plain
from aifs.datasets.order_files.chosen import OrderSources, chosen_of
from aifs.datasets.order_files.names import OrderName
from aifs.datasets.virtual import Joined


def order_bytes(index: Index, name: OrderName, sources: OrderSources) -> Joined:
    """What the file ``name`` of a dataset holds. Blocks: its files' headers and footers are read.
    Raises DatasetError with what cannot be put into an order, and why."""
    format = megatron if name.suffix == b".idx" else plain
    return format.joined(chosen_of(index, name), sources)
