"""The driver for Kubernetes, called as kubelet and the provisioner call it.

Each case of csi-sanity (kubernetes-csi/csi-test) has its test here:

| cases | test |
|---|---|
| capabilities, plugin info, probe, node info | test_what_the_driver_says_of_itself |
| "should fail when no ... is provided", "... is not found" | test_calls_that_are_refused |
| "should succeed when an invalid ... id is used" | test_what_is_not_there_is_removed |
| create: no capacity, 1 GiB, twice, longest name | test_a_volume_is_made_once |
| create: existing name, different capacity | test_a_name_that_is_taken |
| create from snapshot, from volume; their absence | test_volumes_from_others |
| list volumes, list snapshots: tokens, pages, filters | test_lists_in_pages |
| create snapshot: twice, other source, longest name | test_snapshots |
| validate volume capabilities | test_capabilities_of_a_volume |
| expand by the controller, and on the node | test_a_volume_grows_while_it_is_used |
| node: should work, be idempotent, remove target path | test_a_pod_uses_a_volume |
| node stats: of a volume, of a wrong path | test_a_pod_uses_a_volume, test_calls_that_are_refused |
| controller publish, attach limits, lifecycle | test_what_the_driver_cannot_do (UNIMPLEMENTED) |
"""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("grpc")

import yaml
from grpc import StatusCode

from aifs.core import binds
from aifs.core.mountinfo import all_mounts
from aifs.csi import volumes
from aifs.csi.calls import CallRefused
from aifs.csi.controller import ControllerService
from aifs.csi.node import NodeService
from aifs.csi.volumes import Volumes
from scripts import chart
from tests.support.csi import Driver, Pod, capability, driver, request_of
from tests.support.hosts import until
from tests.support.mounts import TIMEOUT_S, Mounted, aifs
from tests.support.users import errno_of, in_process

PROCESSOR_S = 15.0
MIB, GIB = 1 << 20, 1 << 30
INVALID, MISSING = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND
ANY = [capability()]


@pytest.fixture(scope="module")
def csi(shared: Mounted) -> Iterator[Driver]:
    with TemporaryDirectory(prefix="aifs-csi-") as place:
        with driver(shared.path / "volumes", Path(place) / "csi.sock") as made:
            yield made


@pytest.fixture
def pod(csi: Driver, scratch: Path) -> Iterator[Callable[..., Pod]]:
    """A function that makes pods; afterwards nothing is mounted below ``scratch``."""
    scratch.chmod(0o755)
    yield lambda name, volume_id, **more: Pod(csi, scratch / name, volume_id, **more)
    left = [mount.mountpoint for mount in all_mounts() if f"{scratch}/" in mount.mountpoint]
    for path in left:
        subprocess.run(["umount", "-l", path], check=True)
    assert not left


def make(csi: Driver, name: str, size: int = 0, **fields: Any) -> str:
    range_ = {"required_bytes": size} if size else None
    made = csi.create_volume(
        name=name, capacity_range=range_, volume_capabilities=ANY, **fields
    ).volume
    assert made.capacity_bytes == size
    return str(made.volume_id)


def test_what_the_driver_says_of_itself(csi: Driver) -> None:
    info = csi.get_plugin_info()
    assert info.name == "csi.aifs" and info.vendor_version
    kinds = [it.WhichOneof("type") for it in csi.get_plugin_capabilities().capabilities]
    assert kinds == ["service", "volume_expansion"]
    assert csi.probe().ready.value
    assert csi.node_get_info().node_id == "node-1"
    assert len(csi.node_get_capabilities().capabilities) == 5
    assert len(csi.controller_get_capabilities().capabilities) == 8
    assert csi.get_capacity().available_capacity > 0
    block = {"block": {}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}}
    assert csi.get_capacity(volume_capabilities=[block]).available_capacity == 0


