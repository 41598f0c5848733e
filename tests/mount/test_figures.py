"""The numbers of docs/measured/grouped.md, docs/measured/datasets.md and docs/measured/startup.md
are those of docs/measured/figures/*.json, and scripts/figures makes both.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs/measured"
MEASURING_MAX_S = 1000
GUIDES = ("grouped.md", "datasets.md", "startup.md")
START = "start_figures.py"


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Copies of the guides, without their numbers."""
    copy = tmp_path / "docs"
    copy.mkdir()
    for name in GUIDES:
        guide = (DOCS / name).read_text()
        marks = re.findall(r"^<!-- .*numbers.* -->\n", guide, re.MULTILINE)
        assert len(marks) == 2
        before, _, rest = guide.partition(marks[0])
        (copy / name).write_text(before + "".join(marks) + rest.partition(marks[1])[2])
    return copy


def figures(*words: str | Path, program: str = "figures.py") -> None:
    command = [sys.executable, ROOT / "scripts/benchmarks" / program, *words]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=MEASURING_MAX_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def require_figures(docs: Path, guide: str = "grouped.md") -> None:
    linked = re.findall(r"!\[.*?\]\((figures/.*?)\)", (docs / guide).read_text())
    assert linked
    for name in linked:
        assert (docs / name).read_text().count("<svg") == 1


def test_the_guide_has_the_numbers_of_the_last_run(docs: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the figures extra)")
    figures("--from", DOCS / "figures/grouped.json", "--docs", docs)
    assert (docs / "grouped.md").read_text() == (DOCS / "grouped.md").read_text()
    require_figures(docs)
    require_figures(DOCS)


def test_the_guide_to_datasets_has_the_numbers_of_the_last_run(docs: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (the demo extra)")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the figures extra)")
    numbers = DOCS / "figures/datasets.json"
    speed = json.loads(numbers.read_text())["speed"]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(speed["rows"]))
    words = ("--from", numbers, "--bench", bench, *["--quick"] * speed["quick"], "--docs", docs)
    figures(*words, program="dataset_figures.py")
    assert (docs / "datasets.md").read_text() == (DOCS / "datasets.md").read_text()
    require_figures(docs, "datasets.md")
    require_figures(DOCS, "datasets.md")


def test_the_guide_to_starts_has_the_numbers_of_the_last_run(docs: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the figures extra)")
    numbers = DOCS / "figures/start.json"
    if not numbers.exists():
        assert "Not measured" in (DOCS / "startup.md").read_text()
        return
    figures("--from", numbers, "--docs", docs, program=START)
    assert (docs / "startup.md").read_text() == (DOCS / "startup.md").read_text()
    require_figures(docs, "startup.md")
    require_figures(DOCS, "startup.md")


def test_the_guide_to_starts_takes_what_the_bench_prints(docs: Path, tmp_path: Path) -> None:
    """Seconds of two ways are a row and two bars; a number and what explains it are rows."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the figures extra)")
    rows = tmp_path / "rows.json"
    row = dict.fromkeys(("nothing_to_plain", "aifs_to_plain", "aifs_to_nothing", "c_to_plain"))
    import_ = {"plain": "6.30 s", "aifs": "2.00 s", "target": "3.1 times faster >= 3"}
    missed = {"plain": "", "aifs": "0.070, of 40 MiB", "target": "<= 0.05"}
    first = {"plain": "", "aifs": "5.00 s; plain / warm 3.1", "target": ""}
    found = [
        {**row, **import_, "work": "import numpy", "passed": True},
        {**row, **missed, "work": "blocks missed", "passed": False},
        {**row, **first, "work": "recorded", "passed": True},
    ]
    rows.write_text(json.dumps(found))
    figures("--from", rows, "--docs", docs, program=START)
    guide = (docs / "startup.md").read_text()
    assert "| import numpy | 6.30 s | 2.00 s | 3.1 times faster >= 3 | reached |\n" in guide
    assert "| blocks missed |  | 0.070, of 40 MiB | <= 0.05 | missed |\n" in guide
    assert "| recorded |  | 5.00 s; plain / warm 3.1 |  |  |\n" in guide
    require_figures(docs, "startup.md")
    drawn = (docs / "figures/start-times.svg").read_text()
    assert "import numpy" in drawn and "blocks missed" not in drawn


@pytest.mark.long
@pytest.mark.timeout(MEASURING_MAX_S)
def test_a_small_run_makes_the_guide_anew(docs: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (the demo extra)")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the figures extra)")
    figures("--quick", "--docs", docs)
    found = json.loads((docs / "figures/grouped.json").read_text())
    assert {one["way"] for one in found["memory"]} == {one["way"] for one in found["network"]}
    assert f"{found['mib']} MiB each" in (docs / "grouped.md").read_text()
    require_figures(docs)
