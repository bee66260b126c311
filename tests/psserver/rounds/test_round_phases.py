"""What each event does to a round in each phase, on a server that decides alone or votes with another one. The table in
`PHASES.txt` beside this file is written by `python -m tests.psserver.rounds.test_round_phases`. A change of it is a
change of what members see, and is read line by line."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from psserver.core.core import Core
from psserver.execution.array_queue import ArrayQueue
from psserver.rounds.runner import Deciding, Deferring
from psserver.rounds.steps import Running
from pswire.errors import PSError
from pswire.limits import PART_BYTES
from pswire.model.log import Approved
from pswire.model.plan import Plan
from tests.kit.contributions import Sending, Voters
from tests.kit.rig import WORKERS, at_once, reduce_only, sum_into

TABLE = Path(__file__).with_name("PHASES.txt")


class World(Voters):
    """A round of two members on server 0, whose array work waits until the test runs it. Args: root: the checkpoint
    root; kind: see `KINDS`."""

    def __init__(self, root: Any, kind: str) -> None:
        self.work: list[Callable[[], object]] = []
        self.held = False
        super().__init__(root, submit=self._submit)
        self.cores[1]._arrays = ArrayQueue(at_once)
        modes: dict[str, Any] = {"backup": {"backup_workers": 1}, "async": {"mode": "async"}}
        self.a, self.b = self.job.join(*WORKERS[:2], **modes.get(kind, {}))
        self.sequence = WORKERS[0] if kind == "async" else None
        servers = (0,) if kind in ("alone", "backup", "async") else (0, 1)
        self.variables = [self.job.variable(self.a, np.zeros(2, "float32"), (n,)) for n in servers]
        self.plan = sum_into(*self.variables, returned=False)
        self.other = Plan((*self.plan.reductions, *reduce_only(self.variables[0].spec.tensor).reductions))
        self.job.verbs[0].propose(self.a.session, self.plan, "", None)
        self.calls: dict[str, Future[Any]] = {}
        self.held = True
        if kind == "behind":
            self.core.machine.job.rounds.backlog.begin(AWAITED)

    def _submit(self, work: Callable[[], object]) -> None:
        if self.held:
            self.work.append(work)
        else:
            work()

    @property
    def core(self) -> Core:
        return self.cores[0]

    def approve(self) -> None:
        self.job.append(Approved(self.plan))

    def push(self, name: str, server: int = 0, plan: Plan | None = None, later: int = 0) -> None:
        """A member pushes; `again` in the name marks a resend."""
        worker, plan = {"a": self.a, "b": self.b}[name[0]], plan or self.plan
        worker.round += later
        try:
            self.calls[f"{name}{server}"] = worker.push(plan, [ONES] * len(plan.reductions), server=server)
        except PSError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self.calls[f"{name}{server}"] = failed
        worker.round -= later

    def come_in_part(self) -> None:
        """The second member's push begins to arrive."""
        self.calls["b0"] = Sending(self.b, self.plan, [ONES] * len(self.plan.reductions)).reply

    def do(self, steps: str) -> None:
        """Takes steps: a method's name, or a member that pushes, to the other server where that has a part in it."""
        for step in steps.split():
            if len(step) > 2:
                getattr(self, step)()
            elif len(step) == 1 or len(self.variables) > 1:
                self.push(step[0], len(step) - 1)

    def run(self, *_: Any) -> None:
        """Runs the array work that is there, and what follows from it."""
        while self.work:
            self.work.pop(0)()

    @property
    def phase(self) -> str:
        """The phase of round 0 on server 0."""
        machine = self.core.machine
        runner, sequence = machine.job.runner, machine.job.rounds.sequences.get(self.sequence)
        if sequence is None:
            return "unknown"
        if (record := sequence.records.get(0)) is not None:
            if record.error is not None:
                return f"failed: {type(record.error).__name__}"
            behind = ", not made" if len(machine.job.rounds.backlog) else ""
            return "over" + behind + "".join(f", without {task}" for task in record.excluded)
        if 0 not in sequence.open:
            return "unknown"
        match runner.phase:
            case Deferring():
                return "kept"
            case Running() as running:
                return "tried" if running.on_trial else "running"
            case Deciding():
                return "deciding"
        return "failing" if sequence.open[0].error is not None else "gathering"

    def answers(self) -> dict[str, str]:
        """What the calls were answered so far."""
        over = {name: call.exception() for name, call in self.calls.items() if call.done()}
        return {name: "answered" if error is None else type(error).__name__ for name, error in over.items()}


