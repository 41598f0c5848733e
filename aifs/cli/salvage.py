"""``aifs fsck --rebuild-from-servers``: what it says."""

from contextlib import nullcontext
from dataclasses import asdict

from aifs.cli.output import describe_error, print_error, print_json, print_table

EXIT_INCOMPLETE = 4
EXIT_CANNOT_REBUILD = 8

_LOST = (
    "lost with the metadata: files of some KiB that were kept in it, empty files and directories, links, attributes; "
    "deleted files may be back"
)


def rebuild_from_servers(
    source: str, to: str, force: bool, merge: bool, verify: bool, as_json: bool
) -> int:
    """Rebuild, print what came of it, and return the exit code."""
    from rich.console import Console

    from aifs.check.salvage.merge import merge as merge_unknown
    from aifs.check.salvage.rebuild import rebuild
    from aifs.core import config
    from aifs.core.errors import AifsError
    from aifs.core.units import describe_size

    console = Console(stderr=True)
    try:
        with (
            console.status("looking at the servers")
            if console.is_terminal
            else nullcontext() as status
        ):

            def progress(what: str, done: int, total: int) -> None:
                if status is not None:
                    status.update(f"{what}: {done} of {total}")

            loaded = config.load(source, {})
            if merge:
                result = merge_unknown(loaded, verify, progress)
            else:
                result = rebuild(loaded, to, force, verify, progress)
    except (AifsError, OSError) as error:
        print_error(describe_error(error))
        return EXIT_CANNOT_REBUILD
    if as_json:
        print_json(
            {
                "directory": result.meta,
                "rows": [asdict(row) for row in result.rows],
                "counts": result.counts,
            }
        )
    else:
        if result.rows:
            print_table(
                ("state", "where", "reason"),
                [(row.state, row.where, row.reason) for row in result.rows],
            )
        told = [
            f"{number} {name.replace('_', ' ')}"
            for name, number in result.counts.items()
            if name != "bytes"
        ]
        print(f"recovered {describe_size(result.counts['bytes'])}: {', '.join(told)}")
        if not merge:
            print(_LOST)
        print(f"the metadata is in {result.meta}; check it with: aifs fsck {source} --deep")
    return 0 if result.ok else EXIT_INCOMPLETE
