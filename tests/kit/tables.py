"""Dynamic tables for tests: their states, files, compiled functions, a job with one, and a model of their rounds."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

import psclient as ps
from psserver.checkpoints.tables import FrozenPart, Wanted, restored
from psserver.programs.kernels.compiler import Compiler
from psserver.state.variables import Store
from psserver.tables import saving, table
from psserver.tables.native import Native
from psserver.tables.table import OpenedTable
from pstesting.in_process import InProcessCluster
from pswire.checkpoint.writer import Frozen, write_manifest, write_shard
from pswire.model.table_state import TableState, offsets_of
from tests.kit import internals as inside
from tests.kit.internals import BUCKETS, Array, Input, Node, Plan, Ref, Rows, SavedCheckpoint, SentRows, TableSpec
from tests.kit.internals import ServerDevice as Device
from tests.kit.rig import adding
from tests.kit.strategies import patient

NAME = "users"
SLOTS = (inside.SlotTensor("adam/users/m", "float64", (), 0.5), inside.SlotTensor("adam/users/v", "float32", (2,)))


# ---- States ----

OF_BUCKETS = ("hands", "sketch", "halved", "since")
OF_ITEMS = {
    "offsets": ("keys", "count", "last", "changed"),
    "counted_offsets": ("counted_keys", "counted"),
    "deleted_offsets": ("deleted_keys",),
}


class State(TableState):
    """The state of some buckets."""

    def cut(self, buckets: range) -> State:
        """The state of some of the buckets."""
        first, end = buckets.start - self.buckets.start, buckets.stop - self.buckets.start
        found = {name: getattr(self, name)[first:end] for name in OF_BUCKETS}
        for offsets, names in OF_ITEMS.items():
            starts = getattr(self, offsets)
            items = slice(starts[first], starts[end])
            found |= {offsets: starts[first : end + 1] - starts[first]}
            found |= {name: getattr(self, name)[items] for name in names}
            if offsets == "offsets":
                found["tensors"] = tuple(tensor[items] for tensor in self.tensors)
        return replace(self, buckets=buckets, **found)

    def equals(self, other: TableState) -> bool:
        """Whether all is the same, to the last bit."""
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return one == other


def state_of(frozen: saving.FrozenState) -> State:
    """The state that was frozen, as new arrays."""
    state = frozen.load()
    tensors = tuple(np.concatenate([*frozen.pieces(number)]) for number in range(frozen.rows.tensors))
    return State(**{f.name: getattr(state, f.name) for f in fields(state)} | {"tensors": tensors})


def joined(states: Sequence[State], buckets: range) -> State:
    """The state of a range of buckets, from states of one table that hold all of them, in any order."""
    parts, at = list[State](), buckets.start
    while at < buckets.stop:
        holder = next(state for state in states if state.buckets.start <= at < state.buckets.stop)
        end = min(holder.buckets.stop, buckets.stop)
        parts.append(holder.cut(range(at, end)))
        at = end
    one = parts[0]
    assert {(part.salt, part.round, part.expired) for part in parts} == {(one.salt, one.round, one.expired)}
    found = {name: np.concatenate([getattr(part, name) for part in parts]) for name in OF_BUCKETS}
    for offsets, names in OF_ITEMS.items():
        found[offsets] = offsets_of(np.concatenate([np.diff(getattr(part, offsets)) for part in parts]))
        found |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    tensors = tuple(np.concatenate(each) for each in zip(*(part.tensors for part in parts), strict=True))
    return replace(one, buckets=buckets, tensors=tensors, **found)


class Opened(OpenedTable):
    """The rows that a round finds, and counts of them."""

    @property
    def created(self) -> int:
        """Number of rows that were made."""
        return self.new.size

    @property
    def refused(self) -> int:
        """Number of keys, of those given, that are refused."""
        return int(np.count_nonzero(self.slots < 0))

    @property
    def touched(self) -> np.ndarray:
        """The slots of all keys that are not refused, each once, in increasing order."""
        return np.unique(self.slots[self.slots >= 0])


def remove(table: table.Table, round: int, keys: np.ndarray) -> int:
    """Drops the rows, and the counts, of some keys between two rounds; how many rows."""
    table._check_idle(round)
    hashes, entries = table._contents.find(keys)
    there = entries != 0
    hashes, at = np.unique(hashes[there], return_index=True)
    table._contents.round, before = round, len(table)
    table._contents.drop(hashes, entries[there][at])
    return before - len(table)


class Table(table.Table):
    """A table that can be compared."""

    def begin(self, *args, **more) -> Opened:
        opened = super().begin(*args, **more)
        return Opened(opened.slots, opened.new)

    def lookup(self, keys: np.ndarray, tensor: int = 0) -> np.ndarray:
        """Rows by keys."""
        return self.rows_at(self.find(keys), keys, tensor)

    def remove(self, round: int, keys: np.ndarray) -> int:
        """Drops the rows of some keys; how many."""
        return remove(self, round, keys)

    def state(self) -> State:
        """The state between two rounds."""
        return state_of(self.freeze())

    def delta(self, since: int) -> State:
        """The rows that have changed since a round."""
        frozen = self.freeze(since)
        assert frozen.since == since
        return state_of(frozen)

    def restore(self, states: Sequence[State]) -> None:
        """Replaces everything by states of all buckets."""
        state = joined(states, self.buckets)
        for array, rows in zip(self.place(state), state.tensors, strict=True):
            array[...] = rows


# ---- Files, functions and jobs ----


def ranges(count: int) -> list[range]:
    """Buckets of each of so many servers."""
    ends = np.linspace(0, BUCKETS, count + 1).astype(int)
    return [range(first, stop) for first, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


class Servers:
    """The parts of one table, as servers have them.

    Args:
        root: directory of the checkpoints.
        spec: the table.
        parts: the parts.
        values: variables beside the table, on the first server.
    """

    def __init__(self, root: Path, spec: TableSpec, parts: Sequence[Table], **values: np.ndarray) -> None:
        self.root, self.spec, self.parts, self.values = root, spec, list(parts), values
        self.rounds: dict[str, list[int]] = {}

    @classmethod
    def made(cls, root: Path, spec: TableSpec, count: int = 1, slots=SLOTS, **values: np.ndarray) -> Servers:
        """A table without rows, on so many servers."""
        return cls(root, spec, [Table(spec, slots, each, compiled()) for each in ranges(count)], **values)

    def step(self, keys: np.ndarray, value: float = 1.0) -> None:
        """Makes a round, which adds a number to rows."""
        keys = keys.astype(self.spec.key_dtype)
        buckets = inside.buckets_of(inside.hashes_of(keys, self.spec.salt))
        for part in self.parts:
            opened = part.begin(part.round + 1, keys[(buckets >= part.buckets.start) & (buckets < part.buckets.stop)])
            for array in part.arrays:
                array[np.unique(opened.slots[opened.slots >= 0])] += value
            part.commit(float(part.round + 1))

    def train(self, rng: np.random.Generator, rounds: int = 5, many: int = 5000, count: int = 800) -> None:
        """Makes some rounds, with keys of which some are frequent."""
        for _ in range(rounds):
            self.step((rng.pareto(0.7, count) * 30).astype(np.int64) % many, float(rng.integers(1, 9)))

    def save(self, name: str, base: str = "", objects=None) -> SavedCheckpoint:
        """Writes a checkpoint; with a base what has changed since."""
        since = self.rounds.get(base, [-1] * len(self.parts))
        order = inside.SnapshotOrder(
            name, tuple(range(len(self.parts))), 0, json.dumps({"base": base, "objects": objects or {}})
        )
        place, shards = inside.storage_at(self.root), []
        self.rounds[name] = [part.round for part in self.parts]
        for number, (part, round) in enumerate(zip(self.parts, since, strict=True)):
            held = FrozenPart(NAME, part, part.freeze(round), bool(base))
            frozen = Frozen(order, number, 7, (), {} if number else {**self.values}, tables={NAME: held})
            shards.append(write_shard(place, frozen, lambda value: (value,), lambda name: None))
        write_manifest(place, frozen, inside.manifest_of(shards, order).text())
        return self.opened(name)

    def opened(self, name: str) -> SavedCheckpoint:
        """Opens a checkpoint."""
        return SavedCheckpoint.at(inside.storage_at(self.root), name)

    def restored(self, name: str, count: int, spec: TableSpec | None = None, **wanted) -> Servers:
        """Restores a checkpoint onto so many servers."""
        spec, slots = spec or self.spec, self.parts[0].tensors
        given = {"saved": NAME, "beside": {slot.name: slot.name for slot in slots}} | wanted
        saved = self.opened(name)
        parts = [restored(saved, Wanted(NAME, spec, slots, each, **given), compiled()) for each in ranges(count)]
        return Servers(self.root, spec, parts)

    def state(self) -> inside.TableState:
        """The state of the whole."""
        return joined([state_of(part.freeze()) for part in self.parts], range(BUCKETS))


@cache
def compiled() -> Native:
    """Returns functions that are all there."""
    compiler = Compiler(Device(), 1, os.environ.get("PS_KERNEL_CACHE", ""))
    found = Native(compiler)
    found.index()
    for dtype in ("float32", "float64"):
        found.first_values(dtype)
    found.mark()
    found.count()
    compiler.wait()
    assert compiler.failed == 0
    assert found.index() is not None
    return found


de = ps.dynamic_embedding


class Job:
    """A table on some servers, a plain variable, and what trains both."""

    def __init__(self, root, servers, make=ps.optimizers.Adagrad, **options):
        self.cluster = InProcessCluster(servers, checkpoint_root=root)
        self.make = make
        self.options = {"dim": 2, "admission": de.CounterFilter(2), "eviction": de.GlobalStepEvict(20)} | options

    def __enter__(self):
        resolver = patient(self.cluster.__enter__()).resolver()
        self.strategy = ps.ParameterServerStrategy(cluster_resolver=resolver)
        return self

    def __exit__(self, *rest):
        self.strategy.close()
        self.cluster.__exit__(*rest)

    def build(self, slots=True):
        with self.strategy.scope():
            self.table = de.get_variable("users", **self.options)
            self.bias = ps.Variable(np.ones(2, "float32"), name="bias")
            self.optimizer = self.make(0.1)
            if slots:
                self.optimizer.build([self.table, self.bias])
        self.checkpoint = ps.train.Checkpoint(users=self.table, bias=self.bias, optimizer=self.optimizer)
        return self

    def train(self, steps=1, seed=0, many=60, count=40):
        rng = np.random.default_rng(seed)

        def step(keys):
            rows = self.table.lookup(keys)
            gradients = np.sin(np.asarray(rows.values) + rows.ids[:, None].astype("float32"))
            self.optimizer.apply_gradients([(rows.gradient(gradients), self.table), (np.ones(2, "float32"), self.bias)])

        for _ in range(steps):
            self.strategy.run(step, args=(rng.integers(-many, many, count),))

    def save(self, name):
        path = self.checkpoint.save(f"{name}/ckpt")
        self.checkpoint.sync()
        return path

    def state(self) -> inside.TableState:
        """The state of all parts, with the tensors beside the rows in the order of their names."""
        self.table.size()  # all rounds are over then, on all servers
        stored = [core.machine.job.store.tables()[0] for core in self.cluster.cores]
        states = []
        for each in stored:
            held = state_of(each.freeze(-1))
            order = np.argsort([slot.name for slot in each.table.tensors])
            weights, *beside = held.tensors
            states.append(replace(held, tensors=(weights, *(beside[number] for number in order))))
        return joined(states, range(BUCKETS))

    def numbers(self):
        return {v.name: v.numpy().tobytes() for v in (self.bias, *self.optimizer.variables) if not v.shape}


SIZE = 5
NUMBER, TABLE = inside.TensorSpec("int64", ()), inside.TensorSpec("int64", (SIZE, 2))
PRIME = (1 << 53) - 111

Kind = int
ADDS, TICKS = KINDS = (0, 1)

TICKING = inside.Program(
    (Input("variable", TABLE), Input("value", TABLE), Input("operand", NUMBER)),
    (Node("add", (0, 1)), Node("add", (3, 2))),
    ((0, 4),),
    (),
)

Name = tuple[int, Hashable, int]
"""A round of a server: the server, whose round, its number."""


class Tables:
    """The tables of all servers, as they should be.

    Args:
        servers: how many there are.
        first: the variable that is the first one's table; tables follow one another by kind, then by server.
    """

    def __init__(self, servers: int, first: int) -> None:
        self._servers, self._first = servers, first
        self._states = [[{kind: np.zeros(TABLE.shape, np.int64) for kind in KINDS}] for _ in range(servers)]
        self._known = [0] * servers  # states that there were when a server was last looked at
        self._after: dict[Name, int] = {}  # the state after a round
        self._least: dict[Name, Mapping[Kind, Array]] = {}
        self._given: dict[tuple[Name, int], dict[Kind, Rows]] = defaultdict(dict)
        self._seen = set[object]()

    # ---- Sections ----

    def variable(self, kind: Kind, server: int) -> int:
        """The number of a table's variable."""
        return self._first + kind * self._servers + server

    def _kind(self, variable: int) -> Kind:
        return (variable - self._first) // self._servers

    def updated(self, plan: Plan, ways: Mapping[Kind, inside.Sparse], returned: bool) -> Plan:
        """A plan that updates tables of its servers as well.

        Args:
            plan: has one operand, which is 1.
            ways: the tables, with what the update is to other rows.
            returned: whether the sums of rows are given back.
        """
        reductions, applies, programs, given = [*plan.reductions], [*plan.applies], [*plan.programs], [*plan.returned]
        for kind, way in ways.items():
            programs.append(TICKING if kind == TICKS else adding(TABLE))
            for server in plan.servers:
                rows = Ref("reduction", len(reductions))
                args = (Ref("variable", self.variable(kind, server)), rows, *[Ref("operand", 0)] * (kind == TICKS))
                applies.append(inside.Apply(len(programs) - 1, (server,), args, way))
                reductions.append(inside.Reduction("sum", TABLE, (server,), "a table", "rows"))
                given += [rows] * returned
        lists = (tuple(found) for found in (reductions, applies, programs, given))
        return replace(plan, **dict(zip(("reductions", "applies", "programs", "returned"), lists, strict=True)))

    def drawn(self, number: int, luck: Random) -> SentRows | None:
        """Rows of one contribution; a number that is given once tells whose they are. Some are none, some nothing."""
        if number % 5 == 0:
            return None
        ids = np.array(sorted(luck.sample(range(SIZE), luck.randrange(SIZE + 1) if number % 5 > 1 else 0)), np.int64)
        values = [[pow(3, (number * SIZE + id) * 2 + column, PRIME) for column in range(2)] for id in ids.tolist()]
        return SentRows(ids, np.array(values, np.int64).reshape(-1, 2))

    # ---- What servers do ----

    def came(self, name: Name, plan: Plan, said: inside.Contribution, payload: inside.Payload) -> None:
        """A contribution begins to arrive."""
        server, _, _ = name
        here = {place: each for place, each in enumerate(plan.reductions) if server in each.servers}
        dense = [place for place, each in here.items() if each.form == "dense" and said.weights[place]]
        sent = {place: n for place, n in zip(plan.rows, said.rows, strict=False) if n and place in here}
        if not sent:
            return
        specs = [spec for n in sent.values() for spec in inside.row_specs(TABLE, n)]
        found = iter(payload.tensors([NUMBER] * (1 + len(dense)) + specs)[1 + len(dense) :])
        updates = {ref.index: apply for apply in plan.applies for ref in apply.args if ref.kind == "reduction"}
        for place in sent:
            kind = self._kind(updates[place].args[0].index)
            self._given[name, said.session][kind] = Rows(next(found), next(found))

    def looked_at(self, server: int) -> None:
        """All rounds of a server are counted: those that are counted next ran since, in any order."""
        self._known[server] = len(self._states[server]) - 1

    def count(self, name: Name, plan: Plan | None, counted: Collection[int], ran: bool) -> None:
        """A round is over; it has these contributions."""
        server, _, _ = name
        states = self._states[server]
        own = {kind: self._sum(name, kind, counted) for kind in KINDS}
        if ran and TICKS in self._updated(plan, server):
            own[TICKS] += 1
        states.append({kind: states[-1][kind] + own[kind] for kind in KINDS})
        self._after[name] = len(states) - 1
        self._least[name] = {
            kind: states[self._known[server]][kind] + own[kind] for kind in self._updated(plan, server)
        }

    def _updated(self, plan: Plan | None, server: int) -> set[Kind]:
        """The tables of a server that a plan updates."""
        assigned = {apply.args[0].index for apply in plan.applies} if plan is not None else set()
        return {kind for kind in KINDS if self.variable(kind, server) in assigned}

    def _sum(self, name: Name, kind: Kind, counted: Collection[int]) -> Array:
        total = np.zeros(TABLE.shape, np.int64)
        for session in counted:
            if kind in self._given[name, session]:
                rows = self._given[name, session][kind]
                total[rows.ids] += rows.values
        return total

    # ---- Laws ----

    def check(self, server: int, store: Store) -> None:
        """The tables are the sums of the rounds that counted, each row as often as it was given."""
        for kind in KINDS:
            variable = self.variable(kind, server)
            if store.initialized(variable):
                found = store.views([variable])[0].whole()
                assert np.array_equal(found, self._states[server][-1][kind]), "a row is not the sum of its rounds"

    def check_given(self, name: Name, plan: Plan, counted: Collection[int], given: Sequence[Array]) -> None:
        """The rows that a round gives back are the sums of what counted, each place once."""
        server, _, _ = name
        arrays = iter(given)
        for ref, _ in plan.given_rows(server):
            (kind,) = {self._kind(apply.args[0].index) for apply in plan.applies if ref in apply.args}
            own = [self._given[name, session][kind] for session in counted if kind in self._given[name, session]]
            ids, values = next(arrays), next(arrays)
            assert ids.tolist() == sorted({id for rows in own for id in rows.ids.tolist()})
            assert np.array_equal(values, self._sum(name, kind, counted)[ids])

    def check_answer(
        self, name: Name, answer: object, reads: Sequence[inside.RowRead], rows: Sequence[Array], alone: bool
    ) -> None:
        """Rows that come with an answer are those after its round; where it is asked again, perhaps of a later one."""
        if answer in self._seen:
            return
        self._seen.add(answer)
        server, _, _ = name
        states = self._states[server][self._after[name] :]
        for read, found in zip(reads, rows, strict=True):
            kind, ids = self._kind(read.variable), read.numbers()
            if alone:  # its own, and of the others' those before it; which of the next are in it, nobody says
                assert (self._least[name][kind][ids] <= found).all(), "rows of before their round"
                assert (found <= states[-1][kind][ids]).all()
            else:
                assert any(np.array_equal(found, state[kind][ids]) for state in states), "rows of no round since"

    def check_read(self, server: int, variable: int, ids: Array, rows: Array) -> None:
        """Rows that a member reads are those of the last round: there is no later one without it."""
        assert np.array_equal(rows, self._states[server][-1][self._kind(variable)][ids]), "rows of another round"

    def check_read_late(self, server: int, variable: int, ids: Array, rows: Array) -> None:
        """Rows that a member reads are those of a round: there may be later ones without it, where it was late."""
        kind = self._kind(variable)
        assert any(np.array_equal(rows, state[kind][ids]) for state in self._states[server]), "rows of no round"

    def check_read_alone(self, last: Name, variable: int, ids: Array, rows: Array) -> None:
        """Rows that an asynchronous member reads are at least those of its last round that updated the table."""
        (server, strand, round), kind = last, self._kind(variable)
        own = [found[2] for found, least in self._least.items() if found[:2] == last[:2] and kind in least]
        at = max((number for number in own if number <= round), default=None)
        least = self._states[server][0] if at is None else self._least[server, strand, at]
        assert (least[kind][ids] <= rows).all(), "rows of before its last round"
        assert (rows <= self._states[server][-1][kind][ids]).all(), "rows that nobody has added"
