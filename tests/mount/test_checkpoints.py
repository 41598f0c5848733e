"""Checkpoints on a mount: the client, the commands, ranks and daemons that are killed."""

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from aifs import client
from aifs.client.checkpoints import manifest
from tests.support.checkpoints import names, save
from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs


@pytest.mark.sweep
def test_a_save_gives_name_manifest_and_pointers_at_once(mounted: Mounted) -> None:
    run = mounted.path / "run"
    run.mkdir()
    os.setxattr(run, "user.aifs.layout", b"unit=64KiB")
    for step in (100, 200):
        with client.checkpoint(run / f"step-{step}", tracker="tracker") as tmp:
            told = json.loads(os.getxattr(tmp, "user.aifs.pending"))
            assert (told["ranks"], told["step"], told["missing"]) == (1, step, [0])
            (tmp / "model.pt").write_bytes(os.urandom(300_000))
            with pytest.raises(OSError) as caught:
                tmp.rename(run / "by-hand")
            assert caught.value.errno == errno.EBUSY
    assert names(run) == {"step-100", "step-200", "latest", "tracker"}
    assert os.readlink(run / "latest") == "step-200" and (run / "tracker").read_text() == "200"
    listed = manifest.read(str(run / "step-200"))
    assert listed is not None and listed.policy.startswith("unit=64KiB")
    mounted.kill()
    mounted.mount()
    assert client.verify(run / "latest") == []
    assert names(run) == {"step-100", "step-200", "latest", "tracker"}
    with pytest.raises(FileExistsError):
        save(run / "step-200")
    save(run / "step-200", "new", replace=True)
    assert (run / "step-200/sub/model.pt").read_text() == "new"
    with pytest.raises(ValueError), client.checkpoint(run / "step-300") as tmp:
        raise ValueError
    assert names(run) == {"step-100", "step-200", "latest", "tracker"}
    client.remove(run / "step-100")
    assert names(run) == {"step-200", "latest", "tracker"}


@pytest.mark.sweep
def test_without_the_bridge(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store("kernel.bridge=off")
    save(store.path / "step-1")
    save(store.path / "step-2")
    save(store.path / "step-2", "new", replace=True)
    client.remove(store.path / "step-1")
    store.remount()
    assert names(store.path) == {"step-2", "latest"}
    assert client.verify(store.path / "latest") == []


def test_the_commands(on_mount: Path) -> None:
    run = on_mount / "run"
    run.mkdir()
    for step in (1, 2, 3):
        tmp = run / "tmp"
        tmp.mkdir()
        for rank in range(2):
            (tmp / f"shard-{rank}").write_bytes(b"%d" % rank * 5000)
        os.setxattr(tmp, "user.aifs.pending", b"ranks=2")
        os.setxattr(tmp, "user.aifs.commit", b"0")
        done = aifs("checkpoint", "publish", tmp, run / f"step-{step}", "--ranks", "2", check=False)
        assert (done.returncode, done.stderr) == (8, f"aifs: {tmp}: rank 1 did not commit\n")
        done = aifs("checkpoint", "publish", tmp, run / f"step-{step}", check=False)
        assert done.returncode == 8 and "1" in done.stderr and len(done.stderr.splitlines()) == 1
        os.setxattr(tmp, "user.aifs.commit", b"1")
        said = aifs(
            "checkpoint",
            "publish",
            tmp,
            run / f"step-{step}",
            "--ranks",
            "2",
            "--latest",
            "latest",
            "--tracker",
            "it",
        ).stdout
        assert said == f"published {run}/step-{step}: 2 files, 9.77 KiB\n"
    (run / "tmp").mkdir()
    os.setxattr(run / "tmp", "user.aifs.pending", b"ranks=4,step=9")
    listed = json.loads(aifs("checkpoint", "ls", run, "--json", "--pending").stdout)
    assert [(Path(one["path"]).name, one["state"], one["step"]) for one in listed] == [
        ("step-1", "complete", 1),
        ("step-2", "complete", 2),
        ("step-3", "complete", 3),
        ("tmp", "pending", 9),
    ]
    assert listed[-1]["problem"] == "4 of 4 ranks have not committed"
    (run / "step-90").mkdir()
    (run / "step-90/shard-0").write_bytes(b"half of it")
    assert aifs("checkpoint", "latest", run).stdout == f"{run}/step-3\n"
    os.rename(run / "step-90", on_mount / "tmp")
    (on_mount / "trained").mkdir()
    for step in (1000, 700):  # saved in place, then copied in the order of names
        (on_mount / f"trained/checkpoint-{step}").mkdir()
        (on_mount / f"trained/checkpoint-{step}/weights").write_bytes(b"1")
    done = aifs("checkpoint", "latest", on_mount / "trained")
    assert done.stdout == f"{on_mount}/trained/checkpoint-1000\n"
    assert "not known to be whole" in done.stderr
    assert client.latest(on_mount / "trained") is None
    assert aifs("checkpoint", "verify", "--all", run).stdout.count("as they were saved") == 3
    aifs("checkpoint", "rm", run / "step-1", "--yes")
    assert aifs("checkpoint", "keep", run, "--last", "1").stdout == f"{run}/step-2\n"
    assert os.getxattr(run, "user.aifs.keep") == b"last=1"
    save(run / "step-4")
    while client.list_checkpoints(run)[0].path.name != "step-4":
        pass
    assert names(run) == {"step-4", "latest", "it", "tmp"}


def test_a_damaged_file_is_named(on_mount: Path) -> None:
    save(on_mount / "step-1")
    (on_mount / "step-1/sub/model.pt").write_text("CONTENT")
    done = aifs("checkpoint", "verify", on_mount / "step-1", check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"aifs: {on_mount}/step-1: sub/model.pt: its bytes are not those that were saved\n"
    )


@pytest.mark.sweep
def test_of_publishers_that_race_for_a_name_one_wins(on_mount: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from aifs import client
        run, number = Path(sys.argv[1]), sys.argv[2]
        for round_ in range(8):
            tmp = run / f"tmp-{round_}-{number}"
            tmp.mkdir()
            for part in range(4):
                (tmp / f"part-{part}").write_text(number)
            sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
            try:
                client.publish(tmp, run / f"step-{round_}", latest="latest", hash=False)
                print("won", flush=True)
            except FileExistsError:
                print("lost", flush=True)
    """
    racers = [start(program, on_mount, number) for number in range(3)]
    for round_ in range(8):
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        outcome = [racer.stdout.readline() for racer in racers]
        assert sorted(outcome) == ["lost\n", "lost\n", "won\n"]
        won = str(outcome.index("won\n"))
        assert {part.read_text() for part in on_mount.glob(f"step-{round_}/part-*")} == {won}
        assert os.readlink(on_mount / "latest") == f"step-{round_}"
    for racer in racers:
        assert racer.wait(TIMEOUT_S) == 0
        racer.stdin.close()
        racer.stdout.close()


def start(program: str, *words: object) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