CALLS = [
    ("create_volume", {"volume_capabilities": ANY}, INVALID),
    ("create_volume", {"name": "x"}, INVALID),
    ("create_volume", {"name": "x", "volume_capabilities": [capability("UNKNOWN")]}, INVALID),
    ("create_volume", {"name": "x", "volume_capabilities": [{"block": {}}]}, INVALID),
    ("delete_volume", {}, INVALID),
    ("validate_volume_capabilities", {"volume_capabilities": ANY}, INVALID),
    ("validate_volume_capabilities", {"volume_id": "none"}, INVALID),
    ("validate_volume_capabilities", {"volume_id": "none", "volume_capabilities": ANY}, MISSING),
    ("list_volumes", {"starting_token": "invalid-token"}, StatusCode.ABORTED),
    ("list_volumes", {"max_entries": -1}, INVALID),
    ("list_snapshots", {"starting_token": "invalid-token"}, StatusCode.ABORTED),
    ("controller_expand_volume", {"capacity_range": {"required_bytes": GIB}}, INVALID),
    ("controller_expand_volume", {"volume_id": "none"}, INVALID),
    (
        "controller_expand_volume",
        {"volume_id": "none", "capacity_range": {"required_bytes": GIB}},
        MISSING,
    ),
    ("create_snapshot", {"source_volume_id": "none"}, INVALID),
    ("create_snapshot", {"name": "x"}, INVALID),
    ("create_snapshot", {"name": "x", "source_volume_id": "none"}, MISSING),
    ("delete_snapshot", {}, INVALID),
    ("node_stage_volume", {"staging_target_path": "/x", "volume_capability": ANY[0]}, INVALID),
    ("node_stage_volume", {"volume_id": "none", "volume_capability": ANY[0]}, INVALID),
    ("node_stage_volume", {"volume_id": "none", "staging_target_path": "/x"}, INVALID),
    (
        "node_stage_volume",
        {"volume_id": "none", "staging_target_path": "/x", "volume_capability": ANY[0]},
        MISSING,
    ),
    ("node_unstage_volume", {"staging_target_path": "/x"}, INVALID),
    ("node_unstage_volume", {"volume_id": "none"}, INVALID),
    ("node_publish_volume", {"target_path": "/x", "volume_capability": ANY[0]}, INVALID),
    ("node_publish_volume", {"volume_id": "none", "volume_capability": ANY[0]}, INVALID),
    ("node_publish_volume", {"volume_id": "none", "target_path": "/x"}, INVALID),
    (
        "node_publish_volume",
        {"volume_id": "none", "target_path": "/x", "volume_capability": ANY[0]},
        StatusCode.FAILED_PRECONDITION,
    ),
    (
        "node_publish_volume",
        {
            "volume_id": "../etc",
            "target_path": "/x",
            "staging_target_path": "/y",
            "volume_capability": ANY[0],
        },
        MISSING,
    ),
    ("node_unpublish_volume", {"target_path": "/x"}, INVALID),
    ("node_unpublish_volume", {"volume_id": "none"}, INVALID),
    ("node_get_volume_stats", {"volume_path": "some/path"}, INVALID),
    ("node_get_volume_stats", {"volume_id": "none"}, INVALID),
    ("node_get_volume_stats", {"volume_id": "none", "volume_path": "some/path"}, MISSING),
    ("node_expand_volume", {"volume_path": "some/path"}, INVALID),
    ("node_expand_volume", {"volume_id": "none"}, INVALID),
    ("node_expand_volume", {"volume_id": "none", "volume_path": "some/path"}, MISSING),
]


def test_calls_that_are_refused(csi: Driver) -> None:
    codes = [(name, fields, csi.code(name, **fields)) for name, fields, _ in CALLS]
    assert codes == CALLS


WRONG = [
    ({"parameters": {"colour": "red"}}, INVALID),
    ({"parameters": {"files": "many"}}, INVALID),
    ({"parameters": {"mode": "rwx"}}, INVALID),
    ({"parameters": {"layout": "kind=spiral"}}, INVALID),
    ({"capacity_range": {"required_bytes": -1}}, INVALID),
    ({"capacity_range": {"required_bytes": 2, "limit_bytes": 1}}, StatusCode.OUT_OF_RANGE),
    ({"volume_capabilities": [capability("SINGLE_NODE_WRITER", fs_type="ext4")]}, INVALID),
    ({"volume_capabilities": [capability("SINGLE_NODE_WRITER", "discard")]}, INVALID),
    ({"volume_content_source": {"volume": {"volume_id": "none"}}}, MISSING),
    ({"volume_content_source": {"snapshot": {"snapshot_id": "none"}}}, MISSING),
]


def test_volumes_that_cannot_be_made(csi: Driver) -> None:
    for fields, code in WRONG:
        fields = {"name": "wrong", "volume_capabilities": ANY, **fields}
        assert csi.code("create_volume", **fields) == code, fields
    assert "wrong" not in [it.volume.volume_id for it in csi.list_volumes().entries]


def test_what_the_driver_cannot_do(csi: Driver) -> None:
    """Attaching is no step of a filesystem that every node has mounted."""
    for name in ("ControllerPublishVolume", "ControllerModifyVolume"):
        assert csi.code_of_unknown(f"/csi.v1.Controller/{name}") == StatusCode.UNIMPLEMENTED


def test_what_is_not_there_is_removed(csi: Driver) -> None:
    for wrong in ("none", "..", "../volumes", "a/b", "x" * 300):
        csi.delete_volume(volume_id=wrong)
        csi.delete_snapshot(snapshot_id=wrong)
        csi.delete_snapshot(snapshot_id=f"{wrong}@{wrong}")
    csi.node_unpublish_volume(volume_id="none", target_path="/nowhere/at/all")
    csi.node_unstage_volume(volume_id="none", staging_target_path="/nowhere/at/all")


