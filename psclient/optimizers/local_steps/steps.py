"""The local steps of a worker: counted, and exchanged when it is time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from psclient._src import context
from psclient._src.distribute.strategy import Strategy
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.variable import Variable
from psclient.optimizers.local_steps.cadence import Cadence
from psclient.optimizers.local_steps.fragment import Fragment
from psclient.optimizers.local_steps.schedule import Schedule
from psclient.optimizers.ranges import is_finite, is_number
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array

log = logging.getLogger("psclient")


class LocalSteps:
    """Counts local steps, and exchanges fragments when it is time. Used by the thread that trains.

    Args:
        strategy: owns the variables.
        fragments: the outer parameters.
        schedule: when they are exchanged.
        name: of the variable by which workers compare their schedules.

    Attributes:
        step: the local steps that this worker has made.
        exchanges: the exchanges that this worker has sent.
        tokens: what this worker has trained with; None if that is not counted.

    Raises:
        ValueError: another worker has another schedule; or the schedule is dynamic, and workers wait for each other.
    """

    def __init__(self, strategy: Strategy, fragments: Sequence[Fragment], schedule: Schedule, name: str) -> None:
        self.fragments, self.schedule = fragments, schedule
        self.step = self.exchanges = 0
        self.tokens: float | None = None
        self._strategy, self._exchange = strategy, cast(RemoteBackend, strategy.backend).exchange
        self._cadence = Cadence(schedule, self._exchange.session.log_status)
        self._under_way: tuple[int, int] | None = None  # a fragment that was sent, and the step at which it is merged
        self._joined = False
        self._compare(name)
        self._warn_of_momentum()

    def _compare(self, name: str) -> None:
        """Raises `ValueError` where synchronous workers would exchange different fragments."""
        own = self.schedule
        if own.dynamic and not self._strategy.backend.group.alone:
            raise InvalidArgument(
                "dynamic=True, but synchronous workers exchange in the same steps; use consistency=ps.Async() or "
                "ps.BoundedStaleness(k), or dynamic=False"
            )
        mine = np.array([own.sync_every, own.fragments, own.sync_delay], np.int64)
        with self._strategy.scope():
            v = Variable(mine, trainable=False, name=name)
        if self._strategy.backend.group.alone:
            return
        found = v.numpy()
        for what, here, there in zip(("sync_every", "fragments", "sync_delay"), mine, found, strict=True):
            if here != there:
                raise InvalidArgument(
                    f"this worker has {what}={here}, but another one has {what}={there}; synchronous workers "
                    "exchange in the same steps: use the same values, or consistency=ps.Async()"
                )

    def _warn_of_momentum(self) -> None:
        rule: Any = self.fragments[0].rule
        momentum = getattr(rule, "momentum", None)
        if self.fragments[0].is_alone and momentum and not hasattr(rule, "delay"):
            log.warning(
                "the outer %s has momentum=%g, which asynchronous workers apply to each arrival: this often diverges; "
                "use ps.optimizers.DelayedNesterov(lr, momentum, delay=number of workers), or momentum=0",
                type(rule).__name__,
                momentum,
            )

    def advance(
        self,
        tokens: float | None,
        local: Callable[[int], Sequence[Array]],
        merge: Callable[[int, Sequence[Array], float], object],
    ) -> bool:
        """Counts a local step; sends a fragment, and merges one, where it is time.

        Args:
            tokens: what the step was made with; None if that is not counted, in no step.
            local: returns this worker's parameters of a fragment.
            merge: gives the parameters of a fragment the outer ones, and the part of their own values that is alpha.

        Returns:
            True if parameters were merged after this step.

        Raises:
            TypeError: `tokens` is not a number.
            ValueError: `tokens` is negative or not finite; or was given in other steps, and not in this one.
            RuntimeError: called in replica or update context.
            PSError: an exchange failed, or the session has ended.
        """
        if context.has_strategy():
            context.require_cross_replica(self._strategy, "step")
        counted = self._counted(tokens)
        if self._joins() or self._moved():
            self.take_all(merge)
        self.step, self.tokens = self.step + 1, counted
        number = self._cadence.sent_at(self.step)
        if number is not None:
            self._receive(merge)  # what an interrupt has left
            self.fragments[number].send(local(number), self.tokens, overlaps=self.schedule.sync_delay > 0)
            self._under_way = number, self.step + self.schedule.sync_delay
            self.exchanges += 1
        merges = self._under_way is not None and self.step >= self._under_way[1]
        if merges:
            self._receive(merge)
            self._cadence.merged(self.step)
        moved = sum(self._exchange.bytes_transferred)
        self._exchange.measures.local_step(tokens, merges, moved, self._cadence.rate)
        return merges

    def take_all(self, merge: Callable[[int, Sequence[Array], float], object]) -> None:
        """Gives all parameters the outer ones; `merge` is as in `advance`."""
        for number, each in enumerate(self.fragments):
            merge(number, each.start, 0.0)

    def continue_at(self, step: int, tokens: float | None) -> None:
        """Goes on from the counts that were saved."""
        self.step, self.tokens, self._under_way = step, tokens, None
        self._cadence.restart(step)
        for each in self.fragments:
            each.counted = tokens or 0.0

    def renew(self) -> None:
        """Begins with the outer parameters of now, as after a restore."""
        self._under_way = None
        for each in self.fragments:
            each.renew()

    def saved(self, restored: Callable[[], object]) -> SavedSteps:
        """Returns what a checkpoint has of it but variables.

        Args:
            restored: called once the outer parameters are those that were restored.
        """
        return SavedSteps(self, restored)

    def _counted(self, tokens: float | None) -> float | None:
        """Returns the tokens of all steps, with those of the next one."""
        if tokens is not None and not is_number(tokens):
            raise InvalidType(f"tokens is {tokens!r}; use a number")
        if tokens is not None and not (is_finite(tokens) and tokens >= 0):
            raise InvalidArgument(f"tokens is {tokens!r}; use a finite number that is not negative")
        if self.step and (tokens is None) != (self.tokens is None):
            raise InvalidArgument("step() was called with tokens and without; give tokens in every step, or in none")
        return None if tokens is None else (self.tokens or 0.0) + float(tokens)

    def _joins(self) -> bool:
        """Returns whether this worker has joined a running job: it begins with the outer parameters of now.

        Waits for the others' next exchange of the first fragment, to which this worker adds nothing.
        """
        if self._joined:
            return False
        self._joined = True
        group = self._strategy.backend.group
        if group.alone or not group.late:
            return False
        self.fragments[0].send(None)
        self.renew()
        self.step = self.schedule.sync_every
        self._cadence.restart(self.step)
        return True

    def _moved(self) -> bool:
        """Returns whether the outer parameters have changed, but by no exchange; they are renewed."""
        if self._under_way is not None or not any(each.moved() for each in self.fragments):
            return False
        self.renew()
        return True

    def _receive(self, merge: Callable[[int, Sequence[Array], float], object]) -> None:
        """Waits for what is under way, if anything is, and merges it."""
        if self._under_way is not None:
            number, _ = self._under_way
            merge(number, self.fragments[number].receive(), self.schedule.alpha)
            self._under_way = None


class SavedSteps:
    """The count of local steps, as a checkpoint has it. All workers have the same one.

    Args:
        steps: whose count it is.
        restored: called after a restore.
    """

    def __init__(self, steps: LocalSteps, restored: Callable[[], object]) -> None:
        self._steps, self._restored = steps, restored

    def state_dict(self) -> dict[str, Any]:
        """Returns the count."""
        return {"step": self._steps.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a count, with the outer parameters that were restored before."""
        self._steps.continue_at(state["step"], None)
        self._steps.renew()
        self._restored()
