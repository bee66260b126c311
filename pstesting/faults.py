"""A network that fails: gRPC interceptors for the connections of one process.

Each call may be dropped before it arrives, cut off in the middle, sent twice, delayed, or lose its answer
after the server has done what it asked.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psclient._src.network.remote_server import RemoteServer
from pswire.cluster import ClusterSpec
from pswire.limits import Refused, Timeouts
from pswire.network.traffic import TransportName
from pswire.security.identity import Security

Continuation = Callable[[Any, Any], Any]


class Dropped(grpc.RpcError, grpc.Call):
    """A call that the network has swallowed."""

    def code(self) -> grpc.StatusCode:
        """UNAVAILABLE."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Text that names the test as the cause."""
        return "a fault of the test"

    def initial_metadata(self) -> Any:
        """Nothing: the call had no response."""
        return ()

    def trailing_metadata(self) -> Any:
        """Nothing: the call had no response."""
        return ()

    def is_active(self) -> bool:
        """False: the call has ended."""
        return False

    def time_remaining(self) -> float:
        """Zero seconds: the call has ended."""
        return 0.0

    def cancel(self) -> bool:
        """False: the call has ended, and cannot be cancelled."""
        return False

    def add_callback(self, callback: Any) -> bool:
        """False: the call has ended, and the callback is not called."""
        return False


class Faults(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Random faults, the same for the same seed and sequence of calls. May be used from any thread.

    Args:
        seed: seed of the random choices.
        rates: probability of each fault: "drop", "cut", "repeat", "late", "lose".
    """

    def __init__(self, seed: int, rates: dict[str, float]) -> None:
        self._random = random.Random(seed)
        self._rates = rates
        self._lock = threading.Lock()  # guards the two above and below
        self._kept: list[Any] = []
        self.counts = dict.fromkeys(rates, 0)

    def _choose(self) -> str:
        with self._lock:
            chosen = self._random.random()
            for fault, rate in self._rates.items():
                if chosen < rate:
                    self.counts[fault] += 1
                    return fault
                chosen -= rate
        return ""

    def intercept_unary_stream(self, continuation: Continuation, details: Any, request: bytes) -> Any:
        """Forwards a call with one request and several responses, with a fault or without."""
        return self._send(lambda: continuation(details, request), list)

    def intercept_unary_unary(self, continuation: Continuation, details: Any, request: bytes) -> Any:
        """Forwards a call with one request and one response, with a fault or without."""
        if self._choose() in ("drop", "cut"):  # of news nothing else is tried: they may take as long as a job
            raise Dropped
        return continuation(details, request)

    def intercept_stream_unary(self, continuation: Continuation, details: Any, frames: Iterator[bytes]) -> Any:
        """Forwards a call with several requests and one response, with a fault or without."""
        return self._send_stream(continuation, details, list(frames), lambda call: call.result())

    def intercept_stream_stream(self, continuation: Continuation, details: Any, frames: Iterator[bytes]) -> Any:
        """Forwards a call with several requests and responses, with a fault or without."""
        return self._send_stream(continuation, details, list(frames), list)

    def _send_stream(
        self, continuation: Continuation, details: Any, frames: list[bytes], read: Callable[[Any], Any]
    ) -> Any:
        return self._send(
            lambda: continuation(details, iter(frames)),
            read,
            lambda: continuation(details, _torn(frames)),
        )

    def _send(self, send: Callable[[], Any], read: Callable[[Any], Any], torn: Callable[[], Any] | None = None) -> Any:
        match self._choose():
            case "drop":
                raise Dropped
            case "cut":
                if torn is None:
                    raise Dropped
                return torn()
            case "repeat":
                read(send())
            case "twice":
                with self._lock:
                    self._kept.append(send())  # its answer comes too late to count
            case "late":
                time.sleep(0.05)
            case "lose":
                read(send())
                raise Dropped
        return send()


def _torn(frames: list[bytes]) -> Iterator[bytes]:
    yield from frames[: (len(frames) + 1) // 2]
    raise ConnectionError("a fault of the test")


class Stall(grpc.StreamStreamClientInterceptor):
    """Lets a push stop in its middle.

    Args:
        when: called before each push; whether this is the one.
        stop: called in the middle of it, after its first frame.
    """

    def __init__(self, when: Callable[[], bool], stop: Callable[[], object]) -> None:
        self._when = when
        self._stop = stop

    def intercept_stream_stream(self, continuation: Continuation, details: Any, frames: Iterator[bytes]) -> Any:
        """Forwards a call, whose requests stall when chosen."""
        return continuation(details, self._stalling(frames) if self._when() else frames)

    def _stalling(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        yield next(frames)
        self._stop()
        yield from frames


def connect(*interceptors: Any, only: int | None = None) -> Callable[..., list[RemoteServer]]:
    """Returns a function that connects as `psclient._src.network.remote_server.connect`, with interceptors.

    Args:
        interceptors: interceptors of gRPC, the first outermost.
        only: the server that gets them; None for all.
    """

    def connected(
        cluster: ClusterSpec,
        timeouts: Timeouts,
        transport: TransportName = "grpc",
        security: Security | None = None,
        drives: bool = False,
        refused: Refused = "lost",
        copied: bool = False,
    ) -> list[RemoteServer]:
        # Always by the grpc transport, whatever is asked for: interceptors see no other.
        return [
            RemoteServer(
                cluster.address(task),
                task,
                timeouts,
                interceptors if only in (None, task.index) else (),
                security=security,
                decides=drives or (task.index == 0 and not copied),
                told=copied and not drives,
            )
            for task in cluster.tasks("ps")
        ]

    return connected


def use(*interceptors: Any, only: int | None = None) -> None:
    """Makes the strategies of this process connect like that; their chief, too."""
    from psclient._src.strategies import parameter_server

    setattr(parameter_server, "connect", connect(*interceptors, only=only))  # noqa: B010  # it is a seam of ours
