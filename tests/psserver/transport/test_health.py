"""What gRPC's own means tell of a server: whether it serves, and what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from psserver.config import ServerConfig
from psserver.state import sessions
from psserver.transport import health
from psserver.transport.server import Server
from pswire.encoding.verbs import SERVICE, VERBS
from pswire.errors import ServerLost
from pswire.security.identity import Security
from tests.kit.rig import SOON, WORKERS, Job, core, sum_into
from tests.kit.rig import serving as serving_core

Status = health_pb2.HealthCheckResponse
ASKED = health_pb2.HealthCheckRequest


def serving(
    test: Callable[[grpc.aio.Channel, Server], Awaitable[Any]], well: Callable[[], bool] = lambda: True
) -> None:
    async def run() -> None:
        one = core()
        config = ServerConfig(one.task, shared_memory=0, security=Security(token="0123456789abcdef"))
        server = Server(one, config, well)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(test(channel, server), SOON)
        await server.stop(0.0)
        one.close()

    asyncio.run(run())


@pytest.mark.parametrize("service", ["", SERVICE])
def test_a_server_serves_until_it_ends(service):
    """Who watches is told so, of the whole server and of our service."""

    async def test(channel: grpc.aio.Channel, server: Server) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(ASKED(service=service))).status == Status.SERVING
        watch = stub.Watch(ASKED(service=service))
        assert (await watch.read()).status == Status.SERVING
        ending = asyncio.ensure_future(server.stop(SOON))
        assert (await watch.read()).status == Status.NOT_SERVING
        watch.cancel()
        await ending

    serving(test)


def test_a_server_that_is_not_well_does_not_serve(monkeypatch):
    """Whoever asks is told, and told again when it goes on."""
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.01)
    well = [True]

    async def test(channel: grpc.aio.Channel, server: Server) -> None:
        watch = health_pb2_grpc.HealthStub(channel).Watch(ASKED())
        for now in (True, False, True):
            well[0] = now
            assert (await watch.read()).status == (Status.SERVING if now else Status.NOT_SERVING)
        watch.cancel()

    serving(test, lambda: well[0])


def test_a_probe_needs_no_token():
    """It learns whether the server serves, and nothing else."""

    async def test(channel: grpc.aio.Channel, server: Server) -> None:
        assert (await health_pb2_grpc.HealthStub(channel).Check(ASKED())).status == Status.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(VERBS["Status"].path)(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    serving(test)


def test_what_is_not_served_is_not_found():
    """A service that is another's has no health here."""

    async def test(channel: grpc.aio.Channel, server: Server) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(ASKED(service="somebody.Else"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    serving(test)


def test_a_server_describes_itself():
    """Clients without our files learn which services there are, and the methods of ours."""

    async def test(channel: grpc.aio.Channel, server: Server) -> None:
        asked = (
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        )
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter(asked))
        services, files = [answer async for answer in call]
        names = {service.name for service in services.list_services_response.service}
        assert names >= {SERVICE, "grpc.health.v1.Health"}
        found = FileDescriptorProto.FromString(files.file_descriptor_response.file_descriptor_proto[0])
        assert "Push" in {method.name for method in found.service[0].method}

    serving(test)


def test_a_core_that_nobody_looks_at_is_not_well():
    """By its own clock; a look ends it."""
    one = core()
    one._clock.now += sessions.STILL_SECONDS
    assert not one.well()
    one.tick()
    assert one.well()


def test_a_core_with_half_a_round_is_not_well(tmp_path, monkeypatch):
    """It refuses every call from then on, until the job begins anew: who probes it is told."""
    with serving_core("core", 1, tmp_path) as servers:
        job, (one,) = Job(servers), servers.cores
        (worker,) = job.join(WORKERS[0])
        plan = job.approve(sum_into(job.variable(worker, np.zeros(2, "float32"))), worker)
        monkeypatch.setattr(one.machine.store, "commit", lambda *args: 1 / 0)
        assert one.well()
        with pytest.raises(ServerLost):
            worker.push(plan, [np.ones(2, "float32")]).result(SOON)
        assert not one.well()
