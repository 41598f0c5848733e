"""``aifs hosts``: the hosts that have a store mounted."""

from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH
from aifs.core.errors import StoreError

_EPILOG = """\b
Examples:
  aifs hosts /mnt/store
  aifs hosts /mnt/store --json
  aifs hosts /mnt/store --fence gpu-003"""


@click.command("hosts", short_help="Show the hosts that have a store mounted.", epilog=_EPILOG)
@click.argument("mountpoint", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
@click.option(
    "--fence",
    "fenced",
    default="",
    metavar="NAME",
    help="End the session of the host NAME at once, instead of when its lease is over.",
)
def hosts_command(mountpoint: str, as_json: bool, fenced: str) -> None:
    """Show all hosts that have the store of MOUNTPOINT mounted, as the database and they themselves
    say.

    A host that is silent has not renewed its lease. It is ended soon, and others go on without it.
    One that is joining copies the metadata, and serves nobody yet. The lag of a host is how many
    changes of others it has not heard of. A directory that is delegated to a host is changed there
    without waiting for the database. What is undrained is in its burst
    tier alone, but for the mirrors of it that other hosts keep; its own mirrors are of theirs. The
    host with the role does the background work of the whole store.

    A host that is fenced changes nothing any more, wherever it hangs: its mount ends as soon as it
    notices. What it has not drained is there again when it mounts the store again.
    """
    from aifs.cli.mounts import mount_of, read_status
    from aifs.cli.output import print_json, print_table

    path = mount_of(mountpoint)
    if not read_status(path)["cluster"]["hosts"]:
        raise StoreError(f"{mountpoint}: its store has one host (meta.engine is local)")
    if fenced:
        hints.put(path, hints.FENCE, fenced)
        print(f"the session of host {fenced} has ended")
        return
    state = hints.read(path, hints.HOSTS)
    if as_json:
        print_json(state)
        return
    print_table(
        (
            "host",
            "session",
            "state",
            "lease left",
            "lag",
            "undrained",
            "mirrors",
            "delegated",
            "role",
            "address",
        ),
        [_row_of(host) for host in state["hosts"]],
        right=("session", "lease left", "lag", "undrained", "mirrors", "delegated"),
    )


def _row_of(host: dict[str, Any]) -> tuple[object, ...]:
    from aifs.core.units import describe_size

    undrained, mirrors = (
        "unknown" if host[which] is None else describe_size(host[which])
        for which in ("undrained_bytes", "mirror_bytes")
    )
    return (
        f"{host['name']}{' (this one)' if host['is_this'] else ''}",
        host["session"],
        host["state"],
        f"{host['lease_left_s']:.1f} s",
        host["lag"],
        undrained,
        mirrors,
        host["delegations"],
        "yes" if host["has_role"] else "",
        host["address"],
    )
