"""Variables: state that lives on the servers, used like an array."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from psclient import context, values
from psclient.arrays import AnyArray, Device, to_device, to_numpy
from psclient.readable import Readable
from pswire.spec import Variable as Handle
from pswire.tensor import Array, portable


class VariableAggregation(enum.Enum):
    """How an assignment in replica context combines the replicas' values."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"


class _Once(type):
    """Replicas that create a variable meet for it, and get the same one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        replica = context.get_replica_context()
        if replica is None or replica.strategy is None:
            return super().__call__(*args, **kwargs)
        return replica.merge_call(cls._create, (context.Box((args, kwargs)),))

    def _create(cls, strategy: Any, boxes: Any) -> Any:
        args, kwargs = values.local_results(boxes)[0].leaves
        return cls(*args, **kwargs)


class Variable(Readable, metaclass=_Once):  # type: ignore[metaclass]  # Only NumPy's stub says ABC.
    """A variable on the parameter servers. Create it inside `strategy.scope()`, on every process alike.

    Arithmetic and NumPy functions use its value: in replica and cross-replica context a read-only array as
    of the last round, on the replica's device; in an update function the value at that point. In replica
    context the local replicas create one together.

    Args:
        initial_value: array, number, nest of numbers, or a function without arguments that returns one.
            The first process's value wins, and in replica context the first replica's.
        trainable: whether optimizers should touch it.
        name: unique in the strategy; a repeated name gets a number.
        dtype: a key of `pswire.tensor.DTYPES`, or what NumPy makes one of; by default that of the value,
            where Python floats are float32.
        aggregation: how `assign*` in replica context combines the replicas' values.

    Raises:
        RuntimeError: there is no strategy in scope, or it is created in an update function.
        InvalidRequest: its dtype cannot travel.
        VariableMismatch: another process created something else in its place.
        MemoryLimit: its server has no room for it.
    """

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
        if context.update_lift() is not None:
            raise RuntimeError("an update function cannot create variables; create them before, in strategy.scope()")
        value = initial_value() if callable(initial_value) else initial_value
        if dtype is None and not hasattr(value, "dtype") and np.asarray(value).dtype == np.float64:
            dtype = np.float32
        array = portable(np.asarray(to_numpy(value) if hasattr(value, "dtype") else value, dtype))
        self.aggregation = VariableAggregation(aggregation)
        self.strategy = strategy
        self.handle: Handle = strategy.extended.create_variable(array, trainable, name)
        self.spec = self.handle.spec.tensor
        self._copies: dict[Device, tuple[Array, AnyArray]] = {}

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
    def devices(self) -> tuple[str, ...]:
        """The parameter devices that hold it."""
        names = self.strategy.extended.parameter_devices
        return tuple(names[server] for server in self.handle.servers)

    def check_strategy(self, strategy: Any) -> None:
        """Raises `ValueError` if it was created in the scope of another strategy."""
        if self.strategy is not strategy:
            raise ValueError(
                f"{self!r} was created in the scope of another strategy; read it there, and pass its value"
            )

    def __repr__(self) -> str:
        return f"<ps.Variable {self.name!r} {self.spec} on {', '.join(self.devices)}>"

    # ---- Reading ----

    value = Readable.read_value

    def _fetch(self) -> Array:
        value: Array = self.strategy.extended.read(self.handle)
        return value

    def _copy_on(self, device: Device) -> AnyArray:
        # What was read is the same object until a round changes it: so long its copy serves as well.
        host, copy = self._copies.get(device, (None, None))
        value = self._fetch()
        if value is not host:
            copy = to_device(value, device)
            self._copies[device] = (value, copy)
        return copy

    # ---- Writing ----

    def assign(self, value: Any) -> Any:
        """Gives it a value.

        In an update function this is part of the update. In cross-replica context, which is entered where
        there is no scope, it is an update of its own, with a value that every process has alike. In replica
        context the replicas' values are combined as `aggregation` says, and assigned once.

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
        if context.in_cross_replica_context() or not context.has_strategy():
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
