"""Values that processes and servers agree on: variables, plans, and orders to save or restore.

All are frozen values. A plan's id is a hash of its canonical bytes, see `canonical`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from pswire.errors import InvalidRequest, LocalityError, ProgramError
from pswire.limits import MAX_NAME, PART_BYTES
from pswire.model import row_updates
from pswire.model.compression import FLOATS, Codec
from pswire.model.hashing import canonical
from pswire.model.program import Program
from pswire.model.tables import MAX_COUNT, MIN_CAPACITY, ROWS, TablePart
from pswire.model.tensor import DTYPES, TensorSpec

ReduceOp = Literal["sum", "mean", "first"]

Nonfinite = Literal["apply", "skip", "raise"]
"""What becomes of a round's updates if a contribution to them has NaN or infinity: applied, not applied, an error."""
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "mean", "first")

Form = Literal["dense", "rows", "keys"]
"""The form of contributions: whole arrays; ids and rows, each id once, in increasing order; or keys of a dynamic table,
each with how often it came, and rows."""


@dataclass(frozen=True)
class ShardOf:
    """The rows of a partitioned variable that one of its shards has.

    Attributes:
        whole: name of the partitioned variable, by which checkpoints have it.
        first: number of the shard's first row in it.
        rows: number of all its rows.
    """

    whole: str
    first: int
    rows: int


@dataclass(frozen=True)
class VariableSpec:
    """A variable as its creators describe it.

    Attributes:
        name: unique in the job, by creation order.
        tensor: dtype and shape.
        trainable: True if optimizers should train it; kept for checkpoints and tools.
        saved_as: the name that checkpoints have it by: None for its own; "" for scratch, which they leave out; else
            that of another variable, whose value it always has.
        shard: which rows of a partitioned variable it has, as whose part checkpoints have it; None for a whole one.
        part: which part of a dynamic table it is, or lies beside; None for an array.
        alone: True if each worker updates it in rounds of its own, also where all others are made by all together.
    """

    name: str
    tensor: TensorSpec
    trainable: bool = True
    saved_as: str | None = None
    shard: ShardOf | None = None
    part: TablePart | None = None
    alone: bool = False

    def __str__(self) -> str:
        rows = TensorSpec(self.tensor.dtype, self.tensor.shape[1:])  # a table has no size
        what = f"{self.tensor}" if self.part is None else f"with rows {rows}"
        return f"{self.name!r} {what}{' with ps.Async()' if self.alone else ''}"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes from the beginning; a part of a table has no size, and begins with its filter."""
        return self.tensor.nbytes if self.part is None else self.part.nbytes

    @property
    def saved_name(self) -> str:
        """The name that checkpoints have it by, or what it is a part of; "" if they do not have it."""
        if self.shard is not None:
            return self.shard.whole
        if self.part is not None:
            return self.part.whole
        return self.name if self.saved_as is None else self.saved_as

    def check(self) -> VariableSpec:
        """Returns itself; raises `InvalidRequest` for a name or a tensor that cannot be."""
        table = self.name if self.part is None else self.part.table
        names = (self.name, self.saved_as or self.name, self.saved_name or self.name, table)
        if not all(0 < len(name) <= MAX_NAME and name.isprintable() for name in names):
            raise InvalidRequest(f"a variable's name must have 1 to {MAX_NAME} printable characters")
        self.tensor.check()
        if self.shard is not None:
            count = self.tensor.shape[0] if self.tensor.shape else 0
            if self.saved_as is not None or not 0 <= self.shard.first < self.shard.first + count <= self.shard.rows:
                raise InvalidRequest(f"{self.name!r} of shape {self.tensor.shape} is not a shard {self.shard}")
        if self.part is not None:
            self.part.check()
            if self.shard is not None or self.saved_as is not None or self.tensor != self.part.tensor:
                raise InvalidRequest(f"{self.name!r} is {self.tensor}, but its part of a table is {self.part.tensor}")
        return self


@dataclass(frozen=True)
class PlacedVariable:
    """A variable as the cluster knows it.

    Attributes:
        id: its number in creation order.
        spec: the description that its creators gave.
        servers: the servers that hold it: more than one for non-slot variables, and where variables have copies.
    """

    id: int
    spec: VariableSpec
    servers: tuple[int, ...]


Sparse = Literal["dense", "lazy", "exact", "closed"]
"""What an update with the gradient of some rows is to the other rows.

