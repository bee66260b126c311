"""The rounds of this process that are under way: they are sent, and their answers are taken when somebody looks.

A round is sent without a wait. Two things come of its answers, at two times. Its values are taken when the program
looks at one of them, in the order of the rounds. What the answers say of the members is taken in at places that all
members come to between the same rounds: before a batch, a save, a restore and the end, and before a round for those
that lie a whole window behind it. So what a round is never depends on a look, on threads or on timing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from psclient._src.network.patience import Deadline
from psclient._src.network.session import Session
from psclient._src.options import Round
from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.counters import RoundCounters
from psclient._src.rounds.membership import Group
from psclient._src.rounds.read_cache import ReadCache
from psclient._src.rounds.under_way import Answered, UnderWay
from psclient._src.tracing.diagnostics import users_line
from pswire.api import RoundReply
from pswire.cluster import Task
from pswire.errors import MemoryLimit, ProgramError, PSError, RoundTimeout, ServerGone, ServerLost
from pswire.model.log import Generation, Member
from pswire.model.plan import Ref
from pswire.model.rows import Rows, row_specs
from pswire.model.tensor import Array

if TYPE_CHECKING:
    from psclient._src.telemetry.traces.worker import Flush

log = logging.getLogger("psclient")

FAILED_ROUND = (ProgramError, MemoryLimit)
"""Errors that a round ended with, for every process alike: nothing of it was applied where it failed."""

NOBODY = frozenset[Task]()

MANY_WAITS = 2
"""Waits of a step above which it has waited too often."""

MANY_STEPS = 3
"""Steps, one after the other, that have to wait too often before the log says so, once."""


class Window:
    """The rounds under way. Rounds are added by the thread that runs cross-replica code; any thread may take values.

    Args:
        session: this process's session, open.
        group: this process's place among the members.
        reads: the variables' values, which the answers bring.
        awaited: names the processes that a round waits for.
        measures: counts waits, and rounds.
    """

    def __init__(
        self, session: Session, group: Group, reads: ReadCache, awaited: Awaited, measures: RoundCounters
    ) -> None:
        self._last: Callable[[], Round] | None = None
        self._session = session
        self._group = group
        self._reads = reads
        self._awaited = awaited
        self._measures = measures
        self._taking = threading.RLock()  # held by the thread that waits for answers
        self._rounds: deque[UnderWay] = deque()  # whose values are not taken
        self._answered: deque[Answered] = deque()  # what was said of the members, and is not taken in
        self._missing: list[set[Task]] = [set() for _ in session.servers]  # in the last round of each
        self._step_waits = 0
        self._lines: dict[str, None] = {}  # where this step has waited, each once, if its end may say it
        self._often = 0  # steps, one after the other, that have waited too often
        self._told = False
        self._thread = 0

    @property
    def size(self) -> int:
        """The most rounds under way; if it is one, each is waited for by its call.

        One for an asynchronous worker with several servers, which could mix them, and one with bounded staleness: the
        answer to a round is what lets it begin the next.
        """
        session = self._session
        if session.clock is not None or (self._group.alone and len(session.servers) > 1):
            return 1
        return session.window

    @property
    def last_round(self) -> Round | None:
        """The last round whose answers were taken; None before the first."""
        return None if self._last is None else self._last()

    @property
    def mine(self) -> bool:
        """True in the thread that has sent the last round, or where none was sent."""
        return self._thread in (0, threading.get_ident())

    @property
    def busy(self) -> bool:
        """True while rounds are under way whose values were not taken."""
        return bool(self._rounds)

    def add(self, round: UnderWay) -> None:
        """Adds a round that the calling thread has sent, behind all others."""
        self._thread = threading.get_ident()
        self._rounds.append(round)
        self._say_waits()

    def values(self, round: UnderWay) -> Mapping[Ref, Array | Rows]:
        """Returns what the plan of a round returns; waits for the round, and for all before it.

        Raises:
            PSError: the round failed, or the session is over.
        """
        self.take(round)
        if round.failure is not None:
            raise round.failure
        return round.values or {}

    def take(self, round: UnderWay) -> None:
        """Waits for a round and all before it, and takes their values.

        Raises:
            PSError: the session is over.
        """
        if round.values is not None:
            return
        self._session.owner.check()
        with self._taking:
            if round.values is not None:
                return
            if not (round.waited or self._told):
                self._step_waits += 1
                if self._often == MANY_STEPS - 1:
                    self._lines[users_line()] = None
            self._measures.exemplar = None if round.traced is None else round.traced.labels
            with self._measures if round.traced is None else self._measured(round.traced):
                while round.values is None:
                    if self._rounds[0].values is None:  # else an interrupt came before the next line
                        self._take(self._rounds[0])
                    self._rounds.popleft()
                    self._say_waits()

    @contextmanager
    def _measured(self, traced: Flush) -> Iterator[None]:
        with self._measures, traced.waiting():
            yield

    def take_all(self) -> None:
        """Waits for all rounds, and takes their values."""
        if self._rounds:
            self.take(self._rounds[-1])

    def take_in(self, before: int) -> None:
        """Takes in what the answers to the rounds before a number say of the members; waits for them."""
        if self._rounds and self._rounds[0].number < before:
            self.take([round for round in self._rounds if round.number < before][-1])
        while self._answered and self._answered[0].number < before:
            said = self._answered.popleft()
            self._group.answered(said.passed, said.generation, said.more, said.out, said.over)

    def settle(self) -> None:
        """Takes in the answers to all rounds."""
        self.take_in(self._group.round)

    def _begin_step(self) -> None:
        """A step begins, or the script ends: says once where each of the last steps has waited too often.

        A step that does so alone is the last one of a generation, after which the script looks at many values.
        """
        self._measures.steps += 1
        self._often = self._often + 1 if self._step_waits > MANY_WAITS else 0
        if self._often == MANY_STEPS:
            self._told = True
            log.warning(
                "each of the last %d steps waited several times for values of its rounds, the last one %d "
                "times, at %s; each wait costs a round trip. Read values once at the end of a step, or not "
                "in every step",
                MANY_STEPS,
                self._step_waits,
                ", ".join(self._lines),
            )
        self._step_waits, self._lines = 0, {}

    def _say_waits(self) -> None:
        """Notes for the heartbeats which round is the oldest that is not answered."""
        if not self._group.alone:
            rounds = self._rounds
            self._session.waits = (rounds[0].number, rounds[0].plan.id) if rounds else (-1, b"")

    # ---- Answers ----

    def _take(self, round: UnderWay) -> None:
        replies, failure = self._gather(round)
        shares, targets = round.shares, self._reads.targets
        # First, so that there is never room for more than one value of a variable that spans parts.
        self._reads.forget(shares.written, round, everything=shares.restores)
        values: dict[Ref, Array | Rows] = {}
        fresh: dict[int, Array] = {}
        looked_up: dict[int, Rows] = {}
        warnings: dict[str, None] = {}
        for server, reply in replies.items():
            share, want, lookups = shares.shares[server], round.want[server], round.lookups[server]
            ids, specs = want.ids, [*want.specs, *share.given_specs]
            for (_, whole), count in zip(share.given_rows, reply.rows, strict=True):
                specs += row_specs(whole, count)
            for each in lookups:
                specs.append(each.spec)
            filled = targets.of(ids) if targets.ids else {}
            tensors = reply.payload.tensors(specs, filled, shared=True)
            fresh.update(zip(ids, tensors, strict=False))
            for place in filled:
                del fresh[ids[place]]
            behind = iter(tensors[len(ids) :])
            for ref, _ in share.given:
                values[ref] = next(behind)
            for ref, _ in share.given_rows:
                values[ref] = Rows(next(behind), next(behind))
            for each in lookups:
                looked_up[each.variable] = Rows(each.ids, next(behind))
            if targets.ids:
                targets.written(ids)
            if reply.excluded or self._missing[server]:
                self._note_missing(server, reply)
            # Of a variable that several servers hold each of them says the same.
            warnings.update(dict.fromkeys(reply.warnings))
        for words in warnings:
            log.warning("%s", words)
        self._reads.bring(fresh, looked_up, () if round.alone else shares.shares, round.number)
        if len(replies) < len(round.futures) and failure is None:
            gone = round.futures.keys() - replies.keys()
            self._reads.fetch_targets({id for server in gone for id in round.want[server].ids})
        self._measures.rounds["completed" if failure is None else "failed"] += 1
        self._note(round, replies)
        round.failure, round.futures = failure, {}
        round.values = values  # last: who sees it looks at no lock

    def _note_missing(self, server: int, reply: RoundReply) -> None:
        """Notes which members' contributions are not in a round, and says it of those that were in the one before."""
        self._measures.excluded += len(reply.excluded)
        for task in set(reply.excluded) - self._missing[server]:
            # Who is late is so again and again; of who is lost the chief says it.
            level = logging.DEBUG if self._session.consistency.leaves_out else logging.WARNING
            log.log(level, "round %d of server %d is complete without %s", reply.round, server, task)
        self._missing[server] = set(reply.excluded)

    def _note(self, round: UnderWay, replies: Mapping[int, RoundReply]) -> None:
        """Notes what the answers say of the members."""
        out, absent = set[Task](), set[Task]()
        newest: Generation | None = None
        more, over = False, 0
        for reply in replies.values():
            out.update(reply.excluded)
            absent.update(reply.excluded, reply.observers)
            newest = reply.generation if newest is None or reply.generation.number > newest.number else newest
            more, over = more or reply.more, max(over, reply.over)
        if replies:
            members = () if self._group.alone or round.label is None else round.label.members
            generation = round.label.number if round.label else 0
            # It is made where somebody looks at it: there may be a thousand members.
            told = members, self._session.task, out, absent, max(over - 1 - round.number, 0)
            self._last = partial(_last_round, round.number, generation, *told)
        drops = self._session.consistency.drops
        late = frozenset(out) if drops and round.plan.trains else NOBODY
        self._answered.append(Answered(round.number, round.passed, newest, more, late, over if drops else 0))

    def _gather(self, round: UnderWay) -> tuple[dict[int, RoundReply], PSError | None]:
        """Returns the answers, and the error if the round failed on some server: then it failed for every process."""
        session = self._session
        deadline = session.deadline(session.round_limit)
        failure: PSError | None = None
        replies: dict[int, RoundReply] = {}
        self._group.work_meanwhile()
        for server, future in round.futures.items():
            try:
                replies[server] = self._await(round, server, future, deadline)
            except FAILED_ROUND as error:
                failure = error
            except ServerGone:
                continue  # others have made the round as well, and what it would have brought is read from them
            except PSError as error:
                # The others may have made this round: this process has lost its place among them.
                session.end(error)
        if failure is None and round.futures and not replies:
            session.end(
                ServerLost(
                    "was lost together with the servers that had its copies; restart from a checkpoint",
                    _names(round.futures),
                )
            )
        if failure is not None and replies:
            # It is applied where it did not fail: nobody may compute on half a round.
            session.end(failure)
        elif failure is not None and not round.waited:
            # What came after it was computed, and perhaps sent, as if it had been made.
            session.end(type(failure)(f"{failure.message}; sent by {round.line or 'the script'}", failure.task))
        session.check()
        if session.copied:
            session.answered(round.plan.id)
        return replies, failure

    def _await(self, round: UnderWay, server: int, future: Future[RoundReply], deadline: Deadline) -> RoundReply:
        session, number, awaited = self._session, round.number, self._awaited
        return session.wait(
            future,
            deadline,
            lambda: RoundTimeout(
                f"round {number} did not complete within {session.round_limit:g} s: it waits for {awaited.told(server)}"
            ),
            lambda: awaited.reminder(server, number),
            lambda: "the chief" in awaited.names(server),
        )


