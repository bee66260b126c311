"""Local steps: workers train by themselves, and exchange how far they came once in many steps.

What a worker sends is a pseudo-gradient: the outer parameters, with which it began, minus its own. An outer optimizer
on the servers is given the mean over workers. Sources: DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512;
"Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135.

The front ends say what parameters are: `psclient.torch.local_steps` and `psclient.jax.local_steps`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from psclient._src import context
from psclient._src.distribute.reduction import Absent
from psclient._src.distribute.strategy import Strategy
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.sharded import shards_of
from psclient._src.variables.variable import Variable
from psclient.optimizers.base import Optimizer
from psclient.optimizers.ranges import check_count, is_finite, is_number
from psclient.optimizers.state import state_of
from psclient.optimizers.step_driver import StepContribution, StepDriver
from psclient.optimizers.step_functions import state_dtype
from pswire.errors import InvalidArgument, InvalidType
from pswire.model.tensor import Array

log = logging.getLogger("psclient")


@dataclass(frozen=True)
class Schedule:
    """The local steps after which fragments are exchanged, as in Streaming DiLoCo.

    Fragment p of P is sent after each step t with (t - p * H / P) % H == 0, and merged tau steps later.

    Attributes:
        sync_every: H, the local steps between two exchanges of a fragment.
        fragments: P.
        sync_delay: tau, the local steps between sending a fragment and merging the result.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of its range, or does not go with the others.
    """

    sync_every: int
    fragments: int = 1
    sync_delay: int = 0

    def __post_init__(self) -> None:
        check_count("sync_every", self.sync_every, 1)
        check_count("fragments", self.fragments, 1)
        check_count("sync_delay", self.sync_delay, 0)
        if self.sync_every % self.fragments:
            raise InvalidArgument(
                f"sync_every={self.sync_every} is not divisible by the number of fragments, {self.fragments}; one "
                f"fragment is exchanged after every sync_every / {self.fragments} steps"
            )
        if self.sync_delay >= self.between:
            raise InvalidArgument(
                f"sync_delay={self.sync_delay} is too long: the next fragment is sent {self.between} steps later, and "
                f"one exchange is under way at a time; use at most {self.between - 1}"
            )

    @property
    def between(self) -> int:
        """The local steps between two exchanges."""
        return self.sync_every // self.fragments

    def sent_at(self, step: int) -> int | None:
        """Returns the fragment that is sent after a local step, counted from 1; None for none."""
        return None if step % self.between else step // self.between % self.fragments


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Cuts a sequence into parts of about equal size, none of them empty.

    Args:
        sizes: of each element.
        parts: how many parts there shall be.

    Returns:
        For each part the places of its elements, which follow one another.

    Raises:
        ValueError: there are fewer elements than parts.
    """
    if len(sizes) < parts:
        raise InvalidArgument(f"{len(sizes)} parameters cannot be cut into {parts} fragments; use fewer fragments")
    found: list[list[int]] = [[] for _ in range(parts)]
    whole, before = sum(sizes) or 1, 0
    part = 0
    for place, size in enumerate(sizes):
        middle = (2 * before + size) * parts // (2 * whole)
        left, needed = len(sizes) - place, parts - part - 1
        if found[part] and (middle > part or left <= needed):
            part += 1
        found[part].append(place)
        before += size
    return found


def rules_of(rule: Optimizer, count: int) -> list[Optimizer]:
    """Returns an outer optimizer for each fragment, with the same hyperparameters: each has its own count of steps."""
    return [rule, *(type(rule).from_config(rule.get_config()) for _ in range(count - 1))]


def check_servers(strategy: Strategy) -> None:
    """Raises `TypeError` if a strategy has no servers."""
    if not isinstance(strategy.backend, RemoteBackend):
        raise InvalidType(
            f"local steps are exchanged by parameter servers, but a {type(strategy).__name__} has none; use a "
            "ps.ParameterServerStrategy"
        )


