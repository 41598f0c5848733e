"""``aifs status``: what a mounted daemon says of itself."""

import click

from aifs.cli.arguments import PATH


@click.command("status", epilog="\b\nExamples:\n  aifs status /mnt/store\n  aifs status /mnt/store --json")
@click.argument("mountpoint", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def status_command(mountpoint: str, as_json: bool) -> None:
    """Show the state of the mount at MOUNTPOINT and of its data servers."""
    from aifs.cli.mounts import read_status, require_aifs
    from aifs.cli.output import print_facts, print_json, print_table
    from aifs.core.units import describe_size

    status = read_status(require_aifs(mountpoint))
    if as_json:
        print_json(status)
        return
    print_facts((name, value) for name, value in status.items() if not isinstance(value, list | dict))
    print()
    rows = [
        (
            server["id"],
            server["state"],
            describe_size(server["used_bytes"]),
            describe_size(server["free_bytes"]),
            server["path"],
            server["last_error"],
        )
        for server in status["servers"]
    ]
    print_table(
        ("server", "state", "used", "free", "path", "last error"), rows, right=("server", "used", "free")
    )
