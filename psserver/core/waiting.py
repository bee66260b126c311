"""Calls that wait: for news of the log, for a round before they read, for an answer that was given before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from psserver.core.log import Log
from psserver.effects import Effect, Fail, Reply, Work
from psserver.state.rounds import Rounds
from psserver.state.sessions import Membership
from psserver.state.strands import Record
from psserver.state.variables import Store
from pswire.api import UNTIL_ENDED, Contribution, PullReply, Watched
from pswire.errors import InvalidRequest, PSError
from pswire.model.tensor import Array
from pswire.transport.payload import Payload

MAX_CALLS = 256
"""Calls of one kind that wait for one session. Those whose clients have gone away are among them: the oldest."""


@dataclass(frozen=True, eq=False)
class Waiter:
    """One call, which its future answers; the session of a caller without one is 0."""

    session: int
    future: Future[Any]


@dataclass(frozen=True, eq=False)
class Watch(Waiter):
    """Waits until the log is longer than `after`, or there is something for a chief to act on, which changes `version`.

    A version of -1 follows the log alone, `UNTIL_ENDED` nothing.
    """

    after: int
    version: int


@dataclass(frozen=True, eq=False)
class Read(Waiter):
    """Waits until round `after` is complete, to read variables as of then; without a session reads them as they are."""

    variables: tuple[int, ...]
    after: int


@dataclass(frozen=True, eq=False)
class Resend(Waiter):
    """Waits until no round writes: a contribution to a round that is over gets its answer, with values as of now."""

    record: Record
    said: Contribution


class Waiters:
    """All calls that wait, a row each. Guarded by the core's lock.

    Args:
        log, members: what is watched.
        store, rounds: what is read, and what is waited for.
        reply: makes the answers to a resend.

    Attributes:
        rows: those of each kind, the oldest first.
    """

    def __init__(
        self,
        log: Log,
        members: Membership,
        store: Store,
        rounds: Rounds,
        reply: Callable[[Resend], Sequence[Effect]],
    ) -> None:
        self.rows: dict[type[Waiter], list[Any]] = {Resend: [], Read: [], Watch: []}
        self._log = log
        self._members = members
        self._store = store
        self._rounds = rounds
        self._reply = reply
        self._superseded: list[Future[Any]] = []
        self._looked: tuple[int, int] | None = None  # what all watches were compared with

    def add(self, row: Waiter) -> None:
        """A call waits from now on; the oldest of too many of its kind and session wait no more.

        Raises:
            InvalidRequest: it reads a variable that has no value, or one twice.
        """
        match row:
            case Watch():
                self._looked = None
            case Read(variables=ids):
                if len(set(ids)) != len(ids):
                    raise InvalidRequest("a variable is asked for twice")
                for id in ids:
                    self._store.value(id)
        rows = self.rows[type(row)]
        mine = [other for other in rows if other.session == row.session]
        for gone in mine[: max(len(mine) - MAX_CALLS + 1, 0)]:
            rows.remove(gone)
            self._superseded.append(gone.future)
        rows.append(row)

    def drop(self, watches: Callable[[int], bool]) -> list[Future[Any]]:
        """Forgets all rows, of the watches those for whose session `watches` holds; returns their futures."""
        dropped = [row for row in self.rows[Watch] if watches(row.session)] + self.rows[Read] + self.rows[Resend]
        self.rows = {Resend: [], Read: [], Watch: [row for row in self.rows[Watch] if not watches(row.session)]}
        return [row.future for row in dropped]

    def answers(self, now: float, ended: Callable[[int], PSError | None]) -> list[Effect]:
        """Answers those who wait no longer; `ended` gives the reason for those whose session has ended."""
        answers: list[Effect] = []
        if self._superseded:
            error = InvalidRequest(f"{MAX_CALLS} later calls of this session wait as well; make fewer at a time")
            answers += [Fail(future, error) for future in self._superseded]
            self._superseded = []
        for again in self._take(Resend, lambda _: not self._store.lent, ended, answers):
            answers += self._reply(again)
        answers += map(self._read, self._take(Read, self._can_read, ended, answers))
        look = self._members.version, len(self._log.entries)
        if look != self._looked:  # else no session has ended, either; each process waits here as long as it lives
            self._looked = look
            answers += self._news(self._take(Watch, self._has_news, ended, answers), now)
        return answers

    def _take(
        self,
        kind: type[Waiter],
        ready: Callable[[Any], bool],
        ended: Callable[[int], PSError | None],
        answers: list[Effect],
    ) -> list[Any]:
        """Takes out the rows that are ready; those whose session has ended, or whose caller has gone away, as well."""
        found: list[Any] = []
        if not (rows := self.rows[kind]):
            return found
        self.rows[kind] = []
        for row in rows:
            error = ended(row.session) if row.session else None
            if error is not None:
                answers.append(Fail(row.future, error))
            elif not row.future.cancelled():
                (found if ready(row) else self.rows[kind]).append(row)
        return found

    def _can_read(self, row: Read) -> bool:
        complete = not row.session or row.after <= self._rounds.last
        return complete and not self._store.lent.intersection(row.variables)

    def _read(self, row: Read) -> Effect:
        arrays = [self._store.value(id) for id in row.variables]
        return Work("arrays", self._pack, (self._rounds.last, arrays), future=row.future)

    def _pack(self, last: int, arrays: Sequence[Array]) -> PullReply:
        """Brings values to the host; in the thread for arrays."""
        return PullReply(last, Payload.pack([self._store.device.get(array) for array in arrays]))

    def _has_news(self, row: Watch) -> bool:
        if not row.session:
            return True  # nobody would know that its caller is gone
        changed = len(self._log.entries) != row.after or 0 <= row.version != self._members.version
        return changed and row.version != UNTIL_ENDED

    def _news(self, rows: Sequence[Watch], now: float) -> list[Effect]:
        if not rows:
            return []
        plans, sessions = tuple(self._log.proposed.values()), self._members.states(now)
        answers: list[Effect] = []
        for row in rows:
            # A log that is shorter than what the caller knows is another job's.
            start = row.after if row.after <= len(self._log.entries) else 0
            news = Watched(self._members.version, start, tuple(self._log.entries[start:]), plans, sessions)
            answers.append(Reply(row.future, news))
        return answers
