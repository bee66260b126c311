"""Answers of rounds that are over, and that wait: for slower workers, or until no round writes.

Such an answer has the values of when it goes. It is one to a contribution that was sent again, or was held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from psserver.calls import Call, Calls
from psserver.effects import Effect
from psserver.plans.round import Record
from psserver.rounds.open_rounds import computing
from psserver.rounds.pending_round import Waiter
from psserver.rounds.rounds import Rounds
from psserver.state.variables import Store
from pswire.api import Contribution, RoundReply
from pswire.errors import PSError
from pswire.model.status import OpenRound

Owed = tuple[Contribution, Record]
"""A contribution, and the record of its round."""


class LateAnswers:
    """The answers that wait. Guarded by the core's lock.

    Args:
        store, rounds: the state that they wait for.
        describe: returns a plan in words.
        reply: makes the answers to contributions of a round.

    Attributes:
        owed: those that wait until no round writes.
        ahead: those that wait, with bounded staleness, until no other worker is too far behind; then they are owed.
    """

    def __init__(
        self,
        store: Store,
        rounds: Rounds,
        describe: Callable[[bytes], str],
        reply: Callable[[Record, Sequence[Waiter]], list[Effect]],
    ) -> None:
        self.owed: Calls[Owed] = Calls()
        self.ahead: Calls[Owed] = Calls()
        self._store = store
        self._rounds = rounds
        self._describe = describe
        self._reply = reply
        self._looked: tuple[object, ...] = ()  # the clocks, as those that are ahead know them
        self._displaced: list[Effect] = []

    def add(self, said: Contribution, future: Future[RoundReply], record: Record) -> None:
        """Adds the answer to a contribution."""
        calls = self.owed if self._may_go(said) else self.ahead
        self._displaced += calls.add(said.session, (said, record), future)

    def hold(self, record: Record, waiters: list[Waiter]) -> list[Waiter]:
        """Holds back the answers of a round that have to wait for other workers; returns those that may go."""
        if not self._rounds.clocks.sessions:
            return waiters
        late = [waiter for waiter in waiters if not self._may_go(waiter[0])]
        for said, future in late:
            self.add(said, future, record)
        return [waiter for waiter in waiters if waiter not in late] if late else waiters

    def _may_go(self, said: Contribution) -> bool:
        """Returns whether the answer of a round need not wait for the clocks of others.

        A round that a worker makes beside those that it counts never waits.
        """
        return said.alone or self._rounds.clocks.answers(said.session, said.round)

    def held(self, now: float) -> tuple[OpenRound, ...]:
        """Returns the rounds whose answers wait for other workers, each once, with those workers."""
        found: dict[tuple[int, int], OpenRound] = {}
        for call in self.ahead:
            said, _ = call.asked
            section = f"{self._describe(said.plan_id)}; applied, and waits for slower workers"
            behind = self._rounds.clocks.behind(said.session, said.round)
            missing, busy = tuple(sorted(m.task for m in behind)), computing(self._rounds, behind, now)
            found[said.session, said.round] = OpenRound(said.round, section, missing, True, busy)
        return tuple(found.values())

    def due(self) -> list[Effect]:
        """Returns the answers that need not wait any longer."""
        effects, self._displaced = self._displaced, []
        clocks = self._rounds.clocks
        look = clocks, clocks.version, self._rounds.generation
        if look != self._looked:
            self._looked = look
            effects += self.ahead.serve(self._come_near)
        if not self._store.lent:
            effects += self.owed.serve(self._answer)
        return effects

    def _come_near(self, call: Call[Owed]) -> Sequence[Effect] | None:
        said, _ = call.asked
        return self.owed.add(call.session, call.asked, call.future) if self._may_go(said) else None

    def _answer(self, call: Call[Owed]) -> Sequence[Effect] | None:
        said, record = call.asked
        reads = said.want or said.lookups
        return None if reads and self._rounds.backlog.behind else self._reply(record, [(said, call.future)])

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """Fails the answers to a session."""
        return self.owed.session_ended(session, error) + self.ahead.session_ended(session, error)
