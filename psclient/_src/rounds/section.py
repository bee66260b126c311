"""One stretch of cross-replica code as data: what it reduces and updates becomes a plan.

Nothing travels while a section is recorded; its values are lazy. It is flushed when the stretch ends, or
when the program looks at one of its values.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from psclient._src import context
from psclient._src.arraylike import LazyArray, LazyCopy, Mirrored, Readable
from psclient._src.arrays import nest
from psclient._src.arrays.devices import begin_downloads, is_array, to_numpy
from psclient._src.arrays.nest import Leaf, Nest
from psclient._src.context import StrategyFace
from psclient._src.data.adapters import GlobalBatch
from psclient._src.distribute.prepared_step import OwnContributions, SectionTemplate
from psclient._src.distribute.recorded import Operands, Programs
from psclient._src.distribute.reduction import EVERYONE, LocalValue, combine
from psclient._src.distribute.sparse import how_sparse
from psclient._src.distribute.strands import Marks
from psclient._src.rounds.rounds import Outgoing
from psclient._src.tracing.hyperparameters import Settings
from psclient._src.tracing.recorder import AssignedLeaf, OutputLeaf, Recording, Traced, trace
from psclient._src.tracing.symbolic_numbers import Number
from psclient._src.tracing.tracer import Tracer
from psclient._src.tracing.update_function import InputLeaf, TracedCall, UpdateFunction
from psclient._src.values import DistributedValues, PerReplica
from psclient._src.variables.feedback import Feedback
from psclient._src.variables.indexed_slices import IndexedSlices
from psclient._src.variables.kinds import ServerVariable, SyncOnReadVariable
from psclient._src.variables.sharded import ShardedValue, VariableOfShards
from psclient._src.variables.sparse_updates import SparseUpdate
from psclient._src.variables.variable import Variable
from pswire.errors import LocalityError
from pswire.model.plan import Apply, Nonfinite, Plan, Reduction, Ref, SnapshotOrder, Trim
from pswire.model.plan import PlacedVariable as Handle
from pswire.model.rows import Rows
from pswire.model.tensor import Array, TensorSpec, portable, spec_of


class ServerValue(Readable):
    """A value that lives on the servers: reduced, or returned by an update function.

    Pass it to `update` of a variable that lives there, or use it as an array: that ends the section, so
    that the value comes here.

    Args:
        section: that records it.
        ref: what it is called there.
        spec: dtype and shape.
        place: the servers that have it; None where that is not settled yet.
    """

    def __init__(self, section: Section, ref: Ref, spec: TensorSpec, place: tuple[int, ...] | None) -> None:
        self.section = section
        self.ref = ref
        self.spec = spec
        self.place = place

    def _fetch(self) -> Array:
        return cast(Array, self.section.value(self.ref))

    def __repr__(self) -> str:
        return f"Located({self.spec}, {self.section.state(self.ref)})"


class ReducedValue(ServerValue, LazyArray):
    """A reduced value that comes to this process; it is waited for when somebody looks at it."""

    def __repr__(self) -> str:
        return super().__repr__() if not self.section.flushed else LazyArray.__repr__(self)


class ReducedSlices(ServerValue, IndexedSlices):
    """A value on the servers that was reduced from rows: as `ServerValue`, and looked at as rows."""

    @property
    def _indices(self) -> Array:
        return self.rows().ids

    @property
    def _values(self) -> Array:
        values: Array = self.rows().values
        return values

    @property
    def _shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.spec.shape

    def rows(self, where: str = "") -> Rows:
        """Returns the rows, which it waits for."""
        return cast(Rows, self.section.value(self.ref))

    def numpy(self) -> Array:
        """The whole array on the host, with zeros where no row is."""
        return Readable.numpy(self)

    def _fetch(self) -> Array:
        return IndexedSlices._of_rows(self.rows(), self.spec.shape).numpy()


class ReducedKeys(ServerValue):
    """A value on the servers that was reduced from rows by keys: it is for updates of its table alone."""

    def _fetch(self) -> Array:
        raise TypeError(
            "rows reduced for a dynamic table stay on its servers, for updates of the table; look the rows "
            "up, or reduce as an array what you want to read"
        )


class Section:
    """Records one stretch of cross-replica code. Used by the thread that made it; others may ask for its values.

    Args:
        servers: number of servers.
        flush: sends the section and gives the returned values back through `arrived`.
        nonfinite: what becomes of its updates if a contribution has NaN or infinity.
        with_copies: returns the servers that hold what lies on one, which are more where variables have copies.
        marks: takes what of it each worker makes alone; None where all of it is of one kind.
        batch: the global batch in use. It is that of the section's beginning, which all workers have at the same place
            of the program: a worker may look at a value, and so end the section, in another step than the others.

    Attributes:
        own: True if its round is one of this process alone, which counts as no step.
    """

    def __init__(
        self,
        servers: int,
        flush: Callable[[Section], object],
        nonfinite: Nonfinite = "apply",
        with_copies: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda servers: servers,
        marks: Marks | None = None,
        batch: GlobalBatch | None = None,
    ) -> None:
        self._nonfinite, self._with_copies, self.marks, self._batch = nonfinite, with_copies, marks, batch
        self.own = False
        self._servers, self._flush = servers, flush
        self._reductions: list[Reduction] = []
        self._floating: set[int] = set()  # reductions that get their place where they are used
        self._local: list[LocalValue] = []
        self._feedback: list[Feedback | None] = []  # of each reduction whose contributions are compressed
        self._operands, self._programs = Operands(), Programs()
        self._applies, self._results = list[Apply](), 0
        self._returned: set[Ref] = set()
        self._snapshot: SnapshotOrder | None = None
        self._trims, self._written = list[Trim](), set[int]()
        self._calls: list[TracedCall] | None = []  # None once what is recorded depends on more than these.
        self._whole: Plan | None = None
        self._repeated: Outgoing | None = None  # where it is what another section has recorded
        self._own: set[int] = set()  # reductions of what its updates were given, which nobody else can take
        self._values: Mapping[Ref, Array | Rows] | None = None
        # Waits for the values, once the section is sent.
        self._take: Callable[[], Mapping[Ref, Array | Rows]] | None = None
        self._thread = context.THREAD.itself

    @property
    def mine(self) -> bool:
        """True in the thread that made it."""
        return self._thread is context.THREAD.itself

    @property
    def alive(self) -> bool:
        """True if the thread that made it still runs; no other can end it."""
        return self._thread.is_alive()

    def check_thread(self) -> None:
        """Raises `RuntimeError` in any thread but the one that made it."""
        if not self.mine:
            raise RuntimeError(
                "another thread is recording a step of this strategy; use one thread at a time for "
                "reductions and updates (all threads may read variables)"
            )

    @property
    def reduces(self) -> bool:
        """True if it has reductions, whose values later updates may take."""
        return len(self._reductions) > len(self._own)

    @property
    def updates(self) -> int:
        """Number of updates that it makes."""
        return len(self._applies)

    @property
    def flushed(self) -> bool:
        """True if the section has been sent."""
        return self._take is not None

    def writes(self, id: int) -> bool:
        """Returns whether the section, not yet sent, assigns a variable."""
        return not self.flushed and id in self._written

    # ---- Recording ----

    def reduce(
        self,
        local: LocalValue,
        servers: tuple[int, ...] | None,
        target: str = "",
        feedback: Feedback | None = None,
        alone: bool = False,
    ) -> ServerValue:
        """Records a reduction.

        Args:
            local: this process's contribution.
            servers: the servers where the value shall be; None where it only has to come back here.
            target: purpose of the value, in words, for messages.
            feedback: compresses the contribution, if it can; the first one of the section alone.
            alone: True if it is for a variable that each worker updates alone.
        """
        self._check_more()
        kind = ReducedValue if servers is None else ServerValue
        if local.form != "dense":
            kind = ReducedSlices if local.form == "rows" else ReducedKeys
        located = kind(self, Ref("reduction", len(self._reductions)), local.spec, servers)
        codec = None
        if feedback is not None and feedback not in self._feedback:
            codec = feedback.codec_for(local.op, local.spec, local.form)
        place = tuple(sorted(set(servers or ())))
        self._reductions.append(Reduction(local.op, local.spec, place, target, local.form, codec))
        self._local.append(local)
        self._feedback.append(feedback if codec else None)
        if alone and self.marks is not None:
            self.marks.reductions.add(located.ref.index)
        if servers is None:
            self._floating.add(located.ref.index)
            self.give_back(located)
        return located

    def apply(
        self,
        servers: tuple[int, ...],
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Nest:
        """Traces an update function and records its application.

        Args:
            servers: the servers where it runs.
            fn: the function.
            args: its positional arguments: variables, located and mirrored values, arrays that every process has
                alike, Python scalars, anything else that it looks at.
            kwargs: its keyword arguments, likewise.

        Returns:
            What the function returns, with located values and variables as leaves.

        Raises:
            ProgramError: the function cannot be traced.
            ValueError: an argument is a per-replica value, or a variable of another strategy.
            RuntimeError: the function ends the section.
        """
        self._check_more()
        wish = fn if isinstance(fn, SparseUpdate) else None
        fn = fn if wish is None else wish.fn
        strategy = context.get_strategy()
        inputs = _Inputs(self, servers, strategy)
        if isinstance(fn, UpdateFunction):
            call = fn.call(strategy, args, kwargs, inputs.give)
            traced, refs = call.traced, self._refs_of_call(call, servers)
            if self._calls is not None:
                self._calls.append(call)
        else:
            self._calls = None
            with context.enter_update(strategy, inputs.lift):
                own = nest.map_structure(inputs.argument, (tuple(args), dict(kwargs)))
                traced = trace(inputs.recording, fn, *own)
            refs = [o if isinstance(o, Ref) else self._operands.add(np.asarray(o), servers) for o in traced.origins]
        if self.flushed:
            raise RuntimeError(
                "an update function ended the step it belongs to; use only its arguments and variables in it"
            )
        written = [refs[target].index for target, _ in traced.program.assigns]
        if self.marks is not None:
            results = range(self._results, self._results + len(traced.program.outputs))
            self.marks.judge(len(self._applies), refs, written, inputs.variables, self._own, results)
        for id in written:
            self._check_copies(inputs.variables[id], servers)
        self._written.update(written)
        given = [i for i, ref in enumerate(refs) if ref.kind == "reduction" and self._is_rows(ref.index)]
        sparse = how_sparse(traced.program, refs, given, wish, [*inputs.variables.values()])
        optional = wish is not None and wish.optional and any(ref.kind == "reduction" for ref in refs)
        self._applies.append(Apply(self._programs.number(traced.program), servers, tuple(refs), sparse, optional))
        return self._result(traced, refs, inputs.variables, servers)

    def _is_rows(self, number: int) -> bool:
        return self._reductions[number].form != "dense"

    def give_rows(self, value: IndexedSlices, servers: tuple[int, ...]) -> InputLeaf:
        """Records rows that every process has alike, as what an update is given."""
        local = combine("first", [value], EVERYONE, None)
        located = self.reduce(local.kept(), servers, "rows")
        self._own.add(located.ref.index)
        return InputLeaf("value", located.spec, located.ref)

    def _result(
        self, traced: Traced, refs: Sequence[Ref], variables: Mapping[int, ServerVariable], servers: tuple[int, ...]
    ) -> Nest:
        first, specs = self._results, traced.program.output_specs
        self._results += len(specs)

        def leaf(value: Leaf) -> Leaf:
            if isinstance(value, OutputLeaf):
                return ServerValue(self, Ref("result", first + value.index), specs[value.index], servers)
            return variables[refs[value.input].index] if isinstance(value, AssignedLeaf) else value

        return None if traced.result is None else nest.map_structure(leaf, traced.result)

    def _refs_of_call(self, call: TracedCall, servers: tuple[int, ...]) -> list[Ref]:
        """Returns the origins of the inputs of a traced call; calls with the same numbers share operands."""
        refs = []
        for place, (origin, key) in enumerate(zip(call.inputs, call.trace.keys(call.numbers), strict=True)):
            if isinstance(origin, InputLeaf):
                if isinstance(origin.source, Ref):
                    refs.append(origin.source)
                    continue
                self._calls = None  # The next call may be given another array.
                refs.append(self._operands.add(portable(np.array(origin.source)), servers, _label_of_array(call)))
            else:
                refs.append(self._operands.share(call, place, key, servers))
        return refs

    @staticmethod
    def _check_copies(variable: ServerVariable, servers: tuple[int, ...]) -> None:
        if set(variable.place) != set(servers):
            raise LocalityError(
                f"variable {variable.name!r} has copies that this update does not change, and all copies "
                "must stay equal; assign it with update_non_slot(variable.devices, ...)"
            )

    def pin(self, ref: Ref, servers: tuple[int, ...]) -> None:
        """Places a reduction that has no place yet on the servers where it is used."""
        if ref.kind == "reduction" and ref.index in self._floating:
            floating = self._reductions[ref.index]
            placed = tuple(sorted({*floating.servers, *servers}))
            self._reductions[ref.index] = replace(floating, servers=placed)

    def order_snapshot(self, path: str, round: int, state: str, returns: int = 0) -> None:
        """Records that a checkpoint of all servers is wanted, of the round that this section will be; see its order."""
        self._snapshot = SnapshotOrder(path, tuple(range(self._servers)), round, state, returns)

    def skip_nonfinite(self) -> None:
        """Records that nothing of the section shall be applied if a contribution has NaN or infinity."""
        self._nonfinite = "skip"

    def trim(self, part: Handle, rows: int) -> None:
        """Records that a part of a dynamic table is cut to its share of a number of rows."""
        self._check_more()
        if self.marks is not None and part.spec.alone:
            self.marks.trims.add(len(self._trims))
        self._trims.append(Trim(part.id, part.servers, rows))
        self._written.add(part.id)

    def give_back(self, value: object) -> None:
        """Notes which of the section's values the program will look at: the leaves of a nest."""
        for leaf in nest.flatten(value):
            for part in leaf.parts if isinstance(leaf, ShardedValue) else (leaf,):
                if isinstance(part, ServerValue) and part.section is self and not isinstance(part, ReducedKeys):
                    self._returned.add(part.ref)

    def give_back_unused(self) -> None:
        """Notes all values that no program of the section takes: the program may look at any of them."""
        used = {ref for apply in self._applies for ref in apply.args}
        reductions = {Ref("reduction", i) for i, each in enumerate(self._reductions) if each.form != "keys"}
        results = {Ref("result", index) for index in range(self._results)}
        self._returned |= (reductions | results) - used

    # ---- Repeating ----

    def complete(self, numbers: list[Number]) -> SectionTemplate | None:
        """Ends the recording.

        Args:
            numbers: among the arguments of update functions, which may be others when this is repeated.

        Returns:
            What was recorded; None if that may depend on anything but reductions and these numbers.
        """
        if self._calls is None or any(call.numbers and repr(call.numbers) != repr(numbers) for call in self._calls):
            return None
        self._whole = self._plan()
        traces = {call.trace: bool(call.numbers) for call in self._calls}
        written, sources, feedback = frozenset(self._written), tuple(self._operands.sources), tuple(self._feedback)
        return SectionTemplate(self._whole, written, traces, sources, feedback, self.marks)

    def repeat(self, kept: SectionTemplate, numbers: list[Number], local: OwnContributions) -> bool:
        """Records, where nothing is recorded yet, all that another section of the same strategy has recorded.

        Args:
            kept: the recorded section.
            numbers: replace the numbers that it was recorded with.
            local: this process's contributions to its reductions.

        Returns:
            Whether it does: False if something was recorded, or an update function would do something else by now. Then
            nothing is done.
        """
        recorded = self._reductions or self._applies or self._operands.arrays or self._snapshot or self._trims
        if recorded or (self.marks is None) != (kept.marks is None):
            return False
        operands = kept.operands(numbers)
        if operands is None:
            return False
        weights, arrays = tuple(local.weights), tuple(local.arrays)
        self._repeated = Outgoing(kept.plan, weights, arrays, operands, kept.feedback, batch=self._batch)
        self._written.update(kept.written)
        self._whole, self.marks = kept.plan, kept.marks
        return True

    def _check_more(self) -> None:
        if self._whole is not None:
            raise RuntimeError("this compiled step is complete; record further operations in another step")

    # ---- Sending ----

    def outgoing(self) -> Outgoing:
        """Returns the section's plan and this process's data for it, whose copies from GPUs begin."""
        found = self._repeated
        if found is None:
            weights, arrays = tuple([one.weight for one in self._local]), tuple([one.array for one in self._local])
            operands, feedback = tuple(self._operands.arrays), tuple(self._feedback)
            found = Outgoing(self._whole or self._plan(), weights, arrays, operands, feedback, batch=self._batch)
        begin_downloads(found.arrays)
        return found

    def _plan(self) -> Plan:
        reductions = tuple([r if r.servers else replace(r, servers=self._place()) for r in self._reductions])
        returned, copied = tuple(sorted(self._returned)), len(self._with_copies((0,))) > 1
        if not (self._applies or self._operands.arrays or self._snapshot or self._trims):
            return _plan_of(reductions, returned, copied)
        return Plan(
            reductions,
            self._operands.said(),
            self._programs.all,
            tuple(self._applies),
            returned,
            self._snapshot,
            nonfinite=self._nonfinite if self._applies else "apply",
            trims=tuple(self._trims),
            copied=copied,
        )

    def _place(self) -> tuple[int, ...]:
        """Returns where a reduction without a place is made: it shares a server with the others if it can."""
        used = {s for r in self._reductions for s in r.servers} | {s for a in self._applies for s in a.servers}
        words = repr([(r.op, r.tensor, r.target) for r in self._reductions])
        return self._with_copies((min(used) if used else zlib.crc32(words.encode()) % self._servers,))

    def sent(self, take: Callable[[], Mapping[Ref, Array | Rows]]) -> None:
        """The section has been sent; `take` waits for the returned values."""
        self._take = take

    def value(self, ref: Ref) -> Array | Rows:
        """Returns a value of the section; sends the section first if need be, and waits for its round."""
        if self._take is None:
            self.check_thread()
            self._returned.add(ref)
            self._flush(self)
        if self._values is None and self._take is not None:
            self._values = self._take()
        values = self._values or {}
        if ref not in values:
            raise RuntimeError(
                "this value stayed on the servers when its step ended; read it before that, or return it "
                "from the function passed to merge_call"
            )
        return values[ref]

    def state(self, ref: Ref) -> str:
        """Returns what is known of a value, in words; never ends the section."""
        if self._values is None:
            return "not flushed yet" if self._take is None else "under way"
        return f"value={self._values[ref]}" if ref in self._values else "stayed on the servers"


