"""Requests: what a process asks of a server, as one value each. Its class says the verb, its fields the arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar, get_args, get_origin

R = TypeVar("R")
P = ParamSpec("P")


class ServerRequest(Generic[R]):
    """A request of a server. `R` is its answer, a future of it where that may come late.

    Attributes:
        verb: the verb's name in the protocol, such as `CreateBatch`: the class is `CreateBatchRequest`.
        method: the same in Python, such as `create_batch`.
        waits: True if the answer is a future.
        answer: the type of the answer itself.
    """

    verb: ClassVar[str]
    method: ClassVar[str]
    waits: ClassVar[bool]
    answer: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        (base,) = vars(cls)["__orig_bases__"]
        (answer,) = get_args(base)
        cls.waits = get_origin(answer) is Future
        cls.answer = get_args(answer)[0] if cls.waits else answer
        cls.verb = cls.__name__.removesuffix("Request")
        cls.method = re.sub(r"\B(?=[A-Z])", "_", cls.verb).lower()
        REQUESTS[cls.verb] = cls

    @property
    def sender(self) -> str:
        """The process that sends it, in words, where it says what protocol it speaks."""
        return "a process"

    def words(self) -> tuple[int | None, str]:
        """Returns the session that asks, if one does, and what it asks for, in words for people, without secrets."""
        return None, ""


REQUESTS: dict[str, type[ServerRequest[Any]]] = {}
"""The class of each verb's requests."""


class Called(Protocol):
    """What requests are sent to."""

    def call(self, request: ServerRequest[R]) -> R:
        """Does what a request asks for."""
        ...


def verb(request: Callable[P, ServerRequest[R]]) -> Callable[Concatenate[Any, P], R]:
    """Makes the method by which a request of some class is sent: its arguments are the fields."""

    def ask(server: Called, /, *args: P.args, **keys: P.kwargs) -> R:
        return server.call(request(*args, **keys))

    return ask
