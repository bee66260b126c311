"""Drives one step of an optimizer: sums the gradients, measures them, and updates the variables beside them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast

import numpy as np

from psclient._src import context
from psclient._src.arrays.devices import Value
from psclient._src.arrays.nest import Nest
from psclient._src.distribute.destinations import Uncompressed
from psclient._src.distribute.extended import contributions
from psclient._src.distribute.prepared_step import PreparedStep
from psclient._src.distribute.reduction import Absent, LocalValue
from psclient._src.distribute.strategy import Strategy
from psclient._src.tracing.hyperparameters import Settings
from psclient._src.variables.sharded import VariableOfShards, shards_of
from psclient._src.variables.sparse_updates import SparseUpdate
from psclient._src.variables.variable import Variable
from psclient.optimizers.checks import check_gradients, has_rows
from psclient.optimizers.loss_scale import DynamicLossScale
from psclient.optimizers.state import Needs, State
from psclient.optimizers.step_functions import (
    OptimizerView,
    advance,
    apply,
    become,
    begin,
    measure,
    measure_norm,
    total,
)
from pswire.model.plan import ReduceOp
from pswire.model.tensor import Array, spec_of

_TRAINABLE = operator.attrgetter("trainable")


class Extra(NamedTuple):
    """A value that rides in a step beside gradients, and comes back reduced.

    Attributes:
        op: how it is reduced.
        array: this process's part of it.
    """

    op: ReduceOp
    array: Array


class StepContribution(NamedTuple):
    """What this process puts into a step.

    Attributes:
        variables: the variables that are trained.
        gradients: of each of them, as reductions take it.
        extras: what rides beside.
        skips: True if nothing shall be applied where a gradient has NaN or infinity.
        weight: if the step is made by the mean over workers, by how much this one counts in it, and its gradients are
            multiplied by that already; None if the step is made by the sum.
    """

    variables: Sequence[Variable]
    gradients: Sequence[Value]
    extras: Sequence[Extra] = ()
    skips: bool = False
    weight: float | None = None


@dataclass(frozen=True, eq=False)
class StepKey:
    """The key of a prepared step: all that it depends on but gradients, and the numbers that update functions read.

    A step like the last one has the same key, the same object.

    Attributes:
        variables: the variables, in the order of their gradients.
        settings: the optimizer's attributes; their numbers may be others in a step of this key.
        rest: what says which variables take part in weight decay, the number of copies of the state that steps share,
            whether this process makes rounds of its own, what becomes of NaN, what rides beside gradients, and whether
            they are averaged.
    """

    variables: tuple[Variable, ...]
    settings: Settings
    rest: tuple[object, ...]


class StepDriver:
    """Makes the steps of one optimizer. Belongs to the thread that runs cross-replica code, but for `known`.

    Args:
        rule: has the options of a step as a whole.
        state: the optimizer's state.
        check: raises where the optimizer cannot train some variables together.
        needs: returns the state that a variable needs beside it.
        decays: returns whether a variable takes part in weight decay.
        decaying: returns what is equal as long as `decays` says the same of each variable.
        settings: returns the hyperparameters of now; None for the rule's.
        settings_of: returns them as the update functions of a variable are given them, with the same numbers for each
            variable; None for the same.
        optional: True if a gradient may be `Absent`, and a variable stays as it is of which all processes have none.
    """

    def __init__(
        self,
        rule: OptimizerView,
        state: State,
        check: Callable[[Sequence[Variable]], None],
        needs: Callable[[Variable], Needs],
        decays: Callable[[Variable], bool],
        decaying: Callable[[], object],
        settings: Callable[[], Settings] | None = None,
        settings_of: Callable[[Variable], Settings] | None = None,
        optional: bool = False,
    ) -> None:
        self._rule = rule
        self._state = state
        self._check, self._needs, self._decays, self._decaying = check, needs, decays, decaying
        self._settings, self._settings_of, self._optional = settings or rule._settings, settings_of, optional
        self._prepared = PreparedStep()

    def known(self, variables: Sequence[Variable]) -> StepKey | None:
        """Returns the key of the last step if that was of these variables, which then need no check; else None.

        For any thread.
        """
        last: StepKey | None = self._prepared.key
        if last is None or len(last.variables) != len(variables):
            return None
        return last if all(map(operator.is_, last.variables, variables)) and all(map(_TRAINABLE, variables)) else None

    def build(self, strategy: Strategy, variables: Sequence[Variable], grads: Sequence[Value] = ()) -> None:
        """Creates what is not there yet of the state for variables. In cross-replica context.

        Args:
            strategy: the strategy.
            variables: the variables.
            grads: of each variable the gradient, if a step comes next.
        """
        stages = self.in_stages(strategy, variables)
        kept = [v for v, gradient in zip(variables, grads, strict=False) if stages and not has_rows(gradient)]
        self._state.build(variables, self._needs, kept)

    def send(self, strategy: Strategy, step: StepContribution) -> list[Value]:
        """Makes a step in a section of its own, in cross-replica context; what fails is given up altogether.

        Returns:
            As `make`.
        """
        strategy.backend.flush()  # What was begun before is no part of this.
        with context.enter_cross_replica(strategy):
            return strategy.backend.section(lambda: self.make(strategy, step))

    def apply_whole(self, strategy: Strategy, grads: list[Value], variables: list[Variable]) -> None:
        """Makes a step in cross-replica context: in a section of its own, but within a merge call."""
        step = StepContribution(variables, grads)
        if context.in_merge_call():
            self._check(variables)
            check_gradients(grads, variables)
            self._record(strategy, self._settings(), step)
        else:
            self.send(strategy, step)

    def apply_boxes(self, strategy: Strategy, boxes: Nest, variables: list[Variable]) -> None:
        """Makes a step in a section of its own; run by `merge_call`."""
        self.make(strategy, StepContribution(variables, context.unbox(boxes)))

    def make(self, strategy: Strategy, step: StepContribution) -> list[Value]:
        """Makes a step in the open section, which has nothing else: as it is prepared, or by recording it.

        Returns:
            The values that ride beside gradients, reduced: arrays, or lazy arrays.
        """
        gradients, variables, extras = step.gradients, step.variables, step.extras
        known = self.known(variables)
        if known is None:
            self._check(variables)
        check_gradients(gradients, variables)
        if known is None:
            self.build(strategy, variables, gradients)  # the key is that of later steps
        settings = self._settings()
        key = self._key(strategy, settings, step, known)
        riding = [extra.array for extra in extras] if extras else []
        local = partial(contributions, strategy.extended, gradients, variables, riding, step.weight)
        record = partial(self._record, strategy, settings, step)
        return strategy.backend.repeat(self._prepared, key, settings.numbers, local, record, len(extras))

    def knows(self, strategy: Strategy, step: StepContribution) -> bool:
        """Returns whether the last step was like this one, so that its gradients need not be there to send it."""
        key = self._key(strategy, self._settings(), step, self.known(step.variables))
        return self._prepared.find(key) is not None

    @property
    def changed(self) -> bool:
        """True if a learning rate, or another number, is not what the last step was made with."""
        return repr(self._settings().numbers) != repr(self._prepared.numbers)

    def _key(self, strategy: Strategy, settings: Settings, step: StepContribution, known: StepKey | None) -> StepKey:
        """Returns the key of a step; `known` is that of the last one, if that was of the same variables."""
        backend, extras = strategy.backend, step.extras
        beside = tuple([(extra.op, spec_of(extra.array)) for extra in extras]) if extras else ()
        copies, alone = len(self._state.everywhere), backend.group.alone
        rest = self._decaying(), copies, alone, backend.nonfinite, beside, step.skips, step.weight is None
        same = known is not None and (known.settings is settings or known.settings.key == settings.key)
        if known is not None and same and known.rest == rest:
            return known
        return StepKey(tuple(step.variables), settings, rest)

    def _record(self, strategy: Strategy, settings: Settings, step: StepContribution) -> list[Value]:
        """Makes the reductions and updates of a step, one by one; returns as `make`."""
        backend: Any = strategy.backend  # a step is skipped only where there are servers
        self.build(strategy, step.variables, step.gradients)  # other gradients may be of rows by now
        extras = [(LocalValue(op, 1.0, spec_of(array), array), None) for op, array in step.extras]
        reduced: list[Value] = backend.reduce(extras) if extras else []
        if step.skips:
            backend.skip_nonfinite()
        self._update(strategy, settings, step)
        return reduced

    def _update(self, strategy: Strategy, settings: Settings, of: StepContribution) -> None:
        """Sums or averages gradients, and updates their variables; once the state is built.

        Args:
            strategy: the strategy.
            settings: those of now.
            of: what this process puts into the step.
        """
        extended, state, grads, variables = strategy.extended, self._state, of.gradients, of.variables
        reduced = partial(extended._reduce_to, "batch_reduce_to", "sum" if of.weight is None else "mean")
        weight = 1.0 if of.weight is None else of.weight
        rows, stages = list(map(has_rows, grads)), self.in_stages(strategy, variables)
        pairs = list(zip(grads, variables, strict=True))
        # Rows are sent twice, first to be measured: what compression leaves over is that of what is applied.
        first = [(g, Uncompressed(v) if stages and some else v) for (g, v), some in zip(pairs, rows, strict=True)]
        sums = reduced(first, weight)
        given: list[Value] = []
        if stages:
            if self._optional:
                flags = np.array([not isinstance(gradient, Absent) for gradient in grads], np.float32)
                given.append(extended.reduce_to("sum", flags, variables[0]))
            for n, v in enumerate(variables):
                if not rows[n]:
                    staged = cast(Variable, state.of(v).staged)
                    extended.update(staged, become, (sums[n],))
                    sums[n] = staged
        own_norms = [n for n, v in enumerate(variables) if self._has_norm(v, rows[n])]
        measured, norms = self._measured(strategy, settings, variables, sums, own_norms, given)
        if stages and any(rows):  # No server keeps rows between two rounds: they are sent again.
            again = iter(reduced([pairs[n] for n, some in enumerate(rows) if some], weight))
            sums = [next(again) if some else own for own, some in zip(sums, rows, strict=True)]
        begun, finite = {}, measured.get("finite")
        for shared in state.everywhere:
            counted = shared["iterations"].devices
            begun[id(shared)] = extended.update_non_slot(counted, begin, (settings, shared, finite))
        rule, optional = self._rule, self._optional
        step = SparseUpdate(apply, rule.sparse, optional=optional, catch_up=rule.catch_up, of_optimizer=True)
        # A step of several calls changes rows that its last call does not have: in all other rows it is put off.
        marking = SparseUpdate(apply, "exact", optional=optional, of_optimizer=True, as_lazy=True)
        for v, gradient, some, count in zip(variables, sums, rows, given[0] if given else repeat(1), strict=False):
            if not count:
                continue
            own, now = state.of(v), begun[id(state.beside(v))]
            mine = settings if self._settings_of is None else self._settings_of(v)
            if own.number is not None:
                extended.update(own.number, advance, (mine, now))
            rest = (norms.get(id(v), measured.get("norm")), own.average, self._decays(v), own.updated, own.number)
            if own.marks is None:
                extended.update(v, step, (mine, gradient, own.accumulator, now, *rest))
            else:
                extended.update(v, marking, (mine, gradient, own.accumulator, now, *rest, own.marks, some))

    def _measured(
        self,
        strategy: Strategy,
        settings: Settings,
        variables: Sequence[Variable],
        sums: Sequence[Value],
        own_norms: Sequence[int],
        others: list[Value],
    ) -> tuple[dict[str, Value], dict[int, Value]]:
        """The norm of all gradients, and whether they are finite, as far as these are needed.

        Also the norms of the gradients whose places are `own_norms`, by the ids of their variables. Where a step takes
        two rounds, the first one brings other values as well, which take the place of those in `others`.
        """
        extended, state = strategy.extended, self._state
        of = list(zip(variables, sums, strict=True))
        measured: list[tuple[Sequence[Variable], list[dict[str, Value]]]] = []
        for fn, some in ((measure, of if self._measures else []), *((measure_norm, [of[n]]) for n in own_norms)):
            parts: list[dict[str, Value]] = []
            for v, own in some:
                mine = settings if self._settings_of is None else self._settings_of(v)
                given = (mine, own, state.of(v).accumulator, state.beside(v).get("loss_scale"))
                parts += _by_shard(v, extended.update(v, fn, given))
            if parts:
                measured.append(([v for v, _ in some], parts))
        if self.in_stages(strategy, variables):
            # A value never crosses servers inside a section: the parts come here, and what they make goes back.
            leaves = [part[name] for _, parts in measured for part in parts for name in part]
            arrays = iter(strategy.backend.bring([*leaves, *others]))
            here = [[{name: next(arrays) for name in part} for part in parts] for _, parts in measured]
            found = [total(parts) for parts in here]
            others[:] = arrays
        else:
            found = [extended.update_non_slot(extended.non_slot_devices(vs), total, (parts,)) for vs, parts in measured]
        of_all = cast(dict[str, Value], found.pop(0)) if self._measures else {}
        return of_all, {id(variables[n]): each["norm"] for n, each in zip(own_norms, found, strict=True)}

    def _has_norm(self, v: Variable, rows: bool) -> bool:
        """Returns whether a gradient is clipped by its own norm, which no update of the variable can compute."""
        return self._rule.clipnorm is not None and (rows or len(shards_of(v)) > 1)

    @property
    def _measures(self) -> bool:
        return self._rule.global_clipnorm is not None or isinstance(self._rule.loss_scale_factor, DynamicLossScale)

    def in_stages(self, strategy: Strategy, variables: Sequence[Variable]) -> bool:
        """Returns whether a step takes two rounds: what it has to know of a gradient, or all, is on several servers."""
        own = [v for v in variables if v._alone]
        alone = strategy.backend.group.alone or bool(own)
        if len(own) < len(variables) and own and self._measures:
            raise ValueError(
                "global_clipnorm and DynamicLossScale need all gradients of a step, but each worker "
                f"applies that of {own[0].name!r} separately (consistency=ps.Async()); use another "
                "optimizer for such variables, or clipnorm"
            )
        if alone and isinstance(self._rule.loss_scale_factor, DynamicLossScale):
            raise ValueError(
                "with DynamicLossScale, another asynchronous worker may change the scale before a gradient "
                "is divided by it; use a number as loss_scale_factor"
            )
        apart = [v for v in variables if len({shard.place for shard in shards_of(v)}) > 1]
        places = {shard.place for v in variables for shard in shards_of(v)}
        if isinstance(self._rule.loss_scale_factor, DynamicLossScale):
            # All copies of the loss scale have to be told, whether or not a variable of this step is beside them.
            places |= {shared["iterations"].place for shared in self._state.everywhere}
        of_one = self._rule.clipnorm is not None and bool(apart)
        if not of_one and (not self._measures or len(places) == 1):
            return False
        if alone and of_one:
            raise ValueError(
                f"clipnorm needs the whole gradient of {apart[0].name!r}, but its shards are on several "
                "servers, which asynchronous workers update in different orders; use clipvalue, or create "
                "the variable without shards"
            )
        if alone:
            raise ValueError(
                "global_clipnorm and DynamicLossScale need all gradients of a step, but asynchronous "
                "workers update several servers in different orders; use clipnorm, or one server"
            )
        return True


def _by_shard(v: Variable, found: Any) -> list[dict[str, Value]]:
    """Returns what was measured of a variable, of a partitioned one for each shard, which may be a single one."""
    if not isinstance(v, VariableOfShards):
        return [found]
    return [{name: each[n] for name, each in found.items()} for n in range(len(v.variables))]
