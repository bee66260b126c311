"""The object graph of a checkpoint: variables reached from a few objects, by paths such as "model/layers/0/w"."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from psclient._src import values
from psclient._src.distribute.strategy import Strategy
from psclient._src.variables.sharded import whole_of
from psclient._src.variables.table_views import table_of
from psclient._src.variables.variable import Variable, VariableAggregation, VariableSynchronization
from psclient.optimizers import Optimizer
from psclient.optimizers.state import state_of
from pswire import strict_json

_PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)
_CLOSED = (ModuleType, type, FunctionType, MethodType, BuiltinFunctionType, Strategy)

_OF_KINDS: dict[type, Callable[[Any], Mapping[str, Any]]] = {}
"""What objects of other libraries lead to, by their kinds."""


def register_kind(kind: type, children_of: Callable[[Any], Mapping[str, Any]]) -> None:
    """Says what objects of another library lead to, which cannot have `trackable_children`.

    Args:
        kind: their class.
        children_of: returns an object's children by name; raises `ValueError` where it has nothing on servers.
    """
    _OF_KINDS[kind] = children_of


@runtime_checkable
class Stateful(Protocol):
    """An object that says itself what its state is."""

    def state_dict(self) -> Any:
        """Its state: dicts with words as keys, lists, numbers, words, booleans and None."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Takes over what `state_dict` gave."""
        ...


@dataclass
class Tracked:
    """The result of a walk over the objects.

    Attributes:
        variables: the variables that were found, by path.
        stateful: other objects with a state, by path.
        unbuilt: the paths of optimizers that keep nothing yet: they have made no step.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    stateful: dict[str, Stateful] = field(default_factory=dict)
    unbuilt: list[str] = field(default_factory=list)

    def states(self) -> dict[str, Any]:
        """The states of the other objects, by path.

        Raises:
            TypeError: one of them cannot be written as JSON.
        """
        return {path: _plain_state(path, thing.state_dict()) for path, thing in self.stateful.items()}


def explore(root: Mapping[str, object]) -> Tracked:
    """Finds what is reached from objects by attributes, keys and indices; each by the shortest path.

    Of an optimizer these are its counts, `opt/iterations`, and what it keeps of each variable, `opt/momentum/model/w`,
    where "model/w" is the variable's own path, or its name if nothing else leads to it.

    Args:
        root: objects by name; they may refer to each other in circles.
    """
    found, optimizers = Tracked(), list[tuple[str, Optimizer]]()
    seen: dict[int, object] = {}  # Whatever is in it lives as long, so that no id comes again.
    ahead = deque((_escaped(name), thing) for name, thing in root.items())
    while ahead:
        path, thing = ahead.popleft()
        thing = table_of(whole_of(values.container(thing)))
        if isinstance(thing, _PLAIN) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Variable):
            if _is_saved(thing):
                found.variables[path] = thing
        elif isinstance(thing, Optimizer):
            optimizers.append((path, thing))
        elif _says_state(thing):
            if "/" not in path or not getattr(thing, "saved_by_name_alone", False):
                found.stateful[path] = thing
        else:
            ahead.extend((f"{path}/{_escaped(name)}", child) for name, child in children(thing))
    paths = {id(variable): path for path, variable in found.variables.items()}
    for path, optimizer in optimizers:
        if not state_of(optimizer).built:
            found.unbuilt.append(path)
        kept = state_of(optimizer).by_path(lambda v: paths.get(id(v), v.name))
        found.variables |= {f"{path}/{name}": v for name, v in kept.items() if id(v) not in seen}
    return found


def check_trackable(name: str, thing: object) -> None:
    """Raises `ValueError` where an object has nothing that could be saved."""
    if isinstance(thing, (*_PLAIN, *_CLOSED)):
        raise ValueError(
            f"Checkpoint({name}=...) is given {thing!r:.80}, of which there is nothing to save; give variables, lists "
            "and dicts of them, objects that have them, optimizers, metrics, or objects with state_dict"
        )


def _is_saved(v: Variable) -> bool:
    """Copies that differ by replica and are never combined begin anew."""
    alone = v.aggregation is VariableAggregation.NONE
    return not (v.synchronization is VariableSynchronization.ON_READ and alone)


def _says_state(thing: object) -> bool:
    """Returns whether an object says its state; one that says what is to be tracked of it is asked for that."""
    tracked = hasattr(thing, "trackable_children") or isinstance(thing, tuple(_OF_KINDS))
    return isinstance(thing, Stateful) and not (tracked or isinstance(thing, _CLOSED))


def children(thing: object) -> Iterator[tuple[str, Any]]:
    """Returns what an object leads to, by name, key or index."""
    if isinstance(thing, _CLOSED):
        return
    if isinstance(thing, Mapping):
        yield from ((str(key), child) for key, child in thing.items())
    elif isinstance(thing, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(thing))
    elif hasattr(thing, "trackable_children"):
        yield from thing.trackable_children().items()
    elif found := next((of for kind, of in _OF_KINDS.items() if isinstance(thing, kind)), None):
        yield from found(thing).items()
    else:
        yield from getattr(thing, "__dict__", {}).items()


def _escaped(name: str) -> str:
    """A part of a path; TensorFlow writes a slash in it in this way, too."""
    return str(name).replace("/", ".S")


def _plain_state(path: str, state: object) -> Any:
    try:
        return strict_json.shallow(json.loads(json.dumps(state, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"state_dict() of {path!r} gives what cannot be written as JSON ({error}); keep arrays in variables, and "
            "let state_dict give numbers, words, lists and dicts; a module or optimizer of PyTorch is saved by the "
            "psclient.torch.Optimizer that trains it: Checkpoint(optimizer=optimizer)"
        ) from error
