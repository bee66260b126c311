"""`strategy.extended`: what library code such as optimizers uses, in cross-replica context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from psclient import context, nest
from psclient.arrays import Device, is_array, to_device
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
        self._opening = threading.Lock()  # guards that one section is open, and no other is opened beside it
        self._section: Section | None = None
        self._closed = False
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
        self.check_open()
        name = name or "Variable"
        unique = self._unique(name)
        handle = self._exchange.create(VariableSpec(unique, spec_of(value), trainable), self._colocated.get(), value)
        for taken in {name, unique}:
            self._names[taken] = self._names.get(taken, 0) + 1
        self._owned.add(handle.id)
        return handle

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        return self._unique(f"{name}_{count}") if count else name

    def read(self, handle: Handle) -> Array:
        """A variable's value on the host; if this thread's open section assigns it, that is flushed first."""
        self.check_open()
        section = self._mine()
        if section is not None and section.writes(handle.id):
            self.flush()
        return self._exchange.read(handle)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether a variable was created in this strategy's scope."""
        return isinstance(v, Variable) and v.strategy is self._strategy and v.handle.id in self._owned

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

        Raises:
            TypeError: one of them is no variable.
            ValueError: one was created in the scope of another strategy.
        """
        for variable in var_list:
            if not isinstance(variable, Variable):
                raise TypeError(f"non_slot_devices takes a list of variables, and not a {type(variable).__name__}")
            variable.check_strategy(self._strategy)
        servers = sorted({server for variable in var_list for server in variable.handle.servers})
        return tuple(self._parameter_devices[server] for server in servers)

    def _servers(self, place: Variable | Sequence[str]) -> tuple[int, ...]:
        if isinstance(place, Variable):
            place.check_strategy(self._strategy)
            return place.handle.servers
        devices = [place] if isinstance(place, str) else list(place or ())
        unknown = [device for device in devices if device not in self._parameter_devices]
        if unknown or not devices:
            raise ValueError(
                f"{unknown or place!r} is no parameter device; give a variable or what non_slot_devices returned"
            )
        return tuple(sorted(self._parameter_devices.index(device) for device in devices))

    # ---- Reductions ----

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, experimental_hints: Any = None
    ) -> Any:
        """Combines a value across all replicas of all workers. In cross-replica context, or outside of every scope.

        Args:
            reduce_op: SUM or MEAN, also as a string in any case.
            value: a per-replica value with an array from each local replica; with one local replica a plain
                array is this worker's contribution.
            destinations: a variable: the value lives where it does, for `update`; a worker device, a list of
                them, or a per-replica value (also `value` itself): the value comes to these, or to each replica's.
            experimental_hints: ignored.

        Returns:
            A lazy value with the variable's locality, or an array, or a mirrored value.

        Raises:
            ValueError: SUM of a plain value with several local replicas; shapes that differ; a variable of another
                strategy, or a device of another process.
            TypeError: the value is no array of numbers; the destination is none.
        """
        (reduced,) = self._reduce_to("reduce_to", reduce_op, [(value, destinations)])
        return reduced

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        experimental_hints: Any = None,
    ) -> list[Any]:
        """Combines several values at once, as several `reduce_to`. In the same contexts.

        Args:
            reduce_op: as in `reduce_to`.
            value_destination_pairs: (value, destinations) pairs.
            experimental_hints: ignored.

        Returns:
            A list of what `reduce_to` returns.
        """
        return self._reduce_to("batch_reduce_to", reduce_op, value_destination_pairs)

    def _reduce_to(self, what: str, reduce_op: ReduceOp | str, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        with self._cross_replica(what):
            op = ReduceOp.parse(reduce_op)
            # A look at a value ends the section: all are looked at before the first reduction is recorded.
            places = [self._place(place, value) for value, place in pairs]
            local = [self._local(op, value, None) for value, _ in pairs]
            reduced = [
                self.section.reduce(op.wire, mine, place.handle.servers, repr(place.name))
                if isinstance(place, Variable)
                else self.section.reduce(op.wire, mine, None)
                for mine, place in zip(local, places, strict=True)
            ]
            if not all(isinstance(place, Variable) for place in places):
                self.section.give_back(reduced)  # The first that is brought here ends the section for all.
            return [
                value if isinstance(place, Variable) else self._bring(value, place)
                for value, place in zip(reduced, places, strict=True)
            ]

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

    def _place(self, destinations: Any, value: Any) -> Variable | tuple[Device, ...]:
        """Where a reduced value shall be: with a variable, or on devices of this process."""
        if isinstance(destinations, Variable):
            destinations.check_strategy(self._strategy)
            return destinations
        if destinations is value or isinstance(destinations, DistributedValues | Located) or is_array(destinations):
            return self._exchange.group.devices
        names = [destinations] if isinstance(destinations, str) else destinations
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            return tuple(self._worker_device(name) for name in names)
        raise TypeError(
            f"{destinations!r} is no destination; give a variable, a worker device such as "
            f"{self._worker_devices[0]!r}, or the value itself"
        )

    def _worker_device(self, name: str) -> Device:
        full = name if name.startswith("/job:") else Device.parse(name).full_name(self._strategy.task)
        if full not in self._worker_devices:
            raise ValueError(f"{name!r} is no device of this process; it has {', '.join(self._worker_devices)}")
        return self._exchange.group.devices[self._worker_devices.index(full)]

    @staticmethod
    def _bring(value: Located, devices: Sequence[Device]) -> Any:
        """A reduced value on worker devices: an array for one, else mirrored."""
        array = value.numpy()
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
        """Runs `fn(var, *args, **kwargs)` beside a variable, on its server.

        In cross-replica context, or outside of every scope, where this makes a section of its own. The function is
        traced, not called on the server: see `docs/architecture.md`. It may assign `var` and the other variables
        that it is given.

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
            ValueError: a per-replica value, or a variable of another strategy, is among the arguments.
            LocalityError: an argument lives on another server.
        """
        with self._cross_replica("update"):
            return self._apply(self._servers(var), fn, (var, *args), kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Sequence[str] | Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` on the non-slot devices. In the same contexts as `update`.

        Args:
            colocate_with: what `non_slot_devices` returned.
            fn: as in `update`; it may use variables of these devices by closure.
            args, kwargs, group: as in `update`.

        Returns:
            What `fn` returns, lazily.
        """
        with self._cross_replica("update_non_slot"):
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

    @contextlib.contextmanager
    def _cross_replica(self, what: str) -> Iterator[None]:
        with self._strategy.scope():
            context.require_cross_replica(self._strategy, what)
            yield

    @property
    def section(self) -> Section:
        """The section being recorded; a new one if none is.

        Raises:
            RuntimeError: another thread records one, or the strategy is closed.
        """
        self.check_open()
        with self._opening:
            if self._section is None:
                self._section = Section(len(self._parameter_devices), self._send)
            section = self._section
        section.check_thread()
        return section

    def _mine(self) -> Section | None:
        """The section that the calling thread records."""
        section = self._section
        return section if section is not None and section.mine else None

    def flush(self, returned: Any = None) -> None:
        """Ends the calling thread's open section, if there is one: sends what it recorded, and waits for it.

        Args:
            returned: a nest; located values in it are wanted after the end.
        """
        section = self._mine()
        if section is not None:
            section.give_back(returned)
            self._send(section)

    def snapshot(self, path: str) -> Snapshotted:
        """Ends the open section with a checkpoint; waits until it is complete, or failed."""
        section = self.section
        section.order_snapshot(path, self._exchange.group.round)
        plan = self._send(section)
        return self._exchange.snapshot(plan)

    def drop(self) -> None:
        """Forgets the calling thread's open section: what recorded it failed."""
        if self._mine() is not None:
            self._section = None

    def close(self) -> None:
        """From now on nothing is read, created or recorded."""
        self._closed = True
        self._section = None

    def check_open(self) -> None:
        """Raises `RuntimeError` once the strategy is closed."""
        if self._closed:
            raise RuntimeError("this strategy is closed; do what needs its servers before close(), or make another one")

    def _send(self, section: Section) -> Plan:
        self.check_open()
        if section is not self._section:
            raise RuntimeError("this value was never computed: its section was given up when its code failed")
        if not context.in_merge_call():
            section.give_back_unused()
        try:
            outgoing = section.outgoing()
            section.arrived(self._exchange.flush(outgoing) if outgoing.plan.servers else {})
        finally:
            # Only now: a section of another thread would be a second round at the same time.
            self._section = None
        return outgoing.plan
