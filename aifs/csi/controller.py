"""The service that makes and removes volumes and snapshots, for a whole cluster."""

from typing import Any

from grpc import StatusCode

from aifs.csi import csi_pb2
from aifs.csi.asked import capacity, is_within, obstacle, own, page, require_usable
from aifs.csi.calls import CallRefused, VolumeTurns
from aifs.csi.volumes import Snapshot, Volume, Volumes, VolumeWanted, identifier

_Type = csi_pb2.ControllerServiceCapability.RPC.Type
_CAN = (
    _Type.CREATE_DELETE_VOLUME,
    _Type.LIST_VOLUMES,
    _Type.GET_CAPACITY,
    _Type.CREATE_DELETE_SNAPSHOT,
    _Type.LIST_SNAPSHOTS,
    _Type.CLONE_VOLUME,
    _Type.EXPAND_VOLUME,
    _Type.SINGLE_NODE_MULTI_WRITER,
)


class ControllerService:
    def __init__(self, volumes: Volumes) -> None:
        self._volumes = volumes
        self._turns = VolumeTurns()

    def controller_get_capabilities(self, request: Any) -> Any:
        can = csi_pb2.ControllerServiceCapability
        return csi_pb2.ControllerGetCapabilitiesResponse(
            capabilities=[can(rpc=can.RPC(type=kind)) for kind in _CAN]
        )

    # --- volumes ---

    def create_volume(self, request: Any) -> Any:
        """A volume of this name is there already: it is the answer if it is as it is wanted, else
        ALREADY_EXISTS."""
        require_usable(*request.volume_capabilities)
        asked = request.volume_content_source
        source = {
            None: ("", ""),
            "volume": ("volume", asked.volume.volume_id),
            "snapshot": ("snapshot", asked.snapshot.snapshot_id),
        }[asked.WhichOneof("type")]
        wanted = VolumeWanted(capacity(request.capacity_range), own(request.parameters), source)
        volume_id = identifier(request.name)
        with self._turns.take(volume_id):
            found = self._volumes.find(volume_id)
            if found is None:
                found = self._volumes.make(volume_id, wanted)
            elif not is_within(found.size, request.capacity_range) or found.made_by != {
                "parameters": wanted.parameters,
                "source": list(source),
            }:
                reason = f"{volume_id} has {found.size} bytes, and was made by {found.made_by}"
                raise CallRefused(StatusCode.ALREADY_EXISTS, reason)
        return csi_pb2.CreateVolumeResponse(volume=_told(found))

    def delete_volume(self, request: Any) -> Any:
        with self._turns.take(request.volume_id):
            self._volumes.remove(request.volume_id)
        return csi_pb2.DeleteVolumeResponse()

    def controller_expand_volume(self, request: Any) -> Any:
        size = capacity(request.capacity_range)
        with self._turns.take(request.volume_id):
            now = self._volumes.grow(self._require(request.volume_id), size)
        if now and request.capacity_range.limit_bytes and now > request.capacity_range.limit_bytes:
            raise CallRefused(StatusCode.OUT_OF_RANGE, f"the volume has {now} bytes already")
        return csi_pb2.ControllerExpandVolumeResponse(capacity_bytes=now or size)

    def validate_volume_capabilities(self, request: Any) -> Any:
        self._require(request.volume_id)
        reasons = [obstacle(one) for one in request.volume_capabilities]
        answer = csi_pb2.ValidateVolumeCapabilitiesResponse()
        answer.message = "; ".join(filter(None, reasons))
        if not answer.message:
            answer.confirmed.volume_context.update(request.volume_context)
            answer.confirmed.volume_capabilities.extend(request.volume_capabilities)
            answer.confirmed.parameters.update(request.parameters)
        return answer

    def list_volumes(self, request: Any) -> Any:
        names, token = page(self._volumes.names(), request)
        found = filter(None, map(self._volumes.find, names))
        entry = csi_pb2.ListVolumesResponse.Entry
        return csi_pb2.ListVolumesResponse(
            entries=[entry(volume=_told(volume)) for volume in found], next_token=token
        )

    def get_capacity(self, request: Any) -> Any:
        """The bytes that are free in the store: a volume is a limit, and reserves nothing."""
        usable = not any(map(obstacle, request.volume_capabilities))
        free = self._volumes.free_bytes() if usable else 0
        return csi_pb2.GetCapacityResponse(available_capacity=free)

    def _require(self, volume_id: str) -> Volume:
        found = self._volumes.find(volume_id)
        if found is None:
            raise CallRefused(StatusCode.NOT_FOUND, f"there is no volume {volume_id}")
        return found

    # --- snapshots ---

    def create_snapshot(self, request: Any) -> Any:
        if own(request.parameters):
            raise CallRefused(StatusCode.INVALID_ARGUMENT, "snapshots have no parameters")
        with self._turns.take(f"snapshot {request.name}"):
            made = self._volumes.snapshot(request.source_volume_id, request.name)
        return csi_pb2.CreateSnapshotResponse(snapshot=_told_snapshot(made))

    def delete_snapshot(self, request: Any) -> Any:
        with self._turns.take(request.snapshot_id):
            self._volumes.remove_snapshot(request.snapshot_id)
        return csi_pb2.DeleteSnapshotResponse()

    def list_snapshots(self, request: Any) -> Any:
        wanted, of = request.snapshot_id, request.source_volume_id
        names, token = page(
            (
                name
                for name in self._volumes.snapshots()
                if wanted in ("", name) and of in ("", name.partition("@")[2])
            ),
            request,
        )
        found = filter(None, map(self._volumes.find_snapshot, names))
        entry = csi_pb2.ListSnapshotsResponse.Entry
        return csi_pb2.ListSnapshotsResponse(
            entries=[entry(snapshot=_told_snapshot(one)) for one in found], next_token=token
        )


def _told(volume: Volume) -> Any:
    told = csi_pb2.Volume(volume_id=volume.id, capacity_bytes=volume.size)
    kind, source = volume.made_by.get("source", ("", ""))
    if kind == "volume":
        told.content_source.volume.volume_id = source
    elif kind == "snapshot":
        told.content_source.snapshot.snapshot_id = source
    return told


def _told_snapshot(snapshot: Snapshot) -> Any:
    told = csi_pb2.Snapshot(
        snapshot_id=snapshot.id, source_volume_id=snapshot.volume, ready_to_use=True
    )
    told.creation_time.FromNanoseconds(snapshot.made_ns)
    return told
