"""Quotas on a mount, as programs and commands meet them."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.cli import door
from tests.support.hosts import Both, until
from tests.support.mounts import TIMEOUT_S, Mounted, aifs
from tests.support.users import errno_of, in_process

MIB = 1 << 20
ALICE = 1000


@pytest.fixture
def team(shared: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    directory = shared.path / request.node.name
    directory.mkdir()
    yield directory
    aifs("quota", "rm", directory, check=False)
    aifs("rm", "-r", directory)


def limit(directory: Path, *limits: str) -> None:
    aifs("quota", "set", directory, *limits)


def used(directory: Path) -> tuple[int, int]:
    (quota, *_) = json.loads(aifs("quota", "show", directory, "--json", check=False).stdout)
    return quota["used_bytes"], quota["used_files"]


def dd(path: Path, mib: int, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={mib}", *options]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.sweep
@pytest.mark.parametrize("options", [(), ("oflag=direct",), ("conv=fsync",)])
def test_dd_is_stopped_at_the_last_byte(team: Path, options: tuple[str, ...]) -> None:
    limit(team, "--size", "20MiB")
    done = dd(team / "file", 30, *options)
    assert done.returncode == 1 and "Disk quota exceeded" in done.stderr
    assert (team / "file").stat().st_size == 20 * MIB
    assert used(team) == (20 * MIB, 2)
    assert dd(team / "file", 20, "conv=notrunc", *options).returncode == 0
    (team / "file").unlink()
    until(lambda: used(team) == (0, 1), "what is unlinked is erased")
    assert dd(team / "file", 20, *options).returncode == 0


def test_what_writes_by_a_mapping_or_allocates(team: Path) -> None:
    limit(team, "--size", "1MiB")
    with open(team / "file", "w+b") as file:
        assert errno_of(lambda: os.posix_fallocate(file.fileno(), 0, MIB + 1)) == errno.EDQUOT
        assert errno_of(lambda: os.truncate(file.fileno(), MIB + 1)) == errno.EDQUOT
        os.posix_fallocate(file.fileno(), 0, MIB)
        assert used(team) == (MIB, 2)


@pytest.mark.sweep
def test_four_writers(team: Path) -> None:
    """More than fits, in files and appended to one, at a time."""
    limit(team, "--size", "8MiB", "--files", "120")
    script = """
