"""Contributions that came late to their rounds, with a quorum: each is merged into the next round of its plan.

A round that has its quorum does not wait for the other members. What these send is copied once it is whole; then they
are answered with the record of their round, and go on. The copy is added to the next round that runs the same plan and
for which all servers of the plan have it: they say so with their votes. So it counts once, on all servers or on none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from psserver.effects import Effect, Fail, Run, Work
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import Commit, Key, MemberShare, ReadyRound, Record
from psserver.rounds.pending_round import PendingRound, Push, check_weights
from psserver.rounds.sequences import RoundSequence
from psserver.rounds.votes import Votes
from pswire.api import Contribution, RoundReply
from pswire.errors import PSError, PushAgain
from pswire.limits import WINDOW
from pswire.model.log import Member
from pswire.network.payload import Payload
from pswire.servers.votes import LateContribution

Answer = Callable[[Contribution, Future[RoundReply], Record], None]
"""Answers a contribution with the record of its round."""

CHANCES = 2
"""Votes after which a contribution of a session that has ended is dropped, if other servers do not have it."""


@dataclass(eq=False)
class Late:
    """One late contribution.

    Attributes:
        share: what came; once it is kept with a copy of its payload.
        record: the record of its round.
        futures: the calls that wait until it is kept.
        copying: True from the time on at which it is whole.
        kept: True once it is copied, and its sender may be answered.
        missed: votes in which another server did not have it, after its session had ended.
    """

    share: MemberShare
    record: Record
    futures: list[Future[RoundReply]] = field(default_factory=list)
    copying: bool = False
    kept: bool = False
    missed: int = 0


class LateContributions:
    """The late contributions of one server. Guarded by the core's lock; empty without a quorum.

    Args:
        plans: those that are approved here, by id.
        sequences: all sequences of rounds.
        fenced: sessions that have ended.
        votes: in which servers say what they have.
    """

    def __init__(
        self,
        plans: Mapping[bytes, PreparedPlan],
        sequences: Mapping[Key, RoundSequence],
        fenced: Set[int],
        votes: Votes,
    ) -> None:
        self._plans, self._sequences, self._fenced, self._votes = plans, sequences, fenced, votes
        self._waiting: dict[LateContribution, Late] = {}
        # The newest rounds whose contributions are applied, by session: one of them that comes again is a resend.
        self._counted: defaultdict[int, set[int]] = defaultdict(set)

    @property
    def nbytes(self) -> int:
        """Bytes of all that wait."""
        return sum(late.share.payload.size for late in self._waiting.values())

    @property
    def waiting(self) -> bool:
        """True if any waits."""
        return bool(self._waiting)

    # ---- What comes ----

    def _add(self, share: MemberShare, record: Record, futures: Iterable[Future[RoundReply]]) -> None:
        """Takes a contribution to a round that is over, which may still arrive, with the calls that wait for it."""
        self._waiting[share.name] = Late(replace(share, late=True), record, list(futures))

    def take(self, push: Push, member: Member | None, key: Key, record: Record) -> list[Effect] | None:
        """Takes a contribution to a round that is over, or a resend of one, which is to be merged into the next round.

        Args:
            push: the push.
            member: its sender, as it makes the round; None for no member.
            key: the round's sequence.
            record: the record of its round.

        Returns:
            The effects; None where its sender is to be answered at once, since there is nothing to merge any more.

        Raises:
            InvalidRequest: it does not fit its plan.
            PushAgain: it is a sum.
        """
        said = push.said
        if member is None or key is not None or not member.consistency.quorum or said.session not in record.late:
            return None
        share = MemberShare(member, said, push.payload)
        if record.error is not None or not share.has_examples:
            return None
        if self._knows(share.name, self._sequences[key].pushed[said.session]):
            return self._follow(push)
        if said.parts:
            raise PushAgain(f"round {said.round} accepts no sums; each worker must push by itself")
        check_weights(said)
        self._plans[said.plan_id].check(said, push.payload.size, member)
        self._add(share, record, [push.future])
        return []

    def take_over(self, job: ReadyRound, pending: PendingRound, record: Record) -> None:
        """Takes what late members have sent to a round that has run, and forgets what was merged into it."""
        if pending.consistency.quorum:
            for session in job.sessions:
                self._count(session, job.round)
            for session in sorted(job.late & pending.parts.keys()):
                share = pending.parts[session]
                futures = pending.withdraw(session) if share.has_examples else []
                if futures or (share.has_examples and share.whole):  # of a session that has ended nothing more comes
                    self._add(share, record, futures)
            if job.plan.restore is not None:  # what waits is for values that are gone
                self.over([late.share for late in self._waiting.values() if late.kept])
        self.over(job.merged)

    def _follow(self, push: Push) -> list[Effect] | None:
        """Takes a resend; returns the effects, None where it is kept or applied: its sender is to be answered."""
        late = self._waiting.get(LateContribution(push.said.session, push.said.round))
        if late is None or late.kept:
            return None
        late.futures.append(push.future)
        return [] if late.copying else [Run(late.share.payload.follow, (push.payload,))]

    def _knows(self, name: LateContribution, newest: int) -> bool:
        """Returns whether a contribution waits here, or was applied.

        Args:
            name: the contribution.
            newest: the newest round that its session has pushed, of which at most `WINDOW` are not answered.
        """
        counted = self._counted.get(name.session, ())
        return name.round <= newest - WINDOW or name in self._waiting or name.round in counted

    def copies(self, answer: Answer) -> list[Effect]:
        """Returns array work that copies what is whole. Its senders are answered after that: their memory is theirs."""
        whole = [late for late in self._waiting.values() if not late.copying and late.share.payload.whole]
        for late in whole:
            late.copying = True
        return [
            Work("arrays", Payload.copy, (late.share.payload,), then=partial(self._keep, late, answer))
            for late in whole
        ]

    def _keep(
        self, late: Late, answer: Answer, payload: Payload | None, error: PSError | None, now: float
    ) -> list[Effect]:
        futures, late.futures = late.futures, []
        if payload is None:
            del self._waiting[late.share.name]
            failure = error or PSError("a late contribution could not be kept")
            return [Fail(future, failure) for future in futures]
        late.share, late.kept = replace(late.share, payload=payload), True
        for future in futures:
            answer(late.share.said, future, late.record)
        return []

    def session_ended(self, session: int, error: PSError) -> list[Effect]:
        """Fails the calls of a session; what it has not sent whole is dropped."""
        effects: list[Effect] = []
        for late in [late for name, late in self._waiting.items() if name.session == session]:
            effects += [Fail(future, error) for future in late.futures]
            late.futures = []
            if not late.copying and not late.share.payload.whole:
                del self._waiting[late.share.name]
                effects.append(Run(late.share.payload.discard))
        return effects

    # ---- What is merged ----

    def offer(self, job: ReadyRound) -> ReadyRound:
        """Returns a round with the late contributions that it may have.

        Where it hands variables over to a server that comes back these are all: that server has none of them.
        """
        if job.sequence is not None or not self._waiting:
            return job
        order = job.plan.snapshot
        merged = self.ready(None if order is not None and order.returns else job.plan.id)
        return replace(job, merged=merged, commit=Commit.ATOMIC) if merged else job

    def ready(self, plan_id: bytes | None = None) -> tuple[MemberShare, ...]:
        """Returns what this server could merge into a round of a plan, or of any, by plan, task and round."""
        shares = [late.share for late in self._waiting.values() if late.kept]
        shares = [share for share in shares if plan_id in (None, share.said.plan_id)]
        return tuple(sorted(shares, key=lambda share: (share.said.plan_id, share.member.task, *share.name)))

    def _count(self, session: int, round: int) -> None:
        """Notes that a contribution is applied."""
        rounds = self._counted[session]
        rounds.add(round)
        newest = max(rounds)
        rounds.difference_update([each for each in rounds if each <= newest - WINDOW])

    def over(self, shares: Iterable[MemberShare]) -> None:
        """Contributions are part of a round that is over."""
        for share in shares:
            self._waiting.pop(share.name, None)
            self._count(*share.name)

    def agree(self, job: ReadyRound, attempt: int) -> ReadyRound:
        """Returns a round that its servers have voted on, with the late contributions that all of them have.

        What another server does not have of a session that has ended, it may never have.
        """
        agreed = list[MemberShare]()
        for share in job.merged:
            servers = self._plans[share.said.plan_id].plan.servers
            if share.name in self._votes.late(job.round, attempt, servers):
                agreed.append(share)
                continue
            late = self._waiting[share.name]
            late.missed += share.said.session in self._fenced
            if late.missed >= CHANCES:
                del self._waiting[share.name]
        return replace(job, merged=tuple(agreed)) if job.merged else job
