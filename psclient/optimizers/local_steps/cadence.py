"""The speed of local steps, and how many of them a worker makes between two exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable

from psclient.optimizers.local_steps.schedule import Schedule
from pswire.model.status import ServerStatus


class Cadence:
    """When a worker exchanges: by its count of local steps, or also by its speed. Used by the thread that trains.

    With dynamic local updates the fastest worker makes `sync_every` local steps between two exchanges, and each other
    one as many as it can make in that time. So all exchange about equally often.

    Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, section 5.

    Args:
        schedule: what is exchanged after which step.
        status: asks a server, which knows the speed of each worker.

    Attributes:
        rate: local steps per second between the last two exchanges; 0.0 before the first one.
        every: local steps of this worker between two exchanges of a fragment.
    """

    def __init__(self, schedule: Schedule, status: Callable[[], ServerStatus]) -> None:
        self._schedule, self._status = schedule, status
        self.rate, self.every = 0.0, schedule.sync_every
        self.restart(0)

    def restart(self, step: int) -> None:
        """Goes on after a local step: at the beginning, and after a restore. Time counts from the next step's end."""
        self._sent, self._began = step, 0.0

    def merged(self, step: int) -> None:
        """An exchange is merged, after a local step: time counts from now on."""
        self._step, self._began = step, time.monotonic()

    def sent_at(self, step: int) -> int | None:
        """Returns the fragment that is sent after a local step, counted from 1; None for none."""
        if not self._began:
            self.merged(step)
        dynamic = self._schedule.dynamic
        number = (0 if step - self._sent >= self.every else None) if dynamic else self._schedule.sent_at(step)
        if number is not None:
            self._sent = step
            if step > self._step:
                self.rate = (step - self._step) / max(time.monotonic() - self._began, 1e-9)
            if dynamic and self.rate:
                self.every = self._steps()
        return number

    def _steps(self) -> int:
        """Returns how many local steps this worker makes up to its next exchange."""
        rates = [
            each.pace.local.rate
            for each in self._status().sessions
            if each.state == "open" and each.pace.local is not None
        ]
        share = self.rate / max([self.rate, *rates])
        return max(round(self._schedule.sync_every * share), self._schedule.sync_delay + 1)
