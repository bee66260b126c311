"""Silent clients, and clients that ping: HTTP/2 by hand, since a client of gRPC's answers by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from psserver.config import ServerConfig
from psserver.transport import server
from psserver.transport.grpc_service import Context, Handler, Method, Service
from pswire.cluster import Task
from pswire.encoding.verbs import VERBS, Verb
from tests.kit.rig import core

SECONDS = 20.0
"""How long a test waits for what takes a fraction of a second."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
ACK, END_HEADERS = 1, 4
PINGS = 50


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def half_a_push() -> bytes:
    """A call that announces a message of 1000 bytes, and ten of them."""
    headers = {":method": "POST", ":scheme": "http", ":path": VERBS["Push"].path, ":authority": "x"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    block = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in pairs)
    message = b"\0" + (1000).to_bytes(4, "big") + bytes(10)
    return frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, 0, 1, message)


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


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            await scenario()

    asyncio.run(main())


@pytest.mark.parametrize("answered", [0, 1, 5])
def test_a_client_that_has_lost_its_power_is_forgotten(monkeypatch: pytest.MonkeyPatch, answered: int) -> None:
    """Half a push, some signs of life, then silence: the connection is closed, and nothing waits for the other half."""
    calls: list[str] = []

    class Observed(Service):
        def _told(self, verb: Verb, handler: Handler) -> Method:
            method = super()._told(verb, handler)

            async def observed(request: object, context: Context) -> None:
                calls.append("begun")
                try:
                    await method(request, context)
                finally:
                    calls.append("ended")

            return observed

    async def scenario() -> None:
        async with connected() as peer:
            peer.writer.write(half_a_push())
            await until(lambda: calls == ["begun"])
            for _ in range(answered):
                peer.writer.write(frame(PING, ACK, payload=await peer.next_ping()))
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
                while True:
                    await peer.hear()
            await until(lambda: calls == ["begun", "ended"])

    monkeypatch.setattr(server, "KEEPALIVE_MS", 300)
    monkeypatch.setattr(server, "Service", Observed)
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