Dense: what the update is for a whole gradient that is zero there, at once. Lazy: nothing, whatever it would do to them.
Exact: as dense, but made up when a row is touched or read. Closed: as exact, but many updates may be made up as one, by
a closed form, within a few millionths.
"""

LATER: frozenset[Sparse] = frozenset({"exact", "closed"})
"""Ways in which other rows have an update later."""

RefKind = Literal["variable", "reduction", "operand", "result"]


class Ref(NamedTuple):
    """A value within a plan.

    Attributes:
        kind: the plan's list that it is in; "result" counts the outputs of all applications, in order.
        index: a variable's id, else the place in that list.
    """

    kind: RefKind
    index: int  # type: ignore[assignment]  # nobody asks it where a value is


@dataclass(frozen=True)
class Reduction:
    """Contributions in, one value out.

    Attributes:
        op: "sum"; "mean": the sum over the sum of the weights; "first": of the contributions that are there the first.
        tensor: dtype and shape of a contribution and of the value.
        servers: servers on which the value is made; every worker sends its contribution to each.
        target: purpose of the value, in words, for messages.
        form: the form of contributions; the value is the same.
        codec: how contributions are compressed; None for not at all. They are summed as what they stand for.
    """

    op: ReduceOp
    tensor: TensorSpec
    servers: tuple[int, ...]
    target: str = ""
    form: Form = "dense"
    codec: Codec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a contribution as it travels; 0 where it is as many rows as its sender has."""
        if self.form != "dense":
            return 0
        return self.tensor.nbytes if self.codec is None else self.codec.nbytes(self.tensor)


@dataclass(frozen=True)
class Operand:
    """A value that every process sends alike, such as a learning rate.

    Attributes:
        tensor: dtype and shape.
        servers: servers that use it.
        label: the hyperparameters that it is, or is computed from, or the variables that it is for; for messages.
    """

    tensor: TensorSpec
    servers: tuple[int, ...]
    label: str = ""


@dataclass(frozen=True)
class Apply:
    """One program applied beside its variables.

    Attributes:
        program: index into the plan's programs.
        servers: servers on which it runs; on each of them, all that it reads must be.
        args: the values of the program's inputs, in order.
        sparse: what it is to rows that are not given; see `Sparse`.
        optional: True if it is left out of a round in which no contribution to any of its reductions has a weight.
    """

    program: int
    servers: tuple[int, ...]
    args: tuple[Ref, ...]
    sparse: Sparse = "dense"
    optional: bool = False


@dataclass(frozen=True)
class Trim:
    """A limit to which a dynamic table is cut once, after a section's updates.

    Attributes:
        variable: number of the variable that is a part of the table.
        servers: its server.
        rows: most rows that the whole table keeps; each bucket keeps its share of them, the worst go first.
    """

    variable: int
    servers: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class SnapshotOrder:
    """A checkpoint that the section asks for.

    Attributes:
        path: path of the checkpoint, below the servers' checkpoint root.
        servers: all servers of the job.
        round: the round of the section, so that no two orders are the same.
        state: JSON text of the process that proposes it, `{"objects": ..., "state": ...}`, for the manifest. No part of
            the plan's identity: processes may differ in it.
        returns: number of the generation by which a server comes back that is to read it; 0 for none. Then it has the
            arrays that this server held, by the numbers of their variables, and all dynamic tables.
    """

    path: str
    servers: tuple[int, ...]
    round: int = 0
    state: str = field(default="", compare=False)
    returns: int = 0


@dataclass(frozen=True, order=True)
class Turn:
    """The place of a restore among those of a job: equal for all processes that make the same calls; later is greater.

    Attributes:
        round: the next round of the process that asks; where workers are asynchronous that from which they are, 0 where
            the job began so.
        generation: the generation that it has taken in; 0 where workers are asynchronous.
        ordinal: number of restores begun before in that round and generation; where workers are asynchronous, since
            then.
    """

    round: int = 0
    generation: int = 0
    ordinal: int = 0


