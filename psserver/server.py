"""One listening server: binds a port, serves a core on it, ends in good order."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from psserver.lanes import Lanes
from psserver.service import Service
from pswire.api import ParameterServer
from pswire.cluster import Task
from pswire.errors import ConfigError

KEEPALIVE_MS = 10_000
"""Pause after which a silent client is asked for a sign of life, and how long it may take to give it."""


class Server:
    """Serves a core over gRPC. All methods belong to one event loop.

    Args:
        core: the server proper.
        task: which task this is, for messages.
        host: the address to listen on.
        port: the port to listen on, 0 to pick one.
        max_payload_bytes: what one message may announce.
        data_port: the port of the tcp lane, 0 to pick one.
        shared_memory: bytes in which answers are for clients on this host; 0 for no shm lane.
        in_flight: bytes of one client's contribution that are held before they are used.
    """

    def __init__(
        self,
        core: ParameterServer,
        task: Task,
        host: str,
        port: int,
        max_payload_bytes: int,
        data_port: int = 0,
        shared_memory: int = 1 << 30,
        in_flight: int = 64 << 20,
    ) -> None:
        self._host = host
        self._port = port
        self._data_port = data_port
        self._lanes = Lanes(core, task, host, data_port, max_payload_bytes, shared_memory, in_flight)
        self._service = Service(core, task, core.status().incarnation, self._lanes)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listens from now on.

        Returns:
            The port.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        await asyncio.get_running_loop().run_in_executor(None, _probe, self._host, self._port)
        server = grpc.aio.server(handlers=(self._service,), options=_options())
        try:
            port = server.add_insecure_port(join_address(self._host, self._port))
        except RuntimeError:
            raise ConfigError(_cannot(self._host, self._port, "gRPC refused it")) from None
        try:
            self._lanes.start()
        except OSError as error:
            raise ConfigError(_cannot(self._host, self._data_port, error.strerror or str(error))) from None
        await server.start()
        self._server = server
        return port

    async def stop(self, grace: float) -> None:
        """Ends: calls that wait are told `ServerLost`; answers under way get `grace` seconds."""
        self._service.close()
        if self._server:
            await self._server.stop(grace)
            self._server = None
        self._lanes.stop()


async def serve(server: Server, stopped: asyncio.Event, ready: Callable[[int], None], grace: float) -> None:
    """Serves until an event.

    Args:
        server: the server; it is started and stopped.
        stopped: ends it.
        ready: called with the port once it listens.
        grace: seconds that answers under way get at the end.
    """
    ready(await server.start())
    try:
        await stopped.wait()
    finally:
        await server.stop(grace)


class ServerThread:
    """A server on an event loop of its own, in a background thread: for tests, and for embedding.

    Args:
        core: the server proper; the caller closes it.
        task: which task this is.
        host: the address to listen on.
        port: the port to listen on, 0 to pick one.
        max_payload_bytes: what one message may announce.
        grace: seconds that answers under way get at the end.

    Attributes:
        port: where it listens, once entered.
    """

    def __init__(
        self,
        core: ParameterServer,
        task: Task,
        host: str = "127.0.0.1",
        port: int = 0,
        max_payload_bytes: int = 1 << 40,
        grace: float = 1.0,
    ) -> None:
        self.port = port
        self._host = host
        self._server = Server(core, task, host, port, max_payload_bytes)
        self._grace = grace
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"serve {task}", daemon=True)

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return join_address(self._host, self.port)

    def __enter__(self) -> ServerThread:
        """Returns once the server listens; raises `ConfigError` as `Server.start` does."""
        self._thread.start()
        self._ready.wait()
        if self._error:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server and its thread; a second call does nothing. From any thread but its own."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(serve(self._server, self._stopped, self._listening, self._grace))
        except BaseException as error:  # told to who started the thread
            self._error = error
        finally:
            self._loop.close()
            self._ready.set()

    def _listening(self, port: int) -> None:
        self.port = port
        self._ready.set()


def _options() -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # else two servers would share a port, and each get half of the calls
        # A host that loses its power says nothing: without pings what it has half sent would be kept for ever.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        # Clients ping, too, and as often as they like: else they would be refused with too_many_pings.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def join_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _probe(host: str, port: int) -> None:
    """Binds and lets go: gRPC itself does not say why it cannot bind, and prints lines of its own."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        failures = [error for address in addresses if (error := _bind_error(*address))]
    except OSError as error:
        addresses, failures = [], [error]
    if any(error.errno == errno.EADDRINUSE for error in failures):
        raise ConfigError(f"port {port} on {host} is in use by another process; stop it or choose another with --port")
    if failures and len(failures) >= len(addresses):  # one address of several, such as ::1, may be missing
        raise ConfigError(_cannot(host, port, failures[0].strerror or str(failures[0])))


def _bind_error(family: int, kind: int, protocol: int, _: str, address: Any) -> OSError | None:
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _cannot(host: str, port: int, why: str) -> str:
    return f"cannot listen on {join_address(host, port)} ({why}); choose another with --host or --port"
