"""`strategy.extended`: what library code such as optimizers uses, in cross-replica context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from psclient import context, nest
from psclient.arrays import to_device
from psclient.exchange import Exchange
from psclient.reduce_op import ReduceOp
from psclient.section import LocalValue, Located, Section, contribution
from psclient.values import DistributedValues, Mirrored, local_results
from psclient.variables import Variable
from pswire.errors import LocalityError
from pswire.spec import Plan, Snapshotted, VariableSpec
from pswire.spec import Variable as Handle
from pswire.tensor import Array, spec_of

Colocation = tuple[int, ...]


class StrategyExtended:
    """Additional methods for algorithms that need to be distribution-aware.

    Source: `tf.compat.v1.distribute.StrategyExtended`.

    Args:
        strategy: whose methods these are.
        exchange: what travels to the servers.
        parameter_devices: the servers' devices, by name.
        worker_devices: the local replicas' devices, by name.
    """

    def __init__(
        self,
        strategy: Any,
        exchange: Exchange,
        parameter_devices: tuple[str, ...],
        worker_devices: tuple[str, ...],
    ) -> None:
        self._strategy = strategy
        self._exchange = exchange
        self._parameter_devices = parameter_devices
        self._worker_devices = worker_devices
        self._section: Section | None = None
        self._names: dict[str, int] = {}
        self._owned: set[int] = set()
        self._colocated: ContextVar[Colocation] = ContextVar("colocated", default=())

    # ---- What it is ----

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold variables, one for each server: `/job:ps/task:0/device:CPU:0`."""
        return self._parameter_devices

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this process's replicas."""
        return self._worker_devices

    @property
    def experimental_between_graph(self) -> bool:
        """True: every worker runs the whole script."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: arrays may have any shape; each new shape of a reduction makes a new plan."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """True in exactly one of the processes that run the script: the first in task order."""
        return self._exchange.group.leads

    @property
    def should_checkpoint(self) -> bool:
        """True in exactly one of the processes that run the script: the first in task order.

        That is the chief if it runs the script, else worker 0, or who is left if that is gone.
        """
        return self._exchange.group.leads

    @property
    def should_save_summary(self) -> bool:
        """True in exactly one of the processes that run the script: the first in task order."""
        return self._exchange.group.leads

    # ---- Variables ----

    def create_variable(self, value: Array, trainable: bool, name: str | None) -> Handle:
        """Gets or creates a variable on the servers; called by `Variable`."""
        spec = VariableSpec(self._unique(name or "Variable"), spec_of(value), trainable)
        handle = self._exchange.create(spec, self._colocated.get(), value)
        self._owned.add(handle.id)
        return handle

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return self._unique(f"{name}_{count}") if count else name

    def read(self, handle: Handle) -> Array:
        """A variable's value on the host; if the open section assigns it, that is flushed first."""
        if self._section is not None and self._section.writes(handle.id):
            self.flush()
        return self._exchange.read(handle)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether a variable was created in this strategy's scope."""
        return v.strategy is self._strategy and v.handle.id in self._owned

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable | Sequence[str]) -> Iterator[None]:
        """Variables created within live on the same servers. May be called in any context of the scope.

        Args:
            colocate_with_variable: a variable of this strategy, or what `non_slot_devices` returned.
        """
        token = self._colocated.set(self._servers(colocate_with_variable))
        try:
            yield
        finally:
            self._colocated.reset(token)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """The devices for variables that serve several others, such as a step count.

        Such a variable is mirrored on every server that holds one of `var_list`, so that it is beside each
        update that reads it.

        Args:
            var_list: the variables being optimized.

        Returns:
            Devices, for `colocate_vars_with` and `update_non_slot`.
        """
        servers = sorted({server for variable in var_list for server in variable.handle.servers})
        return tuple(self._parameter_devices[server] for server in servers)

    def _servers(self, place: Variable | Sequence[str]) -> tuple[int, ...]:
        if isinstance(place, Variable):
            self._check_owned(place)
            return place.handle.servers
        devices = [place] if isinstance(place, str) else list(place)
        unknown = [device for device in devices if device not in self._parameter_devices]
        if unknown or not devices:
            raise ValueError(
                f"{unknown or place!r} is no parameter device; give a variable or what non_slot_devices returned"
            )
        return tuple(sorted(self._parameter_devices.index(device) for device in devices))

    def _check_owned(self, variable: Variable) -> None:
        if variable.strategy is not self._strategy:
            raise ValueError(f"{variable!r} was created in the scope of another strategy")

    # ---- Reductions ----

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, experimental_hints: Any = None
    ) -> Any:
        """Combines a value across all replicas of all workers. In cross-replica context.

        Args:
            reduce_op: SUM or MEAN, also as a string in any case.
            value: a per-replica value with an array from each local replica; with one local replica a plain
                array is this worker's contribution.
            destinations: a variable: the value lives where it does, for `update`; a worker device, or a
                per-replica value (also `value` itself): the value comes to that device, or to each replica's.
            experimental_hints: ignored.

        Returns:
            A lazy value with the variable's locality, or an array, or a mirrored value.

        Raises:
            ValueError: SUM of a plain value with several local replicas; shapes that differ.
        """
        context.require_cross_replica(self._strategy, "reduce_to")
        op = ReduceOp.parse(reduce_op)
        if isinstance(destinations, Variable):
            self._check_owned(destinations)
            target = repr(destinations.name)
            return self.section.reduce(op.wire, self._local(op, value, None), destinations.handle.servers, target)
        return self._bring(self.section.reduce(op.wire, self._local(op, value, None), None), destinations)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        experimental_hints: Any = None,
    ) -> list[Any]:
        """Combines several values at once, as several `reduce_to`. In cross-replica context.

        Args:
            reduce_op: as in `reduce_to`.
            value_destination_pairs: (value, destinations) pairs.
            experimental_hints: ignored.

        Returns:
            A list of what `reduce_to` returns.
        """
        context.require_cross_replica(self._strategy, "batch_reduce_to")
        op = ReduceOp.parse(reduce_op)
        pending = [
            (
                self.section.reduce(
                    op.wire,
                    self._local(op, value, None),
                    place.handle.servers if isinstance(place, Variable) else None,
                    repr(place.name) if isinstance(place, Variable) else "",
                ),
                place,
            )
            for value, place in value_destination_pairs
        ]
        return [v if isinstance(place, Variable) else self._bring(v, place) for v, place in pending]

    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> Array:
        """One reduction whose value comes back to every process, at once; see `Strategy.reduce`."""
        return self.section.reduce(op.wire, self._local(op, value, axis), None).numpy()

    def _local(self, op: ReduceOp, value: Any, axis: int | None) -> LocalValue:
        replicas = len(self._worker_devices)
        if isinstance(value, DistributedValues):
            values = local_results(value)
        elif replicas == 1:
            values = (value,)
        elif op is ReduceOp.MEAN:
            values = (value,) * replicas
        else:
            raise ValueError(
                f"SUM of {type(value).__name__}, which is not a per-replica value, with {replicas} local replicas: "
                "give what strategy.run returned from each replica, or use MEAN"
            )
        values = tuple(v.numpy() if isinstance(v, Variable | Located) else v for v in values)
        return contribution(op.wire, values, self._exchange.group.empty, axis)

    def _bring(self, value: Located, destinations: Any) -> Any:
        """A reduced value on worker devices: an array for one, else mirrored on the replicas' devices."""
        array = value.numpy()
        devices = self._exchange.group.devices
        if isinstance(destinations, str):
            if destinations not in self._worker_devices:
                raise ValueError(
                    f"{destinations!r} is no device of this process; it has {', '.join(self._worker_devices)}"
                )
            return to_device(array, devices[self._worker_devices.index(destinations)])
        copies = [to_device(array, device) for device in devices]
        return copies[0] if len(copies) == 1 else Mirrored(copies)

    # ---- Updates ----

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(var, *args, **kwargs)` beside a variable, on its server. In cross-replica context.

        The function is traced, not called on the server: see `docs/`. It may assign `var` and the other
        variables that it is given.

        Args:
            var: the variable.
            fn: takes what stands for it, and the arguments.
            args, kwargs: variables and located values of the same server, mirrored values, arrays and
                numbers that every process has alike; no per-replica values.
            group: False gives a nest with a list of the one copy at each leaf.

        Returns:
            What `fn` returns, lazily.

        Raises:
            ProgramError: `fn` cannot be traced.
            ValueError: a per-replica value is among the arguments.
            LocalityError: an argument lives on another server.
        """
        context.require_cross_replica(self._strategy, "update")
        self._check_owned(var)
        return self._apply(var.handle.servers, fn, (var, *args), kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Sequence[str] | Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` on the non-slot devices. In cross-replica context.

        Args:
            colocate_with: what `non_slot_devices` returned.
            fn: as in `update`; it may use variables of these devices by closure.
            args, kwargs, group: as in `update`.

        Returns:
            What `fn` returns, lazily.
        """
        context.require_cross_replica(self._strategy, "update_non_slot")
        return self._apply(self._servers(colocate_with), fn, args, kwargs, group)

    def _apply(
        self,
        servers: tuple[int, ...],
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        group: bool,
    ) -> Any:
        for leaf in nest.flatten((tuple(args), dict(kwargs or {}))):
            self._check_place(leaf, servers)
        result = self.section.apply(servers, fn, args, kwargs or {})
        return result if group else nest.map_structure(lambda leaf: [leaf], result)

    def _check_place(self, value: Any, servers: tuple[int, ...]) -> None:
        """Says here, where the user's line is, what the server would refuse."""
        if isinstance(value, Variable) and not set(servers) <= set(value.handle.servers):
            place = ", ".join(self._parameter_devices[server] for server in servers)
            raise LocalityError(
                f"a value never crosses servers inside a section: {value!r} is used in an update on {place}; "
                "create it there with colocate_vars_with, or read it first and pass its value"
            )

    # ---- Sections ----

    @property
    def section(self) -> Section:
        """The section being recorded; a new one if none is."""
        if self._section is None or self._section.flushed:
            self._section = Section(len(self._parameter_devices), self._send)
        return self._section

    def flush(self, returned: Any = None) -> None:
        """Ends the open section, if there is one: sends what it recorded, and waits for it.

        Args:
            returned: a nest; located values in it are wanted after the end.
        """
        section = self._section
        if section is not None and not section.flushed:
            section.give_back(returned)
            self._send(section)

    def snapshot(self, path: str) -> Snapshotted:
        """Ends the open section with a checkpoint; waits until it is complete, or failed."""
        section = self.section
        section.order_snapshot(path, self._exchange.group.round)
        plan = self._send(section)
        return self._exchange.snapshot(plan)

    def drop(self) -> None:
        """Forgets the open section: what recorded it failed."""
        self._section = None

    def _send(self, section: Section) -> Plan:
        if self._section is section:
            self._section = None
        outgoing = section.outgoing()
        section.arrived(self._exchange.flush(outgoing) if outgoing.plan.servers else {})
        return outgoing.plan
