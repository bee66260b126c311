"""How the rounds of a plan are made: what the consistency of their members means for a server."""

from __future__ import annotations

from dataclasses import dataclass

from pswire.model.consistency import Consistency
from pswire.model.plan import Plan


@dataclass(frozen=True)
class Policy:
    """For whom a round waits, who decides whose contributions it has, and when it may begin.

    Attributes:
        backup: number of members that it does not wait for, the last ones.
        quorum: number of members that suffice, and what the others send later is merged into the next round; 0 for no
            such number.
        grace: with a quorum the seconds for which a round that has it waits for the others.
        voters: the servers that agree on its contributions; none where one decides alone.
        streams: True if it may begin before its contributions are whole.
    """

    backup: int = 0
    quorum: int = 0
    grace: float = 0.0
    voters: tuple[int, ...] = ()
    streams: bool = False

    @classmethod
    def of(cls, plan: Plan, consistency: Consistency, may_refuse: bool, streams: bool) -> Policy:
        """Returns the policy of a plan for members of one consistency.

        Args:
            plan: the plan.
            consistency: of the members; of a round that a worker makes alone `ASYNC`.
            may_refuse: True if its rounds may fail by what they compute.
            streams: True if contributions to it are large enough to be used while they come.
        """
        if consistency.own_rounds:
            return cls()
        voters = plan.servers if len(plan.servers) > 1 else ()
        # One that is tried before several servers vote on it waits for all: nobody can read what it assigns until all
        # have voted, and a server may wait in another round for a member that reads.
        if (may_refuse and voters) or not plan.trains:
            return cls(voters=voters, streams=streams)
        backup, quorum = consistency.backup_workers, consistency.quorum
        # The members that will be late are not known before the others are whole.
        return cls(backup, quorum, consistency.grace, voters, streams and not (backup or quorum))

    def needs(self, members: int) -> int:
        """Returns how many of some members have to contribute examples; 0 if a round waits for all of them."""
        if self.quorum:
            return max(min(self.quorum, members), 1)
        return max(members - self.backup, 1) if self.backup else 0
