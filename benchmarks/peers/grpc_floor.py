"""The floor of gRPC in Python: the same bytes on long-lived streams, and nothing is done with them.

Each of two clients sends the bytes of its gradients in parts of our size, in messages that are there already. Once
those of both have come, the server sends each its own messages back. It is asyncio's, and the clients are not, as ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
from rounds import WORKERS, Work, free_ports, from_arguments, run_together, tell

METHOD = "/floor/Exchange"

PART_BYTES = (4 << 20) - (4 << 10)
"""Of a message: ours, which gRPC's default limit bounds."""


def messages(work: Work, worker: int) -> list[bytes]:
    """The gradients of a worker, in parts."""
    whole = np.concatenate(work.gradients(worker)).tobytes()
    return [whole[at : at + PART_BYTES] for at in range(0, len(whole), PART_BYTES)]


class Echo(grpc.GenericRpcHandler):
    """Answers each round of a client once all clients have sent theirs.

    Args:
        works: the models, in order.
    """

    def __init__(self, works: list[Work]) -> None:
        self._counts = [len(messages(work, 0)) for work in works for _ in range(work.warm + work.rounds)]
        self._here = [0] * len(self._counts)
        self._all = [asyncio.Event() for _ in self._counts]

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Has one method."""
        return grpc.stream_stream_rpc_method_handler(self._exchange)

    async def _exchange(self, asked: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        for round, count in enumerate(self._counts):
            parts = [await anext(asked) for _ in range(count)]
            self._here[round] += 1
            if self._here[round] == WORKERS:
                self._all[round].set()
            await self._all[round].wait()
            for part in parts:
                yield part


def serve(port: int, works: list[Work]) -> None:
    """The server's process."""

    async def run() -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((Echo(works),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def train(worker: int, port: int, works: list[Work]) -> None:
    """A client's process; raises `ValueError` if other bytes come back."""
    outgoing = SimpleQueue[bytes]()

    def sent() -> Iterator[bytes]:
        while True:
            yield outgoing.get()

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(60)
        exchange: Any = channel.stream_stream(METHOD)
        answers = exchange(sent())
        for work in works:
            parts, seconds = messages(work, worker), []
            for _ in range(work.warm + work.rounds):
                start = time.perf_counter()
                for part in parts:
                    outgoing.put(part)
                back = [next(answers) for _ in parts]
                seconds.append(time.perf_counter() - start)
            if back != parts:
                raise ValueError(f"{work.size}: other bytes came back")
            if worker == 0:
                tell(work, seconds[work.warm :])


def main() -> None:
    """Starts the clients and the server."""
    works = from_arguments()
    (port,) = free_ports(1)
    run_together([(train, (worker, port, works)) for worker in range(WORKERS)], [(serve, (port, works))])


if __name__ == "__main__":
    main()
