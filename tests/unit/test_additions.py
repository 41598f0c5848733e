"""The lists of CONTRIBUTING.md are whole: what is added as they say works."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from aifs.check import records as checked
from aifs.cli import main
from aifs.cli.command import Report, command
from aifs.core.kinds import LAYOUT_KINDS
from aifs.data import storages
from aifs.data.directory_storage import DirectoryStorage
from aifs.files import rights
from aifs.files.asks import FILE, Hint, HintCall
from aifs.files.services import ServeOptions
from aifs.files.types import ROOT
from aifs.layout import kinds
from aifs.layout.striped import Striped
from aifs.meta import crossing, keys
from aifs.meta.records import Inode
from aifs.vfs import hints
from scripts import hint_text

ROOT_OF_TREE = Path(__file__).parents[2]


def test_the_tests_of_the_table_exist() -> None:
    text = (ROOT_OF_TREE / "CONTRIBUTING.md").read_text()
    globs = set(re.findall(r"`(tests/\S+)`", text))
    assert len(globs) > 15
    assert not [name for name in globs if not any(ROOT_OF_TREE.glob(name))]


class Greeting:
    """A part with a hint of its own."""

    HINTS = (
        Hint(
            "greeting",
            FILE,
            "a word",
            read=rights.anybody,
            get=lambda part, ask: part.word,
            call=HintCall(
                rights.anybody, lambda part, ask: {"word": part.word}, {}, "Says it.", where=FILE
            ),
        ),
    )
    word = "hello"


async def test_a_hint_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getattr_(ino: int) -> Inode:
        return cast(Inode, SimpleNamespace(ino=ino, is_dir=False, is_file=True))

    attributes: Any = SimpleNamespace(getattr=getattr_)
    unused: Any = None
    asked = hints.Hints(unused, attributes, unused, ServeOptions(), [Greeting()])
    assert await asked.get(7, b"user.aifs.greeting", ROOT) == b"hello"
    monkeypatch.setattr(hints, "SUBJECTS", (*hints.SUBJECTS, Greeting))
    assert "| `greeting` | file | anybody |" in hint_text.reference()
    assert "greeting" in hint_text.c_header()


def test_a_command_is_a_module_and_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @command("hello", short_help="Say hello.")
    def hello_command() -> Report:
        """Say hello."""
        return Report({"word": "hello"}, "hello")

    module = ModuleType("aifs.cli.hello")
    module.hello_command = hello_command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aifs.cli.hello", module)
    monkeypatch.setattr(main, "NAMES", [*main.NAMES, "hello"])
    assert main.main(["hello"]) == 0 and capsys.readouterr().out == "hello\n"
    assert main.main(["hello", "--json"]) == 0 and '"word"' in capsys.readouterr().out


def test_each_kind_of_record_is_checked_and_crosses() -> None:
    text = keys.__doc__ or ""
    letters = set(re.findall(r"^    (\w)(?: |$)", text, re.MULTILINE))
    assert {kind.letter.decode() for kind in checked.KINDS} >= letters - {"S", "c", "j"}
    moved = {chr(kind) for kind in {*crossing.KEPT, *crossing.DROPPED}}
    moved |= {chr(kind) for kind in crossing.Crossing(0, {}).kinds}
    assert moved >= letters - {"S", "s"}  # those are given, as they will be


def test_a_layout_is_an_object_set_of_its_own() -> None:
    class Reversed(Striped):
        """Columns in the opposite order."""

    layout = Reversed(1 << 20, (0, 1, 2))
    assert kinds.objects_of(layout) is layout and kinds.chunks_of(layout) is None
    assert LAYOUT_KINDS == ("striped", "interleaved")  # a new name is known to all that ask for one


def test_a_storage_is_a_class_and_a_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Elsewhere(DirectoryStorage):
        def __init__(self, address: str) -> None:
            super().__init__(address.partition("://")[2])

    monkeypatch.setitem(storages.KINDS, "elsewhere", Elsewhere)
    assert isinstance(storages.storage_at(f"elsewhere://{tmp_path}"), Elsewhere)
