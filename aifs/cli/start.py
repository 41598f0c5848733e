"""``aifs start``: jobs whose start is recorded once, and prefetched from then on."""

import math
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import IO, TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import click

from aifs.cli.command import PATH, Column, Report, Table, group, is_json, number
from aifs.cli.output import count, duration, print_error, size, when
from aifs.client import startup

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
    """The exit code of ``command``, which gets our signals, and writes to ``output``, or our
    output. Raises click's UsageError if it cannot start."""
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
        page.write(render_page(job, run, spans, stages))
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


# The page of ``aifs start report --html``: one file without script or outside parts, with a table
# of the stages and a timeline of all ranks.
#
# Names of stages and hosts are whatever somebody has written: they are put in as text, by a tree of
# elements, and the page forbids itself all but its own style. Colours are after Okabe and Ito;
# stages have numbers besides, as there can be more of them than colours.

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_COLOURS = 6
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --box: #f4f5f7; --text: #1a1d21; --faint: #5a6470;
  --line: #d5d9df; --c0: #0072b2; --c1: #b34e00; --c2: #007a5a; --c3: #a34a7f; --c4: #7a5c00;
  --c5: #4a5568; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --box: #1e2329; --text: #e8eaed;
  --faint: #a3acb8; --line: #3a424c; --c0: #56b4e9; --c1: #e69f00; --c2: #2fc497; --c3: #dd90ba;
  --c4: #f0e442; --c5: #b8c2cf; } }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; background: var(--ground);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1rem; }
p { color: var(--faint); margin: .3rem 0; }
.scroll { overflow-x: auto; background: var(--box); border: 1px solid var(--line);
  border-radius: .5rem; padding: .8rem; }
.scroll:focus-visible { outline: 3px solid var(--c0); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; min-width: 62rem; }
th, td { padding: .2rem .6rem; text-align: left; vertical-align: top; font-weight: inherit;
  overflow-wrap: anywhere; }
tbody th { min-width: 11rem; }
thead th { color: var(--faint); border-bottom: 1px solid var(--line); }
.number { text-align: right; white-space: nowrap; }
b { display: inline-block; min-width: 1.4rem; padding: 0 .2rem; margin-right: .5rem;
  border-radius: .2rem; text-align: center; color: var(--ground); background: var(--colour); }
