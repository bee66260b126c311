"""The buffers of a module, such as the running means of BatchNorm: the first worker's, means, or each worker's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from psclient._src.arrays.conversions import on_host, to_torch
from psclient._src.arrays.devices import CPU
from psclient._src.variables.kinds import Cell, SyncOnReadVariable
from psclient._src.variables.variable import Variable, VariableAggregation, VariableSynchronization
from psclient.optimizers.step_driver import Extra
from psclient.torch.parameters import name_of
from pswire.errors import InvalidArgument, InvalidRequest
from pswire.model.plan import ReduceOp
from pswire.model.tensor import Array, spec_of

Mode = Literal["first", "mean", "own"]
"""How the workers' buffers belong together: after a step all have the first worker's, or the mean of floating ones; or
each keeps its own."""


class BufferCell(Cell):
    """The place of a variable's copy that is a buffer of a module: who writes the one writes the other.

    Args:
        variable: the variable, with a copy for each replica.
        buffer: of the module.
    """

    foreign = True

    def __init__(self, variable: SyncOnReadVariable, buffer: torch.Tensor) -> None:
        self.device, self._name, self._spec = CPU, variable.name, variable.spec
        self._buffer = buffer
        self._lock = variable._component(0).cell._lock

    @property
    def array(self) -> Any:
        """A copy of the buffer."""
        found = np.array(on_host(self._buffer))
        found.flags.writeable = False
        return found

    @array.setter
    def array(self, value: Array) -> None:
        with torch.no_grad():
            self._buffer.copy_(to_torch(np.array(value)))


class ModuleBuffers:
    """The persistent buffers of a module, as variables of which each replica has a copy: they are in checkpoints.

    All workers begin with those of the first. A checkpoint has the first worker's, which are all workers' in the mode
    "first".

    Args:
        mode: how those of the workers belong together.
        prefix: of the variables' names.

    Attributes:
        variables: of the buffers, by their names in the module.
        by_id: the same by the `id` of the buffers.
    """

    def __init__(self, mode: Mode, prefix: str) -> None:
        self._mode, self._prefix = mode, prefix
        self._tensors: list[torch.Tensor] = []
        self.variables: dict[str, Variable] = {}
        self.by_id: dict[int, Variable] = {}

    def add(self, module: torch.nn.Module) -> None:
        """Adds those of a module that are not here yet. In the strategy's scope.

        Raises:
            ValueError: a buffer has a dtype that servers do not have, such as float8.
        """
        kept = {name_of(name) for name in module.state_dict(keep_vars=True)}
        for path, buffer in module.named_buffers():
            name = name_of(path)
            if name in kept and name not in self.variables:
                self.variables[name] = self.by_id[id(buffer)] = _created(f"{self._prefix}{name}", buffer)
                self._tensors.append(buffer)

    @property
    def _shared(self) -> list[torch.Tensor]:
        """The buffers that are the same on all workers after each step."""
        if self._mode == "mean":
            return [t for t in self._tensors if t.is_floating_point()]
        return self._tensors if self._mode == "first" else []

    def contributions(self) -> list[Extra]:
        """Returns all that is shared, in one array of each dtype."""
        op: ReduceOp = "first" if self._mode == "first" else "mean"
        shared = _by_dtype(self._shared)
        return [Extra(op, on_host(torch.cat([_wide(t).reshape(-1) for t in some]))) for some in shared]

    def take(self, values: Sequence[Array]) -> None:
        """Writes what `contributions` gave, as it is after the round."""
        for some, value in zip(_by_dtype(self._shared), values, strict=True):
            whole = to_torch(np.array(value))
            for tensor, own in zip(some, whole.split([t.numel() for t in some]), strict=True):
                # As BatchNorm itself does, without a new version: a graph that was made before can still be gone back.
                tensor.data.copy_(own.view(tensor.shape))


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a buffer as servers reduce it: half precision in single, truth values as numbers."""
    if tensor.dtype is torch.bool:
        return tensor.detach().to(torch.uint8)
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().float() if half else tensor.detach()


def _created(name: str, buffer: torch.Tensor) -> Variable:
    """Creates the variable of a buffer, which gets the first worker's value. In the strategy's scope."""
    try:
        first = np.array(on_host(buffer))
        spec_of(first)
    except (TypeError, InvalidRequest):
        raise InvalidArgument(
            f"buffer {name!r} is {buffer.dtype}, a dtype that servers do not support; register it with "
            "persistent=False, or use another dtype"
        ) from None
    made: Any = Variable(
        first,
        trainable=False,
        name=name,
        synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
    )
    cell = BufferCell(made, buffer)
    cell.array = made._component(0).cell.array
    made._component(0).cell = cell
    made.handed_in()
    return made  # type: ignore[no-any-return]
