"""Services that ask for no token: requests are small, and strangers may keep few of them half sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

MAX_AT_ONCE = 4
"""Requests of a service that are read at a time; others wait until one is here, or late."""

REQUEST_SECONDS = 5.0
"""Seconds in which a request has to be here."""


class SmallRequests(grpc.GenericRpcHandler):
    """Reads the requests of a service by itself, with a limit of time, and as few of them at once as said above.

    gRPC reads a request before it calls a handler, and would keep any number of them, of up to 4 MiB, for ever.

    Args:
        inner: handles the calls.
    """

    def __init__(self, inner: grpc.GenericRpcHandler) -> None:
        self._inner = inner
        self._budget = asyncio.Semaphore(MAX_AT_ONCE)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Returns the handler of a method, which reads a stream; None for one of no service here."""
        found: Any = self._inner.service(details)
        if found is None:
            return None
        codec = found.request_deserializer, found.response_serializer
        match found.request_streaming, found.response_streaming:
            case False, False:
                return grpc.stream_unary_rpc_method_handler(self._one(found.unary_unary), *codec)
            case False, True:
                return grpc.stream_stream_rpc_method_handler(self._one(found.unary_stream), *codec)
            case True, True:
                return grpc.stream_stream_rpc_method_handler(self._all(found.stream_stream), *codec)
        raise NotImplementedError(details.method)

    def _one(self, answer: Callable[[Any, Any], Any]) -> Any:
        async def read(requests: AsyncIterator[Any], context: Any) -> Any:
            async for request in self._read(requests):
                return await answer(request, context)
            return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come in time")

        return read

    def _all(self, answer: Callable[[Any, Any], Any]) -> Any:
        async def read(requests: AsyncIterator[Any], context: Any) -> None:
            async for reply in answer(self._read(requests), context):
                await context.write(reply)

        return read

    async def _read(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yields what comes in time."""
        while True:
            async with self._budget:
                try:
                    async with asyncio.timeout(REQUEST_SECONDS):
                        request = await anext(requests)
                except (TimeoutError, StopAsyncIteration):
                    return
            yield request


class Guarded:
    """A server as generated code registers services on it, each with `SmallRequests` before it.

    Args:
        server: the server.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Registers handlers."""
        self._server.add_generic_rpc_handlers(tuple(map(SmallRequests, handlers)))

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Does nothing: these would be asked first, and are the same."""
