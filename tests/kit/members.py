"""Processes of a job over cores in this one, with a chief that the test plays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from psclient._src.devices import Device
from psclient._src.rounds.membership import Group
from psclient._src.rounds.rounds import Exchange, Outgoing
from psclient._src.transport.session import Session
from pswire.limits import Timeouts
from pswire.model.log import Member, Mode
from pswire.model.plan import VariableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.rig import WORKERS, Job

NUMBER = TensorSpec("int64", ())
SLOW = Timeouts(beat=60.0)


class Process:
    """One process's part of a strategy."""

    def __init__(self, job: Job, task: Any, mode: Mode, replicas: int = 1, timeouts: Timeouts = SLOW) -> None:
        devices = tuple(Device("cpu", index) for index in range(replicas))
        self.session = Session(task, job.verbs, replicas, timeouts=timeouts, consistency=mode)
        self.session.open()
        self.group = Group(self.session, devices)
        self.exchange = Exchange(self.session, self.group)

    @property
    def member(self) -> Member:
        return Member(self.session.task, self.session.number, self.session.replicas, self.session.consistency)

    def create(self, name: str, server: int = 0) -> Any:
        return self.exchange.creation.create(VariableSpec(name, NUMBER), (server,), np.asarray(0), now=True)

    def add(self, plan: Any, value: int) -> None:
        self.exchange.enter(plan)
        self.exchange.send(Outgoing(plan, (1.0,), (np.asarray(value),), ()))
        self.exchange.window.settle()


@contextmanager
def began(job: Job, mode: Mode, *replicas: int) -> Iterator[list[Process]]:
    """Processes that begin a job together, with these numbers of replicas."""
    found = [Process(job, task, mode, count) for task, count in zip(WORKERS, replicas, strict=False)]
    try:
        job.close([one.member for one in found])
        yield found
    finally:
        for one in found:
            one.session.leave()
