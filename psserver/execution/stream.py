"""Runs a round while its contributions come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import numpy as np

from psserver.devices import owned
from psserver.execution.calls import Call
from psserver.execution.executor import Values, told
from psserver.execution.nonfinite import Found
from psserver.execution.senders import Sender
from psserver.plans.outline import Application, needs
from psserver.plans.round import ReadyRound
from psserver.programs.kernels.kernels import Kernels
from pswire.cluster import Task
from pswire.errors import ProgramError
from pswire.limits import PART_BYTES
from pswire.model.plan import Ref
from pswire.model.tensor import Array

STEP_BYTES = PART_BYTES
"""Of contributions that one member makes to what is done at once: values go back while later ones are computed."""


class Stream:
    """A round that runs while its contributions come: each application as soon as what it needs is there.

    None of its values can be refused, so that only a lack of memory can end it halfway. Used by one thread at a time.

    Args:
        job: the plan and the contributions; those of its first members are there up to their operands, or will be.
        kernels: of the device where the variables live and the programs run.
    """

    def __init__(self, job: ReadyRound, kernels: Kernels) -> None:
        self.job = job
        self._run = Values(job, kernels)
        self._senders = self._run.senders
        outline = self._run.outline
        self._steps = deque(enumerate(outline.steps))
        self._last = outline.last
        self._readers = outline.uses.copy()
        self._begun = False
        self._count = 1
        self.ran = 0.0
        """Seconds for which its steps were made."""
        self.has_written = False
        """Whether it has changed a variable."""
        self.given: list[Array] = []
        """The plan's returned values of this server, on the host."""
        self.dropped: set[Task] = set()
        """Members that were lost before their contributions were whole."""

    @property
    def found(self) -> Found:
        """Values that are NaN or infinite, of the steps that were made."""
        return self._run.found

    @property
    def done(self) -> bool:
        """Whether all of it has run."""
        return self._begun and not self._steps

    @property
    def abandoned(self) -> bool:
        """Whether all are lost who contribute."""
        return bool(self._senders) and all(sender.gone for sender in self._senders)

    def drop(self, sessions: Set[int]) -> bool:
        """Members are lost: what they have not sent whole is waited for no more; says whether there are new ones."""
        known = len(self.dropped)
        for sender in self._run.senders:
            if sender.part.member.session in sessions and not sender.part.payload.whole:
                sender.gone = True
                self.dropped.add(sender.task)
        return len(self.dropped) > known

    def close(self) -> None:
        """It is over: nobody reads what is left of the contributions, or still comes."""
        for part in self.job.parts:
            part.payload.discard()

    def awaits(self, then: Callable[[], object]) -> bool:
        """Whether the next step has to wait; then a function is called when it may be worth to look again."""
        for sender, end in self._needs():
            if sender.part.payload.end < end and not sender.gone:
                sender.part.payload.reach(end, then)
                return True
        return False

    def _needs(self) -> Iterator[tuple[Sender, int]]:
        """Up to where each sender's payload must be there for the next step."""
        for sender in self._run.senders:
            if not self._begun:
                yield sender, sender.places.operands
            elif self._steps:
                yield sender, max(map(sender.end, needs(self._steps[0][1])), default=0)

    def reads(self) -> set[int]:
        """Decides what the next step is; returns the numbers of the variables that it reads; for the first one all.

        Waits for nothing: it is called under the core's lock.
        """
        steps = [step for _, step in self._steps]
        if self._begun:
            steps = steps[: self._decide()]
        return {id for step in steps if isinstance(step, Application) for id, *_ in step.variables}

    def _decide(self) -> int:
        """Of how many applications the next step is: those of a batch that are there, up to `STEP_BYTES`."""
        number, step = self._steps[0]
        batch = self._run.batches.get(number)
        self._count = 1
        if batch is None or not isinstance(step, Application):
            return 1
        reductions = batch.reductions[number - batch.first :]
        there = min(sender.reached(column) for sender in self._run.senders for column in reductions.T)
        sizes = np.cumsum(batch.nbytes[number - batch.first :])
        self._count = max(1, min(there, int(np.searchsorted(sizes, STEP_BYTES, side="right"))))
        return self._count

    def step(self, values: Mapping[int, Array], alone: Set[int]) -> tuple[dict[int, Array], dict[int | Ref, Array]]:
        """Makes the next step, as `reads` has decided.

        Args:
            values: the variables that it reads, by number.
            alone: variables whose arrays nobody else holds.

        Returns:
            What it assigned, on the device; and the values that nothing changes any more, variables by number and
            returned values, on the host.
        """
        run = self._run
        with told(self.job), run.device.scope():
            if not self._begun:
                run.senders = [sender for sender in run.senders if not sender.gone or sender.has_operands]
                self._check_contributed(bool(run.senders))
                run.begin()
                self._begun = True
                return {}, {}
            number, step = self._steps[0]
            run.values = values
            ready = run.ready(number, number + self._count, alone) if self._count > 1 else None
            numbers = ready.numbers if ready else range(number, number + 1)
            reduced = [index for _ in numbers for index in needs(self._steps.popleft()[1])]
            if ready is None:
                self._check_contributed(all(map(run.contributed, reduced)))
            if isinstance(step, Ref):
                self.given.append(owned(run.value(step)))
                run.judge()
                self._let_go(reduced)
                return {}, {step: self.given[-1]}
            call = ready or run.call(number)
            if isinstance(call, Call):
                call.reserve([True] * call.width, alone, frozenset())
            self.has_written = True
            assigned, run.assigned = run.run(call), {}
            del call  # with it goes what it holds of the contributions
            final = (id for id in assigned if self._last[id] in numbers)
            made: dict[int | Ref, Array] = {id: run.device.get(assigned[id]) for id in final}
            run.judge()  # before the contributions are gone
            self._let_go(reduced)
            return assigned, made

    def _let_go(self, reduced: Iterable[int]) -> None:
        """Frees the memory of contributions that no step needs any more."""
        self._readers.subtract(reduced)
        for index in {index for index in reduced if not self._readers[index]}:
            self._run.forget(index)
        for sender in self._run.senders:
            sender.let_go(self._readers)

    def _check_contributed(self, contributed: bool) -> None:
        """What nobody has sent whole changes no variable."""
        if self.abandoned and not contributed:
            raise ProgramError("all who contribute were lost before their contributions were whole")
