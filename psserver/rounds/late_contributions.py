"""Contributions that came late to their rounds, with a quorum: each is merged into the next round of its plan.

A round that has its quorum does not wait for the other members. What these send is copied once it is whole; then they
are answered with the record of their round, and go on. The copy is added to the next round that runs the same plan and
for which all servers of the plan have it: they say so with their votes. So it counts once, on all servers or on none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from psserver.effects import Effect, Fail, Run, Work
from psserver.plans.round import MemberShare, Record
from psserver.rounds.pending_round import Push
from pswire.api import Contribution, RoundReply
from pswire.errors import PSError
from pswire.limits import WINDOW
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
    """The late contributions of one server. Guarded by the core's lock; empty without a quorum."""

    def __init__(self) -> None:
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

    def add(self, share: MemberShare, record: Record, futures: Iterable[Future[RoundReply]]) -> None:
        """Takes a contribution to a round that is over, which may still arrive, with the calls that wait for it."""
        self._waiting[share.name] = Late(replace(share, late=True), record, list(futures))

    def take(self, push: Push) -> list[Effect] | None:
        """Takes a push that may be a resend; returns the effects, None where it does not wait here.

        It has been kept or applied, then: its sender is to be answered.
        """
        late = self._waiting.get(LateContribution(push.said.session, push.said.round))
        if late is None or late.kept:
            return None
        late.futures.append(push.future)
        return [] if late.copying else [Run(late.share.payload.follow, (push.payload,))]

    def knows(self, name: LateContribution, newest: int) -> bool:
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
        return [Work("arrays", copied, (late.share.payload,), then=partial(self._keep, late, answer)) for late in whole]

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

    def ready(self, plan_ids: Collection[bytes]) -> tuple[MemberShare, ...]:
        """Returns the contributions to some plans that this server could merge, by plan, task and round."""
        shares = [late.share for late in self._waiting.values() if late.kept and late.share.said.plan_id in plan_ids]
        return tuple(sorted(shares, key=lambda share: (share.said.plan_id, share.member.task, *share.name)))

    @property
    def plan_ids(self) -> set[bytes]:
        """The plans of those that wait."""
        return {late.share.said.plan_id for late in self._waiting.values()}

    def count(self, session: int, round: int) -> None:
        """Notes that a contribution is applied."""
        rounds = self._counted[session]
        rounds.add(round)
        newest = max(rounds)
        rounds.difference_update([each for each in rounds if each <= newest - WINDOW])

    def over(self, shares: Iterable[MemberShare]) -> None:
        """Contributions are part of a round that is over."""
        for share in shares:
            self._waiting.pop(share.name, None)
            self.count(*share.name)

    def miss(self, shares: Iterable[MemberShare], fenced: Set[int]) -> None:
        """Another server does not have some contributions; if their senders have ended it may never have them."""
        for share in shares:
            late = self._waiting[share.name]
            late.missed += share.said.session in fenced
            if late.missed >= CHANCES:
                del self._waiting[share.name]

    def clear(self) -> None:
        """Drops what waits: a restore has replaced the values that it is for."""
        self.over([late.share for late in self._waiting.values() if late.kept])


def copied(payload: Payload) -> Payload:
    """Returns a copy of a whole payload. Array work, without the lock."""
    return Payload([(offset, memoryview(bytes(data))) for offset, data in payload.chunks[:]], payload.size)
