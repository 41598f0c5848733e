"""Patterns in files, plans kept from step to step, and the command that explains a plan."""

import builtins
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from aifs.cli.main import main
from aifs.core.errors import ConfigError
from aifs.group import pattern_file, planner
from aifs.group.cache import PlanCache
from aifs.group.pattern import ChunkClass, Destination, Pattern, Source

CONFIG = Path(__file__).resolve().parents[2] / "config"
EXAMPLES = sorted(CONFIG.glob("group-*.yaml"))

GOOD = """\
sources:
  - {name: "host[0-3]", bandwidth: 1GB, memory: 1GiB}
destinations:
  - {name: server, bandwidth: 2GB}
  - name: other
    bandwidth: 1GB
    space: 1TB
links:
  - {from: "host[1-3:2]", to: [server, other], bandwidth: 100MB}
  - {from: host3, to: other, bandwidth: 50MB}
chunks:
  - {size: 4MiB, count: 10, sources: [host3, "host[0-2]"], sharers: 2}
  - {size: 1MiB, count: 5, sources: host1}
"""


def test_a_file_becomes_a_pattern() -> None:
    assert pattern_file.parse("f", GOOD) == Pattern(
        tuple(Source(f"host{i}", 10**9, 1 << 30) for i in range(4)),
        (Destination("server", 2 * 10**9), Destination("other", 10**9, 10**12)),
        (
            ChunkClass(4 << 20, 10, (0, 3)),
            ChunkClass(4 << 20, 10, (1, 2)),
            ChunkClass(1 << 20, 5, (1,)),
        ),
        {(1, 0): 10**8, (1, 1): 10**8, (3, 0): 10**8, (3, 1): 5 * 10**7},
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "bandwidth: 2GB",
            "bandwidth: fast",
            "f:4: destinations[0].bandwidth: 'fast' is not a size from 1",
        ),
        (
            "memory:",
            "memroy:",
            "f:2: sources[0].memroy: unknown key; the nearest valid key is memory",
        ),
        ("chunks:", "chunk:", "f:1: chunks: is missing"),
        ("    bandwidth: 1GB\n", "", "f:5: destinations[1].bandwidth: is missing"),
        (
            "from: host3",
            "from: host4",
            "f:10: links[1].from: there is no host4; the nearest name is host3",
        ),
        ("sharers: 2", "sharers: 3", "f:12: chunks[0].sharers: 3 does not divide 4 sources"),
        (
            '"host[0-3]"',
            '"host[3-0]"',
            "f:2: sources[0].name: 'host[3-0]' is not a name, a row of names",
        ),
        (
            "destinations:",
            "  - {name: host0, bandwidth: 1}\ndestinations:",
            "f: source host0 is given twice",
        ),
        ("count: 10", "count: 0", "f:12: chunks[0].count: 0 is not a whole number from 1"),
        ("count: 10,", "count: 10, count: 9,", "f:12: chunks[0].count: given twice"),
        (
            "sources:\n  -",
            "replicas: 3\nsources:\n  -",
            "f: 3 replicas need as many destinations, not 2",
        ),
        ("links:\n", "links: all\nchunk_s:\n", "f:8: links: must be a list of entries"),
        (
            "  - {size: 1MiB",
            "  - nothing\n  - {size: 1MiB",
            "f:13: chunks[1]: must be an entry of keys and values",
        ),
        ("{size: 1MiB", "{size: 1MiB]", "f:13: not valid YAML"),
    ],
)
def test_mistakes_are_told_with_file_line_and_key(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as told:
        pattern_file.parse("f", GOOD.replace(old, new, 1))
    assert str(told.value).startswith(message)


def test_files_that_are_none(tmp_path: Path) -> None:
    for text in ("", "- a", "text"):
        with pytest.raises(ConfigError, match="must hold keys and values"):
            pattern_file.parse("f", text)
    with pytest.raises(ConfigError, match="No such file"):
        pattern_file.read(str(tmp_path / "none"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        pattern_file.read(str(binary))


# --- the cache ------------------------------------------------------------------------------------


def grown(pattern: Pattern, factor: float) -> Pattern:
    return replace(
        pattern,
        sources=tuple(
            replace(node, bandwidth=int(node.bandwidth * factor)) for node in pattern.sources
        ),
    )


def test_the_same_step_again_is_not_planned_again() -> None:
    cache, pattern = PlanCache(), pattern_file.parse("f", GOOD)
    first = cache.plan(pattern)
    assert cache.plan(pattern_file.parse("f", GOOD)) == first
    assert (cache.hits, cache.misses) == (1, 1)


def test_a_plan_that_is_used_again_has_the_times_of_now() -> None:
    cache, pattern = PlanCache(), pattern_file.parse("f", GOOD)
    cache.plan(pattern)
    slower, faster = cache.plan(grown(pattern, 0.95)), cache.plan(grown(pattern, 1.05))
    assert cache.hits == 2
    for again, now in ((slower, grown(pattern, 0.95)), (faster, grown(pattern, 1.05))):
        assert again.pattern == now
        assert again.lower_bound_s <= planner.plan(now).lower_bound_s <= again.time_s


def test_a_plan_is_made_anew_when_it_may_not_do() -> None:
    pattern = pattern_file.parse("f", GOOD)
    shared, *others = pattern.classes
    fewer_duplicates = (replace(shared, sources=(0,)), replace(shared, sources=(3,)), *others)
    for change in (
        grown(pattern, 1.2),
        grown(pattern, 0.8),
        replace(pattern, links={**pattern.links, (1, 0): 10**7}),
        replace(pattern, links={}),
        replace(pattern, replicas=2),
        replace(pattern, classes=fewer_duplicates),
        replace(
            pattern,
            destinations=(pattern.destinations[0], replace(pattern.destinations[1], space=0)),
        ),
    ):
        cache = PlanCache()
        cache.plan(pattern)
        assert cache.plan(change).pattern == change
        assert (cache.hits, cache.misses) == (0, 2)


def test_the_plans_used_last_are_kept() -> None:
    cache, pattern = PlanCache(capacity=2), pattern_file.parse("f", GOOD)
    kinds = [replace(pattern, classes=pattern.classes[:number]) for number in (1, 2, 3)]
    for wanted in (kinds[0], kinds[1], kinds[0], kinds[2]):
        cache.plan(wanted)
    assert len(cache) == 2 and cache.hits == 1
    cache.plan(kinds[0])
    assert cache.hits == 2
    cache.plan(kinds[1])
    assert cache.hits == 2


# --- the command ----------------------------------------------------------------------------------


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_planned_well(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", "plan", str(example), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lower_bound_s"] <= found["time_s"] <= 1.01 * found["lower_bound_s"]
    assert sum(share["bytes"] for share in found["shares"]) == found["bytes"] * found["replicas"]
    assert f"aifs group plan config/{example.name}" in example.read_text()


def test_the_plan_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", "plan", str(CONFIG / "group-one-host.yaml")]) == 0
    out = capsys.readouterr().out
    marked = [line for line in out.splitlines() if line.endswith("bottleneck")]
    assert len(marked) == 1 and marked[0].startswith("destination")
    for words in ("lower bound", "nvme0 to server3", "server2", "balance"):
        assert words in out


def test_many_links_are_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["group", "plan", str(CONFIG / "group-64-ranks.yaml")]) == 0
    assert "links that are less busy (--json shows all)" in capsys.readouterr().out


def test_the_picture_is_whole_and_refers_to_nothing_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.svg"
    assert main(["group", "plan", str(CONFIG / "group-links.yaml"), "--svg", str(out)]) == 0
    svg = out.read_text()
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    assert "bottleneck" in text and "server-east0" in text and "lower bound" in text
    assert "url(http" not in svg


def test_both_solvers_plan_alike(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for solver in planner.SOLVERS:
        assert (
            main(["group", "plan", str(CONFIG / "group-links.yaml"), "--json", "--solver", solver])
            == 0
        )
        found[solver] = json.loads(capsys.readouterr().out)
    assert found["fast"]["time_s"] == pytest.approx(found["lp"]["time_s"], rel=0.01)


def test_without_scipy_the_reference_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really: Callable[..., Any] = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return really(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    example = str(CONFIG / "group-one-host.yaml")
    assert main(["group", "plan", example, "--solver", "lp"]) == 1
    assert "pip install 'aifs[plan]'" in capsys.readouterr().err
    assert main(["group", "plan", example]) == 0


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("sources: 3")
    assert main(["group", "plan", str(wrong)]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    full = tmp_path / "full.yaml"
    full.write_text(GOOD.replace("memory: 1GiB", "memory: 0"))
    assert main(["group", "plan", str(full)]) == 1
    assert "memory of host0" in capsys.readouterr().err
