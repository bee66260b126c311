"""One listening server: binds a port, serves a core on it, and ends in good order."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from psserver.config import ServerConfig
from psserver.network.access import Access
from psserver.network.grpc_service import GrpcService
from psserver.network.health import Health
from psserver.network.peers import Peers
from psserver.network.served import Served
from psserver.network.transport_server import TransportServer
from pswire.cluster import is_loopback, join_address
from pswire.errors import ConfigError
from pswire.model.status import Happened, ProcessStatus
from pswire.network.traffic import Traffic, TransportName
from pswire.security.identity import Security

log = logging.getLogger("psserver")

KEEPALIVE_MS = 10_000
"""Milliseconds after which a silent client is pinged, and within which it must answer."""

MAX_CALLS = 1024
"""Most concurrent gRPC calls of one client; further ones wait in the client."""

HANDSHAKE_MS = 10_000
"""Milliseconds that a client's gRPC handshake may take."""

IDLE_MS = 30_000
"""Milliseconds after which a connection without a call is closed: nobody knows whose it is. A client opens another."""

LOOK_SECONDS = 5.0
"""Seconds between two looks at the files of certificates; each new connection looks as well."""

EXPOSED = (
    "any host that reaches this port could read and change the variables; give --tls-cert, --tls-key, --tls-ca and "
    "--token-file (psctl certs makes them), or --insecure on a private network"
)


class Server:
    """The network side of a server: serves a core over gRPC and transports. All methods belong to one event loop.

    Args:
        core: the server proper.
        config: the server's configuration.
        well: returns True if the core is healthy, for probes.
    """

    def __init__(self, core: Served, config: ServerConfig, well: Callable[[], bool] = lambda: True) -> None:
        self._config = config
        self._health = Health(well)
        access = Access(config.task, config.security, core.registry)
        self._transports = TransportServer(core, config, access)
        self._service = GrpcService(core, config.task, core.incarnation, self._transports, access)
        self._peers = core.others = Peers(core, config)
        self._server: grpc.aio.Server | None = None
        self._looks: asyncio.Task[None] | None = None

    @property
    def traffic(self) -> Mapping[TransportName, Traffic]:
        """Payload bytes of each transport."""
        return self._transports.traffic

    def serve_page(self, url: str) -> None:
        """Tells those who ask where this server's status page is."""
        self._service.page = url

    def process(self) -> ProcessStatus:
        """Returns the status of this process."""
        return self._service.process()

    def events(self) -> tuple[Happened, ...]:
        """Returns what this server was told last, the newest last. May be called from any thread."""
        return self._service.events()

    def refused(self) -> Mapping[str, int]:
        """Returns how many callers were refused before they reached the core, by reason. From any thread."""
        return self._transports.access.refused.counts

    async def start(self) -> int:
        """Starts listening; returns the port.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's, or it is open to other machines
                without TLS and a token.
        """
        config = self._config
        await asyncio.get_running_loop().run_in_executor(None, check_listening, config)
        server = grpc.aio.server(handlers=(self._service,), options=_options())
        try:
            port = _listen(server, join_address(config.host, config.port), config.security)
        except RuntimeError:
            raise ConfigError(_cannot(config.host, config.port, "gRPC refused it")) from None
        try:
            self._transports.start()
        except OSError as error:
            raise ConfigError(_cannot(config.host, config.data_port, error.strerror or str(error))) from None
        self._health.register(server)
        await server.start()
        await self._health.start()
        self._server = server
        if config.security.tls:
            self._looks = asyncio.create_task(_look(config.security))
        return port

    async def stop(self, grace: float) -> None:
        """Ends the server: waiting calls fail with `ServerLost`; answers under way get `grace` seconds."""
        self._service.close()
        if self._looks:
            self._looks.cancel()
        await asyncio.to_thread(self._peers.close)
        await self._health.stop()
        if self._server:
            await self._server.stop(grace)
            self._server = None
        self._transports.stop()


