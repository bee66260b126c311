"""The steps of one optimizer: gradients go out, perhaps while backward goes on, and parameters come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch

from psclient._src import context
from psclient._src.arrays.conversions import on_host
from psclient._src.arrays.devices import Coming, Value
from psclient._src.distribute.reduction import Absent
from psclient._src.distribute.strategy import Strategy
from psclient._src.interpreter.interrupts import INTERRUPTS
from psclient._src.interpreter.lifetimes import weakly
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.rounds.buffers import Buffer
from psclient._src.variables.kinds import ServerVariable
from psclient._src.variables.lookup import gradient_of_all
from psclient._src.variables.table_views import table_of
from psclient._src.variables.variable import Variable
from psclient.optimizers.step_driver import Extra, StepContribution
from psclient.torch.buffers import ModuleBuffers
from psclient.torch.changes import Changes
from psclient.torch.gradients import Gradients
from psclient.torch.groups import ParameterGroups
from psclient.torch.parameters import Trained, copy_together, names_of
from psclient.torch.rows import TableRows
from pswire.errors import InvalidArgument, InvalidCall, PSError
from pswire.limits import PART_BYTES


class Steps:
    """Makes the steps of one optimizer. Used by one thread at a time.

    Args:
        strategy: owns the variables.
        groups: the rules.
        averages: True if gradients are averaged over workers; False if they are summed.
        overlap: True if gradients may leave while backward goes on.
        refresh: gives the rules the hyperparameters of now.
        module: has the parameters.

    Attributes:
        module: as given.
        trained: the parameters, in the order in which they were registered.
        tables: the rows that are trained.
        buffers: those of the module; None if they are nobody else's concern.
        gradients: those of the parameters.
        overflows: number of workers whose gradients had NaN or infinity, in the last step that a scaler has made.
    """

    def __init__(
        self,
        strategy: Strategy,
        groups: ParameterGroups,
        averages: bool,
        overlap: bool,
        refresh: Callable[[], object],
        module: torch.nn.Module,
    ) -> None:
        self.strategy = strategy
        self._backend = cast(RemoteBackend, strategy.backend)
        self._groups = groups
        self._driver = groups.driver
        self._averages, self._overlap, self._refresh, self.module = averages, overlap, refresh, module
        self.trained: list[Trained] = []
        self.tables: list[TableRows] = []
        self.buffers: ModuleBuffers | None = None
        self._changes = Changes()
        self.gradients = Gradients(self._buffers, weakly(self._refuse))
        self.gradients.begin = weakly(self._begin)
        self.overflows = 0.0
        self._buffers_sent = 0
        self._under_way: list[Value] | None = None  # what rides in the round that was sent while backward went on
        self._unfinished: Callable[[], None] | None = None  # ends a step whose round was sent

    # ---- What the optimizer calls ----

    def make(self, scale: float | None = None, overflow: bool = False) -> None:
        """Makes a step, and waits for it.

        Args:
            scale: under a scaler, the loss scale by which gradients are multiplied; else None.
            overflow: under a scaler, whether this worker's gradients have NaN or infinity.

        Raises:
            RuntimeError: gradients were changed after backward, or a parameter is another one; called in replica or
                update context.
            PSError: the round failed, or the session is over.
        """
        if context.has_strategy():
            context.require_cross_replica(self.strategy, "step")
        self._finish()
        trained = self._active()
        for each in reversed(self.gradients.check(trained)):
            each.check_in(self.module)
        if self._under_way is not None:
            riding: list[Value] | None = self._check_sent(trained, scale)
        else:
            self._prepare(scale)
            excluded = scale is not None and self._overflows(trained, overflow)
            riding = None if excluded else self._send(trained, scale, overflow)
        self._forget_gradients()
        self._unfinished = partial(self._end, riding, trained, scale)
        self._finish()

    def _finish(self) -> None:
        """Ends the step whose round was sent, if there is one: an interrupt may have come while it was waited for."""
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

    def bind(self, some: Sequence[Trained]) -> None:
        """Has rounds write values into the memory of parameters, where they are now, and sees their gradients."""
        for each in some:
            each.bind()
        memory = [partial(self._changes.memory, each) if each.on_host else None for each in some]
        self._backend.reader.into([(each.variable, own) for each, own in zip(some, memory, strict=True)])
        self._fetch([each for each in some if not each.on_host])
        self._changes.note(self.trained)

    def release(self) -> None:
        """Sees no gradients any more, and lets go of the parameters."""
        self.gradients.close()
        if self._under_way is not None:
            self._under_way = None
            INTERRUPTS.release()
        self._backend.reader.into([(each.variable, None) for each in self.trained])

    def forget(self) -> None:
        """Forgets which gradients have come, and those of rows."""
        self._finish()
        self.gradients.forget()
        for rows in self.tables:
            rows.forget()

    def refresh(self) -> None:
        """Gives parameters the values of now, where they have others: this process came late, or was restored."""
        self._backend.reader.refresh()

    def begin_batch(self) -> None:
        """Gives parameters the values of now, before the forward pass of a batch."""
        self._finish()
        self.refresh()

    def _buffers(self, variables: Sequence[Variable]) -> list[Buffer]:
        """Returns the buffers in which the next contributions are computed."""
        own = [v for v in variables if isinstance(v, ServerVariable)]
        if len(own) < len(variables):  # those in shards have no one place in a transport's memory
            return [Buffer(self._backend.buffer(v, 0)) for v in variables]
        return self._backend.exchange.buffers.give_all([v.handle for v in own], self._backend.group.devices[0])

    # ---- Before a round ----

    def _active(self) -> list[Trained]:
        """The parameters that are trained now, in the order in which backward mostly comes to them."""
        return [each for each in reversed(self.trained) if each.tensor.requires_grad]

    def _prepare(self, scale: float | None) -> None:
        self._refresh()
        changed = self._changes.found(self.trained)
        for each in changed:
            each.check(each.tensor)
        if changed:
            self._assign(changed)
        workers = self.strategy.num_replicas_in_sync if self._averages else 1
        self._groups.half_divisor = None if scale is None else float(scale)
        self._groups.divisor = None if scale is None and workers == 1 else workers * float(scale or 1.0)
        group = self._backend.group
        weight = group.weight if self._averages else Fraction(not group.empty)
        self.gradients.factor, self.gradients.half_factor = float(weight * workers), float(weight)

    def _assign(self, changed: Sequence[Trained]) -> None:
        """Gives variables the values of parameters that the script has changed, as it does in all workers."""
        with self.strategy.scope(), self._backend.together():
            for each in changed:
                each.variable.assign(on_host(each.tensor))
        self.bind(changed)

    def _outgoing(self, trained: Sequence[Trained], scale: float | None, overflow: bool) -> StepContribution:
        gradients = self.gradients.take(trained)
        variables: list[Variable] = [each.variable for each in trained]
        for table, gradient in self._rows():
            variables.append(table)
            gradients.append(gradient)
        extras = self._of_buffers()
        if scale is not None:
            self._check_together(variables)
            extras.append(Extra("sum", np.full(1, overflow, np.float32)))
        return StepContribution(variables, gradients, extras, skips=scale is not None)

    def _check_together(self, variables: Sequence[Variable]) -> None:
        """Raises `ValueError` where a step cannot be left out on all workers."""
        if any(v._alone for v in variables) and not self._backend.group.alone:
            raise InvalidArgument(
                "a GradScaler skips a step on all workers if any gradient is not finite, but variables with "
                "consistency=ps.Async() do not wait for all workers; train these with an optimizer without a scaler"
            )

    def _rows(self) -> list[tuple[Any, Any]]:
        """Returns the tables, and the gradient of each; those of tables that are stored as one are one."""
        some: dict[int, list[TableRows]] = {}
        for rows in self.tables:
            some.setdefault(id(table_of(rows.table)), []).append(rows)
        found = []
        for of_one in some.values():
            table = table_of(of_one[0].table)
            came = [each for rows in of_one for each in rows.gradients(self._factor(table))]
            gradient = gradient_of_all(*zip(*came, strict=True)) if came else Absent(table._no_rows())
            found.append((table, gradient))
        return found

    def _factor(self, table: Any) -> float:
        return self.gradients.half_factor if table.dtype == np.float16 else self.gradients.factor

    def _of_buffers(self) -> list[Extra]:
        alone = self.buffers is None or self.strategy.num_replicas_in_sync == 1
        found = [] if alone or self.buffers is None else self.buffers.contributions()
        self._buffers_sent = len(found)
        return found

    def _overflows(self, trained: Sequence[Trained], overflow: bool) -> bool:
        """Returns whether a step is to be left out, where servers cannot decide that: they see it in two rounds."""
        variables = [*(each.variable for each in trained), *(table_of(rows.table) for rows in self.tables)]
        if not self._groups.driver.in_stages(self.strategy, variables):
            return False
        self.overflows = float(self.strategy.reduce("sum", np.float32(overflow), axis=None))
        return self.overflows > 0

    # ---- After a round ----

    def _take(self, riding: Sequence[Value], scale: float | None) -> None:
        """Takes what rode in a round."""
        found = [np.asarray(each) for each in riding]
        if self.buffers is not None and self._buffers_sent:
            self.buffers.take(found[: self._buffers_sent])
        if scale is not None:
            self.overflows = float(found[-1][0])

    def _forget_gradients(self) -> None:
        self.gradients.end()
        for rows in self.tables:
            rows.forget()

    def _end(self, riding: Sequence[Value] | None, trained: Sequence[Trained], scale: float | None) -> None:
        """Waits for the round of a step, and takes its values; `riding` is None where the step was left out."""
        if riding is not None:
            self._backend.reader.take_all()
            self._take(riding, scale)
        self.refresh()
        self._fetch([each for each in trained if not each.on_host])
        if trained:
            torch.autograd.graph.increment_version([each.tensor for each in trained])
        for each in trained:
            each.version = each.tensor._version
        self._changes.note(self.trained)
        self.strategy._begin_step()
        self._backend.reader._begin_step()

    def _fetch(self, some: Sequence[Trained]) -> None:
        """Copies values into parameters where rounds cannot write."""
        by_device: dict[torch.device, list[Trained]] = {}
        for each in some:
            by_device.setdefault(each.device, []).append(each)
        for device, there in by_device.items():
            copy_together(device, [each.tensor for each in there], [each.variable.numpy() for each in there])
        for each in some:
            each.version = each.tensor._version

    # ---- Before gradients are there ----

    def _send(self, trained: Sequence[Trained], scale: float | None, overflow: bool) -> list[Value]:
        """Sends a round; a large one leaves while its gradients are copied. Returns what rides in it."""
        if scale is None and _is_large(trained) and all(each.tensor.grad is not None for each in trained):
            sent = self._promise(trained)
            if sent is not None:
                riding, promised = sent
                self.gradients.keep(promised, trained)
                return riding
        return self._driver.send(self.strategy, self._outgoing(trained, scale, overflow))

    def _begin(self) -> dict[int, Coming] | None:
        """Sends a round whose gradients are still computed, if it is known which of them will come, and is worth it."""
        trained = self._active()
        if not (self._overlap and _is_large(trained) and _will_come(trained)):
            return None
        self._finish()
        self._prepare(None)
        sent = self._promise(trained)
        if sent is None:
            return None
        INTERRUPTS.hold()  # until the step: a gradient that does not come would be missing to all
        self._under_way, promised = sent
        return promised

    def _promise(self, trained: Sequence[Trained]) -> tuple[list[Value], dict[int, Coming]] | None:
        """Sends a large round of gradients that are to come; None if they have to be there before."""
        if self.tables or not self.gradients.factor:
            return None
        if not all(each.is_plain and each.on_host and type(each.variable) is ServerVariable for each in trained):
            return None
        promised = {id(each.tensor): Coming(each.tensor.nbytes) for each in trained}
        out = StepContribution([each.variable for each in trained], [*promised.values()], self._of_buffers())
        known = self._driver.knows(self.strategy, out)
        return (self._driver.send(self.strategy, out), promised) if known else None

    def _check_sent(self, trained: Sequence[Trained], scale: float | None) -> list[Value]:
        """Returns what rides in the round that was sent while backward went on.

        Raises:
            RuntimeError: the round is not this step's.
        """
        riding, self._under_way = cast(list[Value], self._under_way), None
        why = ""
        if missing := self.gradients.missing(trained):
            why = (
                f"backward failed, or computed no gradient for {names_of(missing)}; if an autograd function "
                "returns None for it, create the optimizer without overlap=True"
            )
        elif scale is not None:
            why = "a GradScaler was used for the first time; use it from the first step on, or remove overlap=True"
        else:
            self._refresh()
            if self._driver.changed:
                why = (
                    "a learning rate was changed between backward() and step(); change it before backward() or "
                    "after step()"
                )
        if why:
            self._under_way = riding
            self._refuse(f"gradients were already sent to the servers when {why}")
        INTERRUPTS.release()
        return riding

    def _refuse(self, why: str) -> NoReturn:
        """Raises an error; where gradients have left, which nobody can take back, this process has no part any more."""
        if self._under_way is not None:
            self._under_way = None
            INTERRUPTS.release()
            session = self._backend.group.session
            session.end(PSError(why, str(session.task)))
        raise InvalidCall(why)


def _is_large(trained: Sequence[Trained]) -> bool:
    """Returns whether gradients are more than what leaves at once in any case."""
    return sum([each.tensor.nbytes for each in trained]) > PART_BYTES


def _will_come(trained: Sequence[Trained]) -> bool:
    """Returns whether the backward that is under way will come to all of these parameters."""
    known = getattr(torch._C, "_will_engine_execute_node", None)  # what torch's own multi-grad hooks ask
    if known is None:
        return False
    edge = torch.autograd.graph.get_gradient_edge
    return all(known(edge(each.tensor).node) for each in trained)
