"""The page of ``aifs start report --html``, as a real browser has it (cli/start)."""

import html
import json
import re
from pathlib import Path

from tests.support.browser import NEEDED, browse
from tests.support.mounts import aifs

EVIL = (
    "</title></style><script>document.body.id = 'ran'</script><img src=http://x/ onerror=alert(1)>"
)
EVENTS = [
    ("a", 0, "begin", "import", 100.0),
    ("a", 0, "end", "import", 102.0),
    ("a", 10, "begin", "import", 100.0),
    ("a", 10, "end", "import", 106.0),
    ("a", 10, "begin", EVIL, 106.0),
    ("a", 10, "begin", "inside", 106.5),
    ("a", 10, "end", "inside", 107.0),
    ("a", 10, "end", EVIL, 110.0),
    ("a", 2, "begin", "import", 101.0),
    ("h<i>", 3, "begin", "import", 100.0),
    ("h<i>", 3, "end", "import", 100.0),
]
SPENT_S = {"data server <2>": 3.0, "processor": 1.0}


def written(directory: Path, *options: str | Path) -> Path:
    """The page of these events."""
    run = directory / "job" / "7"
    run.mkdir(parents=True, exist_ok=True)
    for host, rank, event, stage, at_s in EVENTS:
        line = {"event": event, "stage": stage, "rank": rank, "at_s": at_s}
        with (run / f"{host}.jsonl").open("a") as file:
            file.write(json.dumps(line | {"spent_s": SPENT_S}) + "\n")
    page = directory / "page.html"
    assert aifs("start", "report", "job", "--dir", directory, "--html", page).stdout == ""
    return page


def texts(dom: str, element: str) -> list[str]:
    """What such elements hold, as people read it."""
    found = re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", dom, re.S)
    return [" ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split()) for text in found]


@NEEDED
def test_a_browser_shows_all_ranks_and_runs_nothing(tmp_path: Path) -> None:
    seen = browse(f"file://{written(tmp_path)}", tmp_path, "dump-dom")
    assert "CONSOLE" not in seen.stderr, seen.stderr
    assert texts(seen.stdout, "h1") == ["job: start 7"]
    _, first, second, third = texts(seen.stdout, "tr")
    spent = "data server <2> 3.00 s, processor 1.00 s, else 2.00 s"
    assert first == f"1 import 3 2.00 s 6.00 s 3.00 a rank 10 {spent} a rank 2"
    assert EVIL in second and third.startswith("3")
    body = seen.stdout.partition("<svg")[2]
    assert "<script" not in seen.stdout and "<img" not in seen.stdout and 'id="ran"' not in body
    rows = [re.findall(r'class="bar (\w+) ?(\w*)"', row) for row in body.split('class="row"')[1:]]
    assert rows == [
        [("c0", "")],
        [("c0", "open")],
        [("c0", ""), ("c1", ""), ("c2", "")],
        [("c0", "")],
    ]
    titles = texts(body, "title")
    assert [title for title in titles if "," not in title] == [
        "a rank 0",
        "a rank 2",
        "a rank 10",
        "h<i> rank 3",
    ]
    assert "1 import, a rank 2, from 1.00 s on: has not ended" in titles
    assert any(
        title.startswith(f"2 {EVIL}, a rank 10, from 6.00 s on: 4.00 s (") for title in titles
    )
    assert "10 s" in texts(body, "text")


@NEEDED
def test_what_a_browser_complains_of_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.error(1)</script>")
    assert "CONSOLE" in browse(f"file://{page}", tmp_path, "dump-dom").stderr


@NEEDED
def test_it_looks_different_in_the_dark(tmp_path: Path) -> None:
    page, pictures = written(tmp_path), []
    for scheme in range(2):
        file = tmp_path / f"{scheme}.png"
        options = (f"blink-settings=preferredColorScheme={scheme}", f"screenshot={file}")
        browse(f"file://{page}", tmp_path, *options)
        pictures.append(file.read_bytes())
    assert min(map(len, pictures)) > 10_000 and pictures[0] != pictures[1]


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    page = written(tmp_path)
    words = ("start", "report", "job", "--dir", tmp_path)
    done = aifs(*words, "--html", tmp_path / "none" / "page.html", check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No such file" in done.stderr
    full = aifs(*words, "--html", "/dev/full", check=False)  # a device stays what it is
    assert full.returncode == 1 and "No space left" in full.stderr
    assert Path("/dev/full").is_char_device()
    assert aifs(*words, "--html", page, "--json", check=False).returncode == 2
    assert b"No stages" not in page.read_bytes()
    (tmp_path / "job" / "8").mkdir()
    aifs(*words, "--run", "8", "--html", page)
    assert b"No stages were noted" in page.read_bytes()
