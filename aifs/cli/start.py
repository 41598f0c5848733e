"""``aifs start``: jobs whose start is recorded once, and prefetched from then on."""

import os
import signal
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from aifs.cli.command import PATH, Column, Report, Table, group, is_json, number
from aifs.cli.output import count, duration, print_error, size, when

if TYPE_CHECKING:
    from aifs.client.startup.marks import MarkedOutput
    from aifs.core.start_record import StartRecord

_PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python, not by what it starts
_FROM_KERNEL = 0x80  # SI_KERNEL: a key of the terminal, which the whole group has got already

_DIR = click.option(
    "--dir",
    "top",
    type=PATH,
    metavar="DIR",
    help="Where jobs have their directories; otherwise start/ of the mount that you are in, or of "
    "the only one.",
)


@group("start", short_help="Record what the start of a job touches, and prefetch it.")
def start_command() -> None:
    """Starts of jobs: the files that one touches are recorded, and are there for the next one."""


def _top(top: str | None) -> str:
    from aifs.client import startup

    return top or startup.default_directory()


@start_command.command(
    "run",
    examples="""
aifs start run --job llama -- python train.py
srun aifs start run --job llama --key 64gpu -- torchrun train.py
aifs start run --dir /mnt/store/start --job eval -- ./evaluate.sh
aifs start run --job llama --marks -- sh -c 'echo AIFS-STAGE begin data; ./data.sh'
""",
    context_settings={"ignore_unknown_options": True},
    short_help="Run a command whose start is recorded and prefetched.",
    prints=False,
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@click.option("--job", required=True, metavar="NAME", help="Starts of this job are alike.")
@click.option("--key", default="", metavar="KEY", help="Records of each key are kept apart.")
@click.option(
    "--run",
    metavar="RUN",
    help="Name of this start, the same on all hosts; otherwise SLURM_JOB_ID, or the time.",
)
@click.option(
    "--marks",
    is_flag=True,
    help="Lines of COMMAND's output that are AIFS-STAGE begin NAME, or end NAME, are stages of "
    "aifs start report.",
)
@_DIR
def run_command(
    command: tuple[str, ...], job: str, key: str, run: str | None, marks: bool, top: str | None
) -> int:
    """Run COMMAND once on each host. The first time what it reads on the mount in its first 2
    minutes is recorded; from then on that is prefetched while it runs, and recorded anew.

    COMMAND starts at once, gets the signals that this command gets, and its exit code is that of
    this command. If a start cannot be recorded, that is said once; COMMAND runs all the same. With
    --marks this command passes its output on, and ends when nobody can write to that any more.
    """
    from aifs.client import startup
    from aifs.client.startup import stages

    if marks and sys.stdout is None:
        raise click.UsageError("--marks: standard output is closed")
    begun = None
    try:
        directory = startup.directory_of(_top(top), job, key)
        run = run or startup.run_name(os.environ)
        os.environ |= {stages.DIRECTORY: os.path.abspath(directory), stages.RUN: run}
        begun = startup.JobStart(directory, run, print_error)
    except startup.StartUnknown as error:
        print_error(f"the start is not recorded: {error}")
    output = None
    if marks:
        from aifs.client.startup.marks import MarkedOutput

        output = MarkedOutput(sys.stdout.fileno())
    try:
        return _run(command, output)
    finally:
        if begun is not None:
            begun.end()


def _run(command: tuple[str, ...], output: "MarkedOutput | None") -> int:
    """The exit code of ``command``, which gets our signals, and writes to ``output``, or where we
    do. Raises click's UsageError if it cannot be started.
    """
    waited = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        pid = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[] if output is None else [(os.POSIX_SPAWN_DUP2, output.stdout, 1)],
            setsigmask=before,
            setsigdef=_IGNORED,
        )
    except OSError as error:
        raise click.UsageError(f"{command[0]}: {error.strerror}") from None
    if output is not None:
        output.begin(pid)
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        got = signal.sigwaitinfo(waited)
        if got.si_signo != signal.SIGCHLD and got.si_code != _FROM_KERNEL:
            os.kill(pid, got.si_signo)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _, status, usage = ended
    code = os.waitstatus_to_exitcode(status)
    if output is not None:
        output.end(usage)
    return code if code >= 0 else 128 - code


