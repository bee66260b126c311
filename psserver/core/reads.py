"""Calls that read variables: each waits for a round, and until no round writes what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from psserver.calls import Call, Calls
from psserver.effects import Effect, Work
from psserver.rounds.rounds import Rounds
from psserver.state.variables import Store
from psserver.values.keyed import StoredTable
from psserver.values.value import Value
from pswire.api import PullReply, PullRequest, RowRead, TableRead
from pswire.errors import InvalidRequest
from pswire.network.payload import Payload


class Reads:
    """The reads that wait. Guarded by the core's lock.

    Args:
        store, rounds: the state that they wait for, and read.

    Attributes:
        calls: the reads, and whether it was checked already that what they ask for is here.
    """

    def __init__(self, store: Store, rounds: Rounds) -> None:
        self.calls: Calls[tuple[PullRequest, bool]] = Calls()
        self._store = store
        self._rounds = rounds

    def add(self, asked: PullRequest, future: Future[PullReply]) -> list[Effect]:
        """Adds a read. Where the variables are not here yet, what it asks for is checked once they are.

        Raises:
            InvalidRequest: it reads a variable that has no value, or one twice, or rows that are not there.
        """
        if len(set(asked.variables)) != len(asked.variables):
            raise InvalidRequest("a variable is requested twice")
        is_here = not self._rounds.backlog.awaits
        if is_here:
            self._check(asked)
        return self.calls.add(asked.session, (asked, is_here), future)

    def _check(self, asked: PullRequest) -> None:
        """Raises `InvalidRequest` if a variable has no value, or rows are not there."""
        for id in asked.variables:
            self._store.find(id)
        self._store.check_rows(asked.rows)
        self._store.ask(asked.tables)

    def answers(self) -> list[Effect]:
        """Answers the reads that need not wait any longer."""
        return [] if self._rounds.backlog.behind else self.calls.serve(self._answer)

    def _answer(self, call: Call[tuple[PullRequest, bool]]) -> Sequence[Effect] | None:
        asked, checked = call.asked
        if call.session and asked.after > self._rounds.last:
            return None
        rows, questions = (read.variable for read in asked.rows), (read.variable for read in asked.tables)
        if self._store.lent and not self._store.lent.isdisjoint((*asked.variables, *rows, *questions)):
            return None
        if not checked:
            self._check(asked)
        wholes, tables = self._store.views(asked.variables), self._store.views(read.variable for read in asked.rows)
        work = self._rounds.last, wholes, tables, asked.rows, self._store.ask(asked.tables)
        return [Work("arrays", self._pack, work, future=call.future)]

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
        payload = Payload.gathered([*found, *(array for _, each in answers for array in each)])
        return PullReply(last, payload, tuple(count for count, _ in answers))
