"""Values that are more than one: one for each local replica, and how they are taken apart and merged.

A lazy value that lives on servers is a single object that all replicas share: nothing here touches it,
and it comes back from a merge as itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import numpy.typing as npt

from psclient._src.arrays import nest
from psclient._src.arrays.nest import Leaf, Nest
from pswire.model.tensor import Array

_NUMBERS = frozenset({bool, int, float, complex})


class DistributedValues:
    """One value for each local replica, in the order of the replicas.

    Args:
        values: the value of each local replica; a variable with copies may override the property instead.
    """

    def __init__(self, values: Sequence[object]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Leaf, ...]:
        """The values, by local replica."""
        return self._values

    def _component(self, local_replica_id: int) -> Leaf:
        """Returns the value of one local replica; raises `ValueError` if there is none."""
        if not 0 <= local_replica_id < len(self.values):
            name, count = type(self).__name__, len(self.values)
            raise ValueError(f"a {name} of {count} values has no value for local replica {local_replica_id}")
        return self.values[local_replica_id]

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {index}: {value!r}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


class PerReplica(DistributedValues):
    """A value that may differ between replicas."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        raise TypeError(
            "a PerReplica value has one value per replica and cannot be used as an array; reduce it with "
            "strategy.reduce, or list its values with strategy.experimental_local_results"
        )


class Component:
    """One replica's part of a variable that has one for each: base class of such parts.

    Attributes:
        distributed_container: the variable; a merge of all its parts, in order, gives it back.
    """

    distributed_container: DistributedValues


def select(value: Nest, local_replica_id: int) -> Nest:
    """Returns the nest as one local replica sees it: the component of each distributed value, all else as it is.

    Raises:
        ValueError: a distributed value has none for this replica.
    """

    def component(leaf: Leaf) -> Leaf:
        return leaf._component(local_replica_id) if isinstance(leaf, DistributedValues) else leaf

    return None if value is None else nest.map_structure(component, value)


def unwrap(value: Nest, replicas: int) -> list[Nest]:
    """Returns the nest as each of so many local replicas sees it.

    Raises:
        ValueError: a distributed value is of another number of replicas.
    """

    def component(leaf: Leaf, replica: int) -> Leaf:
        if not isinstance(leaf, DistributedValues):
            return leaf
        if len(leaf.values) != replicas:
            raise ValueError(
                f"a {type(leaf).__name__} with {len(leaf.values)} values was passed to {replicas} local "
                "replicas; pass a value made by this strategy"
            )
        return leaf._component(replica)

    return [nest.map_structure(partial(component, replica=replica), value) for replica in range(replicas)]


def regroup(given: Sequence[Nest]) -> Nest:
    """Merges what the local replicas gave, leaf by leaf.

    The same object from all comes back itself, the components of one variable become the variable,
    and all else becomes `PerReplica`. Of a single nest the leaves stay what they are.

    Args:
        given: one nest for each local replica, in order.

    Raises:
        ValueError: the structures differ; the message names the path.
    """
    return _merged(_merge, given)


def regroup_results(results: Sequence[Nest]) -> Nest:
    """Merges what the local replicas computed, as `regroup`; but Python's numbers that are equal merge to that number.

    Python shares small numbers: whether two equal ones are the same object says nothing.
    """
    return _merged(_merge_result, results)


def merge_copies(results: Sequence[Nest], kind: type[DistributedValues]) -> Nest:
    """Merges what an update returned for each copy of a variable, as `regroup`; what differs becomes this kind."""
    return _merged(partial(_merge, kind=kind), results)


def _merged(merge: Callable[..., object], given: Sequence[Nest]) -> Nest:
    first, *others = given
    if not others and (first is None or not any(map(isinstance, nest.flatten(first), repeat(Component)))):
        return first
    return nest.map_structure(merge, *given)


def _merge_result(*leaves: Leaf) -> Leaf:
    first = leaves[0]
    if type(first) in _NUMBERS and all(type(leaf) is type(first) and leaf == first for leaf in leaves):
        return first
    return _merge(*leaves)


def _merge(*leaves: Leaf, kind: type[DistributedValues] = PerReplica) -> Leaf:
    first = leaves[0]
    if isinstance(first, Component):
        whole = first.distributed_container
        if len(whole.values) == len(leaves) and all(map(operator.is_, leaves, whole.values)):
            return whole
    return first if all(leaf is first for leaf in leaves) else kind(leaves)


def container(value: Leaf) -> Leaf:
    """Returns the variable of which a value is a component; else the value itself."""
    return value.distributed_container if isinstance(value, Component) else value


def per_replica(values: Sequence[Leaf]) -> Leaf:
    """Makes a `PerReplica` of leaves even if all are one object; with one local replica the bare value."""
    return values[0] if len(values) == 1 else PerReplica(values)


class LocalResults(tuple[Nest, ...]):
    """The local replicas' values. `in` also finds what they are the values of, and takes arrays for themselves."""

    whole: Nest = None

    def __contains__(self, value: object) -> bool:
        return value is self.whole or any(value is own or _equal(value, own) for own in self)


def _equal(value: object, other: object) -> bool:
    """Returns whether two values are equal, as far as that is one answer: of arrays it is one for each element."""
    arrays = any(hasattr(each, "__array__") for each in (value, other))
    return not arrays and bool(value == other)


def local_results(value: Nest) -> tuple[Nest, ...]:
    """The local replicas' values, of a nest one nest for each; `(value,)` of what is not distributed."""
    counts = [len(leaf.values) for leaf in nest.flatten(value) if isinstance(leaf, DistributedValues)]
    found = LocalResults(select(value, index) for index in range(max(counts))) if counts else LocalResults((value,))
    found.whole = value
    return found
