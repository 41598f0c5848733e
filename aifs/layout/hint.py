"""The policy that a user sets for new files of a directory: layout, and whether they go through the
burst tier. Pure.

The layout's text form is ``kind=interleaved,count=2,compress=zstd:3``."""

from collections.abc import Callable
from typing import Any, NamedTuple

from aifs.core.errors import Invalid
from aifs.core.kinds import LAYOUT_KINDS
from aifs.core.texts import parse_pairs
from aifs.core.units import format_compress, format_size, parse_compress, parse_size
from aifs.layout.kinds import Layout
from aifs.layout.redundancy import REPLICAS_MAX, Redundancy, check_coded_unit, format_ec, parse_ec
from aifs.layout.striped import UNIT_MAX, UNIT_MIN

COUNT_MAX = 255
SERVER_ID_MAX = 0x7FFF

# Numbers in these lists are recorded: new members go to the end.
KINDS = ("", *LAYOUT_KINDS)
TIERS = ("", "burst", "capacity", "pinned")
PUBLISHES = ("", "capacity")
MIRRORS_MAX = 1


class Policy(NamedTuple):
    """How new files are stored. Zeros, empty and None mean: as the store does by default."""

    unit: int = 0  # stripe unit in bytes
    # servers that a file's bytes are striped over, not counting replicas and parity; 0: all
    count: int = 0  # type: ignore[assignment]
    servers: tuple[int, ...] = ()  # ids to choose from, ascending; empty: any
    kind: str = ""  # one of KINDS
    compress: int | None = None  # zstd level of interleaved chunks; 0: none
    tier: str = ""  # one of TIERS: through the burst tier, past it, or in it for good
    expected: int = 0  # size in bytes that a new file is expected to reach; 0: unknown
    replicas: int = 0  # of each byte; 1: one
    data: int = 0  # columns of coded files
    parity: int = 0  # columns of coded files; 0: they are not coded
    publish: str = (
        ""  # one of PUBLISHES: where bytes must be before a rename into the directory shows them
    )
    mirror: int = 0  # other hosts that keep a copy of what is in the burst tier alone

    def redundancy(self, default: Redundancy) -> Redundancy:
        """The redundancy of the files, if ``default`` counts where the policy says nothing."""
        if self.parity:
            return Redundancy(1, self.data, self.parity)
        return Redundancy(self.replicas) if self.replicas else default


DEFAULT_POLICY = Policy()


def policy_of(of: Layout) -> Policy:
    """The policy that gives this layout."""
    layout = of.objects
    if layout is None:
        return Policy(kind=of.kind)
    if layout.parity:
        return Policy(layout.unit, 0, layout.servers, data=layout.width, parity=layout.parity)
    replicas = layout.replicas if layout.is_protected else 0
    return Policy(layout.unit, layout.width, layout.servers, replicas=replicas)


def parse_layout_hint(text: str) -> Policy:
    """The policy of ``text``: ``key=value`` joined by commas; missing keys are the store's.

    Keys: ``kind`` (striped, interleaved), ``unit`` (a size), ``count`` (servers per file, 0: all),
    ``servers`` (ids as ``0:2:3``), ``compress`` (none, zstd:LEVEL; of interleaved files),
    ``replicas`` (of each byte; 1: no more than one), ``ec`` (DATA+PARITY columns, or none). Raises
    Invalid, with the fault. Callers check that the servers exist.
    """
    values: dict[str, Any] = {}
    for key, value in parse_pairs("layout", text, _PARSERS, "unit=4MiB,count=2"):
        values[key] = _PARSERS[key](value)
    if "ec" in values:
        coded = values.pop("ec")
        if not coded[1]:
            values.setdefault("replicas", 1)
        elif "replicas" in values or values.get("count"):
            raise Invalid(
                "layout: ec says how many servers a file has: 'replicas' and 'count' do not go "
                "with it"
            )
        else:
            values["data"], values["parity"] = coded
    policy = Policy(**values)
    if policy.parity and policy.unit:
        check_coded_unit(policy.unit, policy.data)
    least = policy.redundancy(Redundancy()).least_servers
    if policy.servers and least > len(policy.servers):
        raise Invalid(f"layout: {least} servers are needed, but {len(policy.servers)} are listed")
    if policy.servers and policy.count > len(policy.servers):
        raise Invalid(
            f"layout: count={policy.count} is more than the {len(policy.servers)} servers that are "
            "listed"
        )
    return policy


def format_layout_hint(policy: Policy) -> str:
    """The text that ``parse_layout_hint`` reads back as ``policy``."""
    parts = [f"kind={policy.kind}"] if policy.kind else []
    if policy.unit:
        parts.append(f"unit={format_size(policy.unit)}")
    parts.append(f"count={policy.count}")
    if policy.servers:
        parts.append(f"servers={':'.join(map(str, policy.servers))}")
    if policy.parity:
        parts.append(f"ec={format_ec(policy.data, policy.parity)}")
    elif policy.replicas:
        parts.append(f"replicas={policy.replicas}")
    if policy.compress is not None:
        parts.append(f"compress={format_compress(policy.compress)}")
    return ",".join(parts)


def _parse_kind(text: str) -> str:
    if text not in KINDS[1:]:
        raise Invalid(f"layout: kind={text} is unknown; there are {' and '.join(KINDS[1:])}")
    return text


def _parse_unit(text: str) -> int:
    try:
        unit = parse_size(text)
    except ValueError as error:
        raise Invalid(f"layout: unit: {error}") from None
    if unit % UNIT_MIN or not UNIT_MIN <= unit <= UNIT_MAX:
        limits = f"{format_size(UNIT_MIN)} to {format_size(UNIT_MAX)}"
        raise Invalid(f"layout: unit={text} is not a multiple of {UNIT_MIN} bytes from {limits}")
    return unit


def _parse_count(text: str) -> int:
    return _number("count", text, COUNT_MAX)


def _parse_servers(text: str) -> tuple[int, ...]:
    ids = [_number("servers", part.strip(), SERVER_ID_MAX) for part in text.split(":")]
    if len(set(ids)) < len(ids):
        raise Invalid(f"layout: servers={text} names a server twice")
    return tuple(sorted(ids))


def _parse_replicas(text: str) -> int:
    replicas = _number("replicas", text, REPLICAS_MAX)
    if not replicas:
        raise Invalid("layout: replicas=0 would keep nothing; 1 is one copy of each byte")
    return replicas


def _parse_compress(text: str) -> int:
    try:
        return parse_compress(text)
    except ValueError as error:
        raise Invalid(f"layout: {error}") from None


def _number(key: str, text: str, largest: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= largest):
        raise Invalid(f"layout: {key}: {text!r} is not a whole number from 0 to {largest}")
    return int(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "kind": _parse_kind,
    "unit": _parse_unit,
    "count": _parse_count,
    "servers": _parse_servers,
    "compress": _parse_compress,
    "replicas": _parse_replicas,
    "ec": parse_ec,
}
