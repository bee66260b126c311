"""Asks a server by gRPC's own means whether it serves (`grpc.health.v1`), as probes of containers do."""

from __future__ import annotations

import click
import grpc
from grpc_health.v1 import health_pb2

from psclient._src.network.tls_diagnosis import dns_names, mismatch
from psclient.psctl.settings import CHECK, CommandSettings, command
from pswire.cluster import check_address
from pswire.network.grpc_channel import open_channel, reason, stub
from pswire.security.identity import Security
from pswire.security.names import ADMIN, certificate_name

PATH = "/grpc.health.v1.Health/Check"
"""Of the method, in the health service's own .proto."""

Status = health_pb2.HealthCheckResponse


def why_not(address: str, security: Security, seconds: float) -> str:
    """Returns why a server does not serve; "" if it does.

    A probe knows an address and no task: any certificate that our CA has signed will do.

    Args:
        address: the server's address, `host:port`.
        security: certificate and token that psctl shows.
        seconds: time that the server may take to answer.

    Raises:
        ConfigError: `address` is no address.
    """
    host, port = check_address(address, "psctl health")
    name = certificate_name(ADMIN)  # no server has it; its own is not known yet
    try:
        if security.tls:
            name = next(iter(dns_names((host.strip("[]"), port), security, seconds)), "")
    except OSError as error:
        return mismatch(address, security, name) or f"there is no connection: {error.strerror or error}"
    with open_channel(address, security, name) as channel:
        ask = stub(channel, PATH, (False, False))
        try:
            data = ask(health_pb2.HealthCheckRequest().SerializeToString(), timeout=seconds)
        except grpc.RpcError as error:
            return mismatch(address, security, name) or _failure(error)
    status = Status.FromString(data).status
    return "" if status == Status.SERVING else f"it says {Status.ServingStatus.Name(status)}"


def _failure(error: grpc.RpcError) -> str:
    details = error.details() or "" if isinstance(error, grpc.Call) else ""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return "the process there has no health service, so it is not a server of this version; correct the address"
    return reason(details, details or code.name.lower())


@command(
    CHECK,
    ("Check one server, as a probe of a container does", "psctl health 127.0.0.1:2222"),
    ("Check all servers that TF_CONFIG names", "psctl health"),
)
@click.argument("asked", nargs=-1, metavar="[HOST:PORT]...")
def health(settings: CommandSettings, asked: tuple[str, ...]) -> int:
    """Check that servers are ready, for probes.

    Check all servers of the cluster if no HOST:PORT is given. Exit with 1 unless all are ready.
    """
    addresses = asked or tuple(settings.cluster().servers.values())
    security = settings.security()
    found = {address: why_not(address, security, settings.seconds) for address in addresses}
    servers = [{"address": address, "serving": not why, "why": why} for address, why in found.items()]
    lines = (f"{address} serves" if not why else f"{address} does not serve: {why}" for address, why in found.items())
    failed = any(found.values())
    return settings.tell({"serving": not failed, "servers": servers}, *lines, wrong=failed)
