"""``aifs env``: environments that are installed once, and used in place by all ranks and hosts."""

import os
from typing import Any

import click

from aifs.cli.command import DURATION, PATH, Column, Report, Table, group
from aifs.cli.output import count, duration, print_error, size, when
from aifs.core.units import format_duration


@group("env", short_help="Environments that are installed once for all ranks and hosts.")
def env_command() -> None:
    """Environments: directories that are made once for their key, and used in place."""


@env_command.command(
    "run",
    examples="""
env=$(aifs env run --dir /mnt/store/envs --key-from requirements.txt --venv --expire 7d \\
      -- pip install -r requirements.txt)
aifs env use $env -- python train.py
aifs env run --dir envs --key-from environment.yml \\
      -- sh -c 'conda env create -p "$AIFS_ENV" -f environment.yml'
aifs env run --dir /mnt/store/envs --key-from requirements.txt --capture /opt/site \\
      -- pip install --target /opt/site -r requirements.txt
""",
    context_settings={"ignore_unknown_options": True},
    short_help="Make an environment unless it is there, and print its path.",
    prints=False,
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.option(
    "--dir", "directory", required=True, type=PATH, metavar="DIR", help="Where environments are."
)
@click.option(
    "--key-from",
    "key_files",
    multiple=True,
    metavar="FILE[,FILE...]",
    help="Files on whose contents the environment depends, such as a list of packages.",
)
@click.option(
    "--key",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Other texts on which the environment depends.",
)
@click.option(
    "--venv",
    is_flag=True,
    help="Make a virtual environment of Python, into which COMMAND installs.",
)
@click.option(
    "--capture",
    "target",
    type=PATH,
    metavar="TARGET",
    help="COMMAND installs into this directory, which is there already: the files that it adds and "
    "removes are kept, and the same is done to TARGET the next time, instead of running COMMAND.",
)
@click.option(
    "--expire",
    "expire_s",
    type=DURATION,
    metavar="TIME",
    help="It may be removed when nobody has used it for so long.",
)
def run_command(
    command: tuple[str, ...],
    directory: str,
    key_files: tuple[str, ...],
    texts: tuple[str, ...],
    venv: bool,
    target: str | None,
    expire_s: float | None,
) -> None:
    """Print the path of the environment below DIR that depends on the files, texts and COMMAND
    given here, on Python's version, and on this kind of machine; run COMMAND to make it if it is
    not there.

    COMMAND finds the path to install to in AIFS_ENV; with --venv it runs as if the virtual
    environment were active. Its output goes to stderr. Of many that ask at the same time, on
    any host, one runs COMMAND, and the others wait. If COMMAND fails there is no environment, and
    its exit code is that of this command.

    With --capture the environment is not used in place: TARGET, on any disk, gets what COMMAND has
    made of it, as hard links where that can be. The path that is printed is that of the environment
    all the same.
    """
    from aifs.client import startup
    from aifs.core.files import read_file

    key: dict[str, Any] = {"command": list(command), "texts": list(texts), "venv": venv}
    for path in (path for paths in key_files for path in paths.split(",")):
        data = read_file(path)
        if data is None:
            raise click.BadParameter(f"{path}: there is no such file", param_hint="--key-from")
        key.setdefault("files", []).append(data.decode(errors="surrogateescape"))
    if target is None:
        made = startup.environment(
            directory, key=key, make=lambda path: _make(path, command, venv), expire_s=expire_s
        )
    elif venv:
        raise click.UsageError("--venv makes a directory, --capture has one")
    else:
        made = startup.capture(
            directory,
            key=key,
            target=target,
            install=lambda: _make(target, command, False),
            expire_s=expire_s,
        )
    print(made.path)


def _make(path: str, command: tuple[str, ...], venv: bool) -> None:
    """Raises click's Exit with the exit code of what has failed."""
    import subprocess
    import sys

    makers = [(sys.executable, "-m", "venv", path)] if venv else []
    for maker in (*makers, command):
        try:
            code = subprocess.run(maker, env=_active(path), stdout=sys.stderr).returncode
        except OSError as error:
            raise click.UsageError(f"{maker[0]}: {error.strerror}") from None
        if code:
            print_error(f"no environment was made: {maker[0]} has ended with exit code {code}")
            raise click.exceptions.Exit(code if code > 0 else 128 - code)


def _active(path: str) -> dict[str, str]:
    """The variables of a process for which the environment is active."""
    variables = {**os.environ, "AIFS_ENV": path}
    if os.path.exists(os.path.join(path, "pyvenv.cfg")):
        variables["VIRTUAL_ENV"] = path
        variables.pop("PYTHONHOME", None)
    variables["PATH"] = os.path.join(path, "bin") + os.pathsep + variables.get("PATH", os.defpath)
    return variables


@env_command.command(
    "use",
    examples="""
aifs env use /mnt/store/envs/5f0c... -- python train.py
torchrun --no-python aifs env use "$env" -- python train.py
""",
    prints=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Run a command in an environment.",
)
@click.argument("environment", type=PATH)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def use_command(environment: str, command: tuple[str, ...]) -> None:
    """Run COMMAND with the ENVIRONMENT active: its programs come first. It is in use, and so is not
    removed, until COMMAND and all that it has started have ended.
    """
    from aifs.client import startup

    found = startup.made_at(environment)
    os.set_inheritable(found.fd, True)
    variables = _active(found.path)
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise click.UsageError(f"{command[0]}: {error.strerror}") from None


_MADE = (
    Column("name"),
    Column("bytes", show=size),
    Column("made in", "took_s", duration),
    Column("last use", "used_s", when),
    Column("expires", "expire_s", lambda time_s: f"{format_duration(time_s)} unused", "never"),
)


@env_command.command(
    "ls",
    short_help="List the environments of a directory.",
    examples="aifs env ls /mnt/store/envs\naifs env ls /mnt/store/envs --json",
    sizes=True,
)
@click.argument("directory", type=PATH)
def ls_command(directory: str) -> Report:
    """List the environments below DIRECTORY: size, seconds that they took, last use, expiry."""
    from aifs.client import startup

    told = [
        {
            "name": name,
            "key": record.key,
            "made_s": record.made_s,
            "took_s": record.took_s,
            "bytes": record.bytes,
            "used_s": used_s,
            "expire_s": record.expire_s,
        }
        for name, (record, used_s) in startup.list_made(directory).items()
    ]
    return Report(told, Table(_MADE, told))


@env_command.command(
    "expire",
    short_help="Remove the environments whose time is over.",
    examples="aifs env expire /mnt/store/envs",
)
@click.argument("directory", type=PATH)
def expire_command(directory: str) -> Report:
    """Remove the environments below DIRECTORY whose time is over and that nobody uses, and the
    rests of those that were never completed. aifs env run does this, too.
    """
    from aifs.client import startup

    removed = startup.expire(directory)
    return Report({"removed": len(removed)}, f"removed {count(len(removed), 'environment')}")
