"""The command ``aifs``: finds commands, and turns errors into one line and a documented exit code.
A command is imported on demand, and imports the rest when it runs, to start fast."""

import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

import aifs
from aifs.cli.command import CommandGroup
from aifs.cli.output import describe_error, near, print_error
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
"""The packages of the extra ``mount``, as they are imported."""

_OTHER_PACKAGES = {
    "google": ("the driver for Kubernetes", "csi"),
    "grpc": ("the driver for Kubernetes", "csi"),
    "matplotlib": ("figures", "figures"),
    "numpy": ("datasets", "data"),
    "psycopg": ("a host of many", "cluster,mount"),
    "pyarrow": ("datasets", "data"),
    "torch": ("checkpoints of PyTorch", "torch"),
}
"""The uses of other packages, and the extras that install them."""

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
130  interrupted by Ctrl-C
A command that runs another one (env run, env use, start run) has the exit code of that one;
fsck has its own, as fsck(8): see aifs fsck --help.
"""

_COMMANDS = {
    "Stores and mounts": "format mount upgrade umount status info host server config meta fsck "
    "scrub csi",
    "Finding faults": "doctor why stats top trace profile debug bench",
    "Files and tiers": "drain warm evict pin unpin rm trash clone snapshot quota layout hint",
    "Checkpoints": "checkpoint group",
    "Jobs": "start env image dataset",
    "Buckets": "import export",
    "This program": "completion manual",
}
"""The commands, by the headings below which help lists them."""

NAMES = [name for names in _COMMANDS.values() for name in names.split()]

_HIDDEN = {"go-on"}
"""Commands that no person runs."""

_MODULES = {
    "completion": "manual",
    "format": "mount",
    "go-on": "mount",
    "group": "info",
    "host": "server",
    "layout": "info",
    "pin": "tiers",
    "drain": "tiers",
    "evict": "tiers",
    "export": "transfer",
    "import": "transfer",
    "warm": "tiers",
    "unpin": "tiers",
    "profile": "trace",
    "rm": "trash",
    "scrub": "fsck",
    "snapshot": "clone",
    "stats": "status",
    "top": "trace",
    "why": "debug",
}
"""The modules of commands that do not have one of their name."""

_SILENT = {"env"}
"""Commands without a log: ranks wait for them, and logging is a fifth of their imports."""


class _Commands(CommandGroup):
    """All commands, imported on demand: a job starts in less time than all take."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return NAMES

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in NAMES and name not in _HIDDEN:
            return None
        if name not in _SILENT:
            import logging

            logging.basicConfig(  # a daemon sets up its own
                format="aifs: %(message)s", level=logging.WARNING
            )
        module = importlib.import_module(f"aifs.cli.{_MODULES.get(name, name)}")
        return getattr(module, f"{name.replace('-', '_')}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in _COMMANDS.items():
            found = [self.get_command(ctx, name) for name in names.split()]
            with formatter.section(heading):
                formatter.write_dl([(c.name or "", c.get_short_help_str(70)) for c in found if c])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(aifs.__version__, message=f"aifs %(version)s {aifs.COMMIT}".rstrip())
def cli() -> None:
    """AIFS: a POSIX filesystem striped over data servers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one line on stderr."""
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
        if isinstance(error, click.NoSuchOption):
            error = click.NoSuchOption(
                error.option_name, possibilities=near(error.option_name, error.possibilities or ())
            )
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
    except (click.Abort, KeyboardInterrupt) as error:  # Abort: also where a question has no answer
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        print_error("not confirmed, so nothing was done")
        return 1


if __name__ == "__main__":
    sys.exit(main())
