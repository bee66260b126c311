"""In which context a thread is, and what may be called there.

    default          outside of every scope: the default strategy, with one replica, numbered 0
    cross-replica    inside `strategy.scope()`, and inside what `merge_call` runs
    replica          inside the function given to `strategy.run`, once for each local replica
    update           inside the function given to `update` or `update_non_slot`

Each thread has its own stack of contexts; the innermost counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, SupportsIndex, cast

from psclient._src import values
from psclient._src.arrays import nest
from psclient._src.arrays.devices import CPU, Device, Value
from psclient._src.arrays.nest import Leaf, Nest
from psclient._src.options import ReduceOp, ReduceOpName

if TYPE_CHECKING:
    from pswire.model.tensor import Array

Kind = Literal["default", "cross-replica", "replica", "update"]

_REMEDY: dict[Kind, str] = {
    "default": "call it inside `with strategy.scope():`",
    "cross-replica": "call it in the function passed to strategy.run",
    "replica": ("call it outside of strategy.run, or in a function passed to get_replica_context().merge_call"),
    "update": "call it outside of the function passed to update",
}

Lift = Callable[[Leaf], Value | None]
"""In an update context: the tracer of a variable or another value, None for what has none."""

MergeCall = Callable[[Callable[..., Nest], tuple[Nest, ...], dict[str, Nest]], Nest]
"""Runs `merge_fn(strategy, *args, **kwargs)` once for all local replicas."""


class StrategyFace(Protocol):
    """A strategy, as far as variables and contexts know it; `psclient._src.distribute` has the class."""

    @property
    def extended(self) -> Any:
        """Methods for algorithms that need to be distribution-aware."""

    @property
    def backend(self) -> Any:
        """The state behind the faces."""

    @property
    def num_replicas_in_sync(self) -> int:
        """R: the replicas of all processes that are in sync."""

    def scope(self) -> AbstractContextManager[object]:
        """Makes the strategy current."""

    def reduce(self, reduce_op: ReduceOp | ReduceOpName, value: Value, axis: int | None) -> Array:
        """Combines a value across all replicas of all workers."""

    def experimental_make_numpy_dataset(self, numpy_input: object) -> Any:
        """Makes a dataset of arrays."""

    def run(self, fn: Callable[..., Nest], args: Sequence[Nest] = (), kwargs: Mapping[str, Nest] | None = None) -> Nest:
        """Calls a function once on each local replica."""

    def _begin_step(self) -> None:
        """Ends the step before."""


@dataclass(frozen=True, eq=False)
class ReplicaContext:
    """The replica whose function the calling thread runs.

    `strategy.run` makes one for each local replica. Library code may make one by its number among all replicas,
    `ReplicaContext(strategy, 0)`, and enter it with `with`: that replica does not wait for others, and its `merge_call`
    runs the function at once.

    Source: `tf.distribute.ReplicaContext`.

    Attributes:
        strategy: the strategy that runs the replica; in the default context the default strategy.
        local_replica_id: the number of the replica in this process, from 0.
        device: the device on which it computes.

    Raises:
        ValueError: this process has no such replica.
    """

    _nest_leaf: ClassVar[bool] = True

    strategy: StrategyFace
    local_replica_id: int
    device: Device = field(default=cast(Device, None))
    _merge: MergeCall = field(default=cast(MergeCall, None), repr=False)
    _slice: Callable[[], tuple[int, int]] = field(default=lambda: (0, 1), repr=False)
    _entered: list[AbstractContextManager[None]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.device is not None:
            return
        group = self.strategy.backend.group
        first, replicas = group.slice()
        local = self.local_replica_id - first
        if not 0 <= local < len(group.devices):
            raise ValueError(
                f"this process has replicas {first} to {first + len(group.devices) - 1} and cannot give the "
                f"result of replica {self.local_replica_id} of {replicas}"
            )
        made = {"local_replica_id": local, "device": group.devices[local], "_slice": group.slice}
        for name, value in {**made, "_merge": self._merge_alone}.items():
            object.__setattr__(self, name, value)

    def _merge_alone(self, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with enter_cross_replica(self.strategy):
            result = self.strategy.backend.section(lambda: merge_fn(self.strategy, *args, **kwargs))
        return values.select(result, self.local_replica_id)

    def __enter__(self) -> Self:
        _check_same(self.strategy, THREAD.entries[-1])
        entry = enter_replica(self)
        entry.__enter__()
        self._entered.append(entry)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers. It changes only between rounds of this replica."""
        return self._slice()[1]

    @property
    def replica_id_in_sync_group(self) -> int:
        """This replica's number among all, from 0."""
        return self._slice()[0] + self.local_replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """The replica's devices, by name."""
        return (str(self.device),)

    def merge_call(
        self, merge_fn: Callable[..., Nest], args: Sequence[Nest] = (), kwargs: Mapping[str, Nest] | None = None
    ) -> Nest:
        """Waits for the other local replicas and calls a function once, in cross-replica context.

        Args:
            merge_fn: called as `merge_fn(strategy, *args, **kwargs)`. An object that is the same in all replicas is
                passed as it is, everything else as `PerReplica`.
            args: the positional arguments of this replica.
            kwargs: the keyword arguments of this replica.

        Returns:
            What `merge_fn` returned; of each distributed value the component of this replica.

        Raises:
            RuntimeError: this is not the context of the calling thread, or the replicas do not all make the same calls.
            TypeError: `args` is not a tuple or list.
        """
        self._check_current("merge_call")
        return self._merge(merge_fn, *arguments("merge_call", args, kwargs))

    def all_reduce(self, reduce_op: ReduceOp | ReduceOpName, value: Nest) -> Nest:
        """Reduces values over all replicas of all workers, and returns the result to every replica.

        Args:
            reduce_op: "sum" or "mean", in any case.
            value: a nest of arrays, of the same structure and shapes in all replicas.

        Returns:
            A nest like `value`. In the default context, where there is one replica, `value` itself.

        Raises:
            ValueError: the reduction is not known.
            RuntimeError: as `merge_call`.
        """
        self._check_current("all_reduce")
        op = ReduceOp.parse(reduce_op)
        if is_default(self.strategy):
            return value
        reduced = self.merge_call(_reduce_boxes, (op, Box(tuple(nest.flatten(value)))))
        # All replicas are given the same rows; each has a result of its own, as of arrays.
        own = [copy(leaf) if hasattr(leaf, "dense_shape") else leaf for leaf in reduced]
        return nest.pack_sequence_as(value, own)

    def all_gather(self, value: Nest, axis: SupportsIndex) -> Nest:
        """Concatenates values over all replicas of all workers, and returns the result to every replica.

        Args:
            value: a nest of arrays, of the same structure in all replicas, and of one shape except for the size of
                `axis`.
            axis: the dimension to concatenate along, from 0.

        Returns:
            A nest like `value`, see `Strategy.gather`, of arrays on the replica's device. In the default context, where
            there is one replica, `value` itself.

        Raises:
            ValueError: as `Strategy.gather`; or replicas give different axes.
            TypeError: as `Strategy.gather`.
            RuntimeError: as `merge_call`.
        """
        self._check_current("all_gather")
        joined = self.merge_call(_gather_boxes, (Box((axis,)), Box(tuple(nest.flatten(value)))))
        return value if is_default(self.strategy) else nest.pack_sequence_as(value, joined)

    def _check_current(self, what: str) -> None:
        if THREAD.entries[-1].replica is not self:
            raise RuntimeError(
                f"{what} was called on a replica context that is not current; call get_replica_context() in "
                "the function passed to strategy.run"
            )


