"""Calls that wait: for news of the log, for a round before a read, for the answer of a round that is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from psserver.core.log import Log
from psserver.effects import Effect, Fail, Reply, Work
from psserver.plans.round import Record
from psserver.rounds.pending_round import Waiter as Answering
from psserver.rounds.rounds import Rounds
from psserver.state.sessions import Membership
from psserver.state.variables import Store
from psserver.values.keyed import StoredTable
from psserver.values.value import Value
from pswire.api import UNTIL_ENDED, UNTIL_GONE, Contribution, PullReply, PullRequest, RowRead, TableRead, Watched
from pswire.errors import InvalidRequest, PSError
from pswire.model.log import Gone
from pswire.model.status import OpenRound
from pswire.network.payload import Payload

MAX_CALLS = 256
"""Maximum number of calls of one kind that wait for one session. The oldest ones beyond it fail: their clients may be
gone.
"""


@dataclass(frozen=True, eq=False)
class Waiter:
    """One waiting call and the future that answers it; session 0 is a caller without a session."""

    session: int
    future: Future[Any]


@dataclass(frozen=True, eq=False)
class Watch(Waiter):
    """A call that waits until the log is longer than `after`, or until there is news for a chief.

    News change the `version`. A version of -1 watches the log alone.
    """

    after: int
    version: int


@dataclass(frozen=True, eq=False)
class HeldCall(Watch):
    """A call that waits until its session ends, or, with the version `UNTIL_GONE`, until more servers are lost."""


@dataclass(frozen=True, eq=False)
class Read(Waiter):
    """A call that reads variables, and rows, once round `after` is complete; without a session, at once.

    Where the variables are not here yet, what it asks for is checked once they are.
    """

    asked: PullRequest
    checked: bool = True


@dataclass(frozen=True, eq=False)
class Owed(Waiter):
    """A contribution to a round that is over, resent or held back. Its answer has the values of when it goes.

    It waits until no round writes.
    """

    record: Record
    said: Contribution


@dataclass(frozen=True, eq=False)
class Ahead(Owed):
    """One whose answer waits, with bounded staleness, until no other worker is too far behind; then it is owed."""


class Waiters:
    """All waiting calls. Guarded by the core's lock.

    Args:
        log, members: the state that watches wait for.
        store, rounds: the state that reads and owed answers wait for, and read.
        reply: makes an answer that is owed.

    Attributes:
        rows: the calls by kind, the oldest first.
    """

    def __init__(
        self,
        log: Log,
        members: Membership,
        store: Store,
        rounds: Rounds,
        reply: Callable[[Owed], Sequence[Effect]],
    ) -> None:
        self.rows: dict[type[Waiter], list[Any]] = {Owed: [], Ahead: [], Read: [], Watch: [], HeldCall: []}
        self._log = log
        self._members = members
        self._store = store
        self._rounds = rounds
        self._reply = reply
        self._superseded: list[Future[Any]] = []
        self._looked: tuple[int, int] | None = None  # the version and length that all watches were compared with
        self._held: tuple[object, int] | None = None  # what ends sessions, and the losses, as all holds know them
        self._waited: tuple[int, object] | None = None  # the clocks, and what ends sessions, as those ahead know them
        self._fresh = 0  # how many holds, the last ones, were compared with neither

    def add(self, row: Waiter) -> None:
        """Adds a waiting call; drops the oldest ones of its kind and session beyond `MAX_CALLS`.

        Raises:
            InvalidRequest: it reads a variable that has no value, or one twice, or rows that are not there.
        """
        match row:
            case HeldCall():
                self._fresh += 1
            case Watch():
                self._looked = None
            case Owed() if not self._may_go(row.said):
                row = Ahead(row.session, row.future, row.record, row.said)
            case Read(asked=PullRequest(variables=ids)):
                if len(set(ids)) != len(ids):
                    raise InvalidRequest("a variable is requested twice")
                if self._rounds.backlog.awaits:
                    row = replace(row, checked=False)
                else:
                    self._check(row.asked)
        calls = self.rows[type(row)]
        mine = [other for other in calls if other.session == row.session] if len(calls) >= MAX_CALLS else []
        for gone in mine[: max(len(mine) - MAX_CALLS + 1, 0)]:
            calls.remove(gone)
            self._superseded.append(gone.future)
        calls.append(row)

    def _check(self, asked: PullRequest) -> None:
        """Raises `InvalidRequest` if a variable has no value, or rows are not there."""
        for id in asked.variables:
            self._store.find(id)
        self._store.check_rows(asked.rows)
        self._store.ask(asked.tables)

    def drop(self, watches: Callable[[int], bool]) -> list[Future[Any]]:
        """Drops all calls, but of the watches only those for whose session `watches` holds; returns their futures."""
        dropped = self.rows[Read] + self.rows[Owed] + self.rows[Ahead]
        self.rows[Read], self.rows[Owed], self.rows[Ahead] = [], [], []
        self._held, self._fresh = None, 0
        for kind in (Watch, HeldCall):
            dropped += [row for row in self.rows[kind] if watches(row.session)]
            self.rows[kind] = [row for row in self.rows[kind] if not watches(row.session)]
        return [row.future for row in dropped]

    def hold(self, record: Record, waiters: list[Answering]) -> list[Answering]:
        """Holds back the answers of a round that have to wait for other workers; returns those that may go."""
        late = [waiter for waiter in waiters if not self._may_go(waiter[0])]
        for said, future in late:
            self.add(Owed(said.session, future, record, said))
        return [waiter for waiter in waiters if waiter not in late] if late else waiters

    @property
    def held(self) -> tuple[OpenRound, ...]:
        """The rounds whose answers wait for other workers, each once, with those workers."""
        found: dict[tuple[int, int], OpenRound] = {}
        for row in self.rows[Ahead]:
            said = row.said
            section = f"{self._log.describe(said.plan_id)}; applied, and waits for slower workers"
            missing = tuple(sorted(member.task for member in self._rounds.clocks.behind(said.session, said.round)))
            found[said.session, said.round] = OpenRound(said.round, section, missing, True)
        return tuple(found.values())

    def due(self, ended: Callable[[int], PSError | None], ends: object) -> list[Effect]:
        """Answers the contributions to rounds that are over, as far as they need not wait any longer.

        Arguments are those of `answers`.
        """
        answers: list[Effect] = []
        waited = self._rounds.clocks.version, ends
        if self.rows[Ahead] and waited != self._waited:
            for row in self._take(Ahead, self._is_near, ended, answers):
                self.rows[Owed].append(Owed(row.session, row.future, row.record, row.said))
        self._waited = waited
        for owed in self._take(Owed, self._can_go, ended, answers):
            answers += self._reply(owed)
        return answers

    def _is_near(self, row: Ahead) -> bool:
        return self._may_go(row.said)

    def _may_go(self, said: Contribution) -> bool:
        """Returns whether the answer of a round need not wait for the clocks of others.

        A round that a worker makes beside those that it counts never waits.
        """
        return said.alone or self._rounds.clocks.answers(said.session, said.round)

    def _can_go(self, row: Owed) -> bool:
        reads = bool(row.said.want or row.said.lookups)
        return not self._store.lent and not (reads and self._rounds.backlog.behind)

    def answers(self, now: float, ended: Callable[[int], PSError | None], ends: object) -> list[Effect]:
        """Answers the calls that need not wait any longer.

        Args:
            now: the time in seconds.
            ended: returns the error of a session that has ended.
            ends: changes where a session may have ended.
        """
        answers: list[Effect] = []
        if self._superseded:
            error = InvalidRequest(
                f"this process already has {MAX_CALLS} later calls that wait; make fewer calls at a time"
            )
            answers += [Fail(future, error) for future in self._superseded]
            self._superseded = []
        answers += self.due(ended, ends)
        answers += map(self._read, self._take(Read, self._can_read, ended, answers))
        look = self._members.version, len(self._log.entries)
        if look != self._looked:  # else no session has ended either
            self._looked = look
            answers += self._news(self._take(Watch, self._has_news, ended, answers), now)
        return answers + self._ends(ended, ends)

    def _ends(self, ended: Callable[[int], PSError | None], ends: object) -> list[Effect]:
        """Answers the calls that are held until sessions end, or servers are lost.

        Each process holds one: a thousand that come one after the other must not look at each other's.
        """
        answers: list[Effect] = []
        calls, held, older = self.rows[HeldCall], (ends, len(self._log.losses)), list[Any]()
        if held == self._held and not self._fresh:
            return answers
        if held == self._held:
            older, self.rows[HeldCall] = calls[: len(calls) - self._fresh], calls[len(calls) - self._fresh :]
        self._held, self._fresh = held, 0
        answers += self._news(self._take(HeldCall, self._has_news, ended, answers), 0.0)
        self.rows[HeldCall] = older + self.rows[HeldCall]
        return answers

    def _take(
        self,
        kind: type[Waiter],
        ready: Callable[[Any], bool],
        ended: Callable[[int], PSError | None],
        answers: list[Effect],
    ) -> list[Any]:
        """Removes and returns the calls that are ready.

        Fails those of ended sessions; drops those whose caller has gone away.
        """
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
        complete = not row.session or row.asked.after <= self._rounds.last
        complete = complete and not self._rounds.backlog.behind
        rows, tables = (read.variable for read in row.asked.rows), (read.variable for read in row.asked.tables)
        ids = (*row.asked.variables, *rows, *tables)
        return complete and not self._store.lent.intersection(ids)

    def _read(self, row: Read) -> Effect:
        asked = row.asked
        if not row.checked:
            try:
                self._check(asked)
            except PSError as error:
                return Fail(row.future, error)
        wholes, tables = self._store.views(asked.variables), self._store.views(read.variable for read in asked.rows)
        questions = self._store.ask(asked.tables)
        return Work("arrays", self._pack, (self._rounds.last, wholes, tables, asked.rows, questions), future=row.future)

    def _pack(
        self,
        last: int,
        wholes: Sequence[Value],
        tables: Sequence[Value],
        rows: Sequence[RowRead],
        questions: Sequence[tuple[StoredTable, TableRead]],
    ) -> PullReply:
        """Copies values to the host; in the thread for arrays."""
        device = self._store.device
        taken = [table.rows(read.numbers(), device.xp) for table, read in zip(tables, rows, strict=True)]
        answers = [table.answer(asked) for table, asked in questions]
        found = [device.get(array) for array in (*(view.whole() for view in wholes), *taken)]
        payload = Payload.pack([*found, *(array for _, each in answers for array in each)])
        return PullReply(last, payload, tuple(count for count, _ in answers))

    def _has_news(self, row: Watch) -> bool:
        if not row.session:
            return True  # nothing would tell that its caller is gone
        if row.version == UNTIL_GONE:
            return len(self._log.losses) > row.after
        changed = len(self._log.entries) != row.after or 0 <= row.version != self._members.version
        return changed and row.version != UNTIL_ENDED

    def _news(self, rows: Sequence[Watch], now: float) -> list[Effect]:
        if not rows:
            return []
        looks = any(row.version >= 0 for row in rows)
        plans, sessions = tuple(self._log.proposed.values()), self._members.states(now) if looks else ()
        answers: list[Effect] = []
        for row in rows:
            # A log shorter than the caller's is another job's.
            if row.version == UNTIL_GONE:
                losses = tuple(entry for entry in self._log.entries if isinstance(entry, Gone))
                answers.append(Reply(row.future, Watched(UNTIL_GONE, 0, losses, (), ())))
                continue
            start = row.after if row.after <= len(self._log.entries) else 0
            news = Watched(self._members.version, start, tuple(self._log.entries[start:]), (), ())
            if row.version >= 0:  # else each of a thousand members was told of all others with each generation
                news = replace(news, plans=plans, sessions=sessions, traces=dict(self._log.traces))
            answers.append(Reply(row.future, news))
        return answers
