"""Variables: state that strategies place, used like an array. How each kind is stored is in `stored`."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from psclient._src import context, values
from psclient._src.arrays import nest
from psclient._src.arrays.devices import Value, as_array, is_array, to_numpy
from psclient._src.arrays.nest import Nest
from psclient._src.context import StrategyFace
from psclient._src.interpreter.lifetimes import Unpicklable
from psclient._src.options import Consistency
from psclient._src.variables.compression import Compressed, check_compression, is_compressible
from psclient._src.variables.consistency import check_consistency, consistency_here, is_apart
from psclient._src.variables.feedback import Feedback
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.partitioners import Cut, check_partitioner
from psclient._src.variables.scatter import SCATTERS, RowWritable, change
from psclient._src.variables.sparse_updates import SparseUpdate
from pswire.errors import InvalidRequest
from pswire.model.compression import FLOATS
from pswire.model.plan import VariableSpec
from pswire.model.tensor import Array, portable, spec_of

InitialValue = npt.ArrayLike | Callable[[], npt.ArrayLike]


class _Named(enum.Enum):
    """The time at which the copies of a variable are made equal."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls.__members__.get(str(value).upper())


class VariableSynchronization(_Named):
    """When the copies of a variable are made equal; the numbers are those of `tf.VariableSynchronization`."""

    AUTO = 0
    """As the strategy prefers, which is ON_WRITE."""
    NONE = 1
    """Never; variables cannot have it."""
    ON_WRITE = 2
    """With each assignment: every replica reads the same value."""
    ON_READ = 3
    """At a read in cross-replica context: each replica has a copy of its own that it assigns freely."""


class VariableAggregation(_Named):
    """How to combine replicas' values when they are assigned to a variable, or its copies when they are read."""

    NONE = 0
    """No combination: assigning in replica context is an error, unless there is one replica."""
    SUM = 1
    """Sum of the replicas' values."""
    MEAN = 2
    """Mean of the replicas' values."""
    ONLY_FIRST_REPLICA = 3
    """The value of replica 0."""


_on_read: ContextVar[VariableAggregation | None] = ContextVar("on_read", default=None)


@contextlib.contextmanager
def on_read_scope(aggregation: VariableAggregation) -> Iterator[None]:
    """Variables created within that do not say otherwise are ON_READ, with this aggregation."""
    token = _on_read.set(aggregation)
    try:
        yield
    finally:
        _on_read.reset(token)


class _VariableType(type):
    """Makes the kind of variable that the current strategy has; replicas meet for it, and get the same one."""

    def __call__(
        cls,
        initial_value: InitialValue,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        compression: Compressed = None,
        consistency: Consistency | None = None,
        partitioner: Cut = None,
    ) -> Any:
        if cls is not Variable:
            raise TypeError(
                f"{cls.__name__} cannot be created directly; use ps.Variable(value) in strategy.scope(). "
                "For shards, give the strategy a variable_partitioner, or use ps.Variable(value, "
                "partitioner=...)"
            )
        if context.in_update():
            raise RuntimeError("an update function cannot create variables; create them before, in strategy.scope()")
        synchronization, aggregation = _settled(synchronization, VariableAggregation(aggregation))
        on_read = synchronization is VariableSynchronization.ON_READ
        if on_read and trainable:
            raise ValueError(
                "a variable with synchronization ON_READ has a value for each replica and cannot be "
                "trained; remove trainable=True, or use ON_WRITE"
            )
        if not isinstance(name, str | None):
            raise TypeError(f"name is {name!r}; use a string, such as {str(name)!r}")
        if check_compression(compression, "ps.Variable") and on_read:
            raise ValueError(
                "a variable with synchronization ON_READ receives no gradients that could be compressed; "
                "remove compression, or use ON_WRITE"
            )
        check_consistency(consistency, name or "Variable")
        if consistency is not None and on_read:
            raise ValueError(
                "a variable with synchronization ON_READ has a value for each replica, which only that "
                "replica updates; remove consistency, or use ON_WRITE"
            )
        strategy = context.get_strategy()
        if partitioner is not False and check_partitioner(partitioner, "partitioner"):
            _check_cut(on_read, bool(strategy.extended._colocation))
        trained = not on_read if trainable is None else bool(trainable)
        if consistency is None and not on_read:
            consistency = consistency_here(strategy)
        # As of the thread that asks: in a merge call another one creates it.
        how = on_read, aggregation, strategy.extended._colocation, compression, consistency, partitioner

        def create(strategy: StrategyFace) -> Any:
            return _create(strategy, initial_value, dtype, name or "Variable", trained, *how)

        replica = context.get_replica_context()
        if replica is None or not context.has_strategy():
            return create(strategy)
        return replica.merge_call(_create_together, (create,))


