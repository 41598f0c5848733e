"""Commands that change the YAML file of a store: the value, and nothing else."""

import os
from pathlib import Path

import pytest
import yaml

from aifs.core import config_file
from aifs.core.errors import ConfigError

TEXT = """\
# ours
meta: {directory: m}  # fast
servers:
  - path: /a  # first
    class: cold
  # the second
  - /b
  - path: /c
    domain: rack
# the tier
burst:
  directories: [x, y]
  high_water: 0.9 # much
layout.unit: 1MiB
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "store.yaml"
    path.write_text(TEXT)
    path.chmod(0o640)
    return path


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("burst.high_water", "0.7", "0.9 #", "0.7 #"),
        ("layout.unit", "4MiB", "unit: 1MiB", "unit: 4MiB"),
        ("meta.directory", "a: b", "directory: m}", "directory: 'a: b'}"),
        ("meta.directory", "a, b}", "directory: m}", "directory: 'a, b}'}"),
        ("log.level", "debug", "1MiB\n", "1MiB\nlog.level: debug\n"),
        ("burst.directories", "z", "[x, y]", "z"),
    ],
)
def test_a_value_is_changed(file: Path, key: str, value: str, old: str, new: str) -> None:
    config_file.save(str(file), {key: value})
    assert file.read_text() == TEXT.replace(old, new)
    assert file.stat().st_mode & 0o777 == 0o640 and os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize(
    ("key", "gone", "old", "new"),
    [
        ("servers", "/a", "  - path: /a  # first\n    class: cold\n", ""),
        ("servers", "/b", "  - /b\n", ""),
        ("servers", "/c", "  - path: /c\n    domain: rack\n", ""),
        ("burst.directories", "x", "[x, y]", "[y]"),
        ("burst.directories", "y", "[x, y]", "[x]"),
        ("burst.directories", "xy", "[x, y]", "[]"),
        ("servers", "none", "", ""),
    ],
)
def test_items_are_left_out(file: Path, key: str, gone: str, old: str, new: str) -> None:
    changed = config_file.leave_out(str(file), key, lambda text: text in (gone, *gone[:2]))
    assert changed == bool(old)
    assert file.read_text() == TEXT.replace(old, new)
    yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("key", "item", "old", "new"),
    [
        ("servers", "/d", "rack\n", "rack\n  - /d\n"),
        (
            *("servers", {"path": "/d", "class": "cold"}, "rack\n"),
            "rack\n  - {class: cold, path: /d}\n",
        ),
        ("burst.directories", "/a, b", "[x, y]", "[x, y, '/a, b']"),
    ],
)
def test_an_item_is_added(file: Path, key: str, item: str | dict, old: str, new: str) -> None:
    assert config_file.add(str(file), key, item)
    assert file.read_text() == TEXT.replace(old, new)
    found = yaml.safe_load(file.read_text())
    assert (found["servers"] if key == "servers" else found["burst"]["directories"])[-1] == item
    assert not config_file.add(str(file), "none", "x")


def test_an_item_is_added_at_the_end_of_a_file(file: Path) -> None:
    file.write_text("servers:\n- /a")
    assert config_file.add(str(file), "servers", "/b")
    assert file.read_text() == "servers:\n- /a\n- /b\n"


def test_the_last_item_of_a_block(file: Path) -> None:
    file.write_text("burst:\n  directories:\n    - /x  # only\nlog: {}\n")
    assert config_file.leave_out(str(file), "burst.directories", lambda text: True)
    assert yaml.safe_load(file.read_text()) == {"burst": {"directories": []}, "log": {}}


def test_a_new_file_says_what_it_is_for(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "aifs.yaml"
    link.symlink_to(file)
    config_file.save(str(link), {})
    assert yaml.safe_load(file.read_text()) is None and file.stat().st_mode & 0o777 == 0o644
    config_file.save(str(link), {"data.movers": "3"})
    assert yaml.safe_load(file.read_text()) == {"data.movers": 3} and link.is_symlink()


def test_what_is_no_yaml_is_left_alone(file: Path) -> None:
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        config_file.save(str(file), {"log.level": "debug"})
    assert file.read_text() == "a: ["
