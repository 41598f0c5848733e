"""Publishing on a real mount: by setfattr, mv and ioctl; what the kernel has cached; who may; two
processes for one name.
"""

import errno
import json
import os
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.machine import RENAME_EXCHANGE, renameat2
from tests.support.mounts import Mounted, call
from tests.support.users import errno_of, in_process

ALICE, BOB = 1000, 1001
TRACKER = "latest_checkpointed_iteration.txt"


def make_tree(path: Path, files: int = 3) -> Path:
    (path / "sub").mkdir(parents=True)
    for number in range(files):
        (path / "sub" / f"{number}.pt").write_bytes(bytes([number + 1]) * 70_000)
    return path


def set_hint(path: Path, name: str, value: object) -> None:
    os.setxattr(
        path, f"user.aifs.{name}", (value if isinstance(value, str) else json.dumps(value)).encode()
    )


def pending(path: Path) -> dict:
    return json.loads(os.getxattr(path, "user.aifs.pending"))


def publish(path: Path, final: Path, step: int, **how: bool) -> None:
    place = final.parent.stat().st_ino
    names = {"parent": place, "final": final.name, "latest": "latest", "tracker": TRACKER}
    call(path, "publish-as", **names, content=str(step), **how)


def require_step(runs: Path, name: str, step: int) -> None:
    """What a reader sees, by name and by listing."""
    assert os.readlink(runs / "latest") == name and (runs / TRACKER).read_text() == str(step)
    assert (runs / "latest" / "sub" / "1.pt").read_bytes() == b"\2" * 70_000
    assert {name, "latest", TRACKER} <= set(os.listdir(runs))


@pytest.fixture
def runs(shared: Mounted, request: pytest.FixtureRequest) -> Path:
    path = shared.path / request.node.name
    path.mkdir()
    return path


