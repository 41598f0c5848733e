"""What is made from the help of the commands: man pages, and completion in a shell."""

import os
import shlex
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import click
import pytest

from aifs.cli.main import cli
from tests.support.mounts import aifs


def commands(group: click.Group, above: str = "aifs") -> dict[str, click.Command]:
    """All, by the names of their pages."""
    found: dict[str, click.Command] = {above: group}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = f"{above}-{name}"
        found |= commands(command, below) if isinstance(command, click.Group) else {below: command}
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("man") / "man1"
    said = aifs("manual", directory).stdout
    made = {path.stem: path.read_text() for path in directory.glob("*.1")}
    assert said == f"{len(made)} pages in {directory}\n"
    return made


def test_each_command_has_a_page_with_its_options(pages: dict[str, str]):
    known = commands(cli)
    assert pages.keys() == known.keys()
    for name, command in known.items():
        assert f".SH NAME\n{name}".replace("-", "\\-") in pages[name]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[-1].replace("-", "\\-") in pages[name]


def test_a_page_keeps_the_lines_of_examples(pages: dict[str, str]):
    assert ".nf\nExample:\n  aifs pin /mnt/store/datasets/train\n.fi" in pages["aifs-pin"]


def examples(command: click.Command) -> list[list[str]]:
    """What follows aifs in its examples."""
    paragraphs = (command.epilog or "").replace("\\\n", "").split("\n\n")
    lines = [each.splitlines() for each in paragraphs if "\nExample" in f"\n{each}"]
    found = []
    for line in [line for some in lines for line in some if line.startswith("  ")]:
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        for is_operator, some in groupby(words, lambda word: set(word) <= set("();<>|&")):
            first, *arguments = some
            if not is_operator and first == "aifs":
                found.append(arguments)
    return found


@pytest.mark.sweep
def test_each_example_is_a_command_as_its_help_describes_it(monkeypatch: pytest.MonkeyPatch):
    """And each command has one of itself."""
    found = []
    for name, command in commands(cli).items():
        found += (mine := examples(command))
        own = name.removeprefix("aifs-").split("-")
        assert isinstance(command, click.Group) or any(each[: len(own)] == own for each in mine)
    called: list[click.Command] = []
    monkeypatch.setattr(click.Command, "invoke", lambda command, context: called.append(command))
    for arguments in found:
        called.clear()
        try:
            cli.main(list(arguments), standalone_mode=False)
        except click.UsageError as error:
            raise AssertionError(f"aifs {' '.join(arguments)}: {error.message}") from None
        assert not isinstance(called[-1], click.Group), arguments


@pytest.mark.sweep
@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_pages_are_in_the_language_of_man(pages: dict[str, str]):
    for text in pages.values():
        done = subprocess.run(
            ["groff", "-man", "-ww", "-Tascii"], input=text, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script(shell: str):
    assert "_AIFS_COMPLETE" in aifs("completion", shell).stdout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("words", "answers"),
    [("aifs pi", ["plain,pin"]), ("aifs pin --h", ["plain,--help"]), ("aifs pin /x", ["file,/x"])],
)
def test_a_shell_is_answered(words: str, answers: list[str]):
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_AIFS_COMPLETE": "bash_complete",
    }
    command = [sys.executable, "-m", "aifs.cli.main"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, answers, "")


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    said = aifs("manual", tmp_path / "file" / "man1", check=False)
    assert said.returncode == 1
    assert said.stderr.count("\n") == 1
    assert "Traceback" not in said.stderr


def test_commands_that_print_take_json() -> None:
    """Except those that run another command, or print a file in a format of its own."""
    others = {"env run", "env use", "start run", "meta serve", "csi", "completion"}
    for name, command in commands(cli).items():
        if not isinstance(command, click.Group):
            has = any("--json" in option.opts for option in command.params)
            assert has != (name.removeprefix("aifs-").replace("-", " ") in others), name
