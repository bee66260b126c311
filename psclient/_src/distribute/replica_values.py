"""The values that the local replicas give to a reduction."""

from __future__ import annotations

from collections.abc import Callable

from psclient._src.arraylike import Mirrored, Readable
from psclient._src.arrays.devices import Value
from psclient._src.distribute.reduction import check_value
from psclient._src.options import ReduceOp
from psclient._src.values import DistributedValues, PerReplica, unwrap
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.kinds import MirroredVariable

Fit = Callable[[IndexedSlices], IndexedSlices]
"""`Variable._fit_slices`."""


def of_replicas(op: ReduceOp, value: object, replicas: int, fit: Fit | None = None) -> list[Value]:
    """Returns what each local replica gives to a reduction.

    Args:
        op: how values are combined.
        value: a per-replica value, or what all replicas have alike.
        replicas: number of local replicas.
        fit: makes `IndexedSlices` be those of the variable that they are reduced for; None where there is none.

    Raises:
        ValueError: SUM of what is one value for all of several replicas; rows that do not fit.
        TypeError: it is no array of numbers.
    """
    if isinstance(value, Mirrored) and op is ReduceOp.SUM:
        raise ValueError(
            "a Mirrored value has one value for all replicas and is already reduced, so SUM is not "
            "defined; use the value itself, or MEAN, which returns it"
        )
    if isinstance(value, DistributedValues) and not isinstance(value, MirroredVariable):
        values = tuple(unwrap(value, replicas))
    elif replicas == 1 or op is ReduceOp.MEAN:
        values = (value,) * replicas
    else:
        if not isinstance(value, Readable | IndexedSlices):
            check_value(value)  # What is no array is told so, however many replicas there are.
        number = isinstance(value, bool | int | float | complex)
        raise ValueError(
            (
                f"SUM got a {type(value).__name__} instead of a per-replica value, with {replicas} local "
                "replicas; pass the values that strategy.run returned, or use MEAN"
            )
            + (
                "; run returns one number if all replicas return equal Python numbers, so return arrays"
                if number
                else ""
            )
        )
    if fit is not None:
        values = tuple([fit(v) if isinstance(v, IndexedSlices) else v for v in values])
    return [own_value(v) for v in values]


def own_value(value: Value) -> Value:
    """Returns one replica's value, read if it is a variable; raises `TypeError` for a per-replica value within one."""
    if isinstance(value, PerReplica):
        raise TypeError("a per-replica value contains another one; reduce its leaves one by one")
    return value.numpy() if isinstance(value, Readable) and not isinstance(value, IndexedSlices) else value