@pytest.mark.parametrize("name", ["pvc-1", "n" * 128, "ein Name mit ü/und ..", "name-1"])
def test_a_volume_is_made_once(csi: Driver, shared: Mounted, name: str) -> None:
    made = make(csi, name, GIB, parameters={"csi.storage.k8s.io/pvc/name": "data"})
    assert make(csi, name, GIB) == made and len(made) <= 128
    assert made == name or made.startswith("name-")
    assert os.listdir(shared.path / "volumes" / made) == ["data"]
    csi.delete_volume(volume_id=made)
    csi.delete_volume(volume_id=made)
    assert not (shared.path / "volumes" / made).exists()


def test_a_name_that_is_taken(csi: Driver) -> None:
    exactly = {"required_bytes": GIB, "limit_bytes": GIB}
    wanted = {"name": "taken", "volume_capabilities": ANY, "capacity_range": exactly}
    csi.create_volume(**wanted)
    for other in (
        {"capacity_range": {"required_bytes": 2 * GIB, "limit_bytes": 2 * GIB}},
        {"capacity_range": {"limit_bytes": MIB}},
        {"parameters": {"tier": "capacity"}},
        {"volume_content_source": {"volume": {"volume_id": "taken"}}},
    ):
        assert csi.code("create_volume", **{**wanted, **other}) == StatusCode.ALREADY_EXISTS
    csi.create_volume(**wanted)
    csi.delete_volume(volume_id="taken")


def test_a_pod_uses_a_volume(csi: Driver, pod: Callable[..., Pod]) -> None:
    volume_id = make(csi, "used", GIB)
    one = pod("one", volume_id)
    for _ in range(3):
        one.start()
    assert sum(mount.mountpoint == str(one.path) for mount in all_mounts()) == 1
    (one.path / "file").write_bytes(b"x" * MIB)
    in_process(lambda: (one.path / "of-another-user").touch(), uid=1000)
    usage = csi.node_get_volume_stats(volume_id=volume_id, volume_path=str(one.path))
    of_bytes, of_inodes = usage.usage
    assert (of_bytes.total, of_bytes.used) == (GIB, MIB)
    assert of_inodes.used > 0 and not usage.volume_condition.abnormal
    wrong = {"volume_id": "other", "volume_path": str(one.path)}
    assert csi.code("node_get_volume_stats", **wrong) == MISSING
    two = pod("two", volume_id)
    assert (two.start() / "file").stat().st_size == MIB
    for _ in range(2):
        one.end()
        two.end()
    assert not one.path.exists()
    csi.delete_volume(volume_id=volume_id)


def test_the_quota_of_a_volume(csi: Driver, pod: Callable[..., Pod]) -> None:
    volume_id = make(csi, "limited", MIB, parameters={"files": "2"})
    path = pod("limited", volume_id).start()
    assert errno_of((path / "large").write_bytes, b"x" * (2 * MIB)) == errno.EDQUOT
    (path / "second").touch()
    assert errno_of((path / "third").touch) == errno.EDQUOT
    pod("limited", volume_id).end()
    csi.delete_volume(volume_id=volume_id)


def test_a_volume_grows_while_it_is_used(csi: Driver, pod: Callable[..., Pod]) -> None:
    volume_id = make(csi, "growing", MIB)
    one = pod("growing", volume_id)
    path = one.start()
    grow = {"volume_id": volume_id, "capacity_range": {"required_bytes": 2 * MIB}}
    for _ in range(2):
        answer = csi.controller_expand_volume(**grow)
        assert answer.capacity_bytes == 2 * MIB and not answer.node_expansion_required
    on_node = csi.node_expand_volume(volume_id=volume_id, volume_path=str(path))
    assert on_node.capacity_bytes == 2 * MIB
    (path / "file").write_bytes(b"x" * (MIB + 1))
    smaller = {"volume_id": volume_id, "capacity_range": {"limit_bytes": MIB}}
    assert csi.code("controller_expand_volume", **smaller) == StatusCode.OUT_OF_RANGE
    one.end()
    csi.delete_volume(volume_id=volume_id)


def test_capabilities_of_a_volume(csi: Driver) -> None:
    volume_id = make(csi, "validated")
    ask = {"volume_id": volume_id, "volume_capabilities": ANY, "parameters": {"a": "b"}}
    confirmed = csi.validate_volume_capabilities(**ask).confirmed
    assert confirmed.volume_capabilities and confirmed.parameters == {"a": "b"}
    block = {"block": {}, "access_mode": {"mode": "SINGLE_NODE_WRITER"}}
    answer = csi.validate_volume_capabilities(volume_id=volume_id, volume_capabilities=[block])
    assert not answer.HasField("confirmed") and "block" in answer.message
    csi.delete_volume(volume_id=volume_id)


