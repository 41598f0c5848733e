"""The service that gives pods of one node their volumes, by bind mounts."""

import errno
import os
from contextlib import suppress
from typing import Any

from grpc import StatusCode

from aifs.core import binds
from aifs.core.mountinfo import FSTYPE
from aifs.core.units import parse_size
from aifs.csi import csi_pb2
from aifs.csi.asked import READ_ONLY, SINGLE_WRITER, own, require_usable
from aifs.csi.calls import CallRefused, VolumeTurns
from aifs.csi.volumes import EPHEMERAL, Volumes, VolumeWanted

_IS_EPHEMERAL = "csi.storage.k8s.io/ephemeral"

_OF_PODS = ("size", "files", "mode")
"""Parameters that a pod may give a volume that lives as long as the pod."""
_OF_ADMINISTRATORS = ("path",)
"""Parameters of a PersistentVolume alone: the path of a directory that is there already."""

_Type = csi_pb2.NodeServiceCapability.RPC.Type
_CAN = (
    _Type.STAGE_UNSTAGE_VOLUME,
    _Type.GET_VOLUME_STATS,
    _Type.EXPAND_VOLUME,
    _Type.VOLUME_CONDITION,
    _Type.SINGLE_NODE_MULTI_WRITER,
)


class NodeService:
    def __init__(self, volumes: Volumes, name: str) -> None:
        self._volumes = volumes
        self._name = name
        self._turns = VolumeTurns()

    def node_get_info(self, request: Any) -> Any:
        return csi_pb2.NodeGetInfoResponse(node_id=self._name)

    def node_get_capabilities(self, request: Any) -> Any:
        can = csi_pb2.NodeServiceCapability
        return csi_pb2.NodeGetCapabilitiesResponse(
            capabilities=[can(rpc=can.RPC(type=kind)) for kind in _CAN]
        )

    # --- staging ---

    def node_stage_volume(self, request: Any) -> Any:
        """The volume can be mounted. Nothing is mounted at the staging path: pods mount what the
        daemon serves now, not what it served when the first pod came."""
        require_usable(request.volume_capability)
        os.close(self._volumes.open(self._root(request)))
        return csi_pb2.NodeStageVolumeResponse()

    def node_unstage_volume(self, request: Any) -> Any:
        """Drain the bytes that this node alone has, as its last pod is gone: then other nodes do
        not need it. Does not wait for the drain."""
        with suppress(OSError, CallRefused):
            self._volumes.drain(request.volume_id)
        return csi_pb2.NodeUnstageVolumeResponse()

    # --- publishing ---

    def node_publish_volume(self, request: Any) -> Any:
        require_usable(request.volume_capability)
        mode = request.volume_capability.access_mode.mode
        options = {*request.volume_capability.mount.mount_flags} - {"rw"}
        if request.readonly or mode in READ_ONLY:
            options.add("ro")
        with self._turns.take(request.volume_id):
            root = self._root(request)
            if self._is_published(request.target_path, root, "ro" in options):
                return csi_pb2.NodePublishVolumeResponse()
            device = self._volumes.mount().device
            others = binds.bound_elsewhere(device, root, request.target_path)
            if mode == SINGLE_WRITER and others:
                raise CallRefused(StatusCode.FAILED_PRECONDITION, f"it is mounted at {others[0]}")
            directory = self._volumes.open(root)
            try:
                binds.bind(directory, request.target_path, options)
            finally:
                os.close(directory)
        return csi_pb2.NodePublishVolumeResponse()

    def _is_published(self, target: str, root: str, is_read_only: bool) -> bool:
        """Raises CallRefused (ALREADY_EXISTS) if something else is there."""
        there = binds.bound_at(target)
        if there is None:
            return False
        if (there.fstype, there.root) != (FSTYPE, root):
            raise CallRefused(StatusCode.ALREADY_EXISTS, f"{target}: {there.root} is mounted there")
        if there.device != self._volumes.mount().device:  # of a daemon that has died
            binds.unbind(target)
            return False
        if ("ro" in there.options) != is_read_only:
            raise CallRefused(StatusCode.ALREADY_EXISTS, f"{target}: it is mounted there otherwise")
        return True

    def node_unpublish_volume(self, request: Any) -> Any:
        """Needs no daemon, except to remove a volume that lives as long as its pod: without one
        that is left."""
        with self._turns.take(request.volume_id):
            there = binds.bound_at(request.target_path)
            binds.unbind(request.target_path)
            if there is None or f"/{EPHEMERAL}/" in there.root:
                with suppress(CallRefused):
                    self._volumes.remove(request.volume_id, EPHEMERAL)
        return csi_pb2.NodeUnpublishVolumeResponse()

    def _root(self, request: Any) -> str:
        """The path of the volume's directory in the mount, which is made for a pod's own volume.
        Raises CallRefused: NOT_FOUND, INVALID_ARGUMENT, FAILED_PRECONDITION."""
        words, volume_id = own(request.volume_context), request.volume_id
        if request.volume_context.get(_IS_EPHEMERAL) == "true":
            _require_only(words, _OF_PODS)
            if self._volumes.find(volume_id, EPHEMERAL) is None:
                size = _size(words.pop("size", "0"))
                self._volumes.make(volume_id, VolumeWanted(size, words), EPHEMERAL)
            return self._volumes.root(volume_id, EPHEMERAL)
        _require_only(words, _OF_ADMINISTRATORS)
        if not request.staging_target_path:
            raise CallRefused(StatusCode.FAILED_PRECONDITION, "staging_target_path is missing")
        if path := words.get("path"):
            return self._volumes.root_of(path)
        if self._volumes.find(volume_id) is None:
            raise CallRefused(StatusCode.NOT_FOUND, f"there is no volume {volume_id}")
        return self._volumes.root(volume_id)

    # --- what is mounted ---

    def node_get_volume_stats(self, request: Any) -> Any:
        answer = csi_pb2.NodeGetVolumeStatsResponse()
        self._require_published(request)
        try:
            self._volumes.mount()
            found = os.statvfs(request.volume_path)
        except (OSError, CallRefused) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOTCONN:
                raise
            answer.volume_condition.abnormal = True
            answer.volume_condition.message = str(error)
            return answer
        answer.volume_condition.message = "the mount serves"
        unit = csi_pb2.VolumeUsage.Unit
        block = found.f_frsize
        for kind, size, total, free, available in (
            (unit.BYTES, block, found.f_blocks, found.f_bfree, found.f_bavail),
            (unit.INODES, 1, found.f_files, found.f_ffree, found.f_favail),
        ):
            usage = answer.usage.add(unit=kind, total=total * size, used=(total - free) * size)
            usage.available = available * size
        return answer

    def node_expand_volume(self, request: Any) -> Any:
        """Its quota is all that limits a volume, and the controller has raised that."""
        self._require_published(request)
        found = self._volumes.find(request.volume_id)
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=found.size if found else 0)

    def _require_published(self, request: Any) -> None:
        """Raises CallRefused (NOT_FOUND) unless the volume is mounted at the path, by a daemon that
        may have died."""
        there = binds.bound_at(request.volume_path)
        root = there.root if there is not None and there.fstype == FSTYPE else ""
        if not root or self._volumes.id_of(root) not in ("", request.volume_id):
            reason = f"{request.volume_path}: {request.volume_id} is not mounted there"
            raise CallRefused(StatusCode.NOT_FOUND, reason)


def _require_only(words: dict[str, str], known: tuple[str, ...]) -> None:
    for key in words:
        if key not in known:
            reason = f"there is no attribute {key}; there are: {' '.join(known)}"
            raise CallRefused(StatusCode.INVALID_ARGUMENT, reason)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise CallRefused(StatusCode.INVALID_ARGUMENT, f"size: {error}") from None
