"""First values of variables: those of the lowest task that runs the script, so that all begin as it does.

Who creates a variable beside it waits for its value, as with TensorFlow, whoever comes first: also in a running job,
but not for longer than one round. A lower task that has come to a round which this process has not made creates nothing
before it. Where each worker makes rounds of its own, which say nothing of the others' places, the lower task gives its
value until it makes its next round, or `PS_REPORT_INTERVAL` has passed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psclient._src.network.session import Session
from psclient._src.rounds.membership import Group
from pswire.cluster import Task
from pswire.errors import PSError, RoundTimeout
from pswire.model.log import Member
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import Array

log = logging.getLogger("psclient")

PAUSES = 0.001, 0.1
"""Seconds between two questions, at first and at last."""

LOOKS = 0.1, 1.0
"""Seconds between two looks at all servers, at first and at last. What they say is as long as there are processes."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A variable that this process creates.

    Attributes:
        variable: its number, description and servers.
        value: this process's first value; of a dynamic table, whose server has it at once, nothing.
        line: the line of the user's script that created it, `file:line`; "" where none runs.
    """

    variable: PlacedVariable
    value: Array
    line: str

    @property
    def name(self) -> str:
        """Its name, in quotes."""
        return repr(self.variable.spec.name)

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers that hold it: the value counts that the first one has, and others get a copy of that."""
        return self.variable.servers

    def named(self, error: PSError) -> PSError:
        """Returns an error about this variable with the line that created it."""
        return type(error)(f"{error.message} (created at {self.line})", error.task) if self.line else error


Ask = Callable[[Sequence[Recorded]], Sequence[Recorded]]
"""Asks the servers which of some variables have no value yet."""


class FirstValueWaiter:
    """Waits where another process gives a variable its first value. Used by the thread that runs cross-replica code.

    Args:
        session: this process's session.
        group: this process's place among the members.
    """

    def __init__(self, session: Session, group: Group) -> None:
        self._session = session
        self._group = group

    def wait(self, missing: Sequence[Recorded], ask: Ask) -> Sequence[Recorded]:
        """Waits until variables have their first values, or until it is this process's turn to give them.

        Args:
            missing: variables that had no value when the servers were asked last.
            ask: asks them again.

        Returns:
            Those to which this process shall give its own values.

        Raises:
            RoundTimeout: whose turn it is does not create them.
        """
        session, ahead = self._session, self._ahead() if missing else ()
        briefly = self._group.alone and self._runs
        limit = session.timeouts.report_interval if briefly else session.timeouts.round_timeout
        deadline, said, pause = session.deadline(limit), time.monotonic(), PAUSES[0]
        first, gap = ahead[0].task if ahead else None, LOOKS[0]
        look = said + gap
        seen: dict[tuple[int, Task], int] = {}
        while ahead and missing:
            if time.monotonic() >= look:
                first, gap = self._first(ahead, seen), min(2 * gap, LOOKS[1])
                look = time.monotonic() + gap
            # Asked behind that: who has come to a round by now has given its values before.
            if len(ask(missing[:1])) == 0 or first is None:
                missing = ask(missing)
                deadline, pause = session.deadline(limit), PAUSES[0]
            if first is None or not missing or (briefly and deadline.left() <= 0):
                break
            if deadline.left() <= 0:
                raise missing[0].named(
                    RoundTimeout(
                        f"variable {missing[0].name} got no initial value within "
                        f"{session.timeouts.round_timeout:g} s from {first}; create the same variables in "
                        "every process, in the same order"
                    )
                )
            if time.monotonic() - said > session.timeouts.report_interval:
                who, what = (session.task, first), missing[0]
                log.warning("%s waits for %s to set the initial value of variable %s (%s)", *who, what.name, what.line)
                said = time.monotonic()
            session.pause(pause)
            pause = min(2 * pause, PAUSES[1])
        return missing

    @property
    def _runs(self) -> bool:
        """True once this process has made a round, or the others have taken it in."""
        group = self._group
        return group.round > group.start or (group.generation is not None and group.late and not group.outside)

    def _ahead(self) -> Sequence[Member]:
        """Returns those before this process, in task order, that may create a variable at the same place."""
        group, me = self._group, self._session.task
        if group.apart or group.generation is None or not self._runs:
            return group.ahead()
        members = group.generation.members
        if group.alone:  # it does not take in who has come since
            states = self._session.look().sessions
            members = tuple(state.member for state in states if state.state == "open" and not state.drives)
        return sorted((member for member in members if member.task < me), key=lambda member: member.task)

    def _first(self, ahead: Sequence[Member], seen: dict[tuple[int, Task], int]) -> Task | None:
        """Returns the first of those before this process who can still give a value; None if nobody can.

        Args:
            ahead: those before it.
            seen: the rounds of its own that each was at when this was asked first, by the server that says so.
        """
        ended = {member.session for member in self._session.ended()}
        here = [member.task for member in ahead if member.session not in ended]
        # Who has come to a round creates nothing before it: the two would wait for each other.
        past = self._at_rounds(here, seen) if here else set()
        return next((task for task in here if task not in past), None)

    def _at_rounds(self, tasks: Sequence[Task], seen: dict[tuple[int, Task], int]) -> set[Task]:
        """Returns which of some members wait in a round, or have made one, that this process has not come to."""
        group, found = self._group, set[Task]()
        briefly = group.alone and self._runs
        for index, server in enumerate(self._session.live):
            status = server.status()
            if group.alone:
                at = dict.fromkeys(tasks, -1) | {place.task: place.round for place in status.places}
                # Of its own the first round, or in a running job the next one.
                found |= {t for t in tasks if at[t] > (seen.setdefault((index, t), at[t]) if briefly else -1)}
            elif status.round >= group.round:
                found |= set(tasks)  # rounds have gone on without this process
            for item in () if briefly else status.waiting:
                # Of others it is not known yet who has come; earlier rounds of this process may still wait.
                if item.missing and (group.alone or item.round >= group.round):
                    found |= set(tasks) - set(item.missing)
        return found
