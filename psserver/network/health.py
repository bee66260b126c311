"""gRPC's own services: health (`grpc.health.v1`) and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from psserver.network.small_requests import Guarded
from pswire.encoding.verbs import SERVICE

if TYPE_CHECKING:
    import grpc

LOOK_SECONDS = 0.5
"""Seconds between two checks of the server's health."""


class Health:
    """The health service. All methods belong to one event loop.

    Args:
        well: returns True if the server is healthy.
    """

    def __init__(self, well: Callable[[], bool]) -> None:
        self._well = well
        self._servicer: Any = health.aio.HealthServicer()
        self._looking: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Registers the services on a server that is not started yet: health of all of it, "", and of our service."""
        guarded: Any = Guarded(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, guarded)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflector = reflection.aio.ReflectionServicer(service_names=names)
        register: Any = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        register(reflector, guarded)

    async def start(self) -> None:
        """Starts to check the server's health."""
        await self._tell()
        self._looking = asyncio.ensure_future(self._look())

    async def stop(self) -> None:
        """Reports that the server does not serve any more, for good."""
        if self._looking:
            self._looking.cancel()
        await self._servicer.enter_graceful_shutdown()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._tell()

    async def _tell(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._well() else statuses.NOT_SERVING
        for service in ("", SERVICE):
            await self._servicer.set(service, status)
