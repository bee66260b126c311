"""The object graph of a checkpoint: variables reached from a few objects, by paths such as "model/layers/0/w"."""

from __future__ import annotations

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
from psclient.train.states import Generator, is_generator, to_json

_PLAIN = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic)
_CLOSED = (ModuleType, type, FunctionType, MethodType, BuiltinFunctionType, Strategy)

_OF_KINDS: dict[type, Callable[[Any], Mapping[str, Any]]] = {}
"""What objects of other libraries lead to, by their kinds."""


def register_kind(kind: type, children_of: Callable[[Any], Mapping[str, Any]]) -> None:
    """Says what objects of another library lead to, which cannot have `_trackable_children`.

    Args:
        kind: their class.
        children_of: returns an object's children by name; raises `ValueError` where it has nothing on servers.
    """
    _OF_KINDS[kind] = children_of


@runtime_checkable
class Stateful(Protocol):
    """An object that says itself what its state is."""

    def state_dict(self) -> Any:
        """Its state, of what `states.to_json` takes."""
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
            TypeError: one of them would not come back as it is.
        """
        return {path: to_json(path, thing.state_dict()) for path, thing in self.stateful.items()}


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
        elif is_generator(thing):
            found.stateful[path] = Generator(thing)
        elif _says_state(thing):
            if "/" not in path or not getattr(thing, "_saved_by_name_alone", False):
                found.stateful[path] = thing
        else:
            ahead.extend(_named(path, thing))
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
            f"Checkpoint({name}=...) got {thing!r:.80}, which has nothing to save; pass variables, lists "
            "and dicts of them, objects that contain them, optimizers, metrics, or objects with state_dict"
        )


def _is_saved(v: Variable) -> bool:
    """Copies that differ by replica and are never combined begin anew."""
    alone = v.aggregation is VariableAggregation.NONE
    return not (v.synchronization is VariableSynchronization.ON_READ and alone)


def _says_state(thing: object) -> bool:
    """Returns whether an object says its state; one that says what is to be tracked of it is asked for that."""
    tracked = hasattr(thing, "_trackable_children") or isinstance(thing, tuple(_OF_KINDS))
    return isinstance(thing, Stateful) and not (tracked or isinstance(thing, _CLOSED))


def children(thing: object) -> Iterator[tuple[str, Any]]:
    """Returns what an object leads to, by name, key or index."""
    if isinstance(thing, _CLOSED):
        return
    if isinstance(thing, Mapping):
        yield from ((str(key), child) for key, child in thing.items())
    elif isinstance(thing, list | tuple | deque):
        yield from ((str(index), child) for index, child in enumerate(thing))
    elif hasattr(thing, "_trackable_children"):
        yield from thing._trackable_children().items()
    elif found := next((of for kind, of in _OF_KINDS.items() if isinstance(thing, kind)), None):
        yield from found(thing).items()
    else:
        yield from getattr(thing, "__dict__", {}).items()
        for name in _slots(type(thing)):
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def _slots(kind: type) -> Iterator[str]:
    """Yields the names of attributes that stand in slots."""
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in sorted({*((slots,) if isinstance(slots, str) else slots)} - {"__dict__", "__weakref__"}):
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if private else name


def _named(path: str, thing: object) -> Iterator[tuple[str, Any]]:
    """Yields what an object leads to, by paths.

    Raises:
        ValueError: two keys are the same in words; or the items of a set have no names by which they come back.
    """
    names = set[str]()
    for name, child in children(thing):
        if name in names:
            raise ValueError(
                f"{path!r} has two keys that become the same name {name!r} in a path, such as 1 and '1'; rename one"
            )
        names.add(name)
        yield f"{path}/{_escaped(name)}", child
    if isinstance(thing, set | frozenset) and not all(isinstance(item, (*_PLAIN, *_CLOSED)) for item in thing):
        raise ValueError(f"{path!r} is a set, whose items have no names to restore them by; use a list or dict")


def _escaped(name: str) -> str:
    """A part of a path; TensorFlow writes a slash in it in this way, too."""
    return str(name).replace("/", ".S")
