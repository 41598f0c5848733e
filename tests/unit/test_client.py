"""Checkpoints in a plain directory: saving, publishing, listing, verifying, removing, keeping."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs import client
from aifs.client import CheckpointError
from aifs.client.checkpoints import catalog, manifest
from aifs.client.checkpoints.manifest import Digest, Manifest
from aifs.core import trees
from tests.support.checkpoints import names, save

NAMES = (
    st.binary(min_size=1, max_size=9)
    .filter(lambda name: not set(name) & set(b"\0/"))
    .map(os.fsdecode)
)
DIGESTS = st.builds(Digest, st.integers(0, 1 << 60), st.sampled_from(["", "ab" * 32]))
PATHS = st.lists(NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map(
    "/".join
)


# --- the manifest ---------------------------------------------------------------------------------


@pytest.mark.sweep
@given(st.none() | st.integers(0), st.dictionaries(PATHS, DIGESTS, max_size=8))
def test_a_manifest_is_read_as_it_was_written(step: int | None, files: manifest.Files) -> None:
    written = Manifest(step, 1763735314.25, 4, "5f0c", "unit=4MiB", files)
    text = "".join(manifest.encode(written))
    assert manifest.decode(text.encode()) == written
    assert text.isascii() and text.count("\n") == len(files) + 2
    hashed = b"".join(
        os.fsencode(path)
        + b"\0"
        + str(files[path].size).encode()
        + b"\0"
        + files[path].blake3.encode()
        + b"\n"
        for path in sorted(files, key=os.fsencode)
    )
    assert json.loads(text)["tree"] == blake3.blake3(hashed).hexdigest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: text.replace('[1, "', '[2, "'),
        lambda text: text.replace('"a"', '"../a"'),
        lambda text: text.replace('"a"', '"/a"'),
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"a": [1', '"a": [true'),
        lambda text: text.replace('"a"', '"b"'),
        lambda text: "[]",
        lambda text: '{"format": 1}',
        lambda text: "",
    ],
)
def test_a_damaged_manifest_is_refused(damage, tmp_path: Path) -> None:  # noqa: ANN001
    text = "".join(manifest.encode(Manifest(1, 0.0, 1, files={"a": Digest(1, "ab" * 32)})))
    assert damage(text) != text
    (tmp_path / manifest.NAME).write_text(damage(text))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        manifest.read(str(tmp_path))


# --- saving ---------------------------------------------------------------------------------------


def test_a_save_gives_name_manifest_and_pointers(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    save(run / "step-100", tracker="latest_checkpointed_iteration.txt")
    assert names(run) == {"step-100", "latest", "latest_checkpointed_iteration.txt"}
    assert names(run / "step-100") == {"sub", "config.json", manifest.NAME}
    assert os.readlink(run / "latest") == "step-100"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "100"
    listed = manifest.read(str(run / "step-100"))
    assert listed is not None and (listed.step, listed.ranks, listed.policy) == (100, 1, "")
    assert listed.files["sub/model.pt"] == Digest(7, blake3.blake3(b"content").hexdigest())
    assert abs(listed.time - time.time()) < 60
    save(run / "step-200", tracker="latest_checkpointed_iteration.txt", latest=None)
    assert os.readlink(run / "latest") == "step-100"
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "200"
    assert client.latest(run) == run / "step-200"
    mask = os.umask(0)
    os.umask(mask)
    assert (run / "step-100").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (run / "step-100" / manifest.NAME).stat().st_mode & 0o777 == 0o666 & ~mask


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    odd = os.fsdecode(b'odd\xff\n"name')
    with client.checkpoint(tmp_path / f"{odd}-1") as tmp:
        (tmp / odd).write_text("x")
    assert client.verify(tmp_path / f"{odd}-1") == []
    (tmp_path / f"{odd}-1" / odd).write_text("y")
    assert client.verify(tmp_path / f"{odd}-1") == [
        f"{odd}: its bytes are not those that were saved"
    ]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    save(tmp_path / "step-1")
    with pytest.raises(error), client.checkpoint(tmp_path / "step-2") as tmp:
        (tmp / "file").touch()
        raise error
    assert names(tmp_path) == {"step-1", "latest"}
    assert os.readlink(tmp_path / "latest") == "step-1"


def test_an_existing_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    save(tmp_path / "step-1", "old")
    with pytest.raises(FileExistsError, match="step-1"):
        save(tmp_path / "step-1")
    save(tmp_path / "step-1", "new", replace=True)
    assert (tmp_path / "step-1/sub/model.pt").read_text() == "new"
    assert names(tmp_path) == {"step-1", "latest"}


def test_without_hashes_sizes_are_what_is_verified(tmp_path: Path) -> None:
    save(tmp_path / "step-1", hash=False)
    (tmp_path / "step-1/sub/model.pt").write_text("CONTENT")
    assert client.verify(tmp_path / "step-1") == []
    (tmp_path / "step-1/sub/model.pt").write_text("short")
    assert client.verify(tmp_path / "step-1") == ["sub/model.pt: has 5 bytes, not 7"]


def test_a_second_process_that_saves_to_the_name_is_refused(tmp_path: Path) -> None:
    with client.checkpoint(tmp_path / "step-1") as tmp:
        (tmp / "file").touch()
        with (
            pytest.raises(CheckpointError, match="another process is saving to it"),
            client.checkpoint(tmp_path / "step-1"),
        ):
            pass
    assert names(tmp_path / "step-1") == {"file", manifest.NAME}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"latest": "a/b"}, "cannot be the name of a pointer"),
        ({"latest": "best"}, "cannot be the name of a pointer"),
        ({"tracker": ".."}, "cannot be the name of a pointer"),
        ({"tracker": "it.txt"}, "its step is not known"),
    ],
)
def test_nonsense_is_told(tmp_path: Path, options: dict, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path / "best", **options)
    assert names(tmp_path) == set()
    with (
        pytest.raises(CheckpointError, match="holds no file"),
        client.checkpoint(tmp_path / "best"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="rank 2 of 2"),
        client.checkpoint(tmp_path / "best", ranks=2, rank=2),
    ):
        pass


def test_a_file_that_is_still_being_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aifs.client.checkpoints import hashing

    def grow(fd: int) -> None:
        os.truncate(f"/proc/self/fd/{fd}", 100)

    monkeypatch.setattr(hashing, "sync_file", grow)
    with pytest.raises(CheckpointError, match="is still being written"):
        save(tmp_path / "step-1")
    assert names(tmp_path) == set()


def test_a_forked_child_can_hash_when_its_parent_has(tmp_path: Path) -> None:
    """Threads that hash do not exist in a child, which must not wait for them."""
    with client.checkpoint(tmp_path / "step-1") as tmp:
        (tmp / "large").write_bytes(os.urandom(8 << 20))
    assert client.verify(tmp_path / "step-1") == []
    pid = os.fork()
    if pid == 0:
        os._exit(len(client.verify(tmp_path / "step-1")))
    assert os.waitpid(pid, 0)[1] == 0


# --- publishing what programs have written --------------------------------------------------------


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    made = tmp_path / "tmp"
    made.mkdir()
    for rank in range(3):
        (made / f"shard-{rank}").write_text(f"content of {rank}")
    return made


def test_members_that_did_not_commit_are_named(tmp: Path) -> None:
    final = tmp.parent / "step-5"
    client.commit(tmp, 1, ["shard-1"])
    with pytest.raises(CheckpointError, match="ranks 0, 2 did not commit"):
        client.publish(tmp, final, ranks=3)
    client.commit(tmp, 0, ["shard-0"])
    client.commit(tmp, 2)  # the rest
    client.commit(tmp, 1, ["shard-1"], hash=False)  # again
    done = client.publish(tmp, final, ranks=3)
    assert done.files["shard-1"] == (12, "") and len(done.files["shard-2"].blake3) == 64
    assert names(final) == {"shard-0", "shard-1", "shard-2", manifest.NAME} and not tmp.exists()


@pytest.mark.parametrize("how", ["short", "missing"])
def test_a_short_or_missing_member_is_named(tmp: Path, how: str) -> None:
    for rank in range(3):
        client.commit(tmp, rank, [f"shard-{rank}"])
    (tmp / "shard-2").write_text("short") if how == "short" else (tmp / "shard-2").unlink()
    with pytest.raises(CheckpointError, match="shard-2 of rank 2 (has 5 bytes, not 12|is missing)"):
        client.publish(tmp, tmp.parent / "step-5", ranks=3)
    assert names(tmp.parent) == {"tmp"}


def test_publish_into_another_directory(tmp: Path) -> None:
    (tmp.parent / "run").mkdir()
    client.publish(tmp, tmp.parent / "run/best", step=7, latest="newest", tracker="it.txt")
    assert names(tmp.parent / "run") == {"best", "newest", "it.txt"}
    assert (tmp.parent / "run/it.txt").read_text() == "7"
    assert names(tmp.parent) == {"run"}


def test_publish_over_what_is_there(tmp: Path) -> None:
    (tmp.parent / "file-1").touch()
    (tmp.parent / "empty-1").mkdir()
    for name in ("file-1", "empty-1"):
        with pytest.raises(FileExistsError, match=name):
            client.publish(tmp, tmp.parent / name)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        client.publish(tmp.parent / "none", tmp.parent / "step-2")
    with pytest.raises(FileNotFoundError):
        client.publish(tmp, tmp.parent / "none" / "step-2")
    client.publish(tmp, tmp.parent / "empty-1", replace=True)
    assert names(tmp.parent) == {"file-1", "empty-1"}


def test_where_names_cannot_change_places_a_replacement_is_refused(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: str, new: str) -> None:
        raise OSError(22, "Invalid argument")

    save(tmp.parent / "step-1", "old")
    monkeypatch.setattr(trees, "exchange", refuse)
    with pytest.raises(CheckpointError, match="remove it first"):
        client.publish(tmp, tmp.parent / "step-1", replace=True)
    assert (tmp.parent / "step-1/sub/model.pt").read_text() == "old"


def _race(barrier, directory: str, number: int, results) -> None:  # noqa: ANN001
    made = Path(directory, f"tmp{number}")
    made.mkdir()
    for part in range(5):
        (made / f"part-{part}").write_text(str(number))
    barrier.wait()
    try:
        client.publish(made, Path(directory, "step-1"), latest="latest")
        results.put(number)
    except FileExistsError:
        results.put(-1)


@pytest.mark.sweep
def test_of_publishers_that_race_for_a_name_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_ in range(5):
        directory = tmp_path / str(round_)
        directory.mkdir()
        barrier, results = context.Barrier(4), context.SimpleQueue()
        racers = [
            context.Process(target=_race, args=(barrier, str(directory), n, results))
            for n in range(4)
        ]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        outcome = sorted(results.get() for _ in racers)
        assert outcome[:3] == [-1, -1, -1] and outcome[3] >= 0
        assert {path.read_text() for path in (directory / "step-1").glob("part-*")} == {
            str(outcome[3])
        }
        assert client.verify(directory / "latest") == []


# --- the catalogue --------------------------------------------------------------------------------


def test_the_list_tells_what_state_each_is_in(tmp_path: Path) -> None:
    for step in (300, 100, 200, 400):
        save(tmp_path / f"step-{step}")
    (tmp_path / "step-100/config.json").unlink()
    (tmp_path / "step-200" / manifest.NAME).write_text("torn")
    (tmp_path / "iter_0000050").mkdir()
    (tmp_path / "iter_0000050/a").write_text("abc")
    os.utime(tmp_path / "iter_0000050", (1, 1))
    (tmp_path / "logs").mkdir()
    (tmp_path / "file-7").touch()
    (tmp_path / ".step-500.pending").mkdir()
    found = client.list_checkpoints(tmp_path)
    assert [(one.path.name, one.state) for one in found] == [
        ("iter_0000050", "no manifest"),
        ("step-100", "damaged"),
        ("step-200", "damaged"),
        ("step-300", "complete"),
        ("step-400", "complete"),
    ]
    assert found[0].size == 3 and found[0].step == 50
    assert found[1].problem == "config.json: is missing" and "cannot be read" in found[2].problem
    assert [one.shown for one in found] == [False, False, False, True, True]
    assert client.latest(tmp_path) == tmp_path / "step-400"
    (tmp_path / "step-400/sub/model.pt").write_text("x")
    assert client.latest(tmp_path) == tmp_path / "step-300"
    pending = client.list_checkpoints(tmp_path, pending=True)[-1]
    assert (pending.path.name, pending.state, pending.step) == (".step-500.pending", "pending", 500)
    assert client.latest(tmp_path / "logs") is None
    (tmp_path / "step-600").mkdir()
    for name in ("step-500", "step-60"):  # made where they are: nothing says that they are whole
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("of it")
    assert client.latest(tmp_path) == tmp_path / "step-300"
    assert client.latest(tmp_path, in_place=True) == tmp_path / "step-500"
    with pytest.raises(FileNotFoundError):
        client.latest(tmp_path / "none")


@pytest.mark.sweep
def test_verify_names_every_bad_file(tmp_path: Path) -> None:
    with client.checkpoint(tmp_path / "step-1") as tmp:
        for name in "abcdef":
            (tmp / name).write_bytes(os.urandom(5 << 20))
    path = tmp_path / "step-1"
    with open(path / "b", "r+b") as file:
        file.seek(5 << 20 >> 1)
        byte = file.read(1)[0]
        file.seek(5 << 20 >> 1)
        file.write(bytes([byte ^ 1]))
    (path / "c").unlink()
    (path / "d").unlink()
    (path / "d").mkdir()
    (path / "e").write_text("")
    (path / "extra").write_text("not of it")
    read = []
    assert client.verify(path, read.append) == [
        "b: its bytes are not those that were saved",
        "c: is missing",
        "d: is no regular file",
        "e: has 0 bytes, not 5242880",
    ]
    assert sum(read) == 3 * (5 << 20)
    (path / manifest.NAME).unlink()
    with pytest.raises(CheckpointError, match="has no manifest"):
        client.verify(path)
    with pytest.raises(FileNotFoundError):
        client.verify(tmp_path / "none")


def test_a_removal_takes_what_a_crashed_one_has_left(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    save(tmp_path / "step-2")
    left = tmp_path / ".step-0.0123abcd.removed"
    left.mkdir()
    (left / "file").touch()
    (tmp_path / ".latest.0123abcd.tmp").symlink_to("step-0")
    os.utime(tmp_path / ".latest.0123abcd.tmp", (1, 1), follow_symlinks=False)
    (tmp_path / ".tracker.0123abcd.tmp").touch()
    for name in ("step-5", "step-6"):  # published before the crash; not yet
        (tmp_path / f".{name}.ranks").mkdir()
        (tmp_path / f".{name}.ranks/attempt").touch()
        os.utime(tmp_path / f".{name}.ranks", (1, 1))
    (tmp_path / ".step-6.pending").mkdir()
    client.remove(tmp_path / "step-1")
    assert (
        not (tmp_path / ".step-5.ranks").exists() and (tmp_path / ".step-6.ranks/attempt").exists()
    )
    # Somebody may be about to rename it.
    assert {name for name in names(tmp_path) if "step-6" not in name} == {
        "step-2",
        "latest",
        ".tracker.0123abcd.tmp",
    }
    with pytest.raises(NotADirectoryError):
        client.remove(tmp_path / "latest")
    with pytest.raises(FileNotFoundError):
        client.remove(tmp_path / "step-1")


@pytest.mark.sweep
def test_keep_spares_what_is_in_use(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path / f"step-{step}")
    os.symlink("step-2", tmp_path / "best")
    with open(tmp_path / "step-3/sub/model.pt"):
        going = client.keep(tmp_path, "last=2,every=4", dry_run=True)
        assert [path.name for path in going] == ["step-1", "step-5"]
        assert len(client.list_checkpoints(tmp_path)) == 7
        assert client.keep(tmp_path, "last=2,every=4") == going
    assert names(tmp_path) == {"step-2", "step-3", "step-4", "step-6", "step-7", "latest", "best"}
    save(tmp_path / "step-8", keep="last=1")
    assert names(tmp_path) == {"step-2", "step-8", "latest", "best"}
    with pytest.raises(CheckpointError, match="keep: "):
        client.keep(tmp_path, "some")


@pytest.mark.sweep
def test_keep_neither_counts_nor_removes_what_may_not_be_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", latest=None)
    for step in (90, 91):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / "step-90/half").write_text("of it")
    assert client.keep(tmp_path, "last=2") == [tmp_path / "step-1"]
    assert names(tmp_path) == {"step-2", "step-3", "step-90", "step-91"}
    os.rename(tmp_path / "step-2", tmp_path / "step-4")
    assert client.keep(tmp_path, "last=1") == []
    assert "step-3 was published after step-4" in caplog.text


def test_a_policy_that_cannot_be_read_is_told_before_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep: "):
        save(tmp_path / "step-1", keep="some")
    assert names(tmp_path) == set()


def test_what_is_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "best")
    for name in ("step-7", "logs", ".step-8.pending"):
        (tmp_path / name).mkdir()
    (tmp_path / "file-7").touch()
    found = {
        name
        for name in ("best", "step-7", "logs", ".step-8.pending", "file-7", "latest", "none")
        if catalog.is_checkpoint(tmp_path / name)
    }
    assert found == {"best", "step-7", ".step-8.pending"}