class Fragment:
    """The outer parameters of one fragment, on the servers. Used by the thread that trains.

    Args:
        strategy: owns the variables.
        rule: the outer optimizer, of this fragment alone.
        variables: the outer parameters.

    Attributes:
        start: the values of now, in arrays that do not change: those from which local steps began.
        counted: all tokens of this worker up to the last exchange.
    """

    def __init__(self, strategy: Strategy, rule: Optimizer, variables: Sequence[Variable]) -> None:
        self.rule, self.variables = rule, list(variables)
        self._strategy, self._backend = strategy, cast(RemoteBackend, strategy.backend)
        given = rule._check_variables, rule._needs, rule._decays, rule._decaying
        self._driver = StepDriver(rule, state_of(rule), *given, optional=True)
        self.counted = 0.0
        with strategy.scope():
            rule.build(self.variables)
        self.renew()

    @property
    def is_alone(self) -> bool:
        """True if each worker updates the variables by itself."""
        return self._strategy.backend.group.alone or any(v._alone for v in self.variables)

    def moved(self) -> bool:
        """Returns whether something but an exchange has changed the outer parameters: a checkpoint was restored."""
        return not self.is_alone and shards_of(self.variables[0])[0].numpy() is not self._seen

    def renew(self) -> None:
        """Begins with the outer parameters of now."""
        self.start = self._read()
        self._seen = None if self.is_alone else shards_of(self.variables[0])[0].numpy()

    def send(self, local: Sequence[Array] | None, tokens: float | None = None, overlaps: bool = False) -> None:
        """Sends how far this worker came. Does not wait for the others.

        Args:
            local: this worker's parameters; None if nothing of it shall count.
            tokens: what this worker has trained with so far; None if that is not counted.
            overlaps: True if the worker trains on while the arrays are sent.
        """
        weight = 1.0 if tokens is None else tokens - self.counted
        self.counted = tokens or 0.0
        if local is None or not weight:
            weight, values = 0.0, [Absent(np.broadcast_to(np.zeros((), v.dtype), v.shape)) for v in self.variables]
        else:
            weight = 1.0 if self.is_alone else weight  # the mean of one is the one: nothing is rounded
            each = zip(self.variables, local, self.start, strict=True)
            values = [self._moved_by(v, own, start, weight, overlaps) for v, own, start in each]
        self._driver.send(self._strategy, StepContribution(self.variables, values, weight=weight))

    def _moved_by(self, v: Variable, local: Array, start: Array, weight: float, overlaps: bool) -> Array:
        """Returns a pseudo-gradient times the weight; in an array that may be read while the worker trains on."""
        dtype = state_dtype(v.dtype)
        if dtype != v.dtype:  # half precision: small differences, and large weights
            start, local = start.astype(dtype), local.astype(dtype)
            found = start
        else:
            found = self._backend.buffer(v, 0) if overlaps else np.empty(v.shape, dtype)
        np.subtract(start, local, out=found)
        if weight != 1.0:
            np.multiply(found, dtype.type(weight), out=found)
        return found

    def receive(self) -> list[Array]:
        """Waits for what was sent, and returns the outer parameters after it: a place to which all workers come."""
        self.renew()
        self._strategy._begin_step()
        self._backend.exchange.begin_run()
        return self.start

    def _read(self) -> list[Array]:
        # Asynchronous workers read anew, as in a step of its own, what their last exchange has not brought.
        fetch = lambda: [v.numpy() for v in self.variables]  # noqa: E731
        return self._strategy.run(fetch) if self.is_alone else fetch()


class LocalSteps:
    """Counts local steps, and exchanges fragments when it is time. Used by the thread that trains.

    Args:
        strategy: owns the variables.
        fragments: the outer parameters.
        schedule: when they are exchanged.
        alpha: the part of a worker's own parameters in those after an exchange.
        name: of the variable by which workers compare their schedules.

    Attributes:
        step: the local steps that this worker has made.
        exchanges: the exchanges that this worker has sent.
        tokens: what this worker has trained with; None if that is not counted.

    Raises:
        ValueError: alpha is out of its range; or another worker has another schedule.
    """

    def __init__(
        self, strategy: Strategy, fragments: Sequence[Fragment], schedule: Schedule, alpha: float, name: str
    ) -> None:
        if not is_number(alpha) or not 0 <= alpha <= 1:
            raise InvalidArgument(f"alpha={alpha!r} is not a number from 0 to 1, the part of the local parameters")
        self.fragments, self.schedule, self.alpha = fragments, schedule, float(alpha)
        self.step = self.exchanges = 0
        self.tokens: float | None = None
        self._strategy, self._session = strategy, cast(RemoteBackend, strategy.backend).exchange.session
        self._under_way: tuple[int, int] | None = None  # a fragment that was sent, and the step at which it is merged
        self._began, self._longest = time.monotonic(), 0.0  # of these steps the begin, and the longest wait so far
        self._joined = False
        self._compare(name)
        self._warn_of_momentum()

    def _compare(self, name: str) -> None:
        """Raises `ValueError` where synchronous workers would exchange different fragments."""
        own = self.schedule
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
        rule = self.fragments[0].rule
        if self.fragments[0].is_alone and getattr(rule, "momentum", 0) and not hasattr(rule, "delay"):
            log.warning(
                "the outer %s has momentum=%g, which asynchronous workers apply to each arrival: this often diverges; "
                "use ps.optimizers.DelayedNesterov(lr, momentum, delay=number of workers), or momentum=0",
                type(rule).__name__,
                rule.momentum,  # type: ignore[attr-defined]
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
        number = self.schedule.sent_at(self.step)
        if number is not None:
            self._receive(merge)  # what an interrupt has left
            with self._patience():
                self.fragments[number].send(local(number), self.tokens, overlaps=self.schedule.sync_delay > 0)
            self._under_way = number, self.step + self.schedule.sync_delay
            self.exchanges += 1
        if self._under_way is None or self.step < self._under_way[1]:
            return False
        self._receive(merge)
        return True

    def take_all(self, merge: Callable[[int, Sequence[Array], float], object]) -> None:
        """Gives all parameters the outer ones; `merge` is as in `advance`."""
        for number, each in enumerate(self.fragments):
            merge(number, each.start, 0.0)

    def continue_at(self, step: int, tokens: float | None) -> None:
        """Goes on from the counts that were saved."""
        self.step, self.tokens, self._under_way = step, tokens, None
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
            with self._patience():
                found = self.fragments[number].receive()
            merge(number, found, self.alpha)
            self._under_way, self._began = None, time.monotonic()

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Within, the log says nothing of waits up to the time of this worker's own steps, or up to those before."""
        session, now = self._session, time.monotonic()
        session.usual_wait = max(now - self._began, 1.5 * self._longest)
        try:
            yield
        finally:
            session.usual_wait, self._longest = 0.0, max(self._longest, time.monotonic() - now)


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
