"""The rounds of closures: whichever workers run a closure, one after another, each of its rounds is made once.

A closure has a sequence of its own on each server, and its answers are kept there until it is over. Who runs it after
another gets the answers to what that has made, and makes the rest.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping

from psserver.effects import Effect
from psserver.plans.round import Key
from psserver.rounds.pending_round import Push
from psserver.rounds.sequences import RoundSequence
from pswire.api import Contribution
from pswire.errors import Fenced, InvalidRequest, ProgramError
from pswire.limits import CLOSURE_ROUNDS
from pswire.model.closures import ClosureName
from pswire.model.consistency import ASYNC
from pswire.model.log import Member


class ClosuresOver:
    """Which closures are over, as server 0 and the pushes of closures say."""

    def __init__(self) -> None:
        self._version = self._newest = 0
        self._begun: frozenset[int] = frozenset()
        self._learned = False

    def learn(self, version: int, newest: int, begun: Collection[int]) -> None:
        """Takes in what is newer than what is known."""
        if version > self._version:
            self._version, self._newest, self._begun, self._learned = version, newest, frozenset(begun), True

    def over(self, number: int) -> bool:
        """Returns True for a closure that is known to be over; no worker has it any more."""
        return number <= self._newest and number not in self._begun

    def forget(self, sequences: MutableMapping[Key, RoundSequence]) -> None:
        """Removes the sequences of closures that are over, if that is news."""
        if self._learned:
            self._learned = False
            for key in [key for key in sequences if isinstance(key, int) and self.over(key)]:
                if not sequences[key].open:
                    del sequences[key]

    def check(
        self, name: ClosureName, said: Contribution, member: Member, sequences: MutableMapping[Key, RoundSequence]
    ) -> None:
        """Checks a push of a closure, and takes in what it says of others.

        Raises:
            Fenced: the closure is over: who pushes for it has lost it to another worker.
            InvalidRequest: it makes too many rounds, or its worker makes none of its own.
        """
        if member.consistency != ASYNC or name.number <= 0:
            raise InvalidRequest("only asynchronous workers run closures, which are numbered from 1")
        self.learn(name.version, name.newest, name.begun)
        self.forget(sequences)
        if self.over(name.number):
            raise Fenced(f"another worker has already run closure {name.number}; restart the process")
        if not 0 <= said.round < CLOSURE_ROUNDS:
            raise InvalidRequest(f"a closure can run at most {CLOSURE_ROUNDS} rounds; split the function")


def take_over(sequence: RoundSequence, push: Push, member: Member, runs: bool, effects: list[Effect]) -> bool:
    """Takes the place of a worker that had a closure before, and was lost: of each round one contribution counts.

    Args:
        sequence: the closure's.
        push, member: the push of the worker that has it now; one of no closure takes nobody's place.
        runs: True if the push's own round runs now.
        effects: gets what becomes of the other's calls.

    Returns:
        True if its round runs with what the other has contributed: then the answer is the push's as well.

    Raises:
        Fenced: the closure was handed to another worker since.
        ProgramError: the other has made another section there.
    """
    name = push.said.closure
    if name is None:
        return False
    for number, pending in list(sequence.open.items()):
        if pending.members == (member,):
            continue
        others = [part.said.closure for part in pending.parts.values()]
        if any(other is not None and other.version > name.version for other in others):
            raise Fenced(f"closure {name.number} was assigned to another worker; restart the process")
        if runs and number == push.said.round:
            same_closure(pending.plan_id, push.said)
            pending.waiters.append((push.said, push.future))
            return True
        effects += pending.fail(Fenced(f"closure {name.number} was assigned to another worker"))
        del sequence.open[number]
    return False


def same_closure(plan_id: bytes, said: Contribution) -> bool:
    """Returns whether a push is of a closure, as the round is that was made, maybe by a worker that was lost.

    Raises:
        ProgramError: that was made with another plan.
    """
    if said.closure is not None and plan_id != said.plan_id:
        raise ProgramError(
            f"closure {said.closure.number} ran a different compiled step in its round {said.round} than on a worker "
            "that was lost; a scheduled function must run the same steps each time"
        )
    return said.closure is not None
