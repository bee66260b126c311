"""The rounds that every peer makes: what goes in, what must come out, and how their time is taken.

Needs NumPy alone, since it runs in the peers' Python. `run.py` says which rounds; a peer's program answers with a line
of JSON for each model.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import connection
from typing import Any

import numpy as np

WORKERS = 2
RATE = 0.125
"""Of the gradient descent; a power of two, as all here, so that float32 computes exactly."""

STEP = 2.0**-10

Array = np.ndarray[Any, np.dtype[np.float32]]
Call = tuple[Callable[..., object], tuple[Any, ...]]


@dataclass(frozen=True)
class Work:
    """The rounds of one model.

    Attributes:
        size: the model's name.
        lengths: elements of each variable; they are float32.
        rounds: how many are measured.
        warm: how many come before, not measured.
    """

    size: str
    lengths: tuple[int, ...]
    rounds: int
    warm: int

    def zeros(self) -> list[Array]:
        """The variables' first values."""
        return [np.zeros(length, np.float32) for length in self.lengths]

    def gradients(self, worker: int) -> list[Array]:
        """What a worker pushes in each round: a number of its own for each variable."""
        return [
            np.full(length, (worker + 1) * (index + 1) * STEP, np.float32) for index, length in enumerate(self.lengths)
        ]

    def check(self, values: Sequence[Any]) -> None:
        """Raises `ValueError` unless the variables have the values that all rounds together give them."""
        if [len(value) for value in values] != list(self.lengths):
            raise ValueError(f"{self.size}: the variables came back with other lengths")
        workers = sum(range(1, WORKERS + 1))
        for index, value in enumerate(values):
            right = -RATE * workers * (index + 1) * STEP * (self.warm + self.rounds)
            if not np.all(np.asarray(value) == np.float32(right)):
                raise ValueError(f"{self.size}: variable {index} should be {right} after all rounds, is {value}")

    def measure(
        self,
        make_round: Callable[[], Any],
        ready: Callable[[], object] = lambda: None,
        values: Callable[[], Sequence[Any]] | None = None,
    ) -> list[float]:
        """Makes all rounds, and checks what comes out.

        Args:
            make_round: makes one, and returns the variables' new values.
            ready: called before each, not measured: what makes the gradients.
            values: called at the end, not measured, where rounds do not return the values.

        Returns:
            Seconds of each round, without the first ones.

        Raises:
            ValueError: the variables do not have the values that they must have.
        """
        seconds = []
        last: Any = ()
        for _ in range(self.warm + self.rounds):
            ready()
            start = time.perf_counter()
            last = make_round()
            seconds.append(time.perf_counter() - start)
        self.check(values() if values else last)
        return seconds[self.warm :]


def to_text(works: Sequence[Work]) -> str:
    """What a peer's program gets as its first argument."""
    return json.dumps([asdict(work) for work in works])


def from_arguments() -> list[Work]:
    """What `run.py` asked this program for."""
    return [Work(**{**each, "lengths": tuple(each["lengths"])}) for each in json.loads(sys.argv[1])]


def tell(work: Work, seconds: Sequence[float]) -> None:
    """Tells `run.py` what was measured."""
    print(json.dumps({"size": work.size, "seconds": list(seconds)}), flush=True)


def run_together(workers: Sequence[Call], servers: Sequence[Call] = ()) -> None:
    """Runs functions in processes of their own until all workers have returned; exits with 1 when any process fails.

    Args:
        workers: functions of a module's top level, and their arguments.
        servers: the same; they are ended with the last worker.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=call, args=args, daemon=True) for call, args in (*workers, *servers)]
    for process in processes:
        process.start()
    waits = {process.sentinel: process for process in processes}
    try:
        while any(process in waits.values() for process in processes[: len(workers)]):
            for sentinel in connection.wait(list(waits)):
                process = waits.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                if process.exitcode:
                    sys.exit(1)
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_ports(count: int) -> list[int]:
    """Ports of this machine on which nobody listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
