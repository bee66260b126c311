"""Gradients between backward and the round that takes them: seen as they come, in buffers that are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch

from psclient._src.arrays.conversions import on_host, to_torch
from psclient._src.arrays.devices import Coming
from psclient._src.distribute.reduction import Absent
from psclient._src.interpreter.lifetimes import weakly
from psclient._src.rounds.buffers import Buffer
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.variable import Variable
from psclient.torch.parameters import Trained
from psclient.torch.rows import TableRows
from pswire.model.tensor import Array, address_of

CHANGED = (
    "the gradient of {} changed between backward() and step(), as with torch.nn.utils.clip_grad_norm_, but "
    "step() uses the gradient from backward(). To clip by the norm over all workers use "
    "global_clipnorm=...; change gradients in a hook: parameter.register_hook(...)"
)

SECOND = (
    "a second backward() before step() computed a gradient of {}, but the first one was already sent to "
    "the servers; put all but the last backward() of a step in `with optimizer.no_sync():`, or create the "
    "optimizer without overlap=True"
)

LEFT = (
    "gradients were already sent to the servers during backward(), {}, and cannot be withdrawn; call "
    "step() after each backward(), or create the optimizer without overlap=True, which sends them in step()"
)


class Gradients:
    """The gradients of an optimizer's parameters. Used by the thread that runs backward, then by that of the step.

    Args:
        buffers: returns the buffers in which the next contributions to some variables are computed.
        refuse: raises an error, for good where gradients have left.

    Attributes:
        accumulating: True while gradients are added up here, and none is sent.
        begin: called when the first gradient of a step has come, if any are sent before `step`; returns those that are
            promised, by the `id` of their parameters, or None if none is sent yet.
        factor, half_factor: by what gradients are multiplied here, and those in float16, whose sum over all workers
            could be too large; 0 if they do not count.
    """

    def __init__(
        self, buffers: Callable[[Sequence[Variable]], list[Buffer]], refuse: Callable[[str], NoReturn]
    ) -> None:
        self._buffers = buffers
        self.refuse = refuse
        self.accumulating = False
        self.begin: Callable[[], dict[int, Coming] | None] = lambda: None
        self.factor = self.half_factor = 1.0
        self._versions: dict[int, int] = {}  # of each gradient that has come, by its parameter's id
        self._came: set[int] = set()  # the parameters to which a backward of this step has come
        self._repeats = False  # True once there were several for a step: what leaves early might not be all
        self._tasks: dict[int, int] = {}  # of each table the backward that has come to its rows, by numbers of torch
        self._promised: dict[int, Coming] | None = None
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}
        self._views: WeakKeyDictionary[Buffer, torch.Tensor] = WeakKeyDictionary()
        self._hooks: list[Any] = []

    def watch(self, each: Trained) -> None:
        """Sees the gradients of a parameter from now on."""
        hook, frozen = partial(weakly(self.arrived), each), not each.tensor.requires_grad
        each.tensor.requires_grad_(True)  # else torch takes no hook; a frozen parameter keeps it for later
        self._hooks.append(each.tensor.register_post_accumulate_grad_hook(hook))
        each.tensor.requires_grad_(not frozen)

    def watch_rows(self, rows: TableRows) -> None:
        """Sees the gradients of a table's rows from now on, as long as the optimizer is there."""
        rows.forget()  # an optimizer of before has them no more
        rows.watch = weakly(self.arrived_at_rows)

    def close(self) -> None:
        """Sees no gradients any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def arrived(self, each: Trained, tensor: torch.Tensor) -> None:
        """A gradient was added to the `grad` of a parameter's tensor."""
        key, gradient = id(tensor), tensor.grad
        if gradient is None:
            return  # another hook has taken it
        if key in self._came:
            self._repeats = True
            if self._promised is not None:
                self._check_whole()
                self.refuse(SECOND.format(repr(each.name)))
        self._versions[key] = gradient._version
        if self.accumulating:
            return
        if not self._came and not self._repeats:
            self._promised = self.begin()
        self._came.add(key)
        if self._promised is not None:
            ((array, view),) = self._fill([each], [gradient])
            self._sent[key] = view, view._version
            self._promised[key].give(array)

    def arrived_at_rows(self, rows: TableRows) -> bool:
        """A gradient was added to that of rows of a table, of which one backward may come to several; returns True."""
        task = torch._C._current_graph_task_id()
        if self._tasks.get(id(rows)) != task:
            self._tasks[id(rows)] = task
            rows.begin_backward()
        return True

    def keep(self, promised: Mapping[int, Coming], trained: Sequence[Trained]) -> None:
        """Gives gradients that were promised, one after the other; all are there.

        Args:
            promised: by the `id` of their parameters.
            trained: the parameters, in the order in which their gradients are sent.
        """
        for each in trained:
            ((array, _),) = self._fill([each], [each.tensor.grad])
            promised[id(each.tensor)].give(array)

    # ---- For a step ----

    @property
    def sent(self) -> bool:
        """True if some of this step have left."""
        return self._promised is not None

    def check(self, trained: Sequence[Trained]) -> list[Trained]:
        """Raises `RuntimeError` if gradients are not as backward has left them; returns parameters without one."""
        without = []
        for each in trained:
            key, gradient = id(each.tensor), each.tensor.grad
            if gradient is None:
                without.append(each)
                if key not in self._sent:
                    continue  # module.zero_grad() has taken it
            sent, version = self._sent.get(key, (gradient, self._versions.get(key)))
            if version is not None and (sent is None or gradient is not sent or sent._version != version):
                self.refuse(CHANGED.format(repr(each.name)))
        return without

    def missing(self, trained: Sequence[Trained]) -> list[Trained]:
        """Returns the parameters whose gradients were promised, and have not come."""
        promised = self._promised or {}
        return [each for each in trained if (own := promised.get(id(each.tensor))) is not None and own.here is None]

    def _check_whole(self) -> None:
        """Raises `RuntimeError` if gradients have left of a backward that has failed."""
        if any(coming.here is None for coming in (self._promised or {}).values()):
            self.refuse(LEFT.format("which has failed"))

    def take(self, trained: Sequence[Trained]) -> list[Any]:
        """Returns the gradients as a round takes them; of a parameter without one, or for a factor of 0, `Absent`."""
        grads = [each.tensor.grad if self.factor else None for each in trained]
        plain = [(each, g) for each, g in zip(trained, grads, strict=True) if each.is_plain and g is not None]
        filled = self._fill([each for each, _ in plain], [g for _, g in plain])
        if len(plain) == len(trained):
            return [array for array, _ in filled]
        arrays = {id(each): array for (each, _), (array, _) in zip(plain, filled, strict=True)}
        return [
            arrays[id(each)] if id(each) in arrays else absent(each) if g is None else self._other(each, g)
            for each, g in zip(trained, grads, strict=True)
        ]

    def end(self) -> None:
        """The step is over."""
        self._versions.clear()
        self._came.clear()
        self._tasks.clear()
        self._sent.clear()
        self._promised = None

    def forget(self) -> None:
        """Forgets which gradients have come: they are not wanted.

        Raises:
            RuntimeError: they have left for the servers.
        """
        self._check_whole()
        if self._promised is not None:
            self.refuse(LEFT.format("and zero_grad() came before step()"))
        self.end()

    def _other(self, each: Trained, gradient: torch.Tensor) -> Any:
        """Returns a gradient that is of rows, or on a GPU."""
        if not each.by_rows:
            factor = self._factor(each)
            return gradient.detach() if factor == 1 else gradient.detach() * factor
        if gradient.is_sparse:
            found = gradient.coalesce()
            values, rows = found.values(), found.indices()[0]
        else:
            values, rows = gradient, torch.arange(len(gradient), device=gradient.device)
        return IndexedSlices(_shown(values * self._factor(each)), _shown(rows), each.shape)

    def _fill(self, some: Sequence[Trained], grads: Sequence[Any]) -> list[tuple[Array, torch.Tensor]]:
        """Copies gradients into the variables' buffers, which are the parameters' gradients from now on."""
        buffers = self._buffers([each.variable for each in some])
        found = [(buffer.array, self._viewed(buffer)) for buffer in buffers]
        views = [view for _, view in found]
        with torch.no_grad():
            if views:
                torch._foreach_copy_(views, [g.to_dense() if g.is_sparse else g for g in grads])
                for factor in {self.factor, self.half_factor} - {1}:
                    scaled = [v for v, each in zip(views, some, strict=True) if self._factor(each) == factor]
                    if scaled:
                        torch._foreach_mul_(scaled, factor)
        for each, view in zip(some, views, strict=True):
            each.tensor.grad = view
        return found

    def _factor(self, each: Trained) -> float:
        return self.half_factor if each.dtype is torch.float16 else self.factor

    def _viewed(self, buffer: Buffer) -> torch.Tensor:
        """Returns the tensor over a buffer's memory."""
        view = self._views.get(buffer)
        if view is None or view.data_ptr() != address_of(buffer.base) or not view.is_contiguous():
            view = self._views[buffer] = to_torch(buffer.base)
        return view


def absent(each: Trained) -> Absent:
    """Returns what stands for a gradient that is not there."""
    if each.by_rows:
        return Absent(
            IndexedSlices(np.empty((0, *each.shape[1:]), each.variable.dtype), np.empty(0, np.int64), each.shape)
        )
    return Absent(np.broadcast_to(np.zeros((), each.variable.dtype), each.shape))


def _shown(tensor: torch.Tensor) -> Any:
    """Returns a tensor as reductions take it: of the host as an array of NumPy."""
    tensor = tensor.detach()
    return on_host(tensor.contiguous()) if tensor.device.type == "cpu" else tensor
