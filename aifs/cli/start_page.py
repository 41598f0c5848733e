"""The page of ``aifs start report --html``: one file without script or outside parts, with a table
of the stages and a timeline of all ranks.

Names of stages and hosts are whatever somebody has written: they are put in as text, by a tree of
elements, and the page forbids itself all but its own style. Colours are after Okabe and Ito; stages
have numbers besides, as there can be more of them than colours.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timezone
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from aifs.client import startup

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


def page(
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
    for number, stage in enumerate(stages):
        row = SubElement(body, "tr")
        name = SubElement(row, "th", scope="row")
        mark = SubElement(name, "b", {"class": _colour(number)})
        mark.text, mark.tail = str(number + 1), stage.stage
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
    """1, 2 or 5 times a power of ten: so many seconds that there are ``_TICKS`` of them at most."""
    power = 10.0 ** math.floor(math.log10(took_s / _TICKS))
    return next(
        step for step in (power, 2 * power, 5 * power, 10 * power) if took_s <= _TICKS * step
    )