@functools.lru_cache(maxsize=256)
def _plan_of(reductions: tuple[Reduction, ...], returned: tuple[Ref, ...], copied: bool) -> Plan:
    """Returns a plan that only reduces. A loop reduces its loss in each step: the same plan has its id already."""
    return Plan(reductions, returned=returned, copied=copied)


def _label_of_array(call: TracedCall) -> str:
    """Returns for what an array is that an update function is given beside variables, for messages."""
    names = [each.variable.name for each in call.inputs if isinstance(each, InputLeaf) and each.variable is not None]
    shown = ", ".join(map(repr, names[:3])) + (" ..." if len(names) > 3 else "")
    return f"an array given to the update of {shown}" if names else ""


class _Inputs:
    """The inputs of one program: turns what an update function takes into tracers."""

    def __init__(self, section: Section, servers: tuple[int, ...], strategy: StrategyFace) -> None:
        self.section = section
        self.strategy = strategy
        self.servers = servers
        self.variables: dict[int, ServerVariable] = {}
        self._slices: dict[int, tuple[IndexedSlices, InputLeaf]] = {}  # by id; what an argument becomes is asked twice
        self.recording = Recording(self.lift)

    def give(self, value: Leaf) -> InputLeaf | None:
        """Returns what a variable, an array, a located or a mirrored value is as an input; None for all else."""
        if isinstance(value, Variable):
            return self._variable(value)
        if isinstance(value, Mirrored) and isinstance(value.values[0], LazyCopy):
            value = value.values[0].source  # it is here once the section has been sent, and there already
        if isinstance(value, ServerValue):
            if value.section is self.section and not value.section.flushed:
                if value.place is not None:
                    self._check_place(value, value.place, "reduce it to what is updated")
                self.section.pin(value.ref, self.servers)
                return InputLeaf("value", value.spec, value.ref)
            if not isinstance(value, IndexedSlices):
                return self._array(value.section.value(value.ref))
        if isinstance(value, IndexedSlices):
            if id(value) not in self._slices:
                self._slices[id(value)] = value, self.section.give_rows(value, self.servers)
            return self._slices[id(value)][1]
        if isinstance(value, Mirrored):
            return self._array(to_numpy(value.values[0]))
        if isinstance(value, PerReplica):
            raise ValueError(
                "update does not take per-replica values; reduce them first with reduce_to(op, value, variable)"
            )
        return self._array(value) if is_array(value) else None

    @staticmethod
    def _array(value: object) -> InputLeaf:
        array = to_numpy(value)
        return InputLeaf("operand", spec_of(array), array)

    def _variable(self, value: Variable) -> InputLeaf:
        value._check_strategy(self.strategy)
        if isinstance(value, SyncOnReadVariable | VariableOfShards):
            value._refuse_update()
        on_server = cast(ServerVariable, value)  # A strategy with sections has no other kind.
        self._check_place(value, value.place, "create it there with colocate_vars_with")
        handle = on_server.handle
        self.variables[handle.id] = on_server
        return InputLeaf("variable", handle.spec.tensor, Ref("variable", handle.id), value)

    def _check_place(self, value: Readable, place: tuple[int, ...], remedy: str) -> None:
        """Says here, where the user's line is, what the server would refuse."""
        if not set(self.servers) <= set(place):
            devices = self.strategy.extended.parameter_devices
            where = ", ".join(devices[server] for server in self.servers)
            raise LocalityError(
                f"a value cannot move between servers within a step: {value!r} is used in an update on "
                f"{where}; {remedy}, or read it first and pass its value"
            )

    def lift(self, value: object) -> Tracer | None:
        """Returns the tracer of a variable or of a located or mirrored value; None for all else."""
        found = self.give(value) if isinstance(value, Readable | DistributedValues | IndexedSlices) else None
        if found is None:
            return None
        if found.kind == "variable":
            return self.recording.variable(found.spec, found.variable.name, found.source)
        return (
            self.recording.value(found.spec, found.source)
            if found.kind == "value"
            else self.recording.operand(found.source)
        )

    def argument(self, value: object) -> object:
        """Returns an argument as the update function sees it: Python scalars and unknown objects as they are."""
        if isinstance(value, Settings):
            return value.view(lambda number: number)
        tracer = self.lift(value)
        if tracer is not None:
            return tracer
        return self.recording.operand(value) if is_array(value) else value
