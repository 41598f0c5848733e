"""Pages that explain what lies beside them name all of it."""

import ast
import re
from pathlib import Path

import click
import pytest

from aifs.cli.main import cli
from scripts import reference

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parents[1] / "support"


def test_the_page_of_the_test_helpers_names_each_of_them() -> None:
    named = set(re.findall(r"`(\w+\.py)`", (SUPPORT / "README.md").read_text()))
    there = {path.name for path in SUPPORT.glob("*.py")} - {"__init__.py"}
    assert named >= there, f"not explained: {there - named}"
    assert all((SUPPORT / name).exists() for name in named if name != "conftest.py")


_LOCKS = {"Lock", "CapacityLimiter", "ParkingLot", "Gate", "Limiter"}


def _locks(tree: ast.Module) -> set[str]:
    """``Class.attribute`` of each lock that a class makes, of those that limit something."""
    found = set()
    for each in ast.walk(tree):
        if not isinstance(each, ast.ClassDef):
            continue
        for node in ast.walk(each):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                name = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                unlimited = [ast.unparse(word) for word in node.value.args] == ["0"]
                if name in _LOCKS and isinstance(target, ast.Attribute) and not unlimited:
                    found.add(f"{each.name}.{target.attr}")
    return found


def test_the_page_of_concurrency_names_each_lock() -> None:
    page = (ROOT / "docs/design/concurrency.md").read_text()
    named = set(re.findall(r"`(\w+\.\w+)`", page))
    for first, more in re.findall(r"`(\w+)\.\w+`((?:, `\.\w+`)+)", page):
        named |= {f"{first}.{name}" for name in re.findall(r"`\.(\w+)`", more)}
    there = set().union(*(_locks(ast.parse(p.read_text())) for p in (ROOT / "aifs").rglob("*.py")))
    assert there <= named | {"Gate._queue"}, f"not explained: {there - named}"


def test_the_reference_is_that_of_the_code() -> None:
    made = reference.documents()
    assert made.keys() >= {str(p.relative_to(ROOT)) for p in ROOT.glob("docs/reference/*")}
    old = [path for path, text in made.items() if (ROOT / path).read_text() != text]
    assert not old, f"run scripts/reference: {old}"


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])


def _outside_code(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _outside_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", _outside_code(page)):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert not lost, "\n".join(lost)


def test_lines_of_pages_have_at_most_100_columns() -> None:
    """So a change of them can be read. Rows of tables and links cannot be broken."""
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        if not {"tests", "reference"} & {*page.parts}
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 100 and not line.lstrip().startswith(("|", "[", "!", "<", "http"))
    ]
    assert not wide, "\n".join(wide)


def _persons(tree: ast.AST) -> int:
    """How often "who" or "whoever" is a subject in strings that stand alone: docstrings."""
    texts = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    subject = r"(?:^|[.;:,]\s+|\()(?:who|whoever) (?!is\b.*\?)[a-z]"
    return sum(len(re.findall(subject, text, re.IGNORECASE)) for text in texts)


def test_the_subject_of_a_docstring_is_a_noun() -> None:
    """The program, the caller, the host, the daemon, the task, the rank: not "who"."""
    counts = {p: _persons(ast.parse(p.read_text())) for p in (ROOT / "aifs").rglob("*.py")}
    assert not [str(path.relative_to(ROOT)) for path, count in counts.items() if count]


def test_the_functions_of_the_trips_are_where_the_map_says() -> None:
    rows = re.findall(
        r"^\| \(?`(?:(\w+)\.)?(\w+)`\)? \| `(\S+\.py)` \|",
        (ROOT / "ARCHITECTURE.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 40
    lost = []
    for class_name, name, path in rows:
        file = ROOT / "aifs" / path
        nodes = list(ast.walk(ast.parse(file.read_text()))) if file.exists() else []
        classes = [n for n in nodes if isinstance(n, ast.ClassDef) and n.name == class_name]
        places = [n for each in classes for n in each.body] if class_name else nodes
        if name not in {getattr(node, "name", "") for node in places}:
            lost.append(f"{class_name}.{name} in {path}")
    assert not lost, "\n".join(lost)


_VERSIONS = r'^(?:\w+, )?_?(?:\w+_)?(?:FORMAT|VERSION) = (?:b"\w+", )?"?([\w ]+?)"?$'


def test_the_page_of_formats_has_their_versions() -> None:
    """Of each row that names a module which has a version, as a cell of its own."""
    page = (ROOT / "docs/design/formats.md").read_text()
    seen = 0
    for row in re.findall(r"^\|.*\|$", page, re.MULTILINE):
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|sql))`", row):
            module = ROOT / "aifs" / name
            assert module.exists(), row
            versions = re.findall(_VERSIONS, module.read_text(), re.MULTILINE)
            if versions and name not in ("meta/lmdb_pages.py", "core/log.py"):
                seen += 1
                assert any(re.search(rf"[`| ]{v}[`| ,(]", row) for v in versions), row
    assert seen > 10


WRITTEN = [page for page in PAGES if "reference" not in page.parts and page.name != "CHANGELOG.md"]


def test_commands_of_pages_exist() -> None:
    context, lost = click.Context(cli), []
    for page in WRITTEN:
        found = re.findall(r"(?:`|^)aifs ([a-z][\w-]*)(?: ([a-z][\w-]*))?", page.read_text(), re.M)
        for name, below in found:
            there = cli.get_command(context, name)
            if isinstance(there, click.Group) and below:
                there = there.get_command(context, below)
            if there is None:
                lost.append(f"{page.relative_to(ROOT)}: aifs {name} {below}")
    assert not lost, "\n".join(lost)


def test_files_of_pages_exist() -> None:
    lost = []
    for page in WRITTEN:
        for name in re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|c|h|sql|yaml))`", page.read_text()):
            roots = (ROOT, ROOT / "aifs", ROOT / "tests", page.parent)
            if not any((root / name).exists() for root in roots):
                lost.append(f"{page.relative_to(ROOT)}: {name}")
    assert not lost, "\n".join(lost)