def _check_cut(on_read: bool, beside: bool) -> None:
    """Raises `ValueError` if a variable cannot have a partitioner of its own."""
    if on_read:
        raise ValueError(
            "a variable with synchronization ON_READ has a value for each replica and is never split; "
            "remove partitioner, or use ON_WRITE"
        )
    if beside:
        raise ValueError(
            "a variable in colocate_vars_with is split like the variable it is placed with; remove "
            "partitioner, or create it outside of colocate_vars_with"
        )


def _settled(
    synchronization: VariableSynchronization, aggregation: VariableAggregation
) -> tuple[VariableSynchronization, VariableAggregation]:
    found, given = VariableSynchronization(synchronization), _on_read.get()
    if found is VariableSynchronization.NONE:
        raise ValueError(
            "synchronization NONE is not supported for variables of a strategy; use ON_READ for a value "
            "for each replica"
        )
    if found is VariableSynchronization.AUTO and given is not None:
        return VariableSynchronization.ON_READ, given
    return VariableSynchronization.ON_WRITE if found is VariableSynchronization.AUTO else found, aggregation


def _create_together(strategy: StrategyFace, creates: Nest) -> Any:
    return values.local_results(creates)[0](strategy)


def _create(
    strategy: StrategyFace,
    initial_value: InitialValue,
    dtype: npt.DTypeLike | None,
    name: str,
    trainable: bool,
    on_read: bool,
    aggregation: VariableAggregation,
    place: Any,
    compression: Compressed,
    consistency: Consistency | None,
    partitioner: Cut,
) -> Any:
    try:
        value = _first_value(initial_value, dtype)
        spec_of(value)
    except (TypeError, InvalidRequest) as error:
        kind = InvalidRequest if isinstance(error, InvalidRequest) else TypeError
        raise kind(f"the initial value of variable {name!r} is not an array of numbers: {error}") from error
    if aggregation is VariableAggregation.MEAN and value.dtype.kind in "iub":
        raise ValueError(
            f"a variable of {value.dtype} cannot hold a mean; use a floating dtype, or aggregation SUM or "
            "ONLY_FIRST_REPLICA"
        )
    if aggregation is VariableAggregation.SUM and value.dtype.kind == "b":
        raise ValueError(
            "a variable of bool cannot hold a sum; use an integer dtype, or aggregation ONLY_FIRST_REPLICA"
        )
    alone = is_apart(strategy, consistency, name)
    spec = VariableSpec(name, spec_of(value), trainable, alone=alone)
    if compression and not is_compressible(spec.tensor.dtype):
        raise ValueError(
            f"gradients for variable {name!r} of {spec.tensor.dtype} cannot be compressed; remove "
            f"compression, or use a floating dtype: {', '.join(FLOATS)}"
        )
    # Strategies of others need not know of compression, nor of partitioners.
    asked = {"compression": compression, "partitioner": partitioner}
    more: dict[str, Any] = {option: given for option, given in asked.items() if given is not None}
    made = strategy.extended.create_variable(spec, value, place, on_read, aggregation, **more)
    if compression is not None:
        made.compression = compression
    made.consistency = consistency
    return made


def _first_value(initial_value: InitialValue, dtype: npt.DTypeLike | None) -> Array:
    value: object = initial_value() if callable(initial_value) else initial_value
    array = to_numpy(value)
    if dtype is None and not hasattr(value, "dtype") and array.dtype == np.float64:
        dtype = np.float32
    return portable(np.asarray(array, dtype))


