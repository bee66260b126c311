"""Channels of gRPC: their settings, calls of raw bytes, and what their errors mean."""

from __future__ import annotations

from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from pswire.limits import Timeouts
from pswire.security.identity import Security

OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # retries are ours: they know the keys and the deadlines
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # time limit of one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # An answer is read by the thread that waits for it: a push or pull of one message makes no thread of gRPC's.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Of every channel."""

KEEPALIVE = 5.0
"""Seconds at most that nothing may come on a connection until a sign of life is asked for, and until it is missed."""

NOBODY, SILENT = "nothing listens there", "it does not answer"

REASONS = {
    "lookup failed": "the host's name is unknown",
    "DNS": "the host's name is unknown",
    "Connection refused": NOBODY,
    "No route": "there is no route to the host",
    "Deadline": SILENT,
    "timed out": SILENT,
}
"""Readings of gRPC's details for people, by a part of them."""

Interceptor = (
    grpc.UnaryUnaryClientInterceptor
    | grpc.UnaryStreamClientInterceptor
    | grpc.StreamUnaryClientInterceptor
    | grpc.StreamStreamClientInterceptor
)


def reason(details: str, otherwise: str = "") -> str:
    """Returns gRPC's details of a failure in words for people; `otherwise`, or the details, where none are known."""
    return next((words for part, words in REASONS.items() if part in details), otherwise or details)


def open_channel(
    address: str, security: Security, name: str, lease: float = Timeouts().session_timeout
) -> grpc.Channel:
    """Opens a channel to a server.

    Args:
        address: the server's address, `host:port`.
        security: certificate and token that this process shows, and the CA that it asks for.
        name: the name that the server's certificate must have, whatever its address is.
        lease: seconds; a connection whose packets vanish is given up after half of it, so that a heartbeat gets through
            on another one.
    """
    pause = int(1000 * min(lease / 4, KEEPALIVE))
    # The last one is for a ping that was under way for another reason: gRPC sends no keepalive beside it.
    names = "grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"
    options = (*OPTIONS, *((name, pause) for name in names))
    if not security.tls:
        return grpc.insecure_channel(address, options=options)
    security = security.newest()
    credentials = grpc.ssl_channel_credentials(security.ca, security.key, security.certificate)
    return grpc.secure_channel(address, credentials, options=(*options, ("grpc.ssl_target_name_override", name)))


def stub(channel: grpc.Channel, path: str, streams: tuple[bool, bool]) -> Any:
    """Returns a callable of raw bytes: without serializers, gRPC passes them on."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    return kinds[streams](path)