n=$0
for i in $(seq 40); do head -c 100000 /dev/zero > "$n-$i"; done
for i in $(seq 40); do head -c 100000 /dev/zero >> log; done
"""
    writers = [
        subprocess.Popen(["sh", "-c", script, str(n)], cwd=team, stderr=subprocess.DEVNULL)
        for n in range(4)
    ]
    for writer in writers:
        writer.wait(TIMEOUT_S)
    sizes = [path.stat().st_size for path in team.iterdir()]
    assert used(team) == (sum(sizes), len(sizes) + 1)
    assert 8 * MIB - 100_000 < sum(sizes) <= 8 * MIB, sum(sizes)
    assert len(sizes) == 119
    for path in team.iterdir():
        path.unlink()
    until(lambda: used(team) == (0, 1), "what is unlinked is erased")


def test_df_shows_the_quota(shared: Mounted, team: Path) -> None:
    limit(team, "--size", "64MiB", "--files", "1k")
    (team / "sub").mkdir()
    (team / "sub" / "file").write_bytes(bytes(16 * MIB))

    def df(path: Path) -> list[str]:
        words = ["df", "-B1M", "--output=size,used,itotal,iused", path]
        said = subprocess.run(words, check=True, capture_output=True, text=True)
        return said.stdout.splitlines()[1].split()

    assert df(team / "sub") == ["64", "16", "1000", "3"]
    assert df(shared.path)[0] != "64"
    limit(team, "--size", "none")
    assert df(team / "sub")[2:] == ["1000", "3"] and df(team)[0] == df(shared.path)[0]


def test_mv_copies_and_links_are_refused(shared: Mounted, team: Path) -> None:
    limit(team, "--files", "100")
    outside = team.with_name("outside")
    (outside / "tree" / "sub").mkdir(parents=True)
    (outside / "tree" / "sub" / "file").write_text("text")
    assert errno_of(lambda: os.rename(outside / "tree", team / "tree")) == errno.EXDEV
    assert errno_of(lambda: os.link(outside / "tree/sub/file", team / "link")) == errno.EXDEV
    subprocess.run(["mv", outside / "tree", team], check=True)
    assert used(team) == (4, 4) and (team / "tree" / "sub" / "file").read_text() == "text"
    subprocess.run(["mv", team / "tree" / "sub", outside], check=True)
    until(lambda: used(team) == (0, 2), "what is moved away is erased")
    aifs("rm", "-r", outside)


@pytest.mark.sweep
def test_a_normal_user(shared: Mounted, team: Path) -> None:
    os.chown(team, ALICE, ALICE)
    shared.path.chmod(0o755)
    hidden = team / "hidden"
    hidden.mkdir(0o700)
    limit(team, "--files", "4")
    limit(hidden, "--files", "5")

    def full() -> int:
        for number in range(3):
            code = errno_of((team / f"{number}").touch)
            if code:
                return code
        return 0

    assert in_process(full, ALICE) == errno.EDQUOT
    for order in (
        lambda: door.put(str(team), "quota", "size=1TiB"),
        lambda: door.remove(str(team), "quota"),
    ):
        assert in_process(lambda order=order: errno_of(order), ALICE) == errno.EPERM
    told = in_process(lambda: door.read(str(team), "quota"), ALICE)
    assert (told["used_files"], told["files"]) == (4, 4)
    seen = in_process(lambda: door.read(str(shared.path), "quotas"), ALICE)
    assert [quota["path"] for quota in seen["quotas"]] == [f"/{team.name}"]
    paths = [q["path"] for q in json.loads(aifs("quota", "ls", shared.path, "--json").stdout)]
    assert sorted(paths) == [str(team), str(hidden)]


@pytest.mark.sweep
def test_what_is_there_is_counted_and_said(shared: Mounted, team: Path) -> None:
    for number in range(300):
        path = team / f"{number % 7}" / f"{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(number))
    done = aifs("quota", "set", team, "--size", "1MiB", "--files", "1M")
    assert str(team) in done.stdout and "counted" in done.stdout
    assert used(team) == (sum(range(300)), 308)
    (line,) = [x for x in aifs("quota", "ls", shared.path).stdout.splitlines() if str(team) in x]
    assert "1.00 MiB" in line and "1000000" in line
    aifs("quota", "rm", team)
    done = aifs("quota", "show", team, check=False)
    assert done.returncode == 1 and "no quota counts it" in done.stderr
    assert aifs("quota", "rm", team, check=False).returncode == 1
    assert aifs("quota", "ls", shared.path).stdout == "there are no quotas\n"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("words", "code"),
    [((), 2), (("--size", "1XB"), 2), (("--files", "many"), 2), (("--size", "none"), 1)],
)
def test_wrong_limits(team: Path, words: tuple[str, ...], code: int) -> None:
    done = aifs("quota", "set", team, *words, check=False)
    assert done.returncode == code and done.stderr.startswith("aifs: "), done.stderr
    assert aifs("quota", "set", "/proc", "--size", "1MiB", check=False).returncode == 6


@pytest.mark.sweep
def test_kill_and_count_on(mounted: Mounted) -> None:
    """A quota that is being set, and files that are being written, when the daemon is killed."""
    team = mounted.path / "team"
    team.mkdir()
    for number in range(2000):
        (team / f"{number}").touch()
    aifs("quota", "set", team, "--size", "10MiB", "--no-wait")
    with open(team / "open", "wb", buffering=0) as file:
        file.write(bytes(3 * MIB))
        mounted.kill()
    mounted.mount()
    until(lambda: used(team)[1] == 2002, "all is counted")
    assert used(team) == (3 * MIB, 2002)
    assert dd(team / "more", 8).returncode == 1


@pytest.mark.sweep
def test_both_hosts_of_a_cluster(both: Both) -> None:
    here, there = both
    limit(here, "--size", "4MiB", "--files", "10")
    until(lambda: used(there) == (0, 1), "the other host knows it")
    (here / "file").write_bytes(bytes(3 * MIB))
    assert used(there) == (3 * MIB, 2)
    assert dd(there / "other", 3).returncode == 1
    assert (there / "other").stat().st_size == MIB
    assert errno_of(lambda: os.truncate(here / "file", 3 * MIB + 1)) == errno.EDQUOT
    (there / "file").unlink()
    until(lambda: used(here) == (MIB, 2), "what is unlinked is erased")
    for number in range(8):
        (here if number % 2 else there).joinpath(f"{number}").touch()
    until(lambda: used(here) == used(there) == (MIB, 10), "all is counted on both")
    assert errno_of((there / "one more").touch) == errno.EDQUOT
    aifs("quota", "rm", there)
    until(lambda: errno_of((here / "one more").touch) == 0, "the other host knows it")