def arguments(
    what: str, args: Sequence[Nest], kwargs: Mapping[str, Nest] | None
) -> tuple[tuple[Nest, ...], dict[str, Nest]]:
    """Returns the arguments for a function call; raises `TypeError` unless `args` is a tuple or a list.

    Args:
        what: the method that was given the arguments, for the message.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(f"{what} takes a tuple of arguments, but args is a {type(args).__name__}; use args=(x,)")
    return tuple(args), dict(kwargs or {})


@dataclass(frozen=True, eq=False)
class Box:
    """One replica's values. A box of its own keeps a value that all replicas share from being merged."""

    _nest_leaf: ClassVar[bool] = True

    leaves: tuple[Leaf, ...]


def unbox(boxes: Nest) -> list[Leaf]:
    """The values in the replicas' boxes, each as a per-replica value; with one local replica as it is.

    Raises:
        ValueError: the boxes do not hold the same number of values.
    """
    if isinstance(boxes, Box):
        return list(boxes.leaves)
    rows = [box.leaves for box in values.local_results(boxes)]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"the replicas reduce different numbers of values: {[len(row) for row in rows]}; reduce the same "
            "values in every replica"
        )
    return [values.per_replica(column) for column in zip(*rows, strict=True)]


def _reduce_boxes(strategy: StrategyFace, reduce_op: ReduceOp, boxes: Nest) -> list[Value]:
    return list(strategy.extended.batch_reduce_to(reduce_op, [(column, column) for column in unbox(boxes)]))


def _gather_boxes(strategy: StrategyFace, axes: Nest, boxes: Nest) -> Nest:
    named = [box.leaves[0] for box in values.local_results(axes)]
    if any(axis != named[0] for axis in named):
        raise ValueError(f"the replicas gather along different axes: {named}; use the same axis in all replicas")
    return strategy.extended._all_gather(unbox(boxes), named[0])


