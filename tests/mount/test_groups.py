"""Groups on a real mount: by setfattr and ioctl, from shells, Python and C; processes that die; the
daemon too.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.client import latest, verify
from aifs.core import ioctl
from aifs.fuse import extension
from tests.support.mounts import Mounted, aifs, call
from tests.support.users import errno_of, in_process

SIZE = 300 << 10
LIMIT_S = 60
LIMIT_MS = LIMIT_S * 1000
ALICE = 1000

needs_bridge = pytest.mark.skipif(extension is None, reason="the bridge has not been built")


@pytest.fixture
def top(shared: Mounted, request: pytest.FixtureRequest) -> Path:
    path = shared.path / request.node.name
    path.mkdir()
    return path


def tell(path: Path) -> dict:
    return json.loads(os.getxattr(path, "user.aifs.group"))


def begin(path: Path, text: str) -> None:
    os.setxattr(path, "user.aifs.group", f"name=step,{text}".encode())


def create(path: Path, ranks: int, commit: str = "explicit", **words: str) -> int:
    return call(path, "group", name="step", ranks=ranks, commit=commit, **words)["id"]


def join(path: Path, rank: int, number: int = 0) -> None:
    call(path, "group.join", rank=rank, id=number)


def commit(path: Path, rank: int, number: int = 0) -> None:
    call(path, "group.commit", rank=rank, id=number)


def wait(path: Path, until: str = "durable", number: int = 0, timeout_ms: int = LIMIT_MS) -> None:
    call(path, "group.wait", **{"for": until}, id=number, timeout_ms=timeout_ms)


def query(path: Path, number: int = 0) -> dict:
    return call(path, "group.state", id=number)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens in the background."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def other_process(code: str, *args: object) -> Iterator[subprocess.Popen]:
    """A process that may be a rank; ``code`` ends with the line "ready". It is killed in the
    end."""
    text = "import sys; from tests.mount.test_groups import *; top = Path(sys.argv[1])\n" + code
    command = [sys.executable, "-c", text, *map(str, args)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


READY = "print('ready', flush=True); sys.stdin.read()"


# --- shells ---------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_shell_is_enough(mounted: Mounted) -> None:
    script = f"""
        set -e
        cd {mounted.path}
        head -c {SIZE} /dev/urandom > /dev/shm/aifs-group-$$; trap 'rm /dev/shm/aifs-group-$$' EXIT
        mkdir tmp; setfattr -n user.aifs.group -v 'name=step,ranks=4,publish=step-1' tmp
        for rank in 0 1 2 3; do cp /dev/shm/aifs-group-$$ tmp/$rank.pt & done; wait
        is_durable() {{
            getfattr --only-values -n user.aifs.group . step-1 2>/dev/null |
                grep -q '"state": "durable"'
        }}
        until is_durable; do sleep 0.05; done
        test ! -e tmp; for rank in 0 1 2 3; do cmp /dev/shm/aifs-group-$$ step-1/$rank.pt; done
        mkdir other; setfattr -n user.aifs.group -v 'name=step,ranks=2' other
        setfattr -x user.aifs.group other
        getfattr --only-values -n user.aifs.group other | grep -q '"state": "cancelled"'
        if setfattr -n user.aifs.group -v 'ranks=2' other 2>/dev/null; then exit 7; fi
    """
    done = subprocess.run(
        ["bash", "-c", script], check=False, capture_output=True, text=True, timeout=2 * LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert os.readlink(mounted.path / "latest") == "step-1"
    assert latest(mounted.path) == mounted.path / "step-1" and verify(mounted.path / "step-1") == []
    told = tell(mounted.path / "step-1")
    assert (
        told["published"] and told["duplicate_bytes"] == 3 * SIZE and told["distinct_bytes"] == SIZE
    )
    assert json.loads(aifs("status", "--json", mounted.path).stdout)["groups"]["durable"] == 1
    assert "1 durable; " in aifs("status", mounted.path).stdout
    shown = aifs("group", "show", mounted.path / "step-1" / "0.pt").stdout
    assert all(
        text in shown for text in ("step, 4 ranks", "step-1: done", "durable", "/step-1/3.pt")
    ), shown
    none = aifs("group", "show", mounted.path, check=False)
    assert none.returncode == 1 and "has no group" in none.stderr and none.stderr.count("\n") == 1


@pytest.mark.sweep
def test_without_the_bridge_attributes_are_enough(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store("kernel.bridge=off")
    begin(store.path, "ranks=2,commit=explicit")
    for rank in (0, 1):
        (store.path / str(rank)).write_bytes(bytes([rank]) * SIZE)
        os.setxattr(store.path, "user.aifs.group.commit", b"%d" % rank)
    until(lambda: tell(store.path)["state"] == "durable")
    assert errno_of(create, store.path, 1) in (errno.ENOTTY, errno.ENOSYS)


# --- ioctls ---------------------------------------------------------------------------------------


@needs_bridge
def test_ranks_use_ioctls(top: Path) -> None:
    number = create(top, 2)
    assert create(top, 2) == number and query(top)["state"] == "open"
    data = os.urandom(SIZE)
    for rank in (0, 1):
        join(top, rank)
        (top / f"{rank}.tmp").write_bytes(data)
        (top / f"{rank}.tmp").rename(top / f"{rank}.pt")
        told = query(top, number)
        assert (told["id"], told["ranks"], told["committed"], told["joined"]) == (
            number,
            2,
            rank,
            rank + 1,
        )
        assert told["dead"] == -1 and told["durable_ns"] == 0
        commit(top, rank, number)
    wait(top, "buffered", number)
    wait(top, number=number)
    told = query(top)
    assert told["state"] == "durable" and told["files"] == 2
    assert (
        told["bytes"] == 2 * SIZE
        and told["duplicate_bytes"] == SIZE
        and told["durable_ns"] >= told["buffered_ns"] > 0
    )
    assert [(top / f"{rank}.pt").read_bytes() for rank in (0, 1)] == [data] * 2
    assert errno_of(wait, top, number=number + 1) == errno.ESTALE


@pytest.mark.sweep
@needs_bridge
def test_mistakes_are_refused_and_named(top: Path) -> None:
    for mistake in (query, lambda path: join(path, 0), lambda path: commit(path, 0), wait):
        assert errno_of(mistake, top) == errno.ENODATA
    for ranks, wrong in ((0, {}), (1 << 20, {}), (2, {"anew": "yes"}), (2, {"flags": "1"})):
        assert errno_of(create, top, ranks, **wrong) == errno.EINVAL
    create(top, 2)
    assert errno_of(create, top, 3) == errno.EINVAL
    assert tell(top)["refused"].startswith("another group is open: name=step,ranks=2,")
    assert errno_of(join, top, 2) == errno.EINVAL and "no rank 2" in tell(top)["refused"]
    with other_process(f"join(top, 0); {READY}", top) as other:
        assert errno_of(join, top, 0) == errno.EINVAL
        assert (
            tell(top)["refused"] == f"rank 0 has been joined by process {other.pid}, which is alive"
        )
        commit(top, 0)  # on behalf of the other process
    assert errno_of(commit, top, 0) == errno.EINVAL and "committed already" in tell(top)["refused"]
    assert errno_of(wait, top, timeout_ms=1) == errno.ETIMEDOUT
    assert errno_of(wait, top, "never") == errno.EINVAL
    call(top, "group.cancel", reason="disk full")
    assert (
        errno_of(commit, top, 1) == errno_of(wait, top) == errno.ECANCELED
        and tell(top)["error"] == "disk full"
    )
    create(top, 1, "close")
    assert errno_of(join, top, 0) == errno_of(commit, top, 0) == errno.EINVAL
    call(top, "group.cancel")
    create(top, 1, timeout="1ms")
    assert (
        errno_of(wait, top) == errno.ETIME
        and tell(top)["missing"] == []
        and "0" in tell(top)["error"]
    )


@pytest.mark.sweep
@needs_bridge
def test_others_may_look_only(top: Path) -> None:
    os.chmod(top, 0o755)
    create(top, 1)
    for forbidden in (
        lambda: create(top, 1),
        lambda: commit(top, 0),
        lambda: join(top, 0),
        lambda: call(top, "group.cancel"),
    ):
        assert errno_of(in_process, forbidden, ALICE) == errno.EACCES
    assert in_process(lambda: query(top)["state"], ALICE) == "open"
    call(top, "group.cancel")


@needs_bridge
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_c_program_takes_part(top: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "rank.c", tmp_path / "rank"
    source.write_text(r"""
