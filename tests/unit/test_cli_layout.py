"""`aifs layout explain`: what is said of a layout is what it does."""

import json

import pytest
from click.testing import CliRunner

from aifs.cli.info import in_words
from aifs.cli.main import cli
from aifs.layout.hint import parse_layout_hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("count=0", ["spread over all servers.", "protected as the store says"]),
        (
            "unit=4MiB,count=1",
            ["Of a large file 4MiB go", "lies on 1 server.", "as the store says"],
        ),
        ("replicas=3", ["Any 2 of its servers may be lost; it takes 3 times"]),
        ("count=2,replicas=2,servers=0:1:2:4", ["lies on 4 servers of 0, 1, 2, 4.", "Any 1 of"]),
        ("ec=4+2", ["lies on 6 servers: 4 columns of data, 2 of parity.", "takes 1.5 times"]),
        ("replicas=1", ["It is not protected"]),
        ("compress=zstd:3", ["Nothing of that is compressed"]),
        ("kind=interleaved,compress=zstd:7", ["share containers", "with zstd, level 7."]),
    ],
)
def test_a_layout_in_words(text: str, said: list[str]) -> None:
    words = " ".join(in_words(parse_layout_hint(text)))
    assert all(each in words for each in said), words


def test_the_command() -> None:
    done = CliRunner().invoke(cli, ["layout", "explain", "ec=2+1", "--json"])
    told = json.loads(done.output)
    assert told["layout"] == "ec=2+1" and "Any 1 of its servers" in " ".join(told["words"])
