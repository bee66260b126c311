"""Closures: calls of registered functions that a coordinator schedules, and workers run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Piece:
    """A piece of the arguments of a closure, or of its result: bytes that no server reads.

    Attributes:
        size: bytes of the whole.
        offset: the place of the piece in it.
        data: the piece; at most `PIECE_BYTES`.
    """

    size: int = 0
    offset: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class ClosureOrder:
    """What a coordinator says to server 0.

    Attributes:
        number: the closure that it schedules, one more than the last; 0 for none.
        function: the name of its function.
        needs: closures whose results are among its arguments.
        arguments: a piece of them; pieces come in order.
        functions: the functions of the coordinator, where it begins; else empty.
        told: the failures that it has raised.
        joins: True to be answered once all closures are over.
        dropped: closures whose results nobody will ask for.
    """

    number: int = 0
    function: str = ""
    needs: tuple[int, ...] = ()
    arguments: Piece = Piece()
    functions: tuple[str, ...] = ()
    told: int = 0
    joins: bool = False
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failure:
    """The error of a closure.

    Attributes:
        function: the name of its function.
        kind: the name of the error's type.
        text: its text.
        task: the worker, as `/job:worker/task:0`.
    """

    function: str
    kind: str
    text: str
    task: str


@dataclass(frozen=True)
class ClosureQueue:
    """The closures of a coordinator, as server 0 has them.

    Attributes:
        number: the last that was taken into the queue.
        queued: how many wait for a worker.
        running: how many are run now.
        workers: the workers that run closures, or wait for one.
        settled: all closures before this one are over.
        failures: failures so far; those that come before the coordinator was told of one are a part of that.
        failure: the first one of which it was not told; None if there is none.
    """

    number: int
    queued: int = 0
    running: int = 0
    workers: int = 0
    settled: int = 1
    failures: int = 0
    failure: Failure | None = None


@dataclass(frozen=True)
class ClosureResult:
    """What a worker says of the closure that it has run.

    Attributes:
        number: the closure.
        result: a piece of what it returned; pieces come in order.
        kind: the name of the type of the error that it raised; "" for none.
        text: the error's text.
    """

    number: int
    result: Piece = Piece()
    kind: str = ""
    text: str = ""


@dataclass(frozen=True)
class ClosureName:
    """The name of a closure in the pushes that it makes, and which closures are over.

    Attributes:
        number: the closure.
        version: grows with each closure that is handed out or is over; of two workers that push for one closure the one
            with the greater version is right.
        newest: the last closure that was ever handed out, in that version.
        begun: those that were handed out and are not over: what is before `newest` and not among them is over.
    """

    number: int
    version: int
    newest: int
    begun: tuple[int, ...]


@dataclass(frozen=True)
class Taken:
    """The answer to a worker that asks for a closure.

    Attributes:
        name: the closure; None if there is none: the coordinator has ended where `over`, else more of the result that
            came is wanted.
        function: the name of its function.
        coordinator: the session of its coordinator.
        arguments: a piece of its arguments.
        over: True if no closure will come.
    """

    name: ClosureName | None = None
    function: str = ""
    coordinator: int = 0
    arguments: Piece = Piece()
    over: bool = False


ClosureState = Literal["done", "failed", "cancelled"]
"""What has become of a closure."""


@dataclass(frozen=True)
class Fetched:
    """The result of a closure.

    Attributes:
        state: what has become of it.
        result: a piece of what it returned.
        failure: why it has failed; of one that was cancelled the failure of the other; None where it is done.
    """

    state: ClosureState
    result: Piece = Piece()
    failure: Failure | None = None
