"""The difference between strategies: where their variables live, and how a reduction travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from psclient._src.arrays.devices import Device, Value
from psclient._src.arrays.nest import Nest
from psclient._src.context import StrategyFace
from psclient._src.data.group import ReplicaGroup
from psclient._src.distribute.destinations import ServerIds, ValueHome
from psclient._src.distribute.reduction import LocalValue
from psclient._src.options import Consistency
from psclient._src.variables.compression import Compressed
from psclient._src.variables.partitioners import Cut
from psclient._src.variables.sharded import Sharding
from psclient._src.variables.variable import Variable, VariableAggregation
from pswire.model.plan import Nonfinite, Reduction, VariableSpec
from pswire.model.tensor import Array

if TYPE_CHECKING:
    from psclient._src.distribute.prepared_step import OwnContributions, PreparedStep
    from psclient._src.tracing.symbolic_numbers import Number

T = TypeVar("T")

Colocation = ServerIds | Sharding
"""Where `colocate_vars_with` places variables: on servers, or beside the shards of a partitioned variable."""


class Names(dict[str, int]):
    """How many variables were created by each name."""

    def unique(self, name: str) -> str:
        """Returns a name that no variable has: this one, or with a number behind it."""
        count = self.get(name, 0)
        return self.unique(f"{name}_{count}") if count else name

    def take(self, *names: str) -> None:
        """Counts a variable with the name that was asked for, and the one that it got."""
        for name in {*names}:
            self[name] = self.get(name, 0) + 1


LocalContributions = Callable[[Sequence[Reduction]], "OwnContributions | None"]
"""Gives what this process contributes to each of some reductions."""


@dataclass(frozen=True)
class NewVariable:
    """A variable to be created.

    Attributes:
        strategy: the strategy that owns it.
        spec: name, dtype, shape.
        value: this process's initial value; the first process's wins.
        place: the servers that hold it, or the shards beside which it is; empty lets the backend choose.
        on_read: True if each replica has a copy of its own.
        how: its aggregation.
        compression: how contributions to it travel; None for what the strategy says.
        cut: its own partitioner, False for none; None for that of the strategy.
    """

    strategy: StrategyFace
    spec: VariableSpec
    value: Array
    place: Colocation
    on_read: bool
    how: VariableAggregation
    compression: Compressed = None
    cut: Cut = None


class Backend(Protocol):
    """One strategy's state, and what moves it. `StrategyFace` and `StrategyExtended` are its faces."""

    @property
    def group(self) -> ReplicaGroup:
        """The replicas that train together."""
        ...

    @property
    def between_graph(self) -> bool:
        """Whether other processes run the same script."""
        ...

    @property
    def nonfinite(self) -> Nonfinite:
        """The policy for updates to which a contribution has NaN or infinity."""
        ...

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """All devices that hold variables, by name."""
        ...

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The local replicas' devices, by name."""
        ...

    def full_name(self, device: Device) -> str:
        """Returns the name of a device of this process as it stands in `worker_devices`."""
        ...

    def close(self) -> None:
        """Closes the strategy: nothing can be read, created, reduced or run any more."""
        ...

    def check_open(self) -> None:
        """Raises `RuntimeError` once the strategy is closed, and `PSError` in a process that it is of no use in."""
        ...

    def create(self, new: NewVariable) -> Variable:
        """Gets or creates a variable. It gets a number behind its name if there is one of this name."""
        ...

    def is_apart(self, consistency: Consistency, name: str) -> bool:
        """Returns whether a variable with a consistency is updated by each worker alone, though others are not.

        Args:
            consistency: what was given for the variable.
            name: its name, for messages.

        Raises:
            ConfigError: a variable of this job cannot have it.
        """
        ...

    def buffer(self, variable: Variable, replica: int) -> Array:
        """Returns the array in which a replica, a local number, computes its next contribution to a variable."""
        ...

    def reduce(self, contributions: Sequence[tuple[LocalValue, ValueHome | None]]) -> list[Value]:
        """Reduces over all processes.

        Args:
            contributions: this process's share of each, and where the value shall stay; None where it has to come
                here.

        Returns:
            Of each an array, or what is read as one.
        """
        ...

    def apply(
        self,
        strategy: StrategyFace,
        place: ServerIds,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> list[Nest]:
        """Runs an update function beside the variables of a place; returns its result for each copy of them."""
        ...

    def repeat(
        self,
        prepared: PreparedStep,
        key: object,
        numbers: list[Number],
        local: LocalContributions,
        record: Callable[[], list[Value]],
        extras: int = 0,
    ) -> list[Value]:
        """Makes the step that was recorded last under an equal key once more, or records one.

        Args:
            prepared: of the caller.
            key: all that the section depends on, but for numbers and contributions; compared with `==`.
            numbers: the arguments of the section's update functions that may differ from call to call; the same list
                always has the same numbers.
            local: gives this process's contributions to the reductions of a plan; None where they do not fit it.
            record: makes the section's reductions and updates, one by one; returns the first reductions' values.
            extras: the number of these values.

        Returns:
            The values, each an array or what is read as one.
        """
        ...

    def bring(self, values: Sequence[object]) -> list[Array]:
        """Brings reduced values here, in one round; that ends what the calling thread has begun."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Returns a context in which updates are of one round, as in a merge call; all of them are made, or none."""
        ...

    def section(self, call: Callable[[], T]) -> T:
        """Runs what `merge_call` was given, and ends what it began."""
        ...

    def run(self, replicas: Callable[[], T]) -> T:
        """Ends what the calling thread has begun, then runs replicas; again where they have to (`RunAgain`).

        Args:
            replicas: runs them, and returns their merged results.
        """
        ...

    def flush(self) -> None:
        """Ends what the calling thread has begun."""
        ...

    def drop(self) -> None:
        """Forgets what the calling thread has begun: its code failed."""
        ...
