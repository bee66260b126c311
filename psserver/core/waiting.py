"""Callers that wait for news of the log, and for a round before they read. Guarded by the core's lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from psserver.core.log import Log
from psserver.effects import Answer, Submit, answering, failing, working
from psserver.state.rounds import Record, Rounds
from psserver.state.sessions import Membership
from psserver.state.variables import Store
from pswire.api import UNTIL_ENDED, Contribution, PullReply, RoundReply, Watched
from pswire.errors import InvalidRequest, PSError
from pswire.transport.payload import Payload

MAX_CALLS = 256
"""Calls of one kind that wait for one session. Those whose clients have gone away are among them: the oldest."""

W = TypeVar("W", bound=tuple[Any, ...])


def _make_room(waiting: list[W], session: int) -> list[W]:
    """Who waits no more, so that one more of a session can; these are taken out."""
    mine = [waiter for waiter in waiting if waiter[0] == session]
    gone = mine[: max(len(mine) - MAX_CALLS + 1, 0)]
    for waiter in gone:
        waiting.remove(waiter)
    return gone


def _superseded() -> PSError:
    return InvalidRequest(f"{MAX_CALLS} later calls of this session wait as well; make fewer at a time")


class Watchers:
    """Who waits until the log is longer, or until there is something for a chief to act on.

    Args:
        log, members: what is watched.
    """

    def __init__(self, log: Log, members: Membership) -> None:
        self._log = log
        self._members = members
        self._waiting: list[tuple[int, int, int, Future[Watched]]] = []
        self._superseded: list[Future[Watched]] = []
        self._looked: tuple[int, int] | None = None  # what all who wait were compared with

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, session: int, after: int, version: int, future: Future[Watched]) -> None:
        """Somebody waits who knows the log up to `after`; a version of -1 follows the log alone, `UNTIL_ENDED` nothing.

        Who has no session, 0, is told at once: nobody would know that it is gone.
        """
        self._superseded += [waiter[-1] for waiter in _make_room(self._waiting, session)]
        self._waiting.append((session, after, version, future))
        self._looked = None

    def drop(self, gone: Callable[[int], bool]) -> list[Future[Watched]]:
        """Forgets those for whose session `gone` holds; returns their futures."""
        dropped = [waiter for waiter in self._waiting if gone(waiter[0])]
        self._waiting = [waiter for waiter in self._waiting if not gone(waiter[0])]
        return [future for *_, future in dropped]

    def answers(self, now: float, ended: Callable[[int], PSError | None]) -> list[Answer]:
        """News for those who do not know it, and the reason for those whose session has ended."""
        version, length = self._members.version, len(self._log.entries)
        if self._looked == (version, length):
            return []  # a session ends by either; each process waits here as long as it lives
        self._looked = version, length
        # A log that is shorter than what the caller knows is another job's.
        superseded, self._superseded = self._superseded, []
        answers: list[Answer] = [failing(future, _superseded()) for future in superseded]
        ready: list[tuple[int, int, int, Future[Watched]]] = []
        waiting: list[tuple[int, int, int, Future[Watched]]] = []
        for waiter in self._waiting:
            session, after, known, future = waiter
            error = ended(session) if session else None
            if error is not None:
                answers.append(failing(future, error))
                continue
            news = known != UNTIL_ENDED and (length != after or (known >= 0 and known != version))
            if not future.cancelled():
                (ready if news or not session else waiting).append(waiter)
        if not ready:
            self._waiting = waiting
            return answers
        self._waiting = waiting
        plans, sessions = tuple(self._log.proposed.values()), self._members.states(now)
        for _, after, _, future in ready:
            start = after if after <= length else 0
            entries = tuple(self._log.entries[start:])
            answers.append(answering(future, Watched(version, start, entries, plans, sessions)))
        return answers


Resend = tuple[Record, Contribution, Future[RoundReply]]


class Resends:
    """Who contributed again to a round that is over, and is answered with values as they are after some round.

    Args:
        store: what is read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Resend] = []

    def add(self, resend: Resend) -> None:
        """Somebody did."""
        self._waiting.append(resend)

    def take(self) -> list[Resend]:
        """Those who can be answered now: nobody, while a round may be writing."""
        if self._store.lent:
            return []
        taken, self._waiting = self._waiting, []
        return taken

    def drop(self) -> list[Future[RoundReply]]:
        """Forgets all; returns their futures."""
        dropped, self._waiting = self._waiting, []
        return [future for *_, future in dropped]


class Readers:
    """Who waits until a round is complete, to read variables as of then.

    Args:
        store, rounds: what is read, and what is waited for.
        submit: brings values to the host.
    """

    def __init__(self, store: Store, rounds: Rounds, submit: Submit) -> None:
        self._store = store
        self._rounds = rounds
        self._submit = submit
        self._waiting: list[tuple[int, tuple[int, ...], int, Future[PullReply]]] = []
        self._superseded: list[Future[PullReply]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, session: int, variables: tuple[int, ...], after: int, future: Future[PullReply]) -> None:
        """Somebody reads variables, once round `after` is complete; who has no session, 0, as they are.

        Raises:
            InvalidRequest: one has no value, or is asked for twice.
        """
        if len(set(variables)) != len(variables):
            raise InvalidRequest("a variable is asked for twice")
        for id in variables:
            self._store.value(id)
        self._superseded += [waiter[-1] for waiter in _make_room(self._waiting, session)]
        self._waiting.append((session, variables, after if session else -1, future))

    def drop(self) -> list[Future[PullReply]]:
        """Forgets all; returns their futures."""
        dropped, self._waiting = self._waiting, []
        return [future for *_, future in dropped]

    def answers(self, ended: Callable[[int], PSError | None]) -> list[Answer]:
        """Values for those whose round is complete, and the reason for those whose session has ended."""
        superseded, self._superseded = self._superseded, []
        answers: list[Answer] = [failing(future, _superseded()) for future in superseded]
        waiting = []
        for waiter in self._waiting:
            session, ids, after, future = waiter
            error = ended(session) if session else None
            if error is not None:
                answers.append(failing(future, error))
            elif after <= self._rounds.last and not self._store.lent.intersection(ids):
                answers.append(self._read(ids, future))
            else:
                waiting.append(waiter)
        self._waiting = waiting
        return answers

    def _read(self, ids: tuple[int, ...], future: Future[PullReply]) -> Answer:
        arrays, last, device = [self._store.value(id) for id in ids], self._rounds.last, self._store.device

        def read() -> PullReply:
            return PullReply(last, Payload.pack([device.get(array) for array in arrays]))

        return lambda: self._submit(working(future, read))
