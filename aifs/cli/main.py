"""The command ``aifs``: collects the commands, and turns errors into one line and a documented exit
code.

Commands are imported when they are asked for, and import what they need when they run, so that
small commands start fast.
"""

import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

import aifs
from aifs.cli.output import describe_error, print_error
from aifs.core.errors import AifsError, UserError

EXIT_INTERRUPTED = 130

MOUNT_PACKAGES = frozenset(
    (
        "h11",
        "lmdb",
        "pydantic",
        "pyeclib",
        "pyfuse3",
        "sortedcontainers",
        "trio",
        "yaml",
        "zstandard",
    )
)
"""What the extra ``mount`` installs, as it is imported."""

_OTHER_PACKAGES = {
    "matplotlib": ("figures", "figures"),
    "numpy": ("datasets", "data"),
    "psycopg": ("a host of many", "cluster,mount"),
    "pyarrow": ("datasets", "data"),
    "torch": ("checkpoints of PyTorch", "torch"),
}
"""What other packages are for, and the extras that install them."""

EPILOG = """
SOURCE is a directory, which holds the whole store (metadata, four data servers), or a YAML file
that says where each part lies.

\b
Examples:
  aifs format /srv/store
  aifs mount /srv/store /mnt/store
  aifs status /mnt/store
  aifs umount /mnt/store

\b
Exit codes:
  0  done
  1  an error of the system, such as a file that cannot be read; or not all was done, as the
     command says
  2  wrong usage of the command line
  3  wrong configuration or mount option
  4  the store, or one of its directories, is not what it should be
  5  the store is in use by another process
  6  the mount cannot be made, is not there, or did not end in order
  7  the time that the command was given is over
  8  a checkpoint cannot be made, is not there, or is not what its manifest says
  9  a dataset cannot be read, or is not the one that was indexed
 10  an environment or image cannot be made, or is not there
fsck has its own, as fsck(8): see aifs fsck --help.
"""

_COMMANDS = {
    "format": "aifs.cli.format:format_command",
    "mount": "aifs.cli.mount:mount_command",
    "umount": "aifs.cli.umount:umount_command",
    "status": "aifs.cli.status:status_command",
    "info": "aifs.cli.info:info_command",
    "doctor": "aifs.cli.doctor:doctor_command",
    "stats": "aifs.cli.stats:stats_command",
    "top": "aifs.cli.top:top_command",
    "trace": "aifs.cli.trace:trace_command",
    "why": "aifs.cli.why:why_command",
    "profile": "aifs.cli.profile:profile_command",
    "debug": "aifs.cli.debug:debug_command",
    "drain": "aifs.cli.drain:drain_command",
    "warm": "aifs.cli.warm:warm_command",
    "evict": "aifs.cli.evict:evict_command",
    "quota": "aifs.cli.quota:quota_group",
    "pin": "aifs.cli.pin:pin_command",
    "unpin": "aifs.cli.pin:unpin_command",
    "rm": "aifs.cli.rm:rm_command",
    "clone": "aifs.cli.clone:clone_command",
    "trash": "aifs.cli.trash:trash_group",
    "snapshot": "aifs.cli.snapshot:snapshot_group",
    "publish": "aifs.cli.publish:publish_command",
    "checkpoints": "aifs.cli.checkpoints:checkpoints_group",
    "fsck": "aifs.cli.fsck:fsck_command",
    "scrub": "aifs.cli.scrub:scrub_command",
    "config": "aifs.cli.config:config_group",
    "server": "aifs.cli.server:server_group",
    "hosts": "aifs.cli.hosts:hosts_command",
    "group": "aifs.cli.group:group_group",
    "meta": "aifs.cli.meta:meta_group",
    "env": "aifs.cli.env:env_group",
    "image": "aifs.cli.image:image_group",
    "dataset": "aifs.cli.dataset:dataset_group",
    "start": "aifs.cli.start:start_group",
    "hints": "aifs.cli.hint_table:hints_command",
    "layout": "aifs.cli.layout:layout_group",
    "bench": "aifs.cli.bench:bench_command",
    "completion": "aifs.cli.completion:completion_command",
    "manual": "aifs.cli.manual:manual_command",
}
"""Where each command is, in the order in which help lists them."""

_SILENT = {"env"}
"""Commands that log nothing. Ranks wait for them when they start, and a fifth of what they import
is logging."""


class _Commands(click.Group):
    """Imports a command when it is asked for: a job starts in less time than all of them take."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        if name not in _SILENT:
            import logging

            logging.basicConfig(  # a daemon sets up its own
                format="aifs: %(message)s", level=logging.WARNING
            )
        module, _, command = _COMMANDS[name].partition(":")
        return getattr(importlib.import_module(module), command)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(aifs.__version__, message="aifs %(version)s")
def cli() -> None:
    """AIFS: a POSIX filesystem striped over data servers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors of the user or the system are one line on
    stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None: it was closed when we were started
            # File names are bytes: they leave as they came.
            stream.reconfigure(errors="surrogateescape")
    try:
        result = cli.main(args=arguments, prog_name="aifs", standalone_mode=False)
        print(end="", flush=True)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        print_error(" ".join(error.format_message().split()))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in MOUNT_PACKAGES:
            what, extra = "the daemon", "mount"
        elif package in _OTHER_PACKAGES:
            what, extra = _OTHER_PACKAGES[package]
        else:
            raise
        print_error(
            f"this needs the packages of {what} ({package} is not installed); in a checkout of "
            f"AIFS: pip install '.[{extra}]'"
        )
        return 1
    except (AifsError, OSError) as error:
        print_error(describe_error(error))
        return error.exit_code if isinstance(error, UserError) else 1
    except (click.Abort, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        print_error("not confirmed, so nothing was done")
        return 1


if __name__ == "__main__":
    sys.exit(main())