class Variable(Unpicklable, RowWritable, metaclass=_VariableType):  # type: ignore[metaclass]  # Only NumPy's stub says ABC.
    """A variable of the current strategy. Create it inside `strategy.scope()`, in the same way on every process.

    Arithmetic and NumPy functions use its value: in replica and cross-replica context a read-only array as of the last
    round, on the replica's device; in an update function the value at that point. In replica context the local replicas
    create one variable together. Outside of every scope it is an ordinary local variable of the default strategy.

    Args:
        initial_value: array, number, nest of numbers, or a function without arguments that returns one, called once.
            The value of the lowest live task that creates the variable is used; in replica context that of its first
            replica.
        trainable: True if optimizers should train it; by default True, except for ON_READ.
        name: unique in the strategy; a repeated name gets a number.
        dtype: a NumPy dtype or the name of one, also "bfloat16"; by default that of the value, where Python floats are
            float32.
        synchronization: ON_READ for a copy per replica, combined when it is read in cross-replica context.
        aggregation: how to combine the replicas' values in `assign*` in replica context, or when ON_READ copies are
            read.
        compression: compresses this process's contributions to the variable: one of `ps.compression`, the same in all
            processes; False for no compression, None for that of the strategy. See `docs/compression.md`.
        consistency: how updates of it by different workers relate, the same in all processes: `ps.Async()` in a
            strategy with `ps.Sync()` for a variable that each worker updates independently; None for that of the
            strategy or, in `colocate_vars_with`, of that variable. See `docs/asynchronous.md`.
        partitioner: cuts the variable into shards on several servers, the same in all processes: a function of its
            shape and dtype, such as one of `ps.experimental.partitioners`; False for no shards, None for that of the
            strategy. Without servers it has no effect. See `docs/embeddings.md`.

    Attributes:
        strategy: the strategy that owns it.
        spec: dtype and shape.
        name: its name, unique in the strategy.
        trainable: True if optimizers train it.
        synchronization: ON_WRITE or ON_READ.
        aggregation: the constructor's aggregation.
        compression: the constructor's compression.
        consistency: the constructor's consistency, or that of the variable beside which it was created.
        alone: True if each worker updates it independently in a job whose other updates are synchronous.
        feedback: what compression has left over of this process's contributions; None without compression.
        residual: with compression, the variable with the sum of all processes' residuals as of the last checkpoint.

    Raises:
        RuntimeError: created in an update function.
        TypeError: the name is not a string; or compression, consistency or partitioner has another type.
        ValueError: synchronization is NONE; ON_READ and trainable; MEAN of an integer dtype; SUM of bool; compression
            of an integer dtype, or with ON_READ; consistency or partitioner with ON_READ; a partitioner in
            `colocate_vars_with`, or one that does not return numbers of parts.
        ConfigError: a server's version does not support compression, or a consistency of a variable; or its consistency
            does not work with that of the job.
        InvalidRequest: its dtype is not supported.
        VariableMismatch: another process created a different variable in its place.
        MemoryLimit: its server does not have enough memory for it.

    Examples:
        >>> import psclient as ps
        >>> strategy = ps.MirroredStrategy()
        >>> with strategy.scope():
        ...     w = ps.Variable([1.0, 2.0], name="w")
        >>> w.assign_add([0.5, 0.5]).numpy()
        array([1.5, 2.5], dtype=float32)
        >>> w * 2
        array([3., 5.], dtype=float32)
    """

    synchronization = VariableSynchronization.ON_WRITE
    place: tuple[int, ...]
    """The parameter devices that hold it, by number."""
    compression: Compressed = None
    consistency: Consistency | None = None
    _alone = False
    feedback: Feedback | None = None
    _residual: Variable | None = None

    if TYPE_CHECKING:  # The metaclass takes these, and makes the kind of variable that the strategy has.

        def __init__(
            self,
            initial_value: InitialValue,
            trainable: bool | None = None,
            name: str | None = None,
            dtype: npt.DTypeLike | None = None,
            synchronization: VariableSynchronization = VariableSynchronization.AUTO,
            aggregation: VariableAggregation = VariableAggregation.NONE,
            compression: Compressed = None,
            consistency: Consistency | None = None,
            partitioner: Cut = None,
        ) -> None: ...

    def _describe(self, strategy: StrategyFace, spec: VariableSpec, aggregation: VariableAggregation) -> None:
        self.strategy = strategy
        self.spec = spec.tensor
        self.name = spec.name
        self.trainable = spec.trainable
        self._alone = spec.alone
        self.aggregation = aggregation

    @classmethod
    def _stored(cls, *args: object) -> Self:
        """Makes a variable of this very kind; for the strategies."""
        made: Self = type.__call__(cls, *args)
        return made

    # ---- What it is ----

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that hold it."""
        names = self.strategy.extended.parameter_devices
        return tuple(names[server] for server in self.place)

    @property
    def device(self) -> str:
        """The device that holds it; with several copies the replica's own, in cross-replica context the first."""
        own = context.local_replica(self.strategy) or 0
        return self.devices[own if own < len(self.devices) else 0]

    def _check_strategy(self, strategy: StrategyFace) -> None:
        """Raises `ValueError` if it is not a variable of this strategy."""
        if self.strategy is not strategy:
            where = (
                "outside of every scope" if context.is_default(self.strategy) else "in the scope of another strategy"
            )
            raise ValueError(
                f"variable {self.name!r} was created {where}; create it in this strategy's scope, or pass its value"
            )

    def __repr__(self) -> str:
        return f"<ps.Variable {self.name!r} {self.spec} on {', '.join(self.devices)}>"

    def value(self) -> Value:
        """Its value, as `read_value`."""
        return self.read_value()

    _pickle_remedy = "send its value, v.numpy(), or create it there, with a strategy of that process"

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """A new variable beside this one, of the same value, whose name gets a number. In any context but update's."""
        with context.within(self.strategy), self.strategy.extended.colocate_vars_with(self):
            how = self.synchronization, self.aggregation, self.compression
            made = Variable(self._first(), self.trainable, self.name, None, *how)
        memo[id(self)] = made
        return made

    def _first(self) -> Array:
        """The value that a new variable like this one begins with."""
        return self.numpy()

    # ---- Writing ----

    def assign(self, value: Value) -> Value:
        """Assigns a value.

        In an update function this is part of the update. In cross-replica context, which is entered if there is no
        scope, it is an update of its own, with a value that is the same in every process. In replica context the
        replicas' values are combined by `aggregation` and assigned once; a single replica's value is assigned as it is;
        for an ON_READ variable each replica assigns its own copy.

        Args:
            value: an array or number of its shape, or one that NumPy would broadcast to it; cast within its kind.

        Returns:
            The variable.

        Raises:
            TypeError: its dtype is of another kind.
            ValueError: its shape does not fit; in replica context a shared value to be summed, or no aggregation while
                several replicas are in sync; in cross-replica context a per-replica value, or an ON_READ variable
                without aggregation.
        """
        return _assigned(self, "assign", value)

    def assign_add(self, delta: Value) -> Value:
        """Adds a value to it; arguments, result and errors are those of `assign`.

        In cross-replica context it adds to each copy of an ON_READ variable; with SUM and NONE it raises an error.
        """
        return _assigned(self, "assign_add", delta)

    def assign_sub(self, delta: Value) -> Value:
        """Subtracts a value from it; arguments, result and errors are those of `assign`.

        In cross-replica context it subtracts from each copy of an ON_READ variable; with SUM and NONE it raises an
        error.
        """
        return _assigned(self, "assign_sub", delta)

    def _assign(self, how: str, value: Value) -> Value:
        lift = context.update_lift()
        if lift is not None:
            return getattr(lift(self), how)(value)
        elsewhere = context.get_strategy() is not self.strategy  # refused there, with a message
        if elsewhere or context.crosses_replicas() or not context.has_strategy():
            return self.strategy.extended.update(self, lambda v, x: getattr(v, how)(x), (self._taken(how, value),))
        replica = context.require_replica(how)
        if self.aggregation is VariableAggregation.NONE and replica.num_replicas_in_sync > 1:
            raise ValueError(
                f"variable {self.name!r} was assigned in replica context, where each replica may have a "
                "different value; create it with aggregation=ps.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA, or assign it in cross-replica context"
            )
        return replica.merge_call(self._merge_assign, args=(how, value))

    def _taken(self, how: str, value: Value) -> Value:
        """The value as an update of this variable takes it, which may raise what `assign` raises."""
        return value

    def _merge_assign(self, strategy: StrategyFace, how: str, value: Value) -> Value:
        self._check_summed(strategy, how, value)
        return self._assign_aggregate(strategy, how, value)

    def _assign_aggregate(self, strategy: StrategyFace, how: str, value: Value) -> Value:
        """Combines the replicas' values as `aggregation` says, and assigns them once. In cross-replica context.

        Args:
            strategy: the strategy that owns the variable.
            how: "assign", "assign_add" or "assign_sub".
            value: a per-replica value, or what all replicas have alike.

        Returns:
            The variable.
        """
        none = self.aggregation is VariableAggregation.NONE  # then there is one replica, which is the first
        combining = VariableAggregation.ONLY_FIRST_REPLICA if none else self.aggregation
        reduced = strategy.extended._aggregate(combining, value, self)
        truth = self.spec.dtype == "bool"  # Reductions know none: it comes as an integer.
        if not truth:
            self._taken(how, reduced)
        return strategy.extended.update(self, lambda v, x: getattr(v, how)(x.astype(bool) if truth else x), (reduced,))

    def _scatter_here(self, how: str, slices: IndexedSlices) -> Value:
        elsewhere = context.get_strategy() is not self.strategy  # refused there, with a message
        if elsewhere or context.crosses_replicas() or not context.has_strategy():
            self._scatter(how, slices)
            return self
        replica = context.require_replica(how)
        if replica.num_replicas_in_sync == 1:
            return replica.merge_call(self._merge_scatter, args=(how, slices))
        of_sum = SCATTERS[how].assign
        if not of_sum or self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                (
                    f"{how} of variable {self.name!r} was called in replica context, where each of "
                    f"{replica.num_replicas_in_sync} replicas may have different rows; "
                )
                + (
                    "create it with aggregation=ps.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or call it in "
                    "cross-replica context"
                    if of_sum
                    else "call it in cross-replica context, with rows that are the same in every process"
                )
            )
        return replica.merge_call(self._merge_assign, args=(of_sum, slices))

    def _merge_scatter(self, strategy: StrategyFace, how: str, slices: IndexedSlices) -> Value:
        self._scatter(how, slices)
        return self

    def _scatter(self, how: str, slices: IndexedSlices) -> None:
        """Changes rows, each place once, of a dtype that fits. In cross-replica context, or outside of every scope."""
        truth = slices.dtype.kind == "b"  # Reductions know none: it travels as an integer.
        given = slices._with_values(slices.values.astype(np.uint8)) if truth else slices

        def assign(v: Value, rows: Value) -> None:
            v.assign(change(how, v.read_value(), rows.astype(bool) if truth else rows, np))

        self.strategy.extended.update(self, SparseUpdate(assign, "lazy"), (given,))

    def _check_summed(self, strategy: StrategyFace, how: str, value: object) -> None:
        copied = isinstance(value, values.DistributedValues) and not _is_mirrored(value)
        replicas = len(strategy.extended.worker_devices)
        if self.aggregation is VariableAggregation.SUM and replicas > 1 and not copied:
            raise ValueError(
                f"{how} of variable {self.name!r} with aggregation SUM got the same value from all "
                f"{replicas} local replicas, so it is not clear how often to count it; pass an array from "
                "each replica, or use aggregation MEAN or ONLY_FIRST_REPLICA"
            )


def _assigned(variable: Any, how: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and context.update_lift() is None and any(map(is_array, nest.flatten(value))):
        value = as_array(value)  # it is one value, and no nest of arguments
    # `update(v, ps.Variable.assign_add, (x,))` calls the method itself with what stands for the variable.
    return variable._assign(how, value) if isinstance(variable, Variable) else getattr(variable, how)(value)


def _is_mirrored(value: object) -> bool:
    return isinstance(value, Variable) and value.synchronization is VariableSynchronization.ON_WRITE