async def serve(server: Server, stopped: asyncio.Event, ready: Callable[[int], None], grace: float) -> None:
    """Serves until an event.

    Args:
        server: the server; it is started and stopped.
        stopped: the event.
        ready: called with the port once it listens.
        grace: seconds that answers under way get at the end.
    """
    ready(await server.start())
    try:
        await stopped.wait()
    finally:
        await server.stop(grace)
        await leave_nothing(grace)


async def leave_nothing(grace: float) -> None:
    """Waits for gRPC's own tasks on this loop, which end a moment after the server; at most `grace` seconds.

    If the loop ended first, they would be logged as errors of calls that were answered.
    """
    if rest := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(rest, timeout=grace)


class ServerThread:
    """A server on an event loop of its own, in a background thread: for tests, and for embedding.

    Args:
        core: the server proper; the caller closes it.
        config: the server's configuration.
        grace: seconds that answers under way get at the end.

    Attributes:
        port: the port that it listens on, once entered.
    """

    def __init__(self, core: Served, config: ServerConfig, grace: float = 1.0) -> None:
        self.port = config.port
        self._host = config.host
        self._server = Server(core, config)
        self._grace = grace
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"serve {config.task}", daemon=True)

    @property
    def address(self) -> str:
        """The server's `host:port`."""
        return join_address(self._host, self.port)

    def __enter__(self) -> ServerThread:
        """Starts the server; returns once it listens. Raises `ConfigError` as `Server.start` does."""
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
        """Ends the server and its thread. A second call does nothing. May be called from any thread but its own."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(serve(self._server, self._stopped, self._listening, self._grace))
        except BaseException as error:  # raised in the thread that started this one
            self._error = error
        finally:
            self._loop.close()
            self._ready.set()

    def _listening(self, port: int) -> None:
        self.port = port
        self._ready.set()


def _options() -> list[tuple[str, int]]:
    return [
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_concurrent_streams", MAX_CALLS),
        # Else a stream that nobody reads may send megabytes ahead: its window is 64 KiB, and that of a message which is
        # being read the message's size.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", 0),  # else two servers would share a port, and each get half of the calls
        # A host that loses power closes nothing: without pings its half-sent messages would be kept for ever.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # of a ping for another reason, beside which there is none
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        # Clients may ping as often as they like: else they would be refused with too_many_pings.
        ("grpc.http2.max_ping_strikes", 0),
    ]


async def _look(security: Security) -> None:
    """Looks at the files of the certificates now and then: new ones that are not taken are told of in time."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(security.newest)


def _listen(server: grpc.aio.Server, address: str, security: Security) -> int:
    if not security.tls:
        return server.add_insecure_port(address)
    used = security.newest()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Returns what a new connection is to be shown; None for what the one before was. In a thread of gRPC's."""
        nonlocal used
        before, used = used, security.newest()
        return None if used is before else _shown(used)

    make: Any = grpc.dynamic_ssl_server_credentials  # its types do not say that None means no change
    return server.add_secure_port(address, make(_shown(used), changed, True))


def _shown(security: Security) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(security.key, security.certificate)], security.ca)


def check_listening(config: ServerConfig) -> None:
    """Checks that the server can listen on its address, and may."""
    host, port = config.host, config.port
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(_cannot(host, port, error.strerror or str(error))) from None
    _probe(host, port, addresses)
    if not all(is_loopback(str(address[0]).partition("%")[0]) for *_, address in addresses):
        _check_exposed(config)


def _check_exposed(config: ServerConfig) -> None:
    """Checks that the server may listen to other machines; raises `ConfigError` if it is open to them."""
    missing = [what for what, given in (("TLS", config.security.tls), ("a token", config.security.token)) if not given]
    if not missing:
        return
    text = f"{config.task} would accept other machines on {config.host} without {' and '.join(missing)}: {EXPOSED}"
    if not config.insecure:
        raise ConfigError(text)
    log.warning("INSECURE: %s", text)


def _probe(host: str, port: int, addresses: Sequence[Any]) -> None:
    """Binds and releases the addresses: gRPC itself does not say why it cannot bind, and prints lines of its own."""
    failures = [error for address in addresses if (error := _bind_error(*address))]
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
