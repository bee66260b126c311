"""gRPC's own means: silent clients, and clients that ping, by hand, since one of gRPC's answers by itself; health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from psserver.config import ServerConfig
from psserver.network import health, server
from psserver.network.grpc_service import Context, GrpcService, Handler, Method
from psserver.network.server import Server
from psserver.state import sessions
from pswire.cluster import Task
from pswire.encoding.verbs import SERVICE, VERBS, Verb
from pswire.errors import ServerLost
from pswire.security.identity import Security
from tests.kit.attacks import DATA, HEADERS, PING, PREFACE, SETTINGS, call_headers, frame
from tests.kit.rig import SOON, WORKERS, core, sum_into

SECONDS = 20.0
"""How long a test waits for what takes a fraction of a second."""

ACK, END_HEADERS, GOAWAY = 1, 4, 7
PINGS = 50


def half_a_push() -> bytes:
    """A call that announces a message of 1000 bytes, and ten of them."""
    message = b"\0" + (1000).to_bytes(4, "big") + bytes(10)
    return frame(HEADERS, END_HEADERS, 1, call_headers(VERBS["Push"].path)) + frame(DATA, 0, 1, message)


class Peer:
    """A connection that does what the test says, and nothing by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def hear(self) -> tuple[int, int, bytes]:
        """Reads one frame; returns its kind, its flags and its payload."""
        head = await self.reader.readexactly(9)
        return head[3], head[4], await self.reader.readexactly(int.from_bytes(head[:3], "big"))

    async def next_ping(self) -> bytes:
        while True:
            kind, flags, payload = await self.hear()
            if (kind, flags) == (PING, 0):
                return payload


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Peer]:
    """A server on this event loop, and a peer that has agreed on the settings."""
    one = server.Server(core(), ServerConfig(Task("ps", 0)))
    reader, writer = await asyncio.open_connection("127.0.0.1", await one.start())
    peer = Peer(reader, writer)
    writer.write(PREFACE + frame(SETTINGS))
    while (await peer.hear())[:2] != (SETTINGS, 0):
        pass
    writer.write(frame(SETTINGS, ACK))
    try:
        yield peer
    finally:
        writer.close()
        await one.stop(0.0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            await scenario()

    asyncio.run(main())


@pytest.mark.parametrize("answered", [0, 1, 5])
def test_a_client_that_has_lost_its_power_is_forgotten(monkeypatch: pytest.MonkeyPatch, answered: int) -> None:
    """Half a push, some signs of life, then silence: the connection is closed, and nothing waits for the other half."""
    begun, ended = asyncio.Event(), asyncio.Event()

    class Observed(GrpcService):
        def _told(self, verb: Verb, handler: Handler) -> Method:
            method = super()._told(verb, handler)

            async def observed(request: object, context: Context) -> None:
                begun.set()
                try:
                    await method(request, context)
                finally:
                    ended.set()

            return observed

    async def scenario() -> None:
        async with connected() as peer:
            peer.writer.write(half_a_push())
            await begun.wait()
            for _ in range(answered):
                peer.writer.write(frame(PING, ACK, payload=await peer.next_ping()))
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
                while True:
                    await peer.hear()
            await ended.wait()

    monkeypatch.setattr(server, "KEEPALIVE_MS", 300)
    monkeypatch.setattr(server, "GrpcService", Observed)
    run(scenario)


def test_a_client_may_ping_as_often_as_it_likes() -> None:
    """Clients look after lost servers in the same way; none is told that it pings too often."""

    async def scenario() -> None:
        async with connected() as peer:
            for count in range(PINGS):
                ping = count.to_bytes(8, "big")
                peer.writer.write(frame(PING, payload=ping))
                while (heard := await peer.hear()) != (PING, ACK, ping):
                    assert heard[0] != GOAWAY, heard

    run(scenario)


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
    """It learns whether the server serves, and nothing else; a service that is another's has no health here."""

    async def test(channel: grpc.aio.Channel, server: Server) -> None:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert (await check(ASKED())).status == Status.SERVING
        for asked, code in (
            (channel.unary_unary(VERBS["Status"].path)(b""), grpc.StatusCode.UNAUTHENTICATED),
            (check(ASKED(service="somebody.Else")), grpc.StatusCode.NOT_FOUND),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked
            assert caught.value.code() is code

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


def test_a_core_with_half_a_round_is_not_well(job, monkeypatch):
    """It refuses every call from then on, until the job begins anew: who probes it is told. Nor is one well that nobody
    looks at, by its own clock; a look ends that."""
    (one,), (worker,) = job.servers.cores, job.join(WORKERS[0])
    plan = job.approve(sum_into(job.variable(worker, np.zeros(2, "float32"))), worker)
    one._clock.now += sessions.STILL_SECONDS
    assert not one.well()
    one.tick()
    assert one.well()
    monkeypatch.setattr(one.machine.job.store, "commit", lambda *args: 1 / 0)
    with pytest.raises(ServerLost):
        worker.push(plan, [np.ones(2, "float32")]).result(SOON)
    assert not one.well()
