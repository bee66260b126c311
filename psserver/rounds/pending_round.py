"""A round that gathers its contributions: who is missing, and whether it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite

from psserver.effects import Effect, Fail, Run
from psserver.plans.policy import Policy
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import Commit, Key, MemberShare, ReadyRound
from psserver.rounds.sums import shares_of
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.errors import InvalidRequest, PSError, PushAgain
from pswire.model.consistency import SYNC, Consistency
from pswire.model.log import Member, Position
from pswire.network.payload import Payload

Waiter = tuple[Contribution, Future[RoundReply]]


@dataclass(slots=True)
class Push:
    """One arrival of a contribution.

    Attributes:
        said: the contribution, without the payload.
        payload: operands, then contributions; it may still grow.
        since: the time of arrival, in monotonic seconds.
        future: its answer.
    """

    said: Contribution
    payload: Payload
    since: float
    future: Future[RoundReply]


@dataclass
class PendingRound:
    """A round that gathers its contributions.

    Attributes:
        plan_id: the id of its plan.
        generation: the number of the generation that its members named.
        members: the members that make it.
        since: the time of its first contribution, in monotonic seconds.
        parts: the contributions, by session.
        waiters: the answers that members wait for.
        error: the error of a failed round; None otherwise.
        doubtful: pushes of newcomers that differ from it, before an older member has pushed.
        attempt: how many votes of it there were before.
        agreed: the sessions that those votes have left; None where anybody may count.
        voted: with too few contributions that all servers have, what this server has voted for, and who was fenced
            then; it votes again once that has changed, or once another server does. None before.
        whole: True if contributions are taken in whole: some were used up of which nothing counts, or the round is to
            be made later.
        batch: who was the first to say which global batch it reads, and in what words; None before.
        enough: the time at which it was first seen to have its quorum, in monotonic seconds; infinite before.
    """

    plan_id: bytes
    generation: int
    members: tuple[Member, ...]
    since: float
    parts: dict[int, MemberShare] = field(default_factory=dict)
    waiters: list[Waiter] = field(default_factory=list)
    error: PSError | None = None
    doubtful: list[Push] = field(default_factory=list)
    attempt: int = 0
    agreed: Set[int] | None = None
    voted: tuple[frozenset[int], frozenset[int]] | None = None
    whole: bool = False
    batch: tuple[Task, str] | None = None
    enough: float = inf
    _lacking: int = 0  # the place in `members` of who was missing when it was last looked for

    @property
    def positions(self) -> tuple[Position, ...]:
        """Positions of its members' datasets."""
        return next((part.said.positions for part in self.parts.values() if part.said.positions), ())

    @property
    def sent(self) -> list[MemberShare]:
        """The contributions that have come by themselves, and the sums; not what is within one."""
        return [part for part in self.parts.values() if part.within is None]

    def differs(self, said: Contribution) -> bool:
        """Returns True if a contribution has another plan or generation than this round, which has not failed."""
        return self.error is None and (self.plan_id, self.generation) != (said.plan_id, said.generation)

    def missing(self, fenced: Set[int]) -> list[Member]:
        """Returns the members, without fenced ones, whose contributions are not whole."""
        whole = {session for session, part in self.parts.items() if part.whole}
        return [member for member in self._counted if member.session not in whole | fenced]

    def passed(self, round: int, members: Iterable[Member], fenced: Set[int]) -> list[Task]:
        """Returns which of some members have come to this round, which has not failed, and left an earlier one out."""
        left = {s for s, part in self.parts.items() if part.said.previous < round} - fenced
        return [member.task for member in members if member.session in left and self.error is None]

    @property
    def _counted(self) -> Sequence[Member]:
        """The members that votes have not left out, in task order."""
        agreed = self.agreed
        return self.members if agreed is None else [member for member in self.members if member.session in agreed]

    @property
    def consistency(self) -> Consistency:
        """That of its members."""
        return self.members[0].consistency if self.members else SYNC

    def usable(self, fenced: Set[int], last: int, whole: bool = False) -> list[MemberShare]:
        """Returns the contributions that count, in task order.

        One of a fenced member does not where it is incomplete, or where the round before it is missing, which will
        not come.

        Args:
            fenced: sessions that are left out.
            last: the last round that is over.
            whole: True if so it is with everybody: the round does not wait for the rest.
        """
        usable = list[MemberShare]()
        for member in self._counted:
            part, asks = self.parts.get(member.session), whole or member.session in fenced
            if part is None or (asks and not (part.whole and (part.said.previous <= last or part.summed))):
                continue
            usable.append(part)
        return usable

    def _has_changed(self, fenced: Set[int], last: int) -> bool:
        """Returns True if other contributions are whole, or other members fenced, than when this server last voted."""
        whole = frozenset(part.said.session for part in self.usable(fenced, last, whole=True))
        return (whole, frozenset(fenced)) != self.voted

    def awaits(
        self, policy: Policy, fenced: Set[int], last: int, near: Callable[[int], bool], called: bool, now: float
    ) -> bool:
        """Returns True if it waits for a contribution to be whole, or, if it streams, to begin.

        Also for a member's round before it, which has not arrived. Where its policy needs some members only, it does
        not wait for the others once enough contribute examples; with a quorum after its time of grace.

        Args:
            policy: of its plan, for its members.
            fenced: sessions that are left out.
            last: the last round that is over.
            near: returns whether a session is near enough to be left out: it will find the records of what it misses.
            called: True if another server has voted in this attempt.
            now: the time, in monotonic seconds.
        """
        if self.voted is not None:
            return not (called or self._has_changed(fenced, last))
        if not self._lacks(policy.streams and not self.whole, fenced, last):
            return False
        needs = policy.needs(len(self.members) - len(fenced))
        if not needs or (self.agreed is None and len(self.parts) < needs):
            return True  # whoever of its members is fenced: they are not counted for each push
        living = [member.session for member in self._counted if member.session not in fenced]
        needs = policy.needs(len(living))
        whole = self.usable(fenced, last, whole=True)
        if sum(part.has_examples for part in whole) < needs:
            return True
        if policy.quorum:
            self.enough = min(self.enough, now)
            return now < self.enough + policy.grace
        return not all(map(near, set(living) - {part.said.session for part in whole}))

    def _lacks(self, streams: bool, fenced: Set[int], last: int) -> bool:
        """Returns True if it waits for one of its members, as `awaits` says.

        Looks first where one was missing before: each push of a thousand members would look at all of them.
        """
        members, agreed = self.members, self.agreed
        for step in range(len(members)):
            place = (self._lacking + step) % len(members)
            session = members[place].session
            if session in fenced or not (agreed is None or session in agreed):
                continue
            part = self.parts.get(session)
            if part is None or part.said.previous > last or not (streams or part.whole):
                self._lacking = place
                return True
        return False

    def ready(
        self,
        number: int,
        plan: PreparedPlan,
        policy: Policy,
        fenced: Set[int],
        describe: Callable[[bytes], str],
        key: Key,
        last: int,
    ) -> ReadyRound | None:
        """Returns this round ready to run; None if there is nothing to run, nor for servers to agree on.

        Args:
            number: its number.
            plan, policy: its plan, and the plan's policy for its members.
            fenced: sessions that are left out.
            describe: returns a plan in words.
            key, last: the key of its sequence, and the last round of it that is over.
        """
        needs = policy.needs(len(self.members))
        parts = self.usable(fenced, last, whole=bool(needs))
        if not (parts or policy.voters):
            return None
        streams = policy.streams and not self.whole and not all(part.said.observes for part in parts)
        commit = Commit.PROGRESSIVE if streams else Commit.ATOMIC
        excluded, late = tuple[Task, ...](), frozenset[int]()
        if len(parts) < len(self.members):
            there = {part.member.session for part in parts}
            out = [member for member in self.members if member.session not in there]
            excluded = tuple([member.task for member in out])
            late = frozenset({member.session for member in out} - fenced) if needs else late
        return ReadyRound(
            number,
            plan,
            tuple(parts),
            excluded,
            partial(describe, self.plan_id),
            key,
            commit,
            self.since,
            self.generation,
            policy.voters,
            self.error,
            self.attempt,
            needs,
            late,
        )

    # ---- Contributions ----

    def take(
        self, push: Push, senders: Sequence[tuple[Contribution, Member]], runs: bool
    ) -> tuple[list[MemberShare], list[Effect]]:
        """Adds a push to a round that has its plan and generation.

        Args:
            push: the push; of one that came before, a resend.
            senders: who contributes, and says what: the sender, or of a sum the senders of its parts.
            runs: True if the round has begun: it reads what is whole.

        Returns:
            The shares with a payload that are new, which is none for a resend; and the effects.

        Raises:
            PSError: why the round has failed.
            InvalidRequest: it was sent before with something else.
            PushAgain: each of a sum's senders has to push by itself.
        """
        if self.error is not None:
            raise self.error
        said, payload = push.said, push.payload
        effects = self._tear_for(said, runs) if said.host else list[Effect]()
        found = self.parts.get(said.session)
        if said.parts:
            self._check_sum(said, found)
        if found is not None and (said.parts or not found.summed) and not _is_again(found.within or found, push):
            raise InvalidRequest(f"round {said.round} of this session was sent again with different data")
        self.waiters.append((said, push.future))
        if found is None and not said.parts:
            share = self.parts[said.session] = MemberShare(senders[0][1], said, payload)
            return [share], effects
        if found is None:
            shares = shares_of(said, payload, [member for _, member in senders])
            self.parts |= {share.member.session: share for share in shares}
            if not self.whole:
                self.whole = True  # if a sum breaks off, its senders send what it has by themselves
                effects += [Run(part.payload.hold) for part in self.sent]
            return [share for share in shares if share.within is None], effects
        # A resend does not replace arrived arrays, which may be in use. It brings the missing ones.
        share = found.within or found
        if found.summed and not said.parts:
            effects.append(Run(payload.discard))
        elif share.payload is not payload:
            effects.append(Run(share.payload.follow, (payload,)))
        return [], effects

    def _check_sum(self, said: Contribution, found: MemberShare | None) -> None:
        """Raises `PushAgain` for a sum beside contributions that its host's workers have sent by themselves."""
        if self.attempt and found is None:  # it may be of some whom other servers have not, and would be cut again
            raise PushAgain(f"round {said.round} is repeated; each worker must push by itself")
        sessions = {part.session for part in said.parts}
        there = found.summed if found is not None else frozenset[int]()
        near = {session for session, part in self.parts.items() if part.said.host == said.host} | there
        if (sessions & self.parts.keys() or near) and not near == there == sessions:
            raise PushAgain(f"round {said.round} already has pushes of this host that are not part of a sum")

    def _tear_for(self, said: Contribution, runs: bool) -> list[Effect]:
        """Drops a sum that is of no use beside a contribution of its host: it has not come whole, or is without it.

        Not a whole one that the round is made with: then the contribution is late, and counts nowhere.
        """
        if said.parts:
            return []
        found = self.parts.get(said.session)
        near = (part for part in self.parts.values() if part.summed and part.said.host == said.host)
        torn = next((part.summed for part in near if not part.whole or (found is None and not runs)), None)
        return [] if torn is None else self.tear(torn)

    def tear(self, sessions: frozenset[int]) -> list[Effect]:
        """Drops a sum, or a contribution; whoever waits for it is asked to push again, each by itself."""
        error = PushAgain("the sum of several workers of this host is not used; each worker must push by itself")
        shares = [self.parts.pop(session) for session in sessions]
        dropped = [Run(share.payload.discard) for share in shares if share.within is None]
        return [*dropped, *(effect for session in sorted(sessions) for effect in self.fail_session(session, error))]

    # ---- The end ----

    def withdraw(self, session: int) -> list[Future[RoundReply]]:
        """Removes the calls of one session, which are answered apart, and returns them."""
        found = [future for said, future in self.waiters if said.session == session]
        self.waiters = [waiter for waiter in self.waiters if waiter[0].session != session]
        return found

    def again(self, attempt: int, agreed: Set[int] | None) -> list[Effect]:
        """Asks for all contributions once more, since they are used up; they will be taken in whole."""
        self.attempt, self.agreed, self.whole = attempt, agreed, True
        self.parts.clear()
        waiters, self.waiters = self.waiters, []
        error = PushAgain("a worker of the round was lost; send the push again")
        return [Fail(future, error) for _, future in waiters]

    def begin_anew(self, plan_id: bytes, generation: int) -> list[tuple[Member, Future[RoundReply]]]:
        """Takes another plan and generation; returns the members that contributed, each with its pending answer."""
        dropped = [(self.parts[said.session].member, future) for said, future in self.waiters]
        self.parts.clear()
        self.waiters.clear()
        self.plan_id, self.generation, self.batch = plan_id, generation, None
        return dropped

    def fail(self, error: PSError) -> list[Effect]:
        """Fails the round for all its waiters."""
        self.error = error
        failed = [*(future for _, future in self.waiters), *(push.future for push in self.doubtful)]
        self.waiters.clear()
        self.doubtful.clear()
        return [Fail(future, error) for future in failed]

    def fail_session(self, session: int, error: PSError) -> list[Effect]:
        """Fails the calls of one session."""
        failed = [push.future for push in self.doubtful if push.said.session == session]
        failed += [future for said, future in self.waiters if said.session == session]
        self.doubtful = [push for push in self.doubtful if push.said.session != session]
        self.waiters = [waiter for waiter in self.waiters if waiter[0].session != session]
        return [Fail(future, error) for future in failed]


def _is_again(share: MemberShare, push: Push) -> bool:
    """Returns whether a push may be a resend of a contribution."""
    return (share.said.weights, share.payload.size) == (push.said.weights, push.payload.size)


def check_weights(said: Contribution) -> None:
    """Raises `InvalidRequest` for weights that are none."""
    if said.weights and not (isfinite(sum(said.weights)) and min(said.weights) >= 0):
        raise InvalidRequest(f"weights {said.weights} are not finite numbers from 0")
    if said.observes and any(said.weights):
        raise InvalidRequest("a process that only observes must not push gradients")