KINDS = {
    "alone": "one server, which decides alone",
    "votes": "two servers, which vote before the round runs",
    "tries": "two servers, on which the round runs first, since it streams, and which vote then",
    "behind": "two servers; this one is back, and has not read its variables",
    "backup": "one server, whose rounds do not wait for the last member",
    "async": "one server, on which each member makes rounds of its own; the round is the first member's",
}
AWAITED = 99
"""The generation by which the variables of a server that is behind are handed over."""

ONES = np.ones(2, "float32")

PHASES = {
    "unknown": "approve",  # no push has come
    "gathering": "approve a",  # one of two members has pushed
    "incomplete": "approve a come_in_part",  # both have; the second push has not arrived whole
    "unapproved": "a b",  # both have pushed; the chief has not approved the plan
    "complete": "approve a b",  # both have pushed; array work, or the other server's vote, is missing
    "decided": "approve a b run",  # this server has run a trial, and voted; the other one has not
    "agreed": "approve a b a1 b1 hear",  # all servers have voted; array work is missing
    "over": "approve a b a1 b1 hear run hear run hear run hear",  # the round is over
}
"""What is done before a phase: see `World.do`."""


def break_work(world: World) -> None:
    """A bug in array work."""
    if isinstance(phase := world.core.machine.job.runner.phase, Running):
        phase.execution.step = mock.Mock(side_effect=RuntimeError("a bug"))  # type: ignore[method-assign]
    world.run()


def refuse(world: World) -> None:
    """The plan cannot run on this server."""
    prepared, rounds = world.core._prepared(world.plan), world.core.machine.job.rounds
    world.core._enter(lambda now: (None, rounds.refuse(prepared, PSError("it cannot run here"))))


EVENTS: dict[str, Callable[[World], None]] = {
    "first member pushes": lambda world: world.push("a again"),
    "second member pushes": lambda world: world.push("b again"),
    "another plan": lambda world: world.push("b other", plan=world.other),
    "next round": lambda world: world.push("a next", later=1),
    "plan approved": World.approve,
    "plan refused": refuse,
    "array work": World.run,
    "a bug in array work": break_work,
    "first member fenced": lambda world: world.job.close([world.b.member]),
    "second member fenced": lambda world: world.job.close([world.a.member]),
    "all fenced": lambda world: world.job.close([]),
    "first member leaves": lambda world: world.core.leave(world.a.session, ""),
    "other server has both": lambda world: world.do("a1 b1 hear"),
    "other server has the second": lambda world: world.do("b1 hear"),
    "variables are read": lambda world: world.core._enter(
        lambda now: (world.core.machine.job.rounds.backlog.has_read(AWAITED), [])
    ),
    "new job": lambda world: world.job.begin(),
}

NEVER = {
    "alone": ("decided", "agreed"),
    "backup": ("decided", "agreed"),
    "async": ("gathering", "incomplete", "decided", "agreed"),
}
"""Phases that a kind has not."""


def outcome(kind: str, phase: str, event: str) -> str:
    """What an event does: the phase after it, and which calls it answers; "-" where nothing happens."""
    streams = mock.patch("pswire.model.plan.PART_BYTES", 0 if kind == "tries" else PART_BYTES)
    with tempfile.TemporaryDirectory() as root, streams:
        world = World(root, kind)
        world.do(PHASES[phase])
        before, answered = world.phase, world.answers()
        try:
            EVENTS[event](world)
            refused = ""
        except PSError as error:
            refused = f" refused: {type(error).__name__}"
        after, new = world.phase, {k: v for k, v in world.answers().items() if k not in answered}
        waits = " work" if world.work else ""
        for one in world.cores:
            one.close()
        told = "".join(f" {name}={said}" for name, said in new.items())
        return (f"{before} -> {after}" if before != after else before) + told + refused + waits


def table(kind: str, phase: str) -> Iterator[str]:
    """The lines of the table for a phase of a kind of round."""
    for event in EVENTS if phase not in NEVER.get(kind, ()) else ():
        if not (kind in NEVER and event.startswith("other server")):
            yield f"{kind:7}{phase:12}{event:29}{outcome(kind, phase, event)}"


if __name__ == "__main__":
    lines = [line for kind in KINDS for phase in PHASES for line in table(kind, phase)]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit()

LINES = TABLE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("kind", "phase"), [(kind, phase) for kind in KINDS for phase in PHASES])
def test_each_event_in_each_phase(kind: str, phase: str) -> None:
    """The phase after it, and which calls are answered with what; the table has all pairs."""
    assert [*table(kind, phase)] == [line for line in LINES if line.startswith(f"{kind:7}{phase:12}")]
