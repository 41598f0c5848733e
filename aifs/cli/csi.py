"""``aifs csi``: the driver of the Container Storage Interface, for Kubernetes."""

import logging
import os
import socket

import click

from aifs.cli.command import command
from aifs.core.errors import ConfigError


@command(
    "csi",
    short_help="Serve volumes to Kubernetes (CSI driver).",
    examples="aifs csi /var/lib/aifs/mnt/volumes --endpoint /csi/csi.sock --node $NODE_NAME\n"
    "aifs csi /var/lib/aifs/mnt/volumes --endpoint /csi/csi.sock --serve controller",
    prints=False,
)
@click.argument("directory", metavar="DIR")
@click.option(
    "--endpoint", required=True, metavar="SOCKET", help="The driver's socket, an absolute path."
)
@click.option(
    "--serve",
    "what",
    type=click.Choice(["all", "node", "controller"]),
    default="all",
    show_default=True,
    help="controller: make and remove volumes, once in a cluster; node: mount them, on each node.",
)
@click.option("--node", default=socket.gethostname, help="The name of this node.  [its hostname]")
@click.option("--name", default="csi.aifs", show_default=True, help="The name of the driver.")
def csi_command(directory: str, endpoint: str, what: str, node: str, name: str) -> None:
    """Answer the calls of the Container Storage Interface (1.9 and later) on a socket, until
    SIGTERM. Volumes are directories in DIR, which lies in an AIFS mount; the driver makes DIR.

    The driver does not mount AIFS, and keeps nothing itself: it may end and start again at any
    time, and no mount notices. While the daemon of the mount does not answer, calls are refused
    (UNAVAILABLE). See docs/operate/kubernetes.md.
    """
    from aifs.csi.controller import ControllerService
    from aifs.csi.node import NodeService
    from aifs.csi.server import IdentityService, serve
    from aifs.csi.volumes import Volumes

    path = endpoint.removeprefix("unix://")
    for word, given in (("--endpoint", path), ("DIR", directory)):
        if not os.path.isabs(given):  # DIR is not asked for: its daemon may hang
            raise ConfigError(f"{word} {given}: is not an absolute path")
    logging.getLogger().setLevel(logging.INFO)
    volumes = Volumes(directory)
    services: list[object] = [IdentityService(volumes, name, what != "node")]
    if what != "node":
        services.append(ControllerService(volumes))
    if what != "controller":
        services.append(NodeService(volumes, node))
    serve(f"unix://{path}", services)
