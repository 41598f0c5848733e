"""Which tests a run executes, and which files a change can reach."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import reach, tiers
from tests.support.tiers import DEFAULT, LONG, SWEEP, TIER


def test_case(
    name: str, marks: list[Any], values: dict[str, Any], indices: dict[str, int]
) -> SimpleNamespace:
    """What the tiers ask of a test of pytest."""
    return SimpleNamespace(
        nodeid=f"{name}[{values}]",
        originalname=name,
        parent="file",
        stash=pytest.Stash(),
        callspec=SimpleNamespace(params=values, indices=indices) if values else None,
        iter_markers=lambda kind: [mark for mark in marks if mark.name == kind],
        get_closest_marker=lambda kind: next((m for m in marks if m.name == kind), None),
    )


test_case.__test__ = False  # type: ignore[attr-defined]


def cases(name: str, *marks: Any, **values: list[Any]) -> list[SimpleNamespace]:
    return [
        test_case(
            name,
            list(marks),
            dict(zip(values, some, strict=True)),
            {key: values[key].index(value) for key, value in zip(values, some, strict=True)},
        )
        for some in product(*values.values())
    ]


def tiers_of(items: list[SimpleNamespace]) -> list[int]:
    tiers._assign_tiers(items)  # type: ignore[arg-type]
    return [item.stash[TIER] for item in items]


def mark(name: str, *args: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, args=args)


def test_a_test_without_a_mark_is_run_by_default_and_a_marked_one_is_not() -> None:
    assert tiers_of(cases("plain")) == [DEFAULT]
    assert tiers_of(cases("values", point=[1, 2])) == [DEFAULT, DEFAULT]
    assert tiers_of(cases("dear", mark("sweep"))) == [SWEEP]
    assert tiers_of(cases("hours", mark("long"), mark("sweep"), kind=["a", "b"])) == [LONG, LONG]


def test_each_point_is_run_once_and_an_axis_takes_its_values_in_turn() -> None:
    items = cases("crossed", mark("sweep", "size"), point=[1, 2, 3], size=[10, 20], kind=["a", "b"])
    tiers_of(items)
    chosen = [item.callspec.params for item in items if item.stash[TIER] == DEFAULT]
    assert [one["point"] for one in chosen] == [1, 2, 3]
    assert len({(one["size"], one["kind"]) for one in chosen}) == 3


def test_of_engines_the_default_run_uses_the_first() -> None:
    items = cases("engines", point=[1, 2], engine_kind=["lmdb", "hostile"])
    assert tiers_of(items) == [DEFAULT, SWEEP, DEFAULT, SWEEP]


def test_a_mark_that_names_no_parameter_is_a_mistake() -> None:
    with pytest.raises(pytest.UsageError, match="sizes"):
        tiers_of(cases("wrong", mark("sweep", "sizes"), size=[1, 2]))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository instead of this one."""
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    caches = (reach._python_files, reach._imports, reach._all_imports)
    for one in caches:
        one.cache_clear()
    texts = {
        "aifs/low.py": "",
        "aifs/inner/__init__.py": "",
        "aifs/inner/high.py": "from aifs.low import x",
        "aifs/inner/schema.sql": "",
        "aifs/alone.py": "",
        "tests/conftest.py": "",
        "tests/support/mounts.py": "",
        "tests/support/helper.py": "from aifs.inner import high",
        "tests/unit/test_high.py": "def test(): from tests.support import helper",
        "tests/unit/test_alone.py": "import aifs.alone",
        "tests/unit/test_page.py": 'ROOT / "docs"',
        "tests/contract/test_command.py": "from tests.support import mounts",
        "tests/mount/test_mount.py": "",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    yield tmp_path
    for one in caches:
        one.cache_clear()


MOUNTS = {"tests/contract/test_command.py", "tests/mount/test_mount.py"}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("aifs/low.py", {"tests/unit/test_high.py", *MOUNTS}),
        ("aifs/alone.py", {"tests/unit/test_alone.py", *MOUNTS}),
        ("aifs/inner/schema.sql", {"tests/unit/test_high.py", *MOUNTS}),
        ("tests/support/helper.py", {"tests/unit/test_high.py"}),
        ("tests/unit/test_alone.py", {"tests/unit/test_alone.py"}),
        ("docs/hosts.md", {"tests/unit/test_page.py"}),
        ("LICENSE", set()),
    ],
)
def test_a_change_reaches_what_imports_it(tree: Path, changed: str, reached: set[str]) -> None:
    assert reach.reached({changed}) == reached


def test_a_change_of_the_fixtures_of_all_reaches_all(tree: Path) -> None:
    assert len(reach.reached({"tests/conftest.py"})) == 5
