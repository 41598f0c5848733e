"""``aifs start``: jobs whose start is recorded once, and prefetched from then on."""

import os
import signal
import sys
from typing import IO, TYPE_CHECKING

import click

from aifs.cli.arguments import PATH

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


@click.group("start", short_help="Record what the start of a job touches, and prefetch it.")
def start_group() -> None:
    """Starts of jobs: what one touches is recorded, and is there when the next one needs it."""


def _top(top: str | None) -> str:
    from aifs.client import startup

    return top or startup.default_directory()


RUN_EPILOG = """
\b
Examples:
  aifs start run --job llama -- python train.py
  srun aifs start run --job llama --key 64gpu -- torchrun train.py
  aifs start run --dir /mnt/store/start --job eval -- ./evaluate.sh
  aifs start run --job llama --marks -- sh -c 'echo AIFS-STAGE begin data; ./data.sh'
"""


@start_group.command(
    "run",
    epilog=RUN_EPILOG,
    context_settings={"ignore_unknown_options": True},
    short_help="Run a command whose start is recorded and prefetched.",
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
    this command. What cannot be recorded is said once; COMMAND runs all the same. With --marks this
    command passes its output on, and ends when nobody can write to that any more.
    """
    from aifs.cli.output import print_error
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


PREFETCH_EPILOG = """
\b
Examples:
  aifs start prefetch llama
  aifs start prefetch llama+64gpu --dir /mnt/store/start
"""


@start_group.command(
    "prefetch", epilog=PREFETCH_EPILOG, short_help="Prefetch what a job will touch, and wait."
)
@click.argument("job")
@_DIR
def prefetch_command(job: str, top: str | None) -> None:
    """Read what the next start of JOB will touch into memory, for who starts it in another way, or
    later. aifs start run does this by itself.
    """
    from aifs.cli.output import count
    from aifs.client import startup
    from aifs.core.units import describe_size

    fetched = startup.prefetch(startup.directory_of(_top(top), job))
    print(
        f"prefetched {describe_size(fetched.bytes)} of {count(fetched.files, 'file')}; "
        f"changed since, or out of reach: {fetched.left_out}"
    )


LS_EPILOG = """
\b
Examples:
  aifs start ls
  aifs start ls --dir /mnt/store/start --json
"""


@start_group.command("ls", epilog=LS_EPILOG, short_help="List jobs whose starts are recorded.")
@_DIR
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def ls_command(top: str | None, as_json: bool) -> None:
    """List the jobs: what the newest start has touched, and when it was."""
    from datetime import datetime

    from aifs.cli.output import print_json, print_table
    from aifs.client import startup
    from aifs.core.units import describe_size

    newest = {job: found[0] for job, found in startup.list_jobs(_top(top)).items() if found}
    if as_json:
        print_json([{"job": job, **_facts(record)} for job, record in newest.items()])
        return
    rows = [
        (
            job,
            record.run,
            len(record.files),
            describe_size(record.bytes),
            datetime.fromtimestamp(record.began_s).strftime("%Y-%m-%d %H:%M"),
        )
        for job, record in newest.items()
    ]
    print_table(("job", "last run", "files", "touched", "when"), rows, ("files", "touched"))


def _facts(record: "StartRecord") -> dict[str, object]:
    return {
        "run": record.run,
        "host": record.host,
        "began_s": record.began_s,
        "took_s": record.took_s,
        "files": len(record.files),
        "bytes": record.bytes,
    }


SHOW_EPILOG = """
\b
Examples:
  aifs start show llama
  aifs start show llama --json
"""


@start_group.command("show", epilog=SHOW_EPILOG, short_help="Show what the next start prefetches.")
@click.argument("job")
@_DIR
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def show_command(job: str, top: str | None, as_json: bool) -> None:
    """Show what the next start of JOB prefetches, in this order: what the last two touched."""
    from aifs.cli.output import print_json, print_table
    from aifs.client import startup
    from aifs.core.units import describe_size

    records = startup.read_records(startup.directory_of(_top(top), job))
    files = startup.plan(records)
    if as_json:
        print_json(
            {
                "records": [_facts(record) for record in records],
                "files": [
                    {"path": file.path, "inode": file.ino, "size": file.size, "hot": file.bytes}
                    for file in files
                ],
            }
        )
        return
    rows = [
        (describe_size(file.bytes), describe_size(file.size), file.path or f"inode {file.ino}")
        for file in files
    ]
    print_table(("hot", "of", "path"), rows, ("hot", "of"))


REPORT_EPILOG = """
\b
Examples:
  aifs start report llama
  aifs start report llama --run 1234 --json
  aifs start report llama --html llama.html
"""


@start_group.command(
    "report", epilog=REPORT_EPILOG, short_help="Show how long each stage of a start took, and whom."
)
@click.argument("job")
@click.option("--run", default="", metavar="RUN", help="Which start; otherwise the last one.")
@_DIR
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
@click.option(
    "--html",
    "page",
    type=click.File("wb", lazy=True),
    metavar="FILE",
    help="Write a page with a timeline of all ranks there instead; - is standard output.",
)
def report_command(
    job: str, run: str, top: str | None, as_json: bool, page: IO[bytes] | None
) -> None:
    """Show the stages that the ranks of JOB have noted by startup.stage: the median and the longest
    time, their ratio, and which rank was slowest, on what it has spent its time, or has not ended.
    """
    from aifs.cli.output import print_json, print_table
    from aifs.client import startup

    if page is not None and as_json:
        raise click.UsageError("--json and --html: one of them")
    run, spans = startup.spans(startup.directory_of(_top(top), job), run)
    stages = startup.summary(spans)
    if page is not None:
        from aifs.cli import start_page

        page.write(start_page.page(job, run, spans, stages))
        return
    if as_json:
        facts = [{**stage._asdict(), "ratio": stage.ratio} for stage in stages]
        print_json({"run": run, "stages": facts})
        return
    rows = [
        (
            stage.stage,
            stage.ranks,
            f"{stage.median_s:.2f} s",
            f"{stage.max_s:.2f} s",
            f"{stage.ratio:.2f}",
            stage.slowest,
            startup.describe_spent(stage.max_s, stage.spent_s),
            ", ".join(stage.unfinished),
        )
        for stage in stages
    ]
    columns = (
        "stage",
        "ranks",
        "median",
        "max",
        "max/median",
        "slowest",
        "its time went to",
        "not ended",
    )
    print_table(columns, rows, columns[1:5])


FORGET_EPILOG = """
\b
Examples:
  aifs start forget llama
"""


@start_group.command("forget", epilog=FORGET_EPILOG, short_help="Remove the records of a job.")
@click.argument("job")
@_DIR
def forget_command(job: str, top: str | None) -> None:
    """Remove all records of JOB: its next start is recorded as if it were the first one."""
    from aifs.client import startup

    startup.forget(startup.directory_of(_top(top), job))
