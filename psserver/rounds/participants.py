"""What a feature has to say to a round, beside those that push to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from psserver.effects import Effect, Work
from psserver.execution.execution import Execution
from psserver.plans.round import ReadyRound
from psserver.values.value import Value
from pswire.errors import PSError
from pswire.servers.votes import Digest

P = ParamSpec("P")
T = TypeVar("T")

Hook: TypeAlias = Sequence[Callable[P, T]]
"""One method of several participants."""


class RoundParticipant:
    """A feature that takes part in rounds, by the methods that it overrides. Guarded by the core's lock."""

    def blocks(self, job: ReadyRound) -> bool:
        """Returns True if a round must not begin now. The runner asks again after each stimulus."""
        return False

    def refuses(self, job: ReadyRound) -> PSError | None:
        """Returns the error of a round that has all contributions and is not to be applied; None if it may be."""

    def assigns(self, job: ReadyRound) -> Mapping[int, Value]:
        """Returns values that a round assigns beside those that it computes, by the number of the variable.

        Raises:
            PSError: why the round cannot be applied.
        """
        return {}

    def warns(self, execution: Execution) -> Sequence[str]:
        """Looks at a round that has run; returns warnings for its members."""
        return ()

    def committed(self, job: ReadyRound, given: Mapping[int, Value]) -> Sequence[Effect]:
        """The values of a round are the variables' values, and its members have no answer yet.

        Args:
            job: the round.
            given: of its values those that participants have assigned.
        """
        return ()

    def closes(self, execution: Execution) -> Work | None:
        """A round is over without an error; returns array work that has to be over before the next round begins."""

    def tells(self, servers: Sequence[int]) -> Mapping[int, Digest]:
        """Returns what some servers are to be told with the vote of this one, which they hear at least once."""
        return {}


class Hooks:
    """The methods of participants, bound, in the order of these; of each only where a participant overrides it.

    Args:
        participants: the features that take part in rounds, in order.
    """

    def __init__(self, participants: Sequence[RoundParticipant]) -> None:
        self._participants = participants
        self.blocks: Hook[[ReadyRound], bool] = self._of(RoundParticipant.blocks)
        self.refuses: Hook[[ReadyRound], PSError | None] = self._of(RoundParticipant.refuses)
        self.assigns: Hook[[ReadyRound], Mapping[int, Value]] = self._of(RoundParticipant.assigns)
        self.warns: Hook[[Execution], Sequence[str]] = self._of(RoundParticipant.warns)
        self.committed: Hook[[ReadyRound, Mapping[int, Value]], Sequence[Effect]]
        self.committed = self._of(RoundParticipant.committed)
        self.closes: Hook[[Execution], Work | None] = self._of(RoundParticipant.closes)
        self.tells: Hook[[Sequence[int]], Mapping[int, Digest]] = self._of(RoundParticipant.tells)

    def _of(self, method: Callable[..., Any]) -> list[Any]:
        name = method.__name__
        return [getattr(each, name) for each in self._participants if getattr(type(each), name) is not method]
