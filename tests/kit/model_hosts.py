"""Hosts of the model test: workers of which one sends the sum of what they contribute; or not, as it comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

from psclient._src.processes.aggregation.sums import Own, part_of, sum_of
from psclient._src.rounds.rounds import Exchange
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.limits import ALIGN
from pswire.model.tensor import TensorSpec
from pswire.transport.payload import Payload

Singles = Sequence[Own]
"""Contributions that are summed."""


class Process(Protocol):
    """A worker's process."""

    task: Task
    state: str
    exchange: Exchange


@dataclass
class Door:
    """A worker's place at its host, which takes what it would push.

    Attributes:
        host: its host.
        process: the worker.
    """

    host: ModelHost
    process: Process

    def push(self, own: Own) -> Future[RoundReply]:
        """Takes a contribution."""
        if not own.plan.sums or own.said.lookups:
            return own.singly()
        self.host.take(self.process, own)
        return own.future

    def by_itself(self, push: Callable[[], Future[RoundReply]]) -> Future[RoundReply]:
        """Pushes a contribution that is in no sum."""
        return push()


class ModelHost:
    """A host.

    Args:
        number: its number.
        send: sends a sum from a task to a server.
        specs: returns the tensors of some variables.
        luck: what comes.
    """

    def __init__(
        self,
        number: int,
        send: Callable[[Task, int, Contribution, Payload, Singles], Future[RoundReply]],
        specs: Callable[[Sequence[int]], list[TensorSpec]],
        luck: Random,
    ) -> None:
        self.number = number
        self.made = 0
        self._send = send
        self._specs = specs
        self._luck = luck
        self._open: dict[tuple[int, int], list[tuple[Process, Own]]] = defaultdict(list)
        self._decided: set[tuple[int, int]] = set()
        self._sent: list[tuple[Process, list[tuple[Process, Own]]]] = []

    def take(self, process: Process, own: Own) -> None:
        """Takes what a worker contributes to a round."""
        key = own.server, own.said.round
        if key in self._decided:
            own.refuse()
        else:
            self._open[key].append((process, own))

    def go_on(self) -> None:
        """Some of what is there is summed, and some goes by itself; more of it may still come."""
        for key in list(self._open):
            if self._luck.randrange(8) == 0:
                self._refuse(self._open.pop(key))
            elif len(self._open[key]) > self._luck.randrange(4):
                self._decided.add(key)
                self._sum(self._open.pop(key))

    def end(self, process: Process) -> None:
        """A worker has died: what it has sent for others may still arrive, and they find out that it is gone."""
        for leader, singles in [each for each in self._sent if each[0] is process]:
            self._sent.remove((leader, singles))
            self._refuse(singles)

    def _sum(self, singles: list[tuple[Process, Own]]) -> None:
        living = [(process, own) for process, own in singles if process.state == "runs"]
        if len(singles) < 2 or not living:
            self._refuse(singles)
            return
        ordered = sorted(singles, key=lambda each: each[0].task)
        leader, mine = self._luck.choice(living)
        found = sum_of(mine, [own for _, own in ordered])
        if found is None:
            self._refuse(singles)
            return
        said, whole = found
        data = whole.chunks[0][1]
        cut = [(begin, data[begin : begin + ALIGN]) for begin in range(0, len(data), ALIGN)]
        self.made += 1
        self._sent.append((leader, ordered))
        pushed = self._send(leader.task, mine.server, said, Payload(cut, whole.size), [own for _, own in ordered])
        pushed.add_done_callback(partial(self._answered, self._sent[-1], mine, said.want))

    def _answered(
        self,
        sent: tuple[Process, list[tuple[Process, Own]]],
        mine: Own,
        want: Sequence[int],
        pushed: Future[RoundReply],
    ) -> None:
        if sent not in self._sent:
            return  # who has sent it is gone
        self._sent.remove(sent)
        if pushed.exception() is not None:
            self._refuse(sent[1])
            return
        specs = [*self._specs(want), *(spec for _, spec in mine.plan.given(mine.server))]
        for process, own in sent[1]:
            if process.state == "runs":
                own.answer(part_of(pushed.result(), want, own.said.want, lambda: specs))

    def _refuse(self, singles: list[tuple[Process, Own]]) -> None:
        for process, own in singles:
            if process.state == "runs":
                own.refuse()