def test_volumes_from_others(csi: Driver, pod: Callable[..., Pod]) -> None:
    """A clone and a restored snapshot have the bytes of then, and go their own ways."""
    first = make(csi, "first", GIB)
    path = pod("first", first).start()
    (path / "file").write_text("then")
    snapshot = csi.create_snapshot(source_volume_id=first, name="then").snapshot
    (path / "file").write_text("later")
    sources = {
        "clone": ({"volume": {"volume_id": first}}, "later"),
        "restored": ({"snapshot": {"snapshot_id": snapshot.snapshot_id}}, "then"),
    }
    for name, (source, text) in sources.items():
        for _ in range(2):
            made = make(csi, name, GIB, volume_content_source=source)
        copy = pod(name, made).start()
        assert (copy / "file").read_text() == text
        (copy / "file").write_text("own")
        told = [it.volume for it in csi.list_volumes().entries if it.volume.volume_id == made]
        assert told[0].content_source.WhichOneof("type") == next(iter(source))
        pod(name, made).end()
        csi.delete_volume(volume_id=made)
    assert (path / "file").read_text() == "later"
    (path / "large").write_bytes(b"x" * (2 * MIB))
    for source, _ in sources.values():
        small = {"name": "small", "capacity_range": {"required_bytes": 3}}
        code = csi.code(
            "create_volume", volume_capabilities=ANY, volume_content_source=source, **small
        )
        assert code == StatusCode.OUT_OF_RANGE
    pod("first", first).end()
    csi.delete_volume(volume_id=first)
    source = {"snapshot": {"snapshot_id": snapshot.snapshot_id}}
    made = make(csi, "after", volume_content_source=source)  # it outlives its volume
    csi.delete_snapshot(snapshot_id=snapshot.snapshot_id)
    assert (pod("after", made).start() / "file").read_text() == "then"
    pod("after", made).end()
    csi.delete_volume(volume_id=made)


def test_snapshots(csi: Driver) -> None:
    one, two = make(csi, "one"), make(csi, "two")
    for name in ("backup", "s" * 128):
        made = csi.create_snapshot(source_volume_id=one, name=name).snapshot
        assert made.ready_to_use and made.creation_time.seconds and len(made.snapshot_id) <= 128
        assert csi.create_snapshot(source_volume_id=one, name=name).snapshot == made
        code = csi.code("create_snapshot", source_volume_id=two, name=name)
        assert code == StatusCode.ALREADY_EXISTS
        for _ in range(2):
            csi.delete_snapshot(snapshot_id=made.snapshot_id)
    wrong = {"source_volume_id": one, "name": "x", "parameters": {"colour": "red"}}
    assert csi.code("create_snapshot", **wrong) == INVALID
    csi.delete_volume(volume_id=one)
    csi.delete_volume(volume_id=two)


def test_a_volume_goes_with_snapshots_that_programs_made_in_it(
    csi: Driver, shared: Mounted, pod: Callable[..., Pod]
) -> None:
    volume_id = make(csi, "with-snapshots")
    path = pod("one", volume_id).start()
    for run in ("first", "second"):
        (path / run).mkdir()
        aifs("snapshot", "make", path / run, "before")
    pod("one", volume_id).end()
    csi.delete_volume(volume_id=volume_id)
    assert not (shared.path / "volumes" / volume_id).exists()


def test_lists_in_pages(csi: Driver) -> None:
    assert not csi.list_volumes().entries and not csi.list_snapshots().entries
    names = [f"listed-{number}" for number in range(5)]
    snapshots = []
    for name in names:
        make(csi, name, GIB)
        made = csi.create_snapshot(source_volume_id=name, name=f"of-{name}").snapshot
        snapshots.append(made.snapshot_id)
    first = csi.list_volumes(max_entries=2)
    assert [it.volume.volume_id for it in first.entries] == names[:2]
    assert first.entries[0].volume.capacity_bytes == GIB
    csi.delete_volume(volume_id=names[1])
    rest = csi.list_volumes(starting_token=first.next_token)
    assert [it.volume.volume_id for it in rest.entries] == names[2:] and not rest.next_token
    first = csi.list_snapshots(max_entries=2)
    rest = csi.list_snapshots(starting_token=first.next_token)
    found = [it.snapshot.snapshot_id for it in (*first.entries, *rest.entries)]
    assert found == snapshots and len(first.entries) == 2
    [only] = csi.list_snapshots(snapshot_id=snapshots[3]).entries
    assert only.snapshot.source_volume_id == names[3]
    [only] = csi.list_snapshots(source_volume_id=names[1]).entries  # which is gone
    assert only.snapshot.snapshot_id == snapshots[1]
    assert not csi.list_snapshots(snapshot_id="none").entries
    assert not csi.list_snapshots(source_volume_id="none").entries
    for name, snapshot in zip(names, snapshots, strict=True):
        csi.delete_volume(volume_id=name)
        csi.delete_snapshot(snapshot_id=snapshot)


