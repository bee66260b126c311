"""What this process has proposed, and may have to propose again: the server that was told may be lost with it."""

from __future__ import annotations

import threading
from typing import NamedTuple

from pswire.model.log import Start
from pswire.model.plan import Plan


class Proposal(NamedTuple):
    """Arguments of `ParameterServer.propose` behind the session."""

    plan: Plan | None
    join_point: str
    start: Start | None


class Proposals:
    """The plans of which no round was answered yet, the last join point, and the last start of an epoch.

    May be used by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._plans: dict[bytes, Plan] = {}
        self._join_point = ""
        self._start: Start | None = None

    def keep(self, proposal: Proposal) -> None:
        """Keeps what is proposed."""
        with self._lock:
            if proposal.plan is not None:
                self._plans[proposal.plan.id] = proposal.plan
            self._join_point = proposal.join_point or self._join_point
            self._start = proposal.start or self._start

    def forget(self, plan_id: bytes) -> None:
        """A plan is known to be approved."""
        with self._lock:
            self._plans.pop(plan_id, None)

    def all(self) -> list[Proposal]:
        """Returns what is to be proposed again."""
        with self._lock:
            found = [Proposal(plan, "", None) for plan in self._plans.values()]
            found += [Proposal(None, self._join_point, None)] if self._join_point else []
            return found + ([Proposal(None, "", self._start)] if self._start else [])
