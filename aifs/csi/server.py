"""The driver's process: its services on a socket, and what it says of itself."""

import logging
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc

import aifs
from aifs.core.errors import UserError
from aifs.csi import csi_pb2
from aifs.csi.calls import CallRefused, handlers
from aifs.csi.volumes import Volumes

_logger = logging.getLogger(__name__)

_THREADS = 16
_END_S = 10.0
"""Calls that are in progress when the driver is to end have so long; then they are cut off, as by
any kill."""


class IdentityService:
    def __init__(self, volumes: Volumes, name: str, has_controller: bool) -> None:
        self._volumes = volumes
        self._name = name
        self._has_controller = has_controller

    def get_plugin_info(self, request: Any) -> Any:
        return csi_pb2.GetPluginInfoResponse(name=self._name, vendor_version=aifs.__version__)

    def get_plugin_capabilities(self, request: Any) -> Any:
        can = csi_pb2.PluginCapability
        answer = csi_pb2.GetPluginCapabilitiesResponse()
        if self._has_controller:
            kind = can.Service.Type.CONTROLLER_SERVICE
            answer.capabilities.add(service=can.Service(type=kind))
        online = can.VolumeExpansion.Type.ONLINE
        answer.capabilities.add(volume_expansion=can.VolumeExpansion(type=online))
        return answer

    def probe(self, request: Any) -> Any:
        """Ready: the daemon answers."""
        answer = csi_pb2.ProbeResponse()
        answer.ready.value = False
        with suppress(CallRefused):
            self._volumes.mount()
            answer.ready.value = True
        return answer


def serve(endpoint: str, services: Sequence[object]) -> None:
    """Answer calls until SIGTERM or SIGINT. Raises UserError if the socket cannot be made."""
    server = grpc.server(
        ThreadPoolExecutor(_THREADS), handlers=[handlers(service) for service in services]
    )
    try:
        server.add_insecure_port(endpoint)
    except RuntimeError as error:
        raise UserError(f"{endpoint}: {error}") from None
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    _logger.info("%s: serves %s", endpoint, aifs.__version__)
    ended.wait()
    server.stop(_END_S).wait()