def test_read_only_and_mount_options(csi: Driver, pod: Callable[..., Pod]) -> None:
    volume_id = make(csi, "options")
    (pod("writer", volume_id).start() / "file").touch()
    words = {"volume_capability": capability("MULTI_NODE_MULTI_WRITER", "nosuid", "noatime")}
    reader = pod("reader", volume_id, readonly=True, **words)
    path = reader.start()
    assert errno_of((path / "file").write_text, "x") == errno.EROFS
    [mount] = [it for it in all_mounts() if it.mountpoint == str(path)]
    assert {"ro", "nosuid", "noatime"} <= set(mount.options)
    reader.publish()
    with pytest.raises(Exception) as caught:
        pod("reader", volume_id).publish()
    assert caught.value.code() == StatusCode.ALREADY_EXISTS
    by_mode = pod("mode", volume_id, volume_capability=capability("MULTI_NODE_READER_ONLY"))
    assert errno_of((by_mode.start() / "file").write_text, "x") == errno.EROFS
    other = make(csi, "another")
    with pytest.raises(Exception) as caught:
        pod("writer", other).start()
    assert caught.value.code() == StatusCode.ALREADY_EXISTS
    for name in ("writer", "reader", "mode"):
        pod(name, volume_id).end()
    csi.delete_volume(volume_id=volume_id)
    csi.delete_volume(volume_id=other)


def test_a_single_writer(csi: Driver, pod: Callable[..., Pod]) -> None:
    volume_id = make(csi, "single")
    words = {"volume_capability": capability("SINGLE_NODE_SINGLE_WRITER")}
    pod("first", volume_id, **words).start()
    pod("first", volume_id, **words).publish()
    with pytest.raises(Exception) as caught:
        pod("second", volume_id, **words).start()
    assert caught.value.code() == StatusCode.FAILED_PRECONDITION
    pod("first", volume_id).end()
    pod("second", volume_id, **words).start()
    pod("second", volume_id).end()
    csi.delete_volume(volume_id=volume_id)


def test_a_volume_that_lives_as_long_as_its_pod(
    csi: Driver, shared: Mounted, pod: Callable[..., Pod]
) -> None:
    context = {"csi.storage.k8s.io/ephemeral": "true", "size": "1MiB", "mode": "0700"}
    scratch = pod("scratch", "csi-1", volume_context=context)
    scratch.path.parent.mkdir()
    for _ in range(2):
        scratch.publish()
    assert scratch.path.stat().st_mode & 0o7777 == 0o700
    assert errno_of((scratch.path / "large").write_bytes, b"x" * (2 * MIB)) == errno.EDQUOT
    assert not csi.list_volumes().entries
    for _ in range(2):
        scratch.unpublish()
    assert not os.listdir(shared.path / "volumes" / ".ephemeral")
    for wrong in ({"path": "x"}, {"uid": "0"}, {"size": "large"}, {"layout": "count=1"}):
        words = {"volume_context": {**context, **wrong}}
        with pytest.raises(Exception) as caught:
            pod("scratch", "csi-1", **words).publish()
        assert caught.value.code() == INVALID


def test_a_directory_that_is_there_already(
    csi: Driver, shared: Mounted, pod: Callable[..., Pod]
) -> None:
    """A PersistentVolume names it by its path; no symlink leads elsewhere."""
    (shared.path / "datasets/c4").mkdir(parents=True)
    (shared.path / "datasets/c4/shard").touch()
    (shared.path / "datasets/link").symlink_to("/etc")
    words = {"volume_context": {"path": "datasets/c4"}, "readonly": True}
    one = pod("static", "c4", **words)
    assert os.listdir(one.start()) == ["shard"]
    assert csi.node_get_volume_stats(volume_id="c4", volume_path=str(one.path)).usage
    one.end()
    for wrong in ("datasets/link", "datasets/none", "../../etc"):
        with pytest.raises(Exception):
            pod("static", "c4", volume_context={"path": wrong}).start()
    assert not one.path.exists()