#include <fcntl.h>
#include <stdio.h>
#include "aifs_ioctl.h"
int main(int argc, char **argv)
{
	struct aifs_call call;
	char json[64];
	long id;
	int version, fd = argc == 2 ? open(argv[1], O_RDONLY | O_DIRECTORY) : -1;
	if (aifs_do_call(fd, &call, "version", ""))
		return 1;
	if (sscanf(call.json, "{\"version\": %d}", &version) != 1 || version != AIFS_CALL_VERSION)
		return 2;
	if (aifs_do_call(fd, &call, "group",
			 "{\"name\": \"from c\", \"ranks\": 1, "
			 "\"commit\": \"explicit\", \"pending\": \"yes\"}"))
		return 3;
	if (sscanf(call.json, "{\"id\": %ld}", &id) != 1)
		return 4;
	snprintf(json, sizeof json, "{\"rank\": 0, \"id\": %ld}", id);
	if (aifs_do_call(fd, &call, "group.join", json))
		return 5;
	if (aifs_do_call(fd, &call, "group.commit", json))
		return 5;
	snprintf(json, sizeof json, "{\"for\": \"durable\", \"id\": %ld}", id);
	if (aifs_do_call(fd, &call, "group.wait", json) || aifs_do_call(fd, &call, "group.state", ""))
		return 6;
	return strstr(call.json, "\"state\": \"durable\"") ? 0 : 7;
}
""")
    headers = Path(ioctl.__file__).parents[1] / "fuse"
    subprocess.run(
        ["cc", "-Wall", "-Werror", f"-I{headers}", source, "-o", program],
        check=True,
        timeout=LIMIT_S,
    )
    (top / "file").write_bytes(b"x" * SIZE)
    assert subprocess.run([program, top], check=False, timeout=LIMIT_S).returncode == 0
    assert tell(top)["name"] == "from c" and tell(top)["pending"]


# --- death ----------------------------------------------------------------------------------------


@pytest.mark.sweep
@needs_bridge
@pytest.mark.parametrize("phase", ["joined", "writing", "written"])
def test_the_others_are_told_at_once_of_a_rank_that_dies(top: Path, phase: str) -> None:
    number = create(top, 3)
    write = {
        "joined": "",
        "writing": "f = open(top / '1', 'wb'); f.write(b'x' * 500_000); f.flush()",
        "written": "(top / '1').write_bytes(b'x' * 500_000)",
    }[phase]
    found: list[int] = []
    with other_process(f"join(top, 1)\n{write}\n{READY}", top) as other:
        join(top, 0)
        (top / "0").write_bytes(b"0" * SIZE)
        commit(top, 0)
        waiting = [
            threading.Thread(target=lambda: found.append(errno_of(wait, top, number=number)))
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        other.kill()
        for thread in waiting:
            thread.join(LIMIT_S)
    assert found == [errno.EOWNERDEAD] * 2
    told = tell(top)
    assert (told["state"], told["error"], told["dead"]) == (
        "failed",
        "rank 1 ended before it committed",
        1,
    )
    assert errno_of(commit, top, 2) == errno.EOWNERDEAD
    again = create(top, 3)
    assert again != number
    for rank in range(3):
        join(top, rank)
        commit(top, rank)
    wait(top, number=again)


@needs_bridge
def test_a_thread_that_ends_is_not_a_rank_that_dies(top: Path) -> None:
    create(top, 1)
    thread = threading.Thread(target=join, args=(top, 0))
    thread.start()
    thread.join()
    assert tell(top)["members"] == [{"rank": 0, "state": "joined", "pid": os.getpid()}]
    commit(top, 0)
    wait(top)


@pytest.mark.sweep
@needs_bridge
def test_a_rank_comes_back_within_its_grace(top: Path) -> None:
    create(top, 1, grace=f"{LIMIT_MS}ms")
    with other_process(f"join(top, 0); {READY}", top):
        pass
    until(lambda: tell(top)["members"][0]["state"] == "away")
    join(top, 0)
    commit(top, 0)
    wait(top)


@pytest.mark.sweep
@needs_bridge
def test_who_waits_may_be_interrupted(top: Path) -> None:
    create(top, 1)
    waits = (
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(5)); print('ready', flush=True); "
        "wait(top, timeout_ms=0)"
    )
    with other_process(waits, top) as other:
        other.send_signal(signal.SIGINT)
        assert other.wait(LIMIT_S) == 5
    commit(top, 0)
    wait(top)


# --- from mount to mount --------------------------------------------------------------------------


@needs_bridge
@pytest.mark.parametrize("end", ["unmount", "kill"])
def test_a_group_outlives_its_mount(mounted: Mounted, end: str) -> None:
    top = mounted.path / "step"
    top.mkdir()
    number = create(top, 2)
    data = os.urandom(SIZE)
    (top / "0").write_bytes(data)
    commit(top, 0)
    if end == "kill":
        mounted.kill()
        mounted.mount()
    else:
        mounted.remount()
    told = tell(top)
    assert (told["id"], told["state"], told["missing"], told["file_count"]) == (
        number,
        "open",
        [1],
        1,
    )
    join(top, 1)
    (top / "1").write_bytes(data)
    commit(top, 1, number)
    wait(top, number=number)
    assert (
        tell(top)["duplicate_bytes"] == SIZE
        and (top / "0").read_bytes() == (top / "1").read_bytes() == data
    )