@dataclass(eq=False, slots=True)
class _Context:
    """Where a thread is. As a context manager: the calling thread is there while it is in it. Entered once."""

    kind: Kind
    strategy: StrategyFace
    replica: ReplicaContext | None = None
    lift: Lift | None = None
    copy: int | None = None
    device: Device | None = None
    merging: bool = False
    _entries: list[_Context] = field(init=False, repr=False)

    def __enter__(self) -> None:
        self._entries = THREAD.entries
        self._entries.append(self)

    def __exit__(self, *error: object) -> None:
        innermost = self._entries[-1] is self
        self._entries.remove(self)
        if not innermost:
            raise RuntimeError(
                f"a {self.kind} context was left before a context that was entered in it; leave contexts in "
                "reverse order"
            )


class _DefaultContext(_Context):
    """The context of threads that are in no scope; the default strategy's own module says what it is."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # The slot is empty until somebody asks for it first.
        import_module("psclient._src.strategies.mirrored")  # makes it, and calls `install_default`
        return object.__getattribute__(self, name)


_DEFAULT = _DefaultContext()


class _Thread(threading.local):
    """The calling thread.

    Attributes:
        entries: the contexts that it is in, the innermost last.
        itself: as `threading.current_thread` returns it.
    """

    def __init__(self) -> None:
        self.entries: list[_Context] = [_DEFAULT]
        self.itself = threading.current_thread()


THREAD = _Thread()
"""For what each step asks many times: reading an attribute is no call."""

_INSIDE = nullcontext()


def install_default(strategy: StrategyFace) -> None:
    """Makes a strategy the one of threads that are in no scope."""

    def merge_alone(merge_fn: Callable[..., Nest], args: tuple[Nest, ...], kwargs: dict[str, Nest]) -> Nest:
        with enter_cross_replica(strategy):
            return strategy.backend.section(lambda: merge_fn(strategy, *args, **kwargs))

    replica = ReplicaContext(strategy, 0, CPU, merge_alone, lambda: (0, 1))
    _Context.__init__(_DEFAULT, "default", strategy, replica)


def is_default(strategy: StrategyFace) -> bool:
    """Returns whether it is the default strategy."""
    return strategy is _DEFAULT.strategy


def enter_default_replica() -> AbstractContextManager[None]:
    """Returns a context in which the calling thread runs the function of the default strategy's one replica."""
    return _Context("replica", _DEFAULT.strategy, _DEFAULT.replica)


def enter_scope(strategy: StrategyFace) -> tuple[int, bool]:
    """Makes a strategy current, until `leave_scope`. Within its own scopes and replicas nothing changes.

    Returns:
        How many contexts the thread was in, as `depth`, and whether it was in no scope.

    Raises:
        RuntimeError: another strategy is current.
    """
    entries = THREAD.entries
    now, depth = entries[-1], len(entries) - 1
    outside = now.strategy is _DEFAULT.strategy
    if now.strategy is strategy:
        own = _Context(now.kind, strategy, now.replica, now.lift, now.copy, now.device, now.merging)
    else:
        if not outside:
            _check_same(strategy, now)
        own = _Context("cross-replica", strategy)
    own.__enter__()
    return depth, outside


def leave_to(depth: int) -> None:
    """Leaves all contexts of the calling thread but so many, in which it was before; those that are left by now, too.

    An interrupt may come between a context and the block that leaves it.
    """
    del THREAD.entries[depth + 1 :]


def leave_scope(depth: int) -> None:
    """As `leave_to`, for a scope, within which nothing is left entered; raises `RuntimeError` if something was."""
    inner, THREAD.entries[depth + 1 :] = THREAD.entries[depth + 2 :], []  # one line, for an interrupt to come before
    if inner:
        raise RuntimeError(
            f"a scope was left before a {inner[-1].kind} context that was entered in it; leave them in reverse order"
        )


def get_strategy() -> Any:
    """Returns the strategy of the current context; outside of every scope the default strategy. In any context.

    Source: `tf.distribute.get_strategy`.
    """
    return THREAD.entries[-1].strategy


def has_strategy() -> bool:
    """Returns whether the calling thread is in the scope of a strategy other than the default one. In any context."""
    return THREAD.entries[-1].strategy is not _DEFAULT.strategy