def test_containers_get_the_mount_by_propagation(
    csi: Driver, scratch: Path, pod: Callable[..., Pod]
) -> None:
    """One that runs already sees a volume that comes later, and not what is gone."""
    volume_id = make(csi, "propagated")
    subprocess.run(["mount", "--bind", scratch, scratch], check=True)
    subprocess.run(["mount", "--make-rshared", scratch], check=True)
    command = ["unshare", "--mount", "--propagation", "slave", sys.executable, "-c"]
    ask = "import os\nwhile True:\n    path = input()\n    print(os.path.exists(path), flush=True)"
    container = subprocess.Popen(
        [*command, ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def sees(path: Path) -> bool:
        assert container.stdin and container.stdout
        print(path, file=container.stdin, flush=True)
        return container.stdout.readline() == "True\n"

    try:
        one = pod("one", volume_id)
        assert not sees(one.path / "file")
        (one.start() / "file").touch()
        assert sees(one.path / "file")
        one.end()
        assert not sees(one.path)
    finally:
        container.kill()
        container.communicate()
        subprocess.run(["umount", "-l", scratch], check=True)
    csi.delete_volume(volume_id=volume_id)


def test_many_calls_at_once(csi: Driver, pod: Callable[..., Pod]) -> None:
    """Each one succeeds, or is told to come again; what comes again succeeds."""
    together = threading.Barrier(8)

    def repeat(call: str, /, **fields: Any) -> set[StatusCode]:
        together.wait()
        return {csi.code(call, **fields) for _ in range(10)}

    one = pod("one", "busy")
    one.staging.mkdir(parents=True)
    volume, target = {"volume_id": "busy"}, {"target_path": str(one.path)}
    publish = {"volume_capability": ANY[0], "staging_target_path": str(one.staging)}
    for name, fields in (
        ("create_volume", {"name": "busy", "volume_capabilities": ANY}),
        ("create_snapshot", {"name": "busy", "source_volume_id": "busy"}),
        ("node_publish_volume", {**volume, **target, **publish}),
        ("node_unpublish_volume", {**volume, **target}),
        ("delete_volume", volume),
        ("delete_snapshot", {"snapshot_id": "busy@busy"}),
    ):
        with ThreadPoolExecutor(8) as threads:
            codes = set().union(*threads.map(lambda _: repeat(name, **fields), range(8)))
        assert codes <= {StatusCode.OK, StatusCode.ABORTED}, name
        assert csi.code(name, **fields) == StatusCode.OK
    assert not csi.list_volumes().entries and not csi.list_snapshots().entries


def test_two_controllers_at_once(csi: Driver, shared: Mounted) -> None:
    """As for a moment when one follows another: a volume is made by one of them, whole."""
    services = [ControllerService(Volumes(str(shared.path / "volumes"))) for _ in range(4)]
    together = threading.Barrier(len(services))
    wanted = {"volume_capabilities": ANY, "capacity_range": {"required_bytes": GIB}}

    def code(service: ControllerService, method: str, **fields: Any) -> StatusCode:
        together.wait()
        try:
            call(service, method, **fields)
        except CallRefused as error:
            return error.code
        return StatusCode.OK

    with ThreadPoolExecutor(len(services)) as threads:
        for number in range(10):
            name = f"both-{number}"
            for method, fields in (
                ("create_volume", {"name": name, **wanted}),
                ("delete_volume", {"volume_id": name}),
            ):
                asked = [threads.submit(code, it, method, **fields) for it in services]
                codes = {each.result() for each in asked}
                assert codes <= {StatusCode.OK, StatusCode.ABORTED}
                if method == "create_volume":
                    assert make(csi, name, GIB) == name
    assert not csi.list_volumes().entries and not os.listdir(shared.path / "volumes/.new")


def test_another_driver_goes_on(shared: Mounted, scratch: Path) -> None:
    """Its end by any signal breaks no mount, and the next one knows all that there was."""
    place = shared.path / "volumes", scratch / "csi.sock"
    first = Driver(*place, "--serve", "node")
    controller = Driver(place[0], scratch / "controller.sock", "--serve", "controller")
    volume_id = make(controller, "kept")
    with open(Pod(first, scratch, volume_id).start() / "file", "w") as file:
        for how in ("kill", "terminate"):
            first.end(how)
            file.write(how)
            file.flush()
            first = Driver(*place, "--serve", "node")
            Pod(first, scratch, volume_id).start()
    assert first.code("create_volume", name="x") == StatusCode.UNIMPLEMENTED
    assert (scratch / "mount/file").read_text() == "killterminate"
    Pod(first, scratch, volume_id).end()
    controller.delete_volume(volume_id=volume_id)
    controller.end()
    first.end()


def call(service: object, method: str, /, **fields: Any) -> Any:
    """Without a socket."""
    name = "".join(word.capitalize() for word in method.split("_"))
    return getattr(service, method)(request_of(name, **fields))


STEPS = {
    *("os.mkdir", "os.rename", "os.rmdir", "os.chmod", "os.chown", "os.setxattr"),
    "fcntl.ioctl",
}
"""Audit events of all that the driver changes, except mounts."""


def dies_at(step: int, function: Callable[[], Any]) -> bool:
    """Run it in a process that is killed before it changes something for the ``step``-th time.
    Returns whether it came that far."""
    pid = os.fork()
    if pid == 0:
        left = step

        def reach(event: str, *_: object) -> None:
            nonlocal left
            if event in STEPS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        bind = binds.bind

        def bind_and_reach(*args: Any) -> None:
            bind(*args)
            reach("os.mkdir")

        binds.bind = bind_and_reach
        sys.addaudithook(reach)
        try:
            function()
        except BaseException:  # noqa: BLE001 - the parent sees it
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_a_driver_that_is_killed_at_any_step(shared: Mounted, scratch: Path) -> None:
    """The same call again, to the next driver, finds or finishes what was begun; and nothing else
    is left."""
    directory = shared.path / "killed"
    place = Volumes(str(directory))
    controller, node = ControllerService(place), NodeService(place, "node-1")
    target, staging = scratch / "mount", scratch / "staging"
    parameters = {"files": "5", "mode": "0750", "uid": "7", "tier": "capacity"}
    wanted = {"name": "a", "volume_capabilities": ANY, "parameters": parameters}
    clone = {"name": "b", "volume_content_source": {"volume": {"volume_id": "a"}}}
    mounted = {"staging_target_path": str(staging), "target_path": str(target)}
    ephemeral = {"csi.storage.k8s.io/ephemeral": "true", "size": "1MiB"}
    publish = {"volume_capability": ANY[0], **mounted}
    of_pod = {"volume_id": "csi-1", "volume_context": ephemeral, **publish}
    small, larger = ({"capacity_range": {"required_bytes": size}} for size in (MIB, GIB))
    for service, name, fields in (
        (controller, "create_volume", {**small, **wanted}),
        (controller, "create_volume", {"volume_capabilities": ANY, **clone}),
        (controller, "create_snapshot", {"name": "s", "source_volume_id": "a"}),
        (controller, "controller_expand_volume", {"volume_id": "a", **larger}),
        (node, "node_publish_volume", {"volume_id": "a", "readonly": True, **publish}),
        (node, "node_unpublish_volume", {"volume_id": "a", "target_path": str(target)}),
        (node, "node_publish_volume", of_pod),
        (node, "node_unpublish_volume", {"volume_id": "csi-1", "target_path": str(target)}),
        (controller, "delete_volume", {"volume_id": "a"}),
        (controller, "delete_snapshot", {"snapshot_id": "s@a"}),
        (controller, "delete_volume", {"volume_id": "b"}),
    ):
        step = 0
        while dies_at(step, lambda: call(service, name, **fields)):
            step += 1
        assert step > 0, name
        first = call(service, name, **fields)
        assert call(service, name, **fields) == first
    assert not target.exists()
    for left in ("", ".new", ".ephemeral", ".snapshots"):
        assert not [it for it in os.listdir(directory / left) if it[0] != "."]


def test_a_daemon_that_dies_or_hangs(
    mounted: Mounted, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Volumes(str(mounted.path / "volumes"))
    controller, node = ControllerService(place), NodeService(place, "node-1")
    call(controller, "create_volume", name="a", volume_capabilities=ANY)
    mounts = {"volume_id": "a", "target_path": str(scratch / "pod")}
    publish = {"volume_capability": ANY[0], "staging_target_path": "/x", **mounts}
    look = {"volume_id": "a", "volume_path": str(scratch / "pod")}
    call(node, "node_publish_volume", **publish)

    monkeypatch.setattr(volumes, "ANSWER_S", 0.2)
    mounted.signal(signal.SIGSTOP)
    assert call(node, "node_get_volume_stats", **look).volume_condition.abnormal
    with pytest.raises(CallRefused, match="has not answered"):
        call(controller, "list_volumes")
    call(node, "node_unpublish_volume", **mounts)
    mounted.signal(signal.SIGCONT)
    monkeypatch.setattr(volumes, "ANSWER_S", 10.0)
    call(node, "node_publish_volume", **publish)

    mounted.kill()
    condition = call(node, "node_get_volume_stats", **look).volume_condition
    assert condition.abnormal
    with pytest.raises(CallRefused, match="lies in no AIFS mount"):
        call(node, "node_publish_volume", **publish)
    mounted.mount()
    call(node, "node_publish_volume", **publish)  # in place of the dead one
    assert errno_of((scratch / "pod/file").touch) == 0
    mounted.kill()
    call(node, "node_unpublish_volume", **mounts)
    assert not (scratch / "pod").exists()
    mounted.mount()
    call(controller, "delete_volume", volume_id="a")


def pod_of(name: str, text: str) -> dict[str, Any]:
    """The template of the pods of a DaemonSet, Deployment or Job in manifests."""
    [found] = [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(text)
        if document["metadata"]["name"] == name and "template" in document.get("spec", ())
    ]
    return found


@pytest.mark.sweep
def test_the_job_that_resumes(csi: Driver, pod: Callable[..., Pod], scratch: Path) -> None:
    """The program of the example, on a volume, of which it sees nothing above: its second run goes
    on where the first one was ended."""
    pytest.importorskip("torch")
    text = (chart.CHART.parent / "examples/training.yaml").read_text()
    [config, *_] = yaml.safe_load_all(text)
    program = scratch / "train.py"
    program.write_text(config["data"]["train.py"])
    [container] = pod_of("train", text)["containers"]
    assert container["args"][-4] == "/program/train.py"
    volume_id = make(csi, "training")
    runs = pod("training", volume_id).start()
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    for steps, begins in (("2", 0), ("4", 2)):
        done = subprocess.run(
            [*words, program, runs / "first", steps, "2"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"begins at step {begins}") == 2
    assert sorted(os.listdir(runs / "first"))[-2:] == ["step-2", "step-4"]
    pod("training", volume_id).end()
    csi.delete_volume(volume_id=volume_id)


@pytest.mark.long
def test_an_environment_from_an_init_container(
    csi: Driver, pod: Callable[..., Pod], scratch: Path
) -> None:
    """The programs of the example, on a volume, but for the packages."""
    text = (chart.CHART.parent / "examples/environment.yaml").read_text()
    template = pod_of("evaluate", text)
    volume_id = make(csi, "environment")
    runs = pod("volume", volume_id).start()
    (scratch / "requirements.txt").write_text("nothing")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = []
    for container in (*template["initContainers"], *template["containers"]) * 2:
        [program] = container["args"]
        for name, place in (
            ("/runs", runs),
            ("/program", scratch),
            ("/chosen", scratch),
            ("pip install -r", "sh -c 'echo made >&2; touch $AIFS_ENV/here'"),
            ("'import einops'", "'import sys; print(sys.prefix)'"),
        ):
            program = program.replace(name, str(place))
        command = [*container["command"], program]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
        assert done.returncode == 0, done.stderr
        said.append((done.stdout, "made" in done.stderr))
    environment = (scratch / "environment").read_text()
    assert said == [("", True), (environment, False), ("", False), (environment, False)]
    pod("volume", volume_id).end()
    csi.delete_volume(volume_id=volume_id)


class DaemonPod:
    """The program of the pod of a node's daemon, with a store of one host below ``place``."""

    def __init__(self, place: Path, options: str) -> None:
        [container] = pod_of("aifs-daemon", chart.render())["containers"]
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NODE_NAME": "node-1",
            "AIFS_STORE": str(place / "store"),
            "AIFS_DIRECTORY": str(place),
            "AIFS_OPTIONS": options,
        }
        command = [*container["command"], *container["args"]]
        self.mountpoint = place / "mnt"
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        until(lambda: errno_of(self.daemon) == 0, "it is mounted")

    def daemon(self) -> int:
        """Its pid."""
        return int(json.loads(os.getxattr(self.mountpoint, "user.aifs.status"))["pid"])

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        assert os.listdir(self.mountpoint) == []


@pytest.mark.sweep
def test_the_pod_of_the_daemon(scratch: Path) -> None:
    """It ends when the mount does. The next one mounts in place of the dead mount, and unmounts
    when it is told to end."""
    aifs("format", scratch / "store")
    first = DaemonPod(scratch, "kernel.restarts=0")
    os.kill(first.daemon(), signal.SIGKILL)
    first.process.wait(TIMEOUT_S)
    second = DaemonPod(scratch, "")
    (second.mountpoint / "file").touch()
    second.end()
    aifs("fsck", scratch / "store")


@pytest.mark.sweep
def test_the_pod_of_a_daemon_that_is_followed_by_another(scratch: Path) -> None:
    """The mount goes on, and so does a pod's volume."""
    aifs("format", scratch / "store")
    pod = DaemonPod(scratch, "noatime")
    place = Volumes(str(pod.mountpoint / "volumes"))
    call(ControllerService(place), "create_volume", name="a", volume_capabilities=ANY)
    node, target = NodeService(place, "node-1"), str(scratch / "volume")
    volume = {"volume_id": "a", "target_path": target}
    publish = {"staging_target_path": "/x", "volume_capability": ANY[0], **volume}
    call(node, "node_publish_volume", **publish)
    with open(scratch / "volume/file", "w") as file:
        before = pod.daemon()
        os.kill(before, signal.SIGKILL)
        file.write("still here")
    assert (scratch / "volume/file").read_text() == "still here"
    assert pod.daemon() != before and pod.process.poll() is None
    call(node, "node_publish_volume", **publish)
    call(node, "node_unpublish_volume", **volume)
    pod.end()
    aifs("fsck", scratch / "store")


@pytest.mark.sweep
def test_a_daemon_beside_the_program(scratch: Path) -> None:
    """The example without the driver: it formats its store once, and unmounts at its end."""
    text = (chart.CHART.parent / "examples/sidecar.yaml").read_text()
    [container] = yaml.safe_load(text)["spec"]["initContainers"]
    [program] = container["args"]
    mountpoint = scratch / "mount/mnt"
    program = program.replace("/store", str(scratch / "store"))
    program = program.replace("/aifs/mnt", str(mountpoint))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (scratch / "store").mkdir()
    for before in ([], ["file"]):
        command = [*container["command"], program]
        daemon = subprocess.Popen(
            command, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL
        )
        until(lambda: os.path.ismount(mountpoint), "it is mounted")
        assert [name for name in os.listdir(mountpoint) if name == "file"] == before
        (mountpoint / "file").touch()
        daemon.terminate()
        assert daemon.wait(TIMEOUT_S) == 0
    assert not os.path.ismount(mountpoint)
    aifs("fsck", scratch / "store")