@dataclass(frozen=True)
class RestoreCommit:
    """The commit of a restore: the variables get the values that the servers have prepared.

    Attributes:
        path: the requested path, of a checkpoint or a directory of them.
        servers: all servers of the job.
        turn: the restore's place among those of the job.
        choice: a digest of which variable gets which tensor, so that processes that want different things are told.
    """

    path: str
    servers: tuple[int, ...]
    turn: Turn = Turn()
    choice: str = ""


@dataclass(frozen=True)
class Plan:
    """The reductions and updates of one cross-replica section. The same on every process, or they diverged.

    Attributes:
        reductions, operands, programs, applies: the parts, in the order of the section's calls.
        returned: values that every process gets back.
        snapshot: a checkpoint to take after the section's updates.
        restore: a restore that the round completes; nothing else is in such a plan.
        nonfinite: what becomes of the round's updates if a contribution has NaN or infinity.
        trims: tables that are cut to a number of rows, after the section's updates.
        copied: True in a job whose variables have copies: each server that has a returned value gives it back, so that
            it comes whichever is lost.
    """

    reductions: tuple[Reduction, ...] = ()
    operands: tuple[Operand, ...] = ()
    programs: tuple[Program, ...] = ()
    applies: tuple[Apply, ...] = ()
    returned: tuple[Ref, ...] = ()
    snapshot: SnapshotOrder | None = None
    restore: RestoreCommit | None = None
    nonfinite: Nonfinite = "apply"
    trims: tuple[Trim, ...] = ()
    copied: bool = False

    @cached_property
    def id(self) -> bytes:
        """SHA-256 of the plan's canonical bytes: equal plans, and only they, have equal ids."""
        return hashlib.sha256(canonical(self)).digest()

    @cached_property
    def trains(self) -> bool:
        """True if its rounds apply what members contribute: only such may be made without the last of the members."""
        return bool(self.reductions and self.applies) and self.snapshot is None and self.restore is None

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Numbers of the reductions whose contributions are rows, by ids or by keys."""
        return tuple(number for number, reduction in enumerate(self.reductions) if reduction.form != "dense")

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Numbers of the reductions whose contributions are rows by the keys of a dynamic table."""
        return tuple(number for number, reduction in enumerate(self.reductions) if reduction.form == "keys")

    @cached_property
    def compressed(self) -> tuple[int, ...]:
        """Numbers of the reductions whose contributions are compressed."""
        return tuple(number for number, reduction in enumerate(self.reductions) if reduction.codec is not None)

    @cached_property
    def sums(self) -> bool:
        """True if contributions may be summed before a server has them: they are whole arrays, and nothing else."""
        whole = (each.form == "dense" and each.codec is None and each.op != "first" for each in self.reductions)
        return bool(self.reductions) and all(whole) and not (self.snapshot or self.restore or self.trims)

    @cached_property
    def chosen(self) -> tuple[int, ...]:
        """Numbers of the reductions whose contributions are elements by their places, which may be refused."""
        each = ((number, self.reductions[number]) for number in self.compressed)
        return tuple(n for n, r in each if r.codec is not None and r.codec.kind == "topk" and r.form == "dense")

    @cached_property
    def by_rows(self) -> tuple[int | None, ...]:
        """For each application the reduction on whose rows it runs; None if it runs on whole variables."""
        return tuple(map(self._runs_on, self.applies))

    @cached_property
    def measured(self) -> tuple[int | None, ...]:
        """For each application that computes numbers of the rows of a reduction alone its number; else None."""
        return tuple(map(self._measures, self.applies))

    def _measures(self, apply: Apply) -> int | None:
        given = {i: ref.index for i, ref in enumerate(apply.args) if self._is_rows(ref)}
        one = len(set(given.values())) == 1 and row_updates.measures(self.programs[apply.program], given)
        return next(iter(given.values())) if one else None

    def _runs_on(self, apply: Apply) -> int | None:
        given = {i: ref.index for i, ref in enumerate(apply.args) if ref.kind == "reduction" and ref.index in self.rows}
        program = self.programs[apply.program]
        one = len(set(given.values())) == 1 and len(set(apply.args)) == len(apply.args)
        if not one or row_updates.refusal(program, given):
            return None
        alone = apply.sparse == "lazy" or row_updates.keeps_rows(program, given)
        later = apply.sparse in LATER and not row_updates.later_refusal(program)
        return next(iter(given.values())) if alone or later else None

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """The servers that take part in a round of this plan."""
        found = {server for item in self._placed for server in item.servers}
        for order in (self.snapshot, self.restore):
            found.update(order.servers if order else ())
        return tuple(sorted(found))

    @property
    def _placed(self) -> tuple[Reduction | Operand | Apply | Trim, ...]:
        """All that has servers."""
        return (*self.reductions, *self.operands, *self.applies, *self.trims)

    def writes(self, server: int) -> tuple[int, ...]:
        """Ids of the variables that the plan assigns on a server, in the order in which their last values are there."""
        return self._writes.get(server, ())

    @cached_property
    def _writes(self) -> dict[int, tuple[int, ...]]:
        last: dict[int, dict[int, None]] = {}
        for apply in self.applies:
            for server, (target, _) in product(apply.servers, self.programs[apply.program].assigns):
                written, id = last.setdefault(server, {}), apply.args[target].index
                written.pop(id, None)
                written[id] = None
        for trim in self.trims:
            for server in trim.servers:
                last.setdefault(server, {})[trim.variable] = None
        return {server: tuple(written) for server, written in last.items()}

    @cached_property
    def applied(self) -> tuple[int, ...]:
        """Numbers of the reductions that updates read."""
        read = {ref.index for apply in self.applies for ref in apply.args if ref.kind == "reduction"}
        return tuple(sorted(read))

    @cached_property
    def streams(self) -> frozenset[int]:
        """Returns the servers that may apply this plan piece by piece, as contributions arrive.

        It is empty where that is not worth it, or where a value or contribution may be refused halfway.
        """
        if self.nonfinite != "apply" or self.keys or any(program.may_refuse for program in self.programs):
            return frozenset()
        sent = Counter[int]()
        for reduction in self.reductions:
            sent.update(dict.fromkeys(reduction.servers, reduction.nbytes))
        waits = {server for number in (*self.rows, *self.chosen) for server in self.reductions[number].servers}
        return frozenset(server for server, nbytes in sent.items() if nbytes > PART_BYTES) - waits

    def given(self, server: int) -> list[tuple[Ref, TensorSpec]]:
        """Returns what a server gives back: each returned value comes from the first server that has it, or from all.

        Reduced rows, which `given_rows` has, come behind.
        """
        return [item for item in self._given(server) if not self._is_rows(item[0])]

    def given_rows(self, server: int) -> list[tuple[Ref, TensorSpec]]:
        """Returns the reduced rows that a server gives back, with the dtype and shape of the whole."""
        return [item for item in self._given(server) if self._is_rows(item[0])]

    def _is_rows(self, ref: Ref) -> bool:
        return ref.kind == "reduction" and ref.index in self.rows

    def _given(self, server: int) -> list[tuple[Ref, TensorSpec]]:
        homes = ((ref, *self._homes(ref)) for ref in self.returned)
        return [(ref, spec) for ref, servers, spec in homes if server in (servers if self.copied else servers[:1])]

    def _homes(self, ref: Ref) -> tuple[tuple[int, ...], TensorSpec]:
        if ref.kind == "reduction":
            reduction = self.reductions[ref.index]
            return reduction.servers, reduction.tensor
        return self.results[ref.index]

    @cached_property
    def results(self) -> tuple[tuple[tuple[int, ...], TensorSpec], ...]:
        """Servers and spec of each output of each application, numbered through the plan."""
        return tuple(
            (apply.servers, spec) for apply in self.applies for spec in self.programs[apply.program].output_specs
        )

    def describe(self, variables: Mapping[int, PlacedVariable]) -> str:
        """The section in words, for messages: `reduce sum float32[3] for 'w'; update variable 'w'`.

        Args:
            variables: the variables that exist, by id.
        """
        words = [
            f"reduce {r.op} {'rows of ' * (r.form != 'dense')}{r.tensor}{' for ' + r.target if r.target else ''}"
            f"{f' as {r.codec}' if r.codec else ''}"
            for r in self.reductions
        ]
        for apply in self.applies:
            written = [apply.args[target] for target, _ in self.programs[apply.program].assigns]
            words += ["update " + " and ".join(describe_ref(ref, variables) for ref in written)] if written else []
        words += [f"cut {describe_ref(Ref('variable', t.variable), variables)} to {t.rows} rows" for t in self.trims]
        if self.snapshot:
            words.append(f"checkpoint {self.snapshot.path!r}")
        if self.restore:
            words.append(f"restore {self.restore.path!r}")
        return "; ".join(words) or "nothing"

    def check_programs(self) -> None:
        """Verifies the programs by themselves, which `verify` then need not do again; raises `ProgramError`."""
        for program in self.programs:
            program.specs  # noqa: B018

    def verify(self, variables: Mapping[int, PlacedVariable], servers: int) -> Plan:
        """Checks everything that can be known before a round.

        Args:
            variables: the variables that exist, by id.
            servers: number of servers of the cluster.

        Returns:
            The plan itself.

        Raises:
            ProgramError, LocalityError, InvalidRequest: the plan is not valid; the message says why.
        """
        for placed in self._placed:
            if not are_some_of(placed.servers, servers):
                raise InvalidRequest(
                    f"a compiled step names servers {placed.servers[:8]}, which are not distinct "
                    f"servers of a job with {servers} servers"
                )
        for reduction in self.reductions:
            spec = reduction.tensor.check()
            if reduction.op not in REDUCE_OPS:
                raise InvalidRequest(f"unknown reduction {reduction.op!r}")
            if spec.dtype == "bool" or (reduction.op == "mean" and DTYPES[spec.dtype].kind in "iu"):
                raise InvalidRequest(f"{reduction.op} of {spec.dtype} is not defined; use another dtype")
            if reduction.form != "dense" and not spec.shape:
                raise InvalidRequest("a scalar has no rows")
            if reduction.form == "keys" and spec.shape[0] != ROWS:
                raise InvalidRequest(f"rows by keys must have a table's shape, not {spec.shape}")
            if reduction.codec is not None:
                codec = reduction.codec.check()
                if reduction.op == "first" or reduction.form == "keys" or spec.dtype not in FLOATS:
                    raise InvalidRequest(
                        f"{reduction.op} of {spec.dtype} by {reduction.form} does not support codec {codec}"
                    )
        if self.snapshot and self.snapshot.servers != tuple(range(servers)):
            raise InvalidRequest("a checkpoint must include all servers")
        if self.restore and (self.restore.servers != tuple(range(servers)) or self._placed or self.snapshot):
            raise InvalidRequest("a restore must include all servers, and nothing else")
        self.check_programs()
        results = 0
        for apply in self.applies:
            if not 0 <= apply.program < len(self.programs):
                raise InvalidRequest("a compiled step applies an update function that it does not contain")
            program = self.programs[apply.program]
            if len(apply.args) != len(program.inputs):
                raise ProgramError("an update function got a wrong number of arguments")
            for ref, item in zip(apply.args, program.inputs, strict=True):
                where, spec = self._locate(ref, variables, results)
                if spec != item.spec:
                    raise ProgramError(f"an update function takes {item.spec}, but got {spec}")
                if (ref.kind == "variable") != (item.kind == "variable"):
                    raise ProgramError("an update function assigns to a value that is not a variable")
                if not set(apply.servers) <= set(where):
                    raise LocalityError(
                        f"{describe_ref(ref, variables)} is on server {where[0]}, but the update that uses it runs on "
                        f"server {apply.servers[0]}; create the variables together with colocate_vars_with, or read "
                        "the value first"
                    )
            for target, _ in program.assigns:
                if set(variables[apply.args[target].index].servers) != set(apply.servers):
                    raise LocalityError("an update must run on all copies of the variables that it assigns")
            self._check_sparse(apply)
            self._check_tables(apply, variables)
            if apply.optional and (program.outputs or not any(ref.kind == "reduction" for ref in apply.args)):
                raise ProgramError("an update that can be skipped must take a reduction, and cannot return results")
            results += len(program.outputs)
        for trim in self.trims:
            known = variables.get(trim.variable)
            if known is None or known.spec.part is None or known.spec.part.slot or trim.servers != known.servers:
                raise InvalidRequest("only dynamic tables can be shrunk")
            if trim.rows and not MIN_CAPACITY <= trim.rows <= MAX_COUNT:
                raise InvalidRequest(f"a table cannot be shrunk to {trim.rows} rows; use 0, or at least {MIN_CAPACITY}")
        for ref in self.returned:
            if ref.kind not in ("reduction", "result"):
                raise InvalidRequest("a compiled step returns a value that is neither reduced nor computed")
            if ref.kind == "reduction" and ref.index in self.keys:
                raise InvalidRequest("rows by keys cannot be returned")
            self._locate(ref, variables, results)
        return self

    def _check_sparse(self, apply: Apply) -> None:
        if apply.sparse != "dense" and self._runs_on(apply) is None:
            given = [i for i, ref in enumerate(apply.args) if self._is_rows(ref)]
            program = self.programs[apply.program]
            why = row_updates.refusal(program, given)
            if why is None and apply.sparse in LATER:
                why = row_updates.later_refusal(program)
            raise ProgramError(f"a sparse update cannot run on rows: {why or 'it takes those of one gradient'}")

    def _check_tables(self, apply: Apply, variables: Mapping[int, PlacedVariable]) -> None:
        """Checks that an update of a dynamic table is one by the keys of its rows, and of no other variables."""
        used = [variables[ref.index] for ref in apply.args if ref.kind == "variable"]
        tables = {v.spec.part.table: v.spec.part for v in used if v.spec.part is not None}
        rows = [v for v in used if v.spec.tensor.shape[:1] == (ROWS,)]
        keys = [ref.index for ref in apply.args if ref.kind == "reduction" and ref.index in self.keys]
        if not tables and (not keys or self._measures(apply) is not None):
            return
        if len(tables) != 1 or len(rows) != sum(v.spec.part is not None for v in used):
            raise ProgramError("an update by keys can use only one dynamic table and its slot variables")
        (name,) = tables
        if not keys or self._runs_on(apply) not in keys:
            raise ProgramError(
                f"an update of the dynamic table {name!r} cannot run on the rows of one gradient: "
                f"{self._why_whole(apply) or 'it takes those of one'}"
            )

    def _why_whole(self, apply: Apply) -> str | None:
        given = [i for i, ref in enumerate(apply.args) if self._is_rows(ref)]
        return row_updates.refusal(self.programs[apply.program], given)

    def _locate(
        self, ref: Ref, variables: Mapping[int, PlacedVariable], results: int
    ) -> tuple[tuple[int, ...], TensorSpec]:
        """Servers and spec of a value; `results` counts the results that are there already."""
        if ref.kind == "variable" and ref.index in variables:
            variable = variables[ref.index]
            return variable.servers, variable.spec.tensor
        if ref.kind == "reduction" and 0 <= ref.index < len(self.reductions):
            return self.reductions[ref.index].servers, self.reductions[ref.index].tensor
        if ref.kind == "operand" and 0 <= ref.index < len(self.operands):
            return self.operands[ref.index].servers, self.operands[ref.index].tensor
        if ref.kind == "result" and 0 <= ref.index < results:
            return self.results[ref.index]
        raise InvalidRequest(f"a compiled step uses {ref.kind} {ref.index}, which does not exist")


def are_some_of(servers: tuple[int, ...], count: int) -> bool:
    """Returns whether these are indices of servers, at least one and none twice; `count` is the number of servers."""
    return 0 < len(servers) <= count and len(set(servers)) == len(servers) and all(0 <= s < count for s in servers)


def describe_ref(ref: Ref, variables: Mapping[int, PlacedVariable]) -> str:
    """A value in words, for messages."""
    if ref.kind == "variable" and ref.index in variables:
        return f"variable {variables[ref.index].spec.name!r}"
    return f"{ref.kind} {ref.index}"