@pytest.mark.sweep
def test_a_shell_is_enough(mounted: Mounted) -> None:
    runs = mounted.path / "runs"
    runs.mkdir()
    script = f"""
        set -e
        cd {runs}
        mkdir tmp; setfattr -n user.aifs.pending -v 'ranks=2,step=100' tmp
        dd if=/dev/zero of=tmp/0.pt bs=100k count=3 status=none
        setfattr -n user.aifs.commit -v 0 tmp
        if mv tmp step-100 2>/dev/null; then exit 7; fi
        dd if=/dev/zero of=tmp/1.pt bs=100k count=3 status=none
        setfattr -n user.aifs.commit -v 1 tmp
        names='"final": "step-100", "latest": "latest", "tracker": "{TRACKER}", "content": "100"'
        setfattr -n user.aifs.publish-as -v "{{$names}}" tmp
        test ! -e tmp; test "$(readlink latest)" = step-100; test "$(cat {TRACKER})" = 100
        test "$(stat -c %s latest/1.pt)" = 307200
        mkdir tmp; setfattr -n user.aifs.pending -v ranks=1 tmp
        setfattr -x user.aifs.pending tmp; mv tmp plain
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(runs)) == sorted(["latest", TRACKER, "plain", "step-100"])
    mounted.kill()
    mounted.mount()
    assert os.readlink(runs / "latest") == "step-100" and (runs / TRACKER).read_text() == "100"


def test_the_kernel_forgets_what_it_has_cached(runs: Path) -> None:
    for step in (1, 2, 3):
        tmp, final = make_tree(runs / "tmp"), runs / f"step-{step}"
        working = os.open(tmp, os.O_RDONLY)
        inside = os.open(tmp / "sub", os.O_RDONLY)
        before = (runs.stat().st_mtime_ns, os.listdir(runs))
        assert not final.exists() and not (runs / "none").exists()  # which the kernel remembers
        if step > 1:
            require_step(runs, f"step-{step - 1}", step - 1)
        publish(tmp, final, step)
        place = f"/proc/self/fd/{working}"  # who works there, and calls getcwd(3)
        assert os.readlink(place) == str(tmp)
        require_step(runs, final.name, step)
        assert os.readlink(place) == str(final)
        os.close(working)
        assert (
            not tmp.exists()
            and runs.stat().st_mtime_ns > before[0]
            and "tmp" not in os.listdir(runs)
        )
        with os.fdopen(
            os.open("0.pt", os.O_RDONLY, dir_fd=inside), "rb"
        ) as file:  # who was below it stays there
            assert file.read() == b"\1" * 70_000
        os.close(inside)
    assert runs.stat().st_nlink == 2 + 3


def test_a_tree_is_replaced(runs: Path) -> None:
    final = runs / "model"
    for step in (1, 2):
        tmp = make_tree(runs / "tmp", files=2 + step)
        (tmp / f"only-{step}").touch()
        if step == 2:
            file = open(final / "sub" / "0.pt", "rb")  # noqa: SIM115
            with pytest.raises(FileExistsError):
                publish(tmp, final, step, exclusive=True)
            with pytest.raises(OSError) as caught:
                publish(tmp, final, step)
            assert caught.value.errno == errno.ENOTEMPTY
            require_step(runs, "model", 1)
        publish(tmp, final, step, replace=True)
        require_step(runs, "model", step)
        assert (final / f"only-{step}").exists() and len(os.listdir(final / "sub")) == 2 + step
    assert not (final / "only-1").exists()
    assert file.read() == b"\1" * 70_000
    file.close()


def test_members_commit_by_ioctl(runs: Path) -> None:
    tmp = make_tree(runs / "tmp")
    set_hint(tmp, "pending", "ranks=2")
    call(tmp, "commit", rank=1, list="sub/0.pt")
    assert pending(tmp)["members"] == [1]
    with pytest.raises(OSError) as caught:
        publish(tmp, runs / "final", 1)
    assert (
        caught.value.errno == errno.EBUSY
        and "ranks have not committed: 0" in pending(tmp)["refused"]
    )
    for fields, number in (
        ({"rank": 1}, errno.EINVAL),
        ({"rank": 2}, errno.EINVAL),
        ({"rank": 0, "list": "none"}, errno.EINVAL),
    ):
        with pytest.raises(OSError) as caught:
            call(tmp, "commit", **fields)
        assert caught.value.errno == number
    call(tmp, "commit", rank=0)
    (tmp / "sub" / "0.pt").unlink()
    with pytest.raises(OSError) as caught:
        publish(tmp, runs / "final", 1)
    assert caught.value.errno == errno.EBUSY and "'sub/0.pt' is missing" in pending(tmp)["refused"]
    (tmp / "sub" / "0.pt").touch()
    publish(tmp, runs / "final", 1)
    require_step(runs, "final", 1)


@pytest.mark.sweep
def test_who_may(runs: Path) -> None:
    tmp = make_tree(runs / "tmp")
    for path in (runs, tmp, *tmp.rglob("*")):
        os.chown(path, ALICE, ALICE)
    for refused in (
        lambda: publish(tmp, runs / "final", 1),
        lambda: call(tmp, "commit", rank=0),
        lambda: set_hint(tmp, "pending", "ranks=1"),
        lambda: set_hint(tmp, "publish-as", {"final": "final"}),
        lambda: set_hint(runs, "keep", "last=1"),
    ):
        assert errno_of(lambda refused=refused: in_process(refused, BOB)) == errno.EACCES
    in_process(lambda: set_hint(tmp, "pending", "ranks=1"), ALICE)
    in_process(lambda: set_hint(tmp, "commit", "0"), ALICE)
    in_process(lambda: publish(tmp, runs / "final", 1), ALICE)
    assert (runs / TRACKER).stat().st_uid == (runs / "latest").lstat().st_uid == ALICE
    require_step(runs, "final", 1)


@pytest.mark.sweep
def test_two_processes_publish_under_one_name(runs: Path) -> None:
    for _ in range(5):
        trees = [make_tree(runs / f"tmp{number}") for number in range(3)]
        start, outcomes = threading.Barrier(len(trees)), []

        def run(tree: Path, start: threading.Barrier = start, outcomes: list = outcomes) -> None:
            start.wait()
            try:
                publish(tree, runs / "final", int(tree.name[-1]))
                outcomes.append(tree.name)
            except OSError as error:
                outcomes.append(error.errno)

        threads = [threading.Thread(target=run, args=(tree,)) for tree in trees]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [outcome for outcome in outcomes if isinstance(outcome, str)]
        assert outcomes.count(errno.ENOTEMPTY) == 2
        require_step(runs, "final", int(winner[-1]))
        assert not (runs / winner).exists() and len(os.listdir(runs)) == 5
        subprocess.run(["rm", "-r", *(runs / name for name in os.listdir(runs))], check=True)


def test_a_rename_into_a_directory_that_publishes_from_the_capacity_tier(runs: Path) -> None:
    outside = runs / "outside"
    tmp = make_tree(outside / "tmp")
    set_hint(runs, "publish", "capacity")
    tmp.rename(runs / "step-1")
    assert json.loads(os.getxattr(runs / "step-1", "user.aifs.state"))["files"]["dirty"] == 0
    (outside / "file").write_bytes(b"x" * 70_000)
    os.replace(outside / "file", runs / "file")
    assert json.loads(os.getxattr(runs / "file", "user.aifs.state"))["state"] in ("clean", "cached")


def test_exchange_then_retention(runs: Path, shared: Mounted) -> None:
    shared.expected.append(
        "all checkpoints stay, despite last=2: step-3 was published after step-4"
    )
    set_hint(runs, "keep", "last=2")
    for step in range(1, 5):
        publish(make_tree(runs / "tmp"), runs / f"step-{step}", step)
    for _ in range(1000):
        if set(os.listdir(runs)) == {"step-3", "step-4", "latest", TRACKER}:
            break
    assert not (runs / "step-1").exists() and not (runs / "step-2").exists()
    renameat2(os.fsencode(runs / "step-3"), os.fsencode(runs / "step-4"), RENAME_EXCHANGE)
    require_step(runs, "step-4", 4)


def test_pointers_are_never_seen_one_new_and_one_old(on_mount: Path) -> None:
    """Whoever has seen the new one of them sees the other new, too."""
    latest, tracker = on_mount / "latest", on_mount / "tracker"
    done = False

    def watch() -> None:
        while not done:
            for first, second in (
                (lambda: os.readlink(latest), tracker.read_text),
                (tracker.read_text, lambda: os.readlink(latest)),
            ):
                with suppress(FileNotFoundError):
                    seen.append((int(first()), int(second())))

    seen: list[tuple[int, int]] = []
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for step in range(1, 101):
            tmp = on_mount / ".tmp"
            tmp.mkdir()
            wanted = {"final": f"{step}", "latest": "latest", "tracker": "tracker"}
            wanted["content"] = str(step)
            os.setxattr(tmp, "user.aifs.publish-as", json.dumps(wanted).encode())
    finally:
        done = True
        watcher.join()
    assert seen and all(first <= second for first, second in seen)


def test_what_latest_names_is_there(runs: Path) -> None:
    """The kernel has kept that it is not, from who waits for it: of a directory that this mount has
    made, by way of the bridge."""
    published, missed = 0, []

    def wait_for_steps() -> None:
        while published < 60:
            (runs / f"step-{published}").exists()
            with suppress(FileNotFoundError):
                name = os.readlink(runs / "latest")
                if not (runs / name).exists():
                    missed.append(name)

    waiting = [threading.Thread(target=wait_for_steps) for _ in range(4)]
    for thread in waiting:
        thread.start()
    try:
        for step in range(60):
            (runs / "tmp").mkdir()
            set_hint(runs / "tmp", "publish-as", {"final": f"step-{step}", "latest": "latest"})
            published = step + 1
    finally:
        published = 60
        for thread in waiting:
            thread.join()
    assert not missed
