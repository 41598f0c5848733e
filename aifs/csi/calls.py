"""Calls of the interface: a service's methods as gRPC handlers, errors as gRPC codes, and one call
at a time for each volume."""

import errno
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf import message_factory
from grpc import StatusCode

from aifs.csi import csi_pb2

_logger = logging.getLogger(__name__)

_REQUIRED = {
    "CreateVolume": ("name", "volume_capabilities"),
    "DeleteVolume": ("volume_id",),
    "ValidateVolumeCapabilities": ("volume_id", "volume_capabilities"),
    "ControllerExpandVolume": ("volume_id", "capacity_range"),
    "CreateSnapshot": ("name", "source_volume_id"),
    "DeleteSnapshot": ("snapshot_id",),
    "NodeStageVolume": ("volume_id", "staging_target_path", "volume_capability"),
    "NodeUnstageVolume": ("volume_id", "staging_target_path"),
    "NodePublishVolume": ("volume_id", "target_path", "volume_capability"),
    "NodeUnpublishVolume": ("volume_id", "target_path"),
    "NodeGetVolumeStats": ("volume_id", "volume_path"),
    "NodeExpandVolume": ("volume_id", "volume_path"),
}
"""The fields without which a call is refused (INVALID_ARGUMENT)."""

_CODES = {
    errno.EACCES: StatusCode.PERMISSION_DENIED,
    errno.EBUSY: StatusCode.FAILED_PRECONDITION,
    errno.EDQUOT: StatusCode.RESOURCE_EXHAUSTED,
    errno.EEXIST: StatusCode.ALREADY_EXISTS,
    errno.EINVAL: StatusCode.INVALID_ARGUMENT,
    errno.ENOENT: StatusCode.NOT_FOUND,
    errno.ENOSPC: StatusCode.RESOURCE_EXHAUSTED,
    errno.ENOTCONN: StatusCode.UNAVAILABLE,
    errno.EPERM: StatusCode.PERMISSION_DENIED,
    errno.EROFS: StatusCode.FAILED_PRECONDITION,
}
"""Of errors of the mount; others are INTERNAL."""


class CallRefused(Exception):
    """A call is answered with this code, and with the reason."""

    def __init__(self, code: StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class VolumeTurns:
    """One call at a time for each volume."""

    def __init__(self) -> None:
        self._held = dict[str, object]()

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Raises CallRefused (ABORTED: the caller comes again) while another call has this name."""
        mine = object()
        if self._held.setdefault(name, mine) is not mine:  # which is one step for all threads
            raise CallRefused(StatusCode.ABORTED, f"{name}: another call is in progress")
        try:
            yield
        finally:
            del self._held[name]


def handlers(service: object) -> grpc.GenericRpcHandler:
    """Those of an object of the class NAMEService: ``create_volume`` answers CreateVolume."""
    name = type(service).__name__.removesuffix("Service")
    described = csi_pb2.DESCRIPTOR.services_by_name[name]
    return grpc.method_handlers_generic_handler(
        described.full_name,
        {
            method.name: grpc.unary_unary_rpc_method_handler(
                partial(_answer, method.name, getattr(service, _snake(method.name))),
                message_factory.GetMessageClass(method.input_type).FromString,
                message_factory.GetMessageClass(method.output_type).SerializeToString,
            )
            for method in described.methods
        },
    )


def _snake(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


def _answer(
    name: str, method: Callable[[Any], Any], request: Any, context: grpc.ServicerContext
) -> Any:
    try:
        given = {field.name for field, _ in request.ListFields()}
        for field in _REQUIRED.get(name, ()):
            if field not in given:
                raise CallRefused(StatusCode.INVALID_ARGUMENT, f"{field} is missing")
        return method(request)
    except CallRefused as error:
        code, reason = error.code, str(error)
    except OSError as error:
        code = _CODES.get(error.errno or 0, StatusCode.INTERNAL)
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    _logger.warning("%s: %s: %s", name, code.name, reason)
    context.abort(code, reason)