def depth() -> int:
    """Returns how many contexts the calling thread has entered, and not left."""
    return len(THREAD.entries) - 1


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica whose function the calling thread runs.

    Returns:
        The context; None in cross-replica and update context. Outside of every scope a default context with one
        replica, whose `merge_call` runs the function at once, with the default strategy.
    """
    return THREAD.entries[-1].replica


def in_cross_replica_context() -> bool:
    """Returns whether the calling thread is in cross-replica context. Update functions are as well.

    Source: `tf.distribute.in_cross_replica_context`.
    """
    return THREAD.entries[-1].kind in ("cross-replica", "update")


def crosses_replicas() -> bool:
    """Returns whether the calling thread is in cross-replica context, and in no update function."""
    return THREAD.entries[-1].kind == "cross-replica"


def in_merge_call() -> bool:
    """Returns whether the calling thread runs what `merge_call` was given."""
    return THREAD.entries[-1].merging


def within(strategy: StrategyFace) -> AbstractContextManager[object]:
    """A context manager: the strategy's scope, for the calling thread; nothing where that is in it already."""
    inside = strategy is THREAD.entries[-1].strategy and strategy is not _DEFAULT.strategy
    return _INSIDE if inside else strategy.scope()


def across_replicas(strategy: StrategyFace, what: str) -> AbstractContextManager[object]:
    """Returns a context in which the thread is in the scope of an open strategy, and in its cross-replica context.

    Args:
        strategy: the strategy whose method was called.
        what: the method, for messages.

    Raises:
        RuntimeError: the thread is in another context, or the strategy is closed.
    """
    outside = THREAD.entries[-1].strategy is _DEFAULT.strategy
    if not outside or strategy is _DEFAULT.strategy:
        require_cross_replica(strategy, what)
    strategy.backend.check_open()
    return strategy.scope() if outside else _INSIDE


def replica_in(strategy: StrategyFace) -> ReplicaContext | None:
    """Returns the replica of this strategy whose function the calling thread runs; None elsewhere.

    Outside of every scope it is the default strategy's.
    """
    current = THREAD.entries[-1]
    return current.replica if current.strategy is strategy else None


def enter_replica(context: ReplicaContext) -> AbstractContextManager[None]:
    """Returns a context in which the calling thread runs a replica's function."""
    return _Context("replica", context.strategy, context)


def enter_cross_replica(strategy: StrategyFace) -> AbstractContextManager[None]:
    """Returns a context in which the calling thread runs the function given to `merge_call`."""
    return _Context("cross-replica", strategy, merging=True)


def enter_update(strategy: StrategyFace, lift: Lift | None = None) -> AbstractContextManager[None]:
    """Returns a context in which the calling thread runs an update function; `lift` makes tracers for it."""
    return _Context("update", strategy, lift=lift)


def enter_update_copy(strategy: StrategyFace, copy: int, device: Device) -> AbstractContextManager[None]:
    """A context manager: the calling thread runs an update function on one copy of the variables, on its device."""
    return _Context("update", strategy, copy=copy, device=device)


def in_update() -> bool:
    """Returns whether the calling thread is in update context."""
    return THREAD.entries[-1].kind == "update"


def update_lift() -> Lift | None:
    """Returns what makes tracers in the calling thread's update context; None in all other contexts."""
    return THREAD.entries[-1].lift


def local_replica(strategy: StrategyFace) -> int | None:
    """Returns the local replica whose copies of a strategy's variables the thread uses, in `run` or in an update.

    Returns:
        A local replica's number; None in cross-replica context and in those of other strategies.
    """
    current = THREAD.entries[-1]
    if current.strategy is not strategy:
        return None
    return current.replica.local_replica_id if current.replica else current.copy


def replica_device() -> Device | None:
    """Returns where the calling thread computes, in a replica's function or an update function; None elsewhere."""
    current = THREAD.entries[-1]
    return current.replica.device if current.replica else current.device


def require_cross_replica(strategy: StrategyFace, what: str) -> None:
    """Raises `RuntimeError` unless the thread is in this strategy's cross-replica context.

    Args:
        strategy: the strategy whose method was called.
        what: the method, for the message.
    """
    current = THREAD.entries[-1]
    if current.strategy is strategy and current.kind in ("cross-replica", "default"):  # the default's own alone
        return
    _check_same(strategy, current)
    kind = current.kind
    raise RuntimeError(f"{what} needs cross-replica context but was called in {kind} context; {_REMEDY[kind]}")


def require_replica(what: str, strategy: StrategyFace | None = None) -> ReplicaContext:
    """Returns the current replica context, the default one included; raises `RuntimeError` if there is none.

    Args:
        what: the function that was called, for the message.
        strategy: the strategy whose replica is required; None accepts any.
    """
    current = THREAD.entries[-1]
    if strategy is not None:
        _check_same(strategy, current)
    if current.replica is None or strategy not in (None, current.strategy):
        remedy = _REMEDY["cross-replica"]
        raise RuntimeError(f"{what} needs replica context but was called in {current.kind} context; {remedy}")
    return current.replica


def _check_same(strategy: StrategyFace, current: _Context) -> None:
    if current.strategy is not strategy and not is_default(current.strategy):
        raise RuntimeError(
            f"a {type(strategy).__name__} was used in the scope of another strategy, a "
            f"{type(current.strategy).__name__}; leave that scope first"
        )