svg { display: block; width: 100%; min-width: 40rem; }
text { font-size: 11px; fill: var(--text); } .axis text, .none { fill: var(--faint); }
line { stroke: var(--line); }
.bar rect { fill: var(--colour); stroke: var(--box); } .bar text { fill: var(--ground); }
.open rect { fill-opacity: .2; stroke: var(--colour); stroke-dasharray: 4 3; }
.open text { fill: var(--text); }
""" + "".join(f".c{number} {{ --colour: var(--c{number}); }}\n" for number in range(_COLOURS))

# Of the timeline, in its own units: some pixels.
_WIDTH, _NAMES, _LANE, _AXIS = 1000, 190, 18, 20
_NUMBERED = 14
"""How wide a bar is that has its number in it."""
_NAME_MAX = 30
_TICKS = 8


def render_page(
    job: str, run: str, spans: Sequence[startup.StageSpan], stages: Sequence[startup.StageReport]
) -> bytes:
    """HTML. ``spans`` in the order in which they have begun, ``stages``: their summary."""
    title = f"{job}: start {run}"
    html = Element("html", lang="en")
    head = SubElement(html, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "title").text = title
    SubElement(head, "style").text = _STYLE
    body = SubElement(html, "body")
    SubElement(body, "h1").text = title
    if not spans:
        SubElement(body, "p").text = "No stages were noted."
    else:
        first = datetime.fromtimestamp(spans[0].began_s, timezone.utc)
        SubElement(body, "p").text = f"The first stage has begun at {first:%Y-%m-%d %H:%M:%S} UTC."
        _add_table(_part(body, "Stages"), stages)
        numbers = {stage.stage: number for number, stage in enumerate(stages)}
        _add_timeline(_part(body, "Ranks"), spans, numbers)
        SubElement(body, "p").text = (
            "Hosts are shown by their own clocks. A bar says more when it is pointed at; one with "
            "a dashed border has not ended."
        )
    indent(html)
    return b"<!doctype html>\n" + tostring(html, "utf-8", method="html") + b"\n"


def _part(body: Element, title: str) -> Element:
    SubElement(body, "h2").text = title
    return SubElement(
        body, "div", {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": title}
    )


def _add_table(part: Element, stages: Sequence[startup.StageReport]) -> None:
    table = SubElement(part, "table")
    row = SubElement(SubElement(table, "thead"), "tr")
    numeric = ("ranks", "median", "max", "max/median")
    for column in ("stage", *numeric, "slowest", "its time went to", "not ended"):
        kind = {"class": "number"} if column in numeric else {}
        SubElement(row, "th", {"scope": "col"} | kind).text = column
    body = SubElement(table, "tbody")
    for place, stage in enumerate(stages):
        row = SubElement(body, "tr")
        name = SubElement(row, "th", scope="row")
        mark = SubElement(name, "b", {"class": _colour(place)})
        mark.text, mark.tail = str(place + 1), stage.stage
        for value in (
            str(stage.ranks),
            f"{stage.median_s:.2f} s",
            f"{stage.max_s:.2f} s",
            f"{stage.ratio:.2f}",
        ):
            SubElement(row, "td", {"class": "number"}).text = value
        SubElement(row, "td").text = stage.slowest
        SubElement(row, "td").text = startup.describe_spent(stage.max_s, stage.spent_s)
        SubElement(row, "td").text = ", ".join(stage.unfinished)


def _add_timeline(
    part: Element, spans: Sequence[startup.StageSpan], numbers: dict[str, int]
) -> None:
    began_s = spans[0].began_s
    ended_s = max(max(span.began_s, span.ended_s or 0.0) for span in spans)
    took_s = max(ended_s - began_s, 1e-3)
    per_s = (_WIDTH - _NAMES - _NUMBERED) / took_s
    svg = SubElement(
        part, "svg", {"role": "img", "aria-label": "When each rank was in which stage"}
    )
    axis = SubElement(svg, "g", {"class": "axis"})
    top = _AXIS
    ranks: dict[str, list[startup.StageSpan]] = defaultdict(list)
    for span in spans:
        ranks[span.who].append(span)
    for who in sorted(ranks, key=_by_numbers):
        row = SubElement(svg, "g", {"class": "row"})
        place = {"x": str(_NAMES - 8), "y": str(top + 13), "text-anchor": "end"}
        name = SubElement(row, "text", place)
        name.text = _shortened(who)
        SubElement(name, "title").text = who
        lanes: list[float] = []  # when the last stage in each has ended
        for span in ranks[who]:
            until_s = ended_s if span.ended_s is None else span.ended_s
            lane = next((n for n, end in enumerate(lanes) if end <= span.began_s), len(lanes))
            lanes[lane : lane + 1] = [until_s]
            x = _NAMES + (span.began_s - began_s) * per_s
            width = max((until_s - span.began_s) * per_s, 1.0)
            _add_bar(row, span, numbers[span.stage], began_s, (x, top + lane * _LANE, width))
        top += len(lanes) * _LANE + 4
        SubElement(svg, "line", x1="0", x2=str(_WIDTH), y1=f"{top - 2}", y2=f"{top - 2}")
    step_s = _step(took_s)
    for tick in range(math.floor(took_s / step_s) + 1):
        at = f"{_NAMES + tick * step_s * per_s:.1f}"
        SubElement(axis, "line", x1=at, x2=at, y1=str(_AXIS - 4), y2=str(top))
        label = SubElement(axis, "text", {"x": at, "y": "11", "text-anchor": "middle"})
        label.text = f"{tick * step_s:g} s"
    svg.set("viewBox", f"0 0 {_WIDTH} {top}")


def _add_bar(
    row: Element,
    span: startup.StageSpan,
    number: int,
    began_s: float,
    place: tuple[float, float, float],
) -> None:
    x, y, width = place
    bar = SubElement(row, "g", {"class": f"bar {_colour(number)}"})
    said = f"{number + 1} {span.stage}, {span.who}, from {span.began_s - began_s:.2f} s on: "
    if span.ended_s is None:
        bar.set("class", f"{bar.get('class')} open")
        said += "has not ended"
    else:
        took_s = span.ended_s - span.began_s
        spent = startup.describe_spent(took_s, span.spent_s)
        said += f"{took_s:.2f} s" + (f" ({spent})" if spent else "")
    SubElement(bar, "title").text = said
    size = {"width": f"{width:.1f}", "height": str(_LANE - 2), "rx": "2"}
    SubElement(bar, "rect", {"x": f"{x:.1f}", "y": f"{y:.1f}"} | size)
    if width >= _NUMBERED:
        middle = {"x": f"{x + width / 2:.1f}", "text-anchor": "middle"}
        SubElement(bar, "text", {"y": f"{y + 12:.1f}"} | middle).text = str(number + 1)


def _colour(number: int) -> str:
    return f"c{number % _COLOURS}"


def _by_numbers(who: str) -> list[tuple[int, str]]:
    """So that rank 2 comes before rank 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", who)]


def _shortened(who: str) -> str:
    """Its end says which rank it is."""
    return who if len(who) <= _NAME_MAX else f"{who[:12]}…{who[13 - _NAME_MAX :]}"


def _step(took_s: float) -> float:
    """1, 2 or 5 times a power of ten seconds, for ``_TICKS`` at most."""
    power = 10.0 ** math.floor(math.log10(took_s / _TICKS))
    return next(
        step for step in (power, 2 * power, 5 * power, 10 * power) if took_s <= _TICKS * step
    )