class OwnWindow(Window):
    """The rounds of this process alone that are under way, beside those of all members: see `OwnRounds`.

    They are as those of an asynchronous worker, but that their calls do not wait for them. What their answers say of
    the members is nothing to this process, which learns it from the rounds of all.
    """

    def __init__(
        self, session: Session, group: Group, reads: ReadCache, awaited: Awaited, measures: RoundCounters
    ) -> None:
        super().__init__(session, group, reads, awaited, measures)
        self._approved: set[bytes] = set()  # plans of which one was made

    @property
    def size(self) -> int:
        """The most rounds under way: one where there are several servers, on which they have no common order.

        Then the next one waits for it, and not its call.
        """
        return self._session.window if len(self._session.servers) == 1 else 1

    def make_room(self) -> None:
        """Waits until one more round may be sent."""
        while len(self._rounds) >= self.size:
            self.take(self._rounds[0])

    def _say_waits(self) -> None:
        """Does nothing: nobody else waits in them."""

    def _note(self, round: UnderWay, replies: Mapping[int, RoundReply]) -> None:
        """Notes that the chief has approved its section."""
        self._approved.add(round.plan.id)

    def _await(self, round: UnderWay, server: int, future: Future[RoundReply], deadline: Deadline) -> RoundReply:
        session, task = self._session, Task("ps", server)
        new = round.plan.id not in self._approved
        whom = f"{task}, or for the chief, which has to approve its first use," if new else str(task)
        said = f"update {round.number} of its own variables, with ps.Async()"
        return session.wait(
            future,
            deadline,
            lambda: RoundTimeout(f"{said} was not made within {session.round_limit:g} s: it waits for {whom}"),
            lambda: f"waits for {whom} to make {said}",
            lambda: new,
        )


def _names(servers: Iterable[int]) -> str:
    return ", ".join(str(Task("ps", server)) for server in servers)


def _last_round(
    number: int, generation: int, members: Sequence[Member], me: Task, out: Set[Task], absent: Set[Task], behind: int
) -> Round:
    """Returns what answers say of a round's members.

    Args:
        number: the round's number.
        generation: the round's generation.
        members: those of the generation; none where this process made the round alone.
        me: its task.
        out: members that it was completed without.
        absent: those, and members that only observed.
        behind: rounds that the process has missed.
    """
    everybody = {member.task for member in members} if members else {me}
    contributors, excluded = (tuple(map(str, sorted(tasks))) for tasks in (everybody - absent, out))
    return Round(number, generation, contributors, excluded, behind)
