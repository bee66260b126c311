"""The worker's part: runs what a coordinator schedules, one function after another, until the coordinator has ended.

It begins when the script of a worker has come to its end, where that has registered functions.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import psclient._src
from psclient._src.interpreter.interrupts import call
from psclient._src.network.session import FATAL
from psclient._src.options import InputContext
from psclient._src.processes.sigterm import NOTICE
from psclient._src.strategies.parameter_server import ParameterServerStrategy, open_strategies
from psclient.coordinator import functions
from psclient.coordinator.cluster_coordinator import HOW, check_asynchronous
from psclient.coordinator.content import decode, encode
from psclient.coordinator.pieces import joined, pieces_of, result_of, wait
from pswire.errors import ConfigError
from pswire.model.closures import ClosureResult, Piece, Taken

log = logging.getLogger("psclient")

ENDED = (
    "the iterator has ended, because its dataset has no more batches on this worker; call repeat() on the "
    "dataset, or catch StopIteration in the function"
)
"""The text of `StopIteration`, which has none."""

_OURS = str(Path(psclient._src.__file__).parents[1])


def serve_at_end() -> None:
    """Runs what is scheduled, in a worker whose script has ended and has registered functions; then the job is over."""
    if not functions.registry():
        return
    for strategy in open_strategies():
        if strategy.task.job != "worker" or strategy.cluster_resolver is None or strategy._has_failed:
            continue
        try:
            if not has_trained(strategy):
                Worker(strategy).serve()
        except BaseException as error:
            strategy.__exit__(type(error), error, error.__traceback__)
            raise


def has_trained(strategy: ParameterServerStrategy) -> bool:
    """Returns True for a script that needs no coordinator, though it has registered functions."""
    return strategy.round > 0 and not (strategy.consistency.mode == "async" and is_coordinated(strategy))


def is_coordinated(strategy: ParameterServerStrategy) -> bool:
    """Returns whether the chief of a worker's job runs the script, or has run it. Waits until all are there."""
    exchange = strategy._exchange
    if exchange.group.has_chief:
        return True
    # One that had nothing to schedule may have left before the job's first generation.
    return any(state.member.task.job == "chief" for state in exchange.session.look().sessions)


class Worker:
    """A worker that runs what a coordinator schedules.

    Args:
        strategy: the strategy of its script.

    Raises:
        ConfigError: nobody coordinates, or the job is not asynchronous.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        check_asynchronous(strategy)
        self._strategy = strategy
        self._exchange = strategy._exchange
        self._session = self._exchange.session
        if not is_coordinated(strategy):
            raise ConfigError(
                f"{strategy.task} has registered functions for a coordinator, but the chief of this job "
                f"does not run a script; {HOW}"
            )
        self._functions = functions.registry()
        self._values = WorkerValues(strategy)

    def serve(self) -> None:
        """Runs closures until the coordinator has ended.

        Raises:
            ConfigError: the coordinator has registered other functions.
            ChiefLost: there was no chief for `PS_CHIEF_TIMEOUT`.
            ServerLost: a server was lost.
        """
        self._exchange.creation.send()  # others may wait for the first values of what the script has created
        self._exchange.creation.by_name = self._exchange.group.coordinated = True
        taken = self._ask(None)
        while not taken.over:
            taken = self._tell(taken, *self._run(taken))

    def _ask(self, result: ClosureResult | None, offset: int = 0) -> Taken:
        """Tells what came of a closure, and waits for the next; leaves there where this process is told to end."""
        session = self._session
        future: Future[Taken] = session.log_server.take(session.number, self._functions, result, offset)
        if NOTICE.leaving:
            wait_for(
                [future], session.timeouts.heartbeat_interval
            )  # until server 0 has the result; it may have no further closure
        with NOTICE.anywhere():
            return wait(session, future, session.check_chief)

    def _tell(self, taken: Taken, content: bytes, kind: str, text: str) -> Taken:
        """Tells what came of a closure; returns the next one."""
        assert taken.name is not None
        for piece in pieces_of(content):
            following = self._ask(ClosureResult(taken.name.number, piece, kind, text))
            if following.name is not None or following.over:
                break  # also where the rest is not wanted
        return following

    def _run(self, taken: Taken) -> tuple[bytes, str, str]:
        """Runs a closure; returns what it returned, or the type and text of its error."""
        name, session = taken.name, self._session
        assert name is not None
        content = joined(taken.arguments, lambda offset: self._more(offset))
        try:
            self._values.of(taken.coordinator)
            with self._strategy.scope():  # where the functions that make datasets are called, too
                args, kwargs, living = decode(content, self._resolve)
            self._values.forget(living)
            with self._exchange.closure(name), self._strategy.scope():
                result = self._call(functions.named(taken.function), args, kwargs)
                return encode(result, f"what {taken.function} returned"), "", ""
        except FATAL:
            raise
        except Exception as error:
            session.check()  # what ends this process is no error of the function
            log.error("closure %d, %s, failed", name.number, taken.function, exc_info=True)
            return b"", type(error).__name__, _told(error)

    def _call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function; what its replicas make of metrics is handed in as a part of it, also where it fails."""
        parts = self._strategy._remote.parts
        parts.begin_function()
        try:
            result = call(fn, *args, **kwargs)
        except Exception:
            parts.hand_in()
            raise
        parts.hand_in()
        return result

    def _more(self, offset: int) -> Piece:
        return self._ask(None, offset).arguments

    def _resolve(self, kind: str, said: Any) -> Any:
        if kind == "remote":
            return decode(result_of(self._session, said, self._session.check_chief))
        return self._values.find(said)


class WorkerValues:
    """The datasets and iterators that this worker has made.

    Args:
        strategy: the strategy of its script.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = strategy
        self._coordinator = 0
        self._made: dict[int, Any] = {}

    def of(self, coordinator: int) -> None:
        """Forgets what was made for another coordinator."""
        if coordinator != self._coordinator:
            self._coordinator, self._made = coordinator, {}

    def forget(self, living: dict[str, Any]) -> None:
        """Forgets what the coordinator refers to no more."""
        kept = set(living["living"])
        self._made = {n: made for n, made in self._made.items() if n in kept or n >= living["next"]}

    def find(self, said: dict[str, Any]) -> Any:
        """Returns what a reference stands for; makes it where it is needed first."""
        dataset = said["dataset"]
        if dataset not in self._made:
            self._made[dataset] = self._dataset(functions.named(said["function"]))
        if said["kind"] == "iterator" and said["number"] not in self._made:
            self._made[said["number"]] = iter(self._made[dataset])
        return self._made[said["number"]]

    def _dataset(self, fn: Callable[..., Any]) -> Any:
        return functions.dataset_of(fn, self._context)

    def _context(self) -> InputContext:
        place, count = self._strategy._exchange.group.pipeline
        return InputContext(count, place, self._strategy.num_replicas_in_sync)


def _told(error: BaseException) -> str:
    """Returns an error's text, and the last line of the user's code that it comes from."""
    frames: Iterator[traceback.FrameSummary] = reversed(traceback.extract_tb(error.__traceback__))
    own = (frame for frame in frames if not frame.filename.startswith((_OURS, "<")))
    frame = next(own, None)
    where = "" if frame is None else f" ({Path(frame.filename).name}:{frame.lineno})"
    text = str(error).strip()
    if not text and isinstance(error, StopIteration):
        text = ENDED
    elif not text:
        text = f"in `{frame.line}`" if frame is not None and frame.line else "it has no text"
    return f"{text}{where}"
