"""Calls that wait for their answers, by the sessions that made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from psserver.effects import Effect, Fail
from pswire.errors import InvalidRequest, PSError

MAX_CALLS = 256
"""Maximum number of calls of one kind that wait for one session. The oldest ones beyond it fail: their clients may be
gone.
"""

Q = TypeVar("Q")


@dataclass(frozen=True, eq=False, slots=True)
class Call(Generic[Q]):
    """One waiting call: what it asks for, and the future that answers it. Session 0 is a caller without a session."""

    session: int
    asked: Q
    future: Future[Any]


class Calls(Generic[Q]):
    """The waiting calls of one kind. Guarded by the core's lock. Methods return effects.

    Args:
        limit: the most calls of one session.

    Attributes:
        waiting: the calls by session, the oldest first.
    """

    def __init__(self, limit: float = MAX_CALLS) -> None:
        self._limit = limit
        self.waiting: dict[int, list[Call[Q]]] = {}  # of nobody an empty list

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def __iter__(self) -> Iterator[Call[Q]]:
        return chain.from_iterable(self.waiting.values())

    def add(self, session: int, asked: Q, future: Future[Any]) -> list[Effect]:
        """Adds a call; fails the oldest of its session if there are too many."""
        calls = self.waiting.setdefault(session, [])
        calls.append(Call(session, asked, future))
        if len(calls) <= self._limit:
            return []
        why = f"this process already has {self._limit} later calls that wait; make fewer calls at a time"
        return [Fail(calls.pop(0).future, InvalidRequest(why))]

    def serve(self, answer: Callable[[Call[Q]], Sequence[Effect] | None]) -> list[Effect]:
        """Answers the calls for which a function returns effects, or raises; those for which it returns None wait on.

        Drops the calls whose callers have gone away.
        """
        effects: list[Effect] = []
        for session, calls in list(self.waiting.items()):
            waiting = [call for call in calls if not call.future.cancelled() and not _served(call, answer, effects)]
            if waiting:
                self.waiting[session] = waiting
            else:
                del self.waiting[session]
        return effects

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """Fails the calls of a session."""
        return [Fail(call.future, error) for call in self.waiting.pop(session, ())]

    def fail_all(self, error: PSError) -> list[Effect]:
        """Fails all calls."""
        return [effect for session in list(self.waiting) for effect in self.session_ended(session, error)]


def _served(call: Call[Q], answer: Callable[[Call[Q]], Sequence[Effect] | None], effects: list[Effect]) -> bool:
    try:
        found = answer(call)
    except PSError as error:
        found = [Fail(call.future, error)]
    effects += found or ()
    return found is not None