@start_command.command(
    "prefetch",
    examples="""
aifs start prefetch llama
aifs start prefetch llama+64gpu --dir /mnt/store/start
""",
    short_help="Prefetch what a job will touch, and wait.",
    sizes=True,
)
@click.argument("job")
@_DIR
def prefetch_command(job: str, top: str | None) -> Report:
    """Read the files that the next start of JOB will touch into memory, to start it in another
    way, or later. aifs start run does this by itself.
    """
    from aifs.client import startup

    fetched = startup.prefetch(startup.directory_of(_top(top), job))
    return Report(
        {"files": fetched.files, "bytes": fetched.bytes, "left_out": fetched.left_out},
        f"prefetched {size(fetched.bytes)} of {count(fetched.files, 'file')}; "
        f"changed since, or out of reach: {fetched.left_out}",
    )


_JOBS = (
    Column("job"),
    Column("last run", "run"),
    Column("files", show=number),
    Column("touched", "bytes", size),
    Column("when", "began_s", when),
)


@start_command.command(
    "ls",
    short_help="List jobs whose starts are recorded.",
    examples="aifs start ls\naifs start ls --dir /mnt/store/start --json",
    sizes=True,
)
@_DIR
def ls_command(top: str | None) -> Report:
    """List the jobs: the files that the newest start has touched, and when it was."""
    from aifs.client import startup

    jobs = startup.list_jobs(_top(top)).items()
    told = [{"job": job, **_facts(found[0])} for job, found in jobs if found]
    return Report(told, Table(_JOBS, told))


def _facts(record: "StartRecord") -> dict[str, object]:
    return {
        "run": record.run,
        "host": record.host,
        "began_s": record.began_s,
        "took_s": record.took_s,
        "files": len(record.files),
        "bytes": record.bytes,
    }


_FILES = (
    Column("hot", show=size),
    Column("of", "size", size),
    Column("path", lambda file: file["path"] or f"inode {file['inode']}"),
)


@start_command.command(
    "show",
    examples="""
aifs start show llama
aifs start show llama --json
""",
    short_help="Show what the next start prefetches.",
)
@click.argument("job")
@_DIR
def show_command(job: str, top: str | None) -> Report:
    """Show the files that the next start of JOB prefetches, in this order: those that the last two
    touched."""
    from aifs.client import startup

    records = startup.read_records(startup.directory_of(_top(top), job))
    files = [
        {"path": file.path, "inode": file.ino, "size": file.size, "hot": file.bytes}
        for file in startup.plan(records)
    ]
    told = {"records": [_facts(record) for record in records], "files": files}
    return Report(told, Table(_FILES, files))


_STAGES = (
    Column("stage"),
    Column("ranks", show=number),
    Column("median", "median_s", duration),
    Column("max", "max_s", duration),
    Column("max/median", lambda stage: f"{stage.ratio:.2f}", number),
    Column("slowest"),
    Column("its time went to", lambda stage: _spent(stage)),
    Column("not ended", lambda stage: ", ".join(stage.unfinished)),
)


@start_command.command(
    "report",
    examples="""
aifs start report llama
aifs start report llama --run 1234 --json
aifs start report llama --html llama.html
""",
    short_help="Show how long each stage of a start took, and whom.",
)
@click.argument("job")
@click.option("--run", default="", metavar="RUN", help="Which start; otherwise the last one.")
@_DIR
@click.option(
    "--html",
    "page",
    type=click.File("wb", lazy=True),
    metavar="FILE",
    help="Write a page with a timeline of all ranks there instead; - is standard output.",
)
def report_command(job: str, run: str, top: str | None, page: IO[bytes] | None) -> Report:
    """Show the stages that the ranks of JOB have noted by startup.stage: the median and the longest
    time, their ratio, and which rank was slowest, on what it has spent its time, or has not ended.
    """
    from aifs.client import startup

    if page is not None and is_json():
        raise click.UsageError("--json and --html: one of them")
    run, spans = startup.spans(startup.directory_of(_top(top), job), run)
    stages = startup.summary(spans)
    if page is not None:
        from aifs.cli import start_page

        page.write(start_page.page(job, run, spans, stages))
        return Report(None)
    told = [{**stage._asdict(), "ratio": stage.ratio} for stage in stages]
    return Report({"run": run, "stages": told}, Table(_STAGES, stages))


def _spent(stage: Any) -> str:
    from aifs.client import startup

    return startup.describe_spent(stage.max_s, stage.spent_s)


@start_command.command(
    "rm",
    examples="""
aifs start rm llama
""",
    short_help="Remove the records of a job.",
)
@click.argument("job")
@_DIR
def rm_command(job: str, top: str | None) -> None:
    """Remove all records of JOB: its next start is recorded as if it were the first one."""
    from aifs.client import startup

    startup.forget(startup.directory_of(_top(top), job))
