"""Variables: state that lives on the servers, used like an array."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from psclient import context, nest
from psclient.arrays import AnyArray, to_device
from pswire.spec import Variable as Handle
from pswire.tensor import DTYPES, Array, TensorSpec, portable


class VariableAggregation(enum.Enum):
    """How an assignment in replica context combines the replicas' values."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


class Variable(np.lib.mixins.NDArrayOperatorsMixin):
    """A variable on the parameter servers. Create it inside `strategy.scope()`, on every process alike.

    Arithmetic and NumPy functions use its value: in replica and cross-replica context a read-only array as
    of the last round, on the replica's device; in an update function the value at that point.

    Args:
        initial_value: array, number, nest of numbers, or a function without arguments that returns one.
            The first process's value wins.
        trainable: whether optimizers should touch it.
        name: unique in the strategy; a repeated name gets a number.
        dtype: a key of `pswire.tensor.DTYPES`, or what NumPy makes one of; by default that of the value,
            where Python floats are float32.
        aggregation: how `assign*` in replica context combines the replicas' values.

    Raises:
        RuntimeError: there is no strategy in scope.
        VariableMismatch: another process created something else in its place.
        MemoryLimit: its server has no room for it.
    """

    __array_priority__ = 1000  # CuPy's operators then leave the operation to us.

    def __init__(
        self,
        initial_value: npt.ArrayLike | Callable[[], npt.ArrayLike],
        trainable: bool = True,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        strategy = context.get_strategy()
        if strategy is None:
            raise RuntimeError("variables live in a strategy; create them inside `with strategy.scope():`")
        value = initial_value() if callable(initial_value) else initial_value
        if dtype is None and not hasattr(value, "dtype") and np.asarray(value).dtype == np.float64:
            dtype = np.float32
        array = portable(np.asarray(value, dtype))
        self.aggregation = VariableAggregation(aggregation)
        self.strategy = strategy
        self.handle: Handle = strategy.extended.create_variable(array, trainable, name)

    # ---- What it is ----

    @property
    def name(self) -> str:
        """Its name, unique in the job."""
        return self.handle.spec.name

    @property
    def trainable(self) -> bool:
        """Whether optimizers should touch it."""
        return self.handle.spec.trainable

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return self.handle.spec.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.shape)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy's dtype."""
        return DTYPES[self.spec.dtype]

    @property
    def devices(self) -> tuple[str, ...]:
        """The parameter devices that hold it."""
        names = self.strategy.extended.parameter_devices
        return tuple(names[server] for server in self.handle.servers)

    def __repr__(self) -> str:
        return f"<ps.Variable {self.name!r} {self.spec} on {', '.join(self.devices)}>"

    # ---- Reading ----

    def read_value(self) -> Any:
        """Its value: an array on the replica's device; in an update function what stands for it there."""
        lift = context.update_lift()
        if lift is not None:
            return lift(self)
        value = self.strategy.extended.read(self.handle)
        device = context.replica_device()
        return value if device is None else to_device(value, device)

    value = read_value

    def numpy(self) -> Array:
        """Its value on the host, read-only."""
        value: Array = self.strategy.extended.read(self.handle)
        return value

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return getattr(ufunc, method)(*map(_read, inputs), **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*nest.map_structure(_read, args), **nest.map_structure(_read, kwargs))

    def __getitem__(self, key: Any) -> AnyArray:
        return self.read_value()[key]

    def __len__(self) -> int:
        return self.shape[0]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    # ---- Writing ----

    def assign(self, value: Any) -> Any:
        """Gives it a value.

        In an update function this is part of the update. In cross-replica context it is an update of its
        own, with a value that every process has alike. In replica context the replicas' values are combined
        as `aggregation` says, and assigned once.

        Returns:
            The variable.

        Raises:
            ValueError: in replica context without an aggregation.
        """
        return self._assign("assign", value)

    def assign_add(self, delta: Any) -> Any:
        """Adds to it; as `assign`."""
        return self._assign("assign_add", delta)

    def assign_sub(self, delta: Any) -> Any:
        """Subtracts from it; as `assign`."""
        return self._assign("assign_sub", delta)

    def _assign(self, how: str, value: Any) -> Any:
        lift = context.update_lift()
        if lift is not None:
            return getattr(lift(self), how)(value)
        if context.in_cross_replica_context():
            return self.strategy.extended.update(self, lambda v, x: getattr(v, how)(x), (value,))
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self!r} is assigned in replica context, where each replica may have another value; create it "
                "with aggregation=ps.VariableAggregation.SUM or MEAN, or assign it in cross-replica context"
            )
        return context.require_replica(how).merge_call(self._merge_assign, args=(how, value))

    def _merge_assign(self, strategy: Any, how: str, value: Any) -> Any:
        reduced = strategy.extended.reduce_to(self.aggregation.value, value, self)
        return strategy.extended.update(self, lambda v, x: getattr(v, how)(x), (reduced,))


def _read(value: Any) -> Any:
    return value.read_value() if isinstance(value, Variable) else value


def _operators() -> None:
    """Python's operators on values: the mixin would ask NumPy's ufuncs, which do not take CuPy arrays and variables."""
    names = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift lt le eq ne gt ge"
    for name in names.split():
        apply = getattr(operator, f"__{name}__")
        setattr(Variable, f"__{name}__", lambda self, other, apply=apply: apply(_read(self), _read(other)))
        setattr(Variable, f"__r{name}__", lambda self, other, apply=apply: apply(_read(other), _read(self)))
    Variable.__hash__ = object.__hash__  # type: ignore[method-assign]


_operators()
