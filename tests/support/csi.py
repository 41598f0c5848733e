"""A client of the driver for Kubernetes: what kubelet and the provisioner call, over its socket."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from grpc import StatusCode

from aifs.csi import csi_pb2
from tests.support.mounts import ROOT, TIMEOUT_S

_METHODS = {
    method.name: method
    for service in csi_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def capability(mode: str = "MULTI_NODE_MULTI_WRITER", *flags: str, **mount: str) -> dict[str, Any]:
    """Of a volume that is mounted."""
    return {"mount": {"mount_flags": flags, **mount}, "access_mode": {"mode": mode}}


def request_of(call: str, /, **fields: Any) -> Any:
    return message_factory.GetMessageClass(_METHODS[call].input_type)(**fields)


class Driver:
    """A driver in a process of its own. Calls are attributes: ``create_volume(name=...)``."""

    def __init__(self, directory: Path, socket: Path, *options: str) -> None:
        words = ["csi", str(directory), "--endpoint", f"unix://{socket}", "--node", "node-1"]
        command = [sys.executable, "-m", "aifs.cli.main", *words, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        grpc.channel_ready_future(self._channel).result(TIMEOUT_S)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = _METHODS["".join(word.capitalize() for word in name.split("_"))]

        def call(**fields: Any) -> Any:
            stub = self._channel.unary_unary(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(
                    method.output_type
                ).FromString,
            )
            return stub(request_of(method.name, **fields), timeout=TIMEOUT_S)

        return call

    def code(self, call: str, /, **fields: Any) -> StatusCode:
        """The code that a call ends with."""
        try:
            getattr(self, call)(**fields)
        except grpc.RpcError as error:
            return error.code()
        return StatusCode.OK

    def code_of_unknown(self, path: str) -> StatusCode:
        """The code of a call that is not in our part of the interface."""
        try:
            self._channel.unary_unary(path)(b"")
        except grpc.RpcError as error:
            return error.code()
        return StatusCode.OK

    def end(self, how: str = "terminate") -> str:
        """``terminate`` or ``kill`` it; returns what it has said."""
        self._channel.close()
        getattr(self.process, how)()
        said = self.process.communicate(timeout=TIMEOUT_S)[1].decode()
        assert self.process.returncode == (0 if how == "terminate" else -9), said
        assert not re.search("Traceback", said), said
        return said


@contextmanager
def driver(directory: Path, socket: Path, *options: str) -> Iterator[Driver]:
    """One that ends with the context, if it has not ended before."""
    made = Driver(directory, socket, *options)
    try:
        yield made
        if made.process.returncode is None:
            made.end()
    finally:
        if made.process.returncode is None:
            made.process.kill()
            made.process.communicate()


class Pod:
    """A pod's volume as kubelet handles it: staged, mounted at ``path``, and given back."""

    def __init__(self, node: Any, place: Path, volume_id: str, **more: Any) -> None:
        self._node = node
        self.path = place / "mount"
        self.staging = place / "globalmount"
        self._volume = {"volume_id": volume_id}
        self._words = {"volume_capability": capability(), **more}

    def stage(self) -> None:
        self.staging.mkdir(parents=True, exist_ok=True)
        words = {key: it for key, it in self._words.items() if key != "readonly"}
        self._node.node_stage_volume(staging_target_path=str(self.staging), **self._volume, **words)

    def publish(self) -> Path:
        self._node.node_publish_volume(
            staging_target_path=str(self.staging),
            target_path=str(self.path),
            **self._volume,
            **self._words,
        )
        return self.path

    def start(self) -> Path:
        self.stage()
        return self.publish()

    def unpublish(self) -> None:
        self._node.node_unpublish_volume(target_path=str(self.path), **self._volume)

    def end(self) -> None:
        self.unpublish()
        self._node.node_unstage_volume(staging_target_path=str(self.staging), **self._volume)
