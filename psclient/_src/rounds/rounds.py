"""Rounds: sends what a section reduces and updates, and takes what comes back.

Per server and round there is one push. Its answer brings back, besides what the section returns, the
variables that it assigned and that this process read before: the next step's reads cost no call.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from psclient._src.options import Round
from psclient._src.rounds.awaited import Awaited
from psclient._src.rounds.counters import RoundCounters
from psclient._src.rounds.creation import Creation
from psclient._src.rounds.membership import Group
from psclient._src.rounds.prepared import PlanShares, ServerShare
from psclient._src.rounds.read_cache import ReadCache, frozen
from psclient._src.transport.patience import Deadline
from psclient._src.transport.session import Session
from psclient._src.transport.staging import Sent, fill, host, pack
from pswire.api import Contribution, RoundReply
from pswire.errors import Fenced, MemoryLimit, ProgramError, PSError, PushAgain, RoundTimeout
from pswire.model.finite import is_finite
from pswire.model.plan import Plan, Ref, SnapshotOrder
from pswire.model.tensor import Array
from pswire.telemetry.reminder import Reminder
from pswire.transport.payload import EMPTY, Payload

log = logging.getLogger("psclient")

FAILED_ROUND = (ProgramError, MemoryLimit)
"""Errors that a round ended with, for every process alike: nothing of it was applied where it failed."""


@dataclass(frozen=True)
class Outgoing:
    """The contribution of this process to a round of a section.

    Attributes:
        plan: the section's plan.
        weights: for each reduction the weight of this process's contribution.
        contributions: for each reduction, a host array, or one on its way from a GPU; None where the weight is 0.
        operands: for each operand, a host array.
    """

    plan: Plan
    weights: tuple[float, ...]
    contributions: tuple[Sent | None, ...]
    operands: tuple[Array, ...]

    def nonfinite(self) -> tuple[int, ...]:
        """Returns the numbers of the applied reductions to which it contributes NaN or infinity, if the plan asks.

        Waits for copies from a GPU: this goes ahead of all that is sent.
        """
        if self.plan.nonfinite == "apply":
            return ()
        sent = ((number, self.contributions[number]) for number in self.plan.applied)
        return tuple([number for number, array in sent if array is not None and not is_finite(host(array))])

    def payload(self, share: ServerShare) -> Payload:
        """Returns what goes to one server."""
        sent = [self.contributions[place] for place in share.reductions]
        return pack([*(self.operands[place] for place in share.operands), *(x for x in sent if x is not None)])


class Exchange:
    """The rounds of this process. Used by the thread that runs cross-replica code.

    Args:
        session: this process's session, open.
        group: this process's place among the members.

    Attributes:
        measures: counters of rounds and reads.
        creation: creates variables.
        reads: the variables' values as they were read between the rounds.
        last_round: the last round that came back; None before the first.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self.session = session
        self.group = group
        self.measures = RoundCounters()
        self.last_round: Round | None = None
        self._awaited = Awaited(session, group)
        self.reads = ReadCache(session, group, self._awaited, self.measures)
        self.creation = Creation(session, group, self.reads)
        self._variables = self.creation.variables
        self._proposed: set[bytes] = set()
        self._prepared: dict[bytes, PlanShares] = {}

    # ---- Rounds ----

    def enter(self, plan: Plan) -> bool:
        """Comes to where a section's round is made; a process that does not take part yet waits until it does.

        Returns:
            Whether the section was computed with what is out of date by now, values or R: rounds were made since.
        """
        waiting = self.group.epoch is None
        self.group.enter(f"plan:{plan.id.hex()}")
        stale = self.reads.renew()
        return waiting and (stale or self.group.given not in (None, self.group.slice()))

    def flush(self, outgoing: Outgoing, observes: bool = False) -> dict[Ref, Array]:
        """Makes one round of a section, whose place was entered, and waits for it.

        Args:
            outgoing: this process's contribution.
            observes: True if nothing of it shall count.

        Returns:
            The plan's returned values.

        Raises:
            PSError: the reason why the round did not happen; the same on every process.
        """
        with self.measures:
            return self._make_round(outgoing, observes)

    def _make_round(self, outgoing: Outgoing, observes: bool) -> dict[Ref, Array]:
        plan = outgoing.plan
        self._propose(plan)
        prepared = self._prepare(plan)
        want = {server: self._want(share.writes, server) for server, share in prepared.shares.items()}
        if not self.group.alone:
            self.session.waits = (self.group.round, plan.id)
        try:
            payloads = {
                server: EMPTY if observes else outgoing.payload(share) for server, share in prepared.shares.items()
            }
            with self._copied():
                nonfinite = () if observes else outgoing.nonfinite()
            futures = {
                server: self._push(
                    server, outgoing.plan, self._said(outgoing, want[server], observes, nonfinite), payload
                )
                for server, payload in payloads.items()
            }
            self._fill(outgoing, payloads.values())
            self._stand_in(plan, futures.values())
            replies, failure = self._gather(futures)
        except BaseException as error:
            if not isinstance(error, PSError):
                # An interrupt: the servers have this contribution, and would take the next section's for a resend.
                self.session.end(Fenced(f"interrupted in round {self.group.round}, which was on its way; restart"))
            raise
        finally:
            self.session.waits = (-1, b"")
        values = self._take(prepared, want, replies)
        if failure is not None:
            raise failure
        return values

    def _propose(self, plan: Plan) -> None:
        """Asks for a plan's approval, once; of one that saves only one process does, whose state it has."""
        if plan.id in self._proposed or (plan.snapshot is not None and not self.group.saves()):
            return
        self.session.log_server.propose(self.session.number, plan, "", None)
        self._proposed.add(plan.id)
        if plan.snapshot is not None and self.group.late:
            self._warn_of_state(plan.snapshot)

    def _warn_of_state(self, order: SnapshotOrder) -> None:
        """Says whose state a checkpoint has, where nobody is left who began the job."""
        own = [repr(path) for path in json.loads(order.state or "{}").get("state", {}) if not path.startswith(".")]
        if own:
            log.warning(
                "%s came to a running job, and saves: in checkpoint %r the state of %s is what this process has, "
                "which was not restored; what those had who began the job is lost. Keep in variables what must not be",
                self.session.task,
                order.path,
                ", ".join(own),
            )

    def _stand_in(self, plan: Plan, futures: Iterable[Future[RoundReply]]) -> None:
        """Waits until a plan that others have to propose is answered; proposes it should all of them be gone."""
        deadline = self.session.deadline(self.session.timeouts.round)
        reminder = Reminder(self.session.timeouts.word, lambda: self._say_who_saves(plan))
        while plan.id not in self._proposed and deadline.left() > 0:
            if not wait(futures, self.session.timeouts.beat).not_done:
                return
            self.session.check()
            self._propose(plan)
            reminder.look()

    def _say_who_saves(self, plan: Plan) -> None:
        names = dict.fromkeys(name for server in plan.servers for name in self._awaited.names(server))
        log.warning("%s waits in round %d for %s", self.session.task, self.group.round, ", ".join(names))

    def _prepare(self, plan: Plan) -> PlanShares:
        """Returns a plan prepared for its rounds; keeps it, unless it saves or restores, and so has a single round."""
        found = self._prepared.get(plan.id)
        if found is None:
            found = PlanShares(plan)
            if plan.snapshot is None and plan.restore is None:
                self._prepared[plan.id] = found
        return found

    def _want(self, writes: Iterable[int], server: int) -> tuple[int, ...]:
        """Returns the variables to ask back: those that a round assigns, and that were read since the last one."""
        return tuple([id for id in self.reads.wanted(writes) if self._variables[id].servers[0] == server])

    def _fill(self, outgoing: Outgoing, payloads: Iterable[Payload]) -> None:
        """Waits until all of a contribution is on the host, while what is there is sent."""
        with self._copied():
            fill(outgoing.contributions, payloads)

    @contextmanager
    def _copied(self) -> Iterator[None]:
        """Ends the session with a device's error."""
        try:
            yield
        except Exception as error:
            # The servers wait for the rest of it, and nobody can send that.
            failure = PSError(
                f"the contribution to round {self.group.round} could not be copied from the GPU ({error}); restart",
                str(self.session.task),
            )
            self.session.end(failure)
            raise failure from error

    def _said(
        self, outgoing: Outgoing, want: tuple[int, ...], observes: bool, nonfinite: tuple[int, ...]
    ) -> Contribution:
        """Returns what this process says to a server that it contributes to."""
        epoch = self.group.epoch
        return Contribution(
            self.session.number,
            epoch.number if epoch else 0,
            self.group.round,
            outgoing.plan.id,
            (0.0,) * len(outgoing.weights) if observes else outgoing.weights,
            self.group.more,
            self.group.positions,
            want,
            observes,
            self.group.start,
            nonfinite,
        )

    def _push(self, server: int, plan: Plan, said: Contribution, payload: Payload) -> Future[RoundReply]:
        """Pushes to a server, and once more whenever it asks for that: at once, since other servers may wait for it."""
        push = partial(self.session.servers[server].push, said, payload)
        if self.session.consistency != "whole" or len(plan.servers) == 1 or server not in plan.streams:
            return push()  # it uses up nothing before all have voted
        answer: Future[RoundReply] = Future()
        push().add_done_callback(partial(_answered, push, answer))
        return answer

    def _gather(self, futures: Mapping[int, Future[RoundReply]]) -> tuple[dict[int, RoundReply], PSError | None]:
        """Returns the answers, and the error if the round failed on some server: then it failed for every process."""
        deadline = self.session.deadline(self.session.round_limit)
        failure: PSError | None = None
        replies: dict[int, RoundReply] = {}
        for server, future in futures.items():
            try:
                replies[server] = self._await(server, future, deadline)
            except FAILED_ROUND as error:
                failure = error
            except PSError as error:
                # The others may have made this round: this process has lost its place among them.
                self.session.end(error)
        if failure is not None and replies:
            # It is applied where it did not fail: nobody may compute on half a round.
            self.session.end(failure)
        self.session.check()
        return replies, failure

    def _await(self, server: int, future: Future[RoundReply], deadline: Deadline) -> RoundReply:
        session, round, awaited = self.session, self.group.round, self._awaited
        return session.wait(
            future,
            deadline,
            lambda: RoundTimeout(
                f"round {round} did not complete within {session.round_limit:g} s: it waits for {awaited.told(server)}"
            ),
            lambda: f"waits in round {round} for {', '.join(awaited.names(server))}",
            lambda: "the chief" in awaited.names(server),
        )

    def _told(self, replies: Iterable[RoundReply]) -> Round:
        """Returns what the answers say of the round's members."""
        label = self.group.epoch
        everybody = {self.session.task} if self.group.alone or label is None else {m.task for m in label.members}
        out = {task for reply in replies for task in reply.left_out}
        idle = {task for reply in replies for task in reply.observers}
        return Round(
            self.group.round,
            label.number if label else 0,
            tuple(map(str, sorted(everybody - out - idle))),
            tuple(map(str, sorted(out))),
        )

    def _take(
        self, prepared: PlanShares, want: Mapping[int, tuple[int, ...]], replies: Mapping[int, RoundReply]
    ) -> dict[Ref, Array]:
        """Keeps what came back; returns what the plan returns."""
        # First, so that there is never room for more than one value of a variable that spans parts.
        self.reads.forget(prepared.written, everything=prepared.restores)
        values: dict[Ref, Array] = {}
        fresh: dict[int, Array] = {}
        for server, reply in replies.items():
            given = prepared.shares[server].given
            wanted = [self._variables[id].spec.tensor for id in want[server]]
            tensors = [frozen(array) for array in reply.payload.tensors(wanted + [spec for _, spec in given])]
            fresh |= zip(want[server], tensors, strict=False)
            values |= zip([ref for ref, _ in given], tensors[len(wanted) :], strict=True)
            for task in reply.left_out:
                self.measures.left_out += 1
                log.warning("round %d of server %d is complete without %s", reply.round, server, task)
        # Of a variable that several servers hold each of them says the same.
        for words in dict.fromkeys(words for reply in replies.values() for words in reply.warnings):
            log.warning("%s", words)
        self.reads.bring(fresh, prepared.shares, self.group.round)
        if replies:
            self.last_round = self._told(replies.values())
        epochs = [reply.epoch for reply in replies.values()]
        newest = max(epochs, key=lambda epoch: epoch.number, default=None)
        self.group.round_over(newest, any(reply.more for reply in replies.values()))
        return values


def _answered(push: Callable[[], Future[RoundReply]], answer: Future[RoundReply], pushed: Future[RoundReply]) -> None:
    """Hands on what a push came to, or pushes once more. No closure, whose cycle would keep the values of the round."""
    again = isinstance(pushed.exception(), PushAgain)
    try:
        if again:
            push().add_done_callback(partial(_answered, push, answer))
        else:
            answer.set_result(pushed.result())
    except PSError as error:
        answer.set_exception(error)
