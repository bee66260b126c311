"""Values that are more than one: one for each local replica, and how they are taken apart and merged.

A lazy value that lives on servers is a single object that all replicas share: nothing here touches it,
and it comes back from a merge as itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from psclient import nest
from psclient.arrays import to_numpy
from psclient.nest import Nest
from pswire.tensor import Array


class DistributedValues:
    """One value for each local replica, in the order of the replicas.

    Args:
        values: of each local replica; a variable with copies may override the property instead.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, by local replica."""
        return self._values

    def component(self, local_replica_id: int) -> Any:
        """The value of one local replica; raises `ValueError` if there is none."""
        if not 0 <= local_replica_id < len(self.values):
            name, count = type(self).__name__, len(self.values)
            raise ValueError(f"a {name} of {count} values has none for local replica {local_replica_id}")
        return self.values[local_replica_id]

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {index}: {value!r}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"


class PerReplica(DistributedValues):
    """A value that differs by replica."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        raise TypeError(
            "a PerReplica value has one value for each replica and is no array; reduce it with "
            "strategy.reduce, or take it apart with strategy.experimental_local_results"
        )


class Mirrored(DistributedValues):
    """A value that is the same on every replica. As an array it is the first replica's."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(to_numpy(self.values[0]), dtype=dtype, copy=copy)


class Component:
    """One replica's part of a variable that has one for each: base class of such parts.

    Attributes:
        distributed_container: the variable; a merge of all its parts, in order, gives it back.
    """

    distributed_container: DistributedValues


def select(value: Nest, local_replica_id: int) -> Nest:
    """The nest as one local replica sees it: of each distributed value its component, all else as it is.

    Raises:
        ValueError: a distributed value has none for this replica.
    """

    def component(leaf: Any) -> Any:
        return leaf.component(local_replica_id) if isinstance(leaf, DistributedValues) else leaf

    return nest.map_structure(component, value)


def regroup(given: Sequence[Nest]) -> Nest:
    """Merges what the local replicas gave, leaf by leaf.

    The same object from all comes back itself, the components of one variable become the variable,
    and all else becomes `PerReplica`. A single nest comes back as it is.

    Args:
        given: one nest for each local replica, in order.

    Raises:
        ValueError: the structures differ; the message names the path.
    """
    return given[0] if len(given) == 1 else nest.map_structure(_merge, *given)


def regroup_results(results: Sequence[Nest]) -> Nest:
    """Merges what the local replicas computed, as `regroup`; but Python numbers always become `PerReplica`.

    Python shares small numbers: whether two equal ones are the same object says nothing.
    """
    return results[0] if len(results) == 1 else nest.map_structure(_merge_result, *results)


def _merge_result(*leaves: Any) -> Any:
    return PerReplica(leaves) if isinstance(leaves[0], bool | int | float | complex) else _merge(*leaves)


def _merge(*leaves: Any) -> Any:
    first = leaves[0]
    if all(leaf is first for leaf in leaves):
        return first
    if isinstance(first, Component):
        whole = first.distributed_container
        if len(whole.values) == len(leaves) and all(map(operator.is_, leaves, whole.values)):
            return whole
    return PerReplica(leaves)


def per_replica(values: Sequence[Any]) -> Any:
    """A `PerReplica` of leaves even if all are one object; with one local replica the bare value."""
    return values[0] if len(values) == 1 else PerReplica(values)


def local_results(value: Nest) -> tuple[Any, ...]:
    """The local replicas' values, of a nest one nest for each; `(value,)` of what is not distributed."""
    counts = [len(leaf.values) for leaf in nest.flatten(value) if isinstance(leaf, DistributedValues)]
    if not counts:
        return (value,)
    return tuple(select(value, index) for index in range(max(counts)))
