"""The state of an optimizer in torch's form: fetched from servers, and assigned there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from psclient._src.arrays.conversions import on_host, to_torch
from psclient._src.distribute.strategy import Strategy
from psclient._src.rounds.backend import RemoteBackend
from psclient._src.variables.variable import Variable
from psclient.optimizers.rules import STEP, TORCH, TorchRule
from psclient.torch.groups import ParameterGroups
from psclient.torch.parameters import Trained
from pswire.errors import InvalidArgument

MOMENTUM = "momentum_buffer"

ITERATIONS = "iterations"
"""The key of the number of steps, of which torch's own optimizers know nothing."""


class SlotState:
    """What the servers keep beside parameters, as `state_dict` has it.

    Args:
        strategy: owns the variables.
        groups: the rules.
    """

    def __init__(self, strategy: Strategy, groups: ParameterGroups) -> None:
        self._strategy = strategy
        self._groups = groups

    def fetch(self, trained: Sequence[Trained]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the slots of each parameter by name, as tensors of the host; nothing before the first step."""
        return {each.tensor: self._of(each) for each in trained if self._groups.state.has(each.variable)}

    @property
    def iterations(self) -> int:
        """The number of steps."""
        state = self._groups.state
        return int(state.shared(ITERATIONS)) if state.built else 0

    def _of(self, each: Trained) -> dict[str, torch.Tensor]:
        own = self._groups.state.of(each.variable)
        found = {name: to_torch(np.array(v.numpy())) for name, v in own.saved()}
        rule = self._groups.of(each.variable)
        if _is_sgd(rule):  # torch keeps no count, and no momentum before the first step
            if STEP in found and not found.pop(STEP):
                found.pop(MOMENTUM, None)
        elif isinstance(rule, TorchRule):
            count = found.pop(STEP, torch.tensor(self.iterations))
            found = {STEP: count.to(torch.float32), **found}
        return found

    def assign(self, saved: Sequence[tuple[Trained, Mapping[str, Any]]], iterations: int | None) -> None:
        """Gives slots the values of a state, as all workers do.

        Args:
            saved: parameters, each with its state.
            iterations: the number of steps; None for that of the parameter that has made most.

        Raises:
            ValueError: a parameter has no such slot, or one of another shape.
        """
        if not any(state for _, state in saved):
            return
        strategy, state = self._strategy, self._groups.state
        steps = [int(own[STEP]) for _, own in saved if STEP in own]
        with strategy.scope():
            self._groups.driver.build(strategy, [each.variable for each, _ in saved])
            with cast(RemoteBackend, strategy.backend).together():
                for each, own in saved:
                    self._assign(each, own)
                for shared in state.everywhere:
                    shared[ITERATIONS].assign(np.int64(max(steps, default=0) if iterations is None else iterations))

    def _assign(self, each: Trained, saved: Mapping[str, Any]) -> None:
        slots: dict[str, Variable] = dict(self._groups.state.of(each.variable).saved())
        given = {name: value for name, value in saved.items() if value is not None}
        unknown = given.keys() - slots.keys() - {STEP}
        if unknown:
            raise InvalidArgument(
                f"the saved state of parameter {each.name!r} has {', '.join(sorted(unknown))}, but a "
                f"{type(self._groups.of(each.variable)).__name__} on servers has {', '.join(slots) or 'nothing'}; "
                "load it into an optimizer of the kind that saved it"
            )
        if STEP in slots and _is_sgd(self._groups.of(each.variable)):
            given[STEP] = np.int64(MOMENTUM in given)  # whether the next gradient is dampened
        for name, value in given.items():
            slot = slots.get(name)
            if slot is None:
                continue  # a count that is not kept of each parameter
            array = on_host(value).astype(slot.dtype)
            if array.shape != slot.shape:
                raise InvalidArgument(
                    f"the saved state of parameter {each.name!r} has {name} of shape {array.shape}, but the "
                    f"servers have {slot.shape}"
                )
            slot.assign(array)


def _is_sgd(rule: Any) -> bool:
    return isinstance(rule, TorchRule) and rule._rule is TORCH["SGD"]


class GroupState:
    """The hyperparameters of groups, as a checkpoint has them: numbers, words and lists of them.

    Args:
        groups: `param_groups`, of which this is a view.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns what JSON can hold of each group, but for its parameters."""
        return [
            {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)}
            for group in self._groups
        ]

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Gives the groups what was saved of them."""
        for group, own in zip(self._groups, saved, strict=False):
            group.update(own)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | torch.Tensor | None) or (
        isinstance(value, list | tuple) and all(map(_is_plain, value))
    )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value
