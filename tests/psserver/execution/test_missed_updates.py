"""Updates that are made up later, in rounds of arrays and of dynamic tables: whatever becomes of a round, each value is
what whole updates of all rows would have made it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from psserver.devices import ServerDevice
from psserver.execution.compiled import CompiledRound
from psserver.execution.execution import Execution
from psserver.state.variables import Store
from psserver.tables.native import Native
from psserver.values import deferred as module
from pswire.api import RowRead
from pswire.errors import ProgramError
from pswire.model.plan import Apply, Operand, PlacedVariable, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.rows import Rows
from pswire.model.tables import Constant, GlobalStepEvict, L2WeightEvict, SlotTensor, TableSpec
from pswire.model.tensor import TensorSpec
from tests.kit.contributions import WHOLE, part_of, round_of, share
from tests.kit.programs import kept_kernels, same_bits
from tests.kit.rig import power

SIZE = 9
TABLE, NUMBER, NUMBERS = TensorSpec("float32", (SIZE, 2)), TensorSpec("float32", ()), TensorSpec("int64", (3,))
V, M, OTHER = (Ref("variable", n) for n in range(3))


def heavy(spec):
    """A moment that decays, and a table that goes with it."""
    return Program(
        (*[Input("variable", spec)] * 2, Input("value", spec), *[Input("operand", NUMBER)] * 2),
        (Node("multiply", (4, 1)), Node("add", (5, 2)), Node("multiply", (3, 6)), Node("subtract", (0, 7))),
        ((0, 8), (1, 6)),
        (),
    )


def halved(spec):
    return Program(
        (Input("variable", spec), Input("value", spec), Input("operand", NUMBER)),
        (Node("multiply", (0, 2)), Node("add", (3, 1))),
        ((0, 4),),
        (),
    )


@cache
def plan_of(make, op="sum", sparse="exact", *, spec, form, fails=False):
    """A plan that updates the tables by rows or keys; one that may fail raises numbers to a power after it."""
    program = make(spec)
    variables = [V, M][: [item.kind for item in program.inputs].count("variable")]
    operands = [Ref("operand", n) for n in range(len(program.inputs) - len(variables) - 1)]
    reductions = [Reduction(op, program.inputs[0].spec, (0,), "", form)]
    applies = [Apply(0, (0,), (*variables, Ref("reduction", 0), *operands), sparse)]
    programs = [program]
    if fails:
        reductions.append(Reduction("sum", NUMBERS, (0,)))
        programs.append(power(NUMBERS))
        applies.append(Apply(1, (0,), (OTHER, Ref("reduction", 1))))
    return Plan(tuple(reductions), tuple(Operand(NUMBER, (0,)) for _ in operands), tuple(programs), tuple(applies))


class Server:
    """A store whose rounds are run as the runner runs them, beside a model that has every update at once."""

    table = None

    def __init__(self, kernels):
        self.kernels = kernels
        self.store = Store(0, ServerDevice(), 0, Native(kernels.compiler))
        self.declare()
        self.store.declare(PlacedVariable(2, VariableSpec("other", NUMBERS, True), (0,)))
        self.store.initialize(2, np.full(3, 2))

    def go(self, plan, ids, rate=0.5, *, power=None, lookups=(), **how):
        """Runs a round of two members; returns what the first has looked up."""
        given = [np.arange(2 * len(own), dtype="f4").reshape(-1, 2) for own in ids]
        heavy = len(plan.operands) == 2
        operands = [np.asarray(number, "f4") for number in ((rate, 0.75) if heavy else (0.5,))]
        more = [] if power is None else [np.full(3, power)]
        sent = [Rows(self.ids(own), values) for own, values in zip(ids, given, strict=True)]
        job = round_of(plan, *(share(n, plan, [sent[n], *more], operands) for n in range(2)))
        if lookups:
            object.__setattr__(job.parts[0].said, "lookups", (RowRead.of(0, np.array(lookups, np.int64)),))
        execution = Execution(job, self.kernels)
        if self.step(execution, **how):
            self.update(plan, heavy, ids, given, np.float32(rate))
        return execution.lookups.found.get(1)


class Arrays(Server):
    """Whole tables, beside arrays."""

    others = ("held", "saved", "dropped")

    def declare(self):
        self.dense = {}
        for id in (0, 1):
            self.store.declare(PlacedVariable(id, VariableSpec(f"v{id}", TABLE, True), (0,)))
            self.dense[id] = np.full(TABLE.shape, 2, "f4") if id else np.arange(2 * SIZE, dtype="f4").reshape(SIZE, 2)
            self.store.initialize(id, self.dense[id].copy())

    ids = staticmethod(lambda own: np.array(own, np.int64))
    plans = staticmethod(partial(plan_of, spec=TABLE, form="rows"))

    def step(self, execution, alone=True, commit=True):
        store = self.store
        store.note_tables(execution.job.prepared.row_tables)
        assigned, _ = execution.step(store.borrow(execution.reads(), alone, {}), store.take_spare)
        if commit:
            store.commit(assigned)
        return commit

    def update(self, plan, heavy, ids, given, rate):
        total, dense = np.zeros(TABLE.shape, "f4"), self.dense
        for own, values in zip(ids, given, strict=True):
            total[own] += values
        if plan.reductions[0].op == "mean":
            total /= np.float32(2)
        if heavy:
            dense[1] = np.float32(0.75) * dense[1] + total
            dense[0] = dense[0] - rate * dense[1]
        elif plan.applies[0].sparse == "lazy":
            at = sorted({*ids[0], *ids[1]})
            dense[0][at] = dense[0][at] * np.float32(0.5) + total[at]
        else:
            dense[0] = dense[0] * np.float32(0.5) + total

    def look(self):
        for id, value in enumerate(self.store.views([0, 1])):
            assert same_bits(np.asarray(value.whole()), self.dense[id])

    def row(self, key):
        return self.dense[0][key]

    def keys(self, rng, turn):
        return [sorted(rng.choice(SIZE, rng.integers(0, 3), replace=False).tolist()) for _ in range(2)]

    def asked(self, rng):
        return rng.integers(0, SIZE, 3).tolist()

    def other(self, what, plan, ids, rate, rng):
        """Values that somebody holds, rounds that are dropped, and checkpoints that are read while rounds go on."""
        if what == "dropped":
            self.go(plan, ids, rate, alone=False, commit=False)
        elif what == "held":
            views, values = self.store.views([0, 1]), [self.dense[id].copy() for id in (0, 1)]
            self.go(plan, ids, rate)
            assert all(same_bits(np.asarray(view.whole()), value) for view, value in zip(views, values, strict=True))
        else:
            self.go(plan, ids, rate)  # which the tables are noted by
            before, places = [self.dense[n].copy() for n in (0, 1)], [id(self.store.find(n).array) for n in (0, 1)]
            held = self.store.freeze([0, 1])
            for _ in range(2):
                self.go(plan, self.keys(rng, 0), rng.random())
            assert places == [id(self.store.find(n).array) for n in (0, 1)]
            assert all(map(same_bits, [np.concatenate(list(value.pieces())) for value in held], before))

    @property
    def missed(self):
        return self.store.find(0).group.updates


class Keyed(Server):
    """Dynamic tables, beside a dict of rows."""

    spec, others = TableSpec((2,), initializer=Constant(3.0)), ("trial", "dropped")

    def declare(self):
        self.store.declare(part_of(0, self.spec))
        self.store.declare(part_of(1, self.spec, slot=SlotTensor("m", "float32", (2,), 0.5)))
        self.rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    ids = staticmethod(lambda own: np.array([own, [1] * len(own)], np.int64))
    plans = staticmethod(partial(plan_of, spec=WHOLE, form="keys"))

    @property
    def table(self):
        return self.store.tables()[0].table

    def step(self, execution, trial=None):
        store, on_trial = self.store, trial is not None
        variables = store.borrow(execution.reads(), not on_trial, {})
        assigned, _ = execution.step(variables, store.take_spare, on_trial=on_trial)
        assert execution.open == (trial is not None)
        assert not assigned.keys() & {0, 1}
        if trial is not None:
            execution.finish(trial)
        if trial is not False:
            store.commit(assigned)
        return trial is not False

    def update(self, plan, heavy, ids, given, rate):
        total = {}
        for own, values in zip(ids, given, strict=True):
            for key, value in zip(own, values, strict=True):
                total[key] = total[key] + value if key in total else value
        for key in total:
            self.rows.setdefault(key, (np.full(2, 3, "f4"), np.full(2, 0.5, "f4")))
        for key, (v, m) in self.rows.items():
            g = total.get(key, np.zeros(2, "f4"))
            if plan.reductions[0].op == "mean":
                g = g / np.float32(2)
            if heavy:
                m = np.float32(0.75) * m + g
                v = v - rate * m
            elif key in total or plan.applies[0].sparse == "exact":
                v = v * np.float32(0.5) + g
            self.rows[key] = v, m
        left = set(self.table.keys().tolist())
        if isinstance(policy := self.spec.eviction, L2WeightEvict):
            assert all(np.linalg.norm(self.rows[key][0]) < policy.threshold for key in self.rows.keys() - left)
        self.rows = {key: rows for key, rows in self.rows.items() if key in left}

    def look(self):
        """All rows, as readers see them, are what they ought to be."""
        assert {*self.table.keys().tolist()} == self.rows.keys()
        keys = np.array(sorted(self.rows), np.int64)
        for id in (0, 1):
            found = self.store.find(id).rows(keys, np)
            assert same_bits(found, np.array([self.rows[key][id] for key in keys.tolist()], "f4").reshape(-1, 2))

    def row(self, key):
        return self.rows[key][0] if key in self.rows else np.full(2, 3, "f4")

    def keys(self, rng, turn):
        return [rng.choice(40 + turn, rng.integers(0, 6), replace=False).tolist() for _ in range(2)]

    def asked(self, rng):
        return rng.integers(0, 200, 3).tolist()

    def other(self, what, plan, ids, rate, rng):
        self.go(plan, ids, rate, trial=what == "trial")

    @property
    def missed(self):
        return self.store.tables()[0].deferred


def evicting(policy):
    return type("Evicting", (Keyed,), {"spec": replace(Keyed.spec, eviction=policy)})


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def kernels(request):
    made = kept_kernels(2, patience=1 if request.param == "compiled" else 10**9, smallest=0)
    for kind in (Arrays, Keyed) if request.param == "compiled" else ():
        warm = kind(made)  # asks for the kernels
        for ids in ([[1], [2]], [[3], [1]], [[2], [1]]):
            warm.go(warm.plans(heavy), ids)
            made.compiler.wait()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "seed"),
    [(Arrays, 0), (Arrays, 1), (Keyed, 0), (evicting(GlobalStepEvict(12)), 0), (evicting(L2WeightEvict(4.0)), 0)],
    ids=["arrays", "arrays again", "all keys stay", "steps evict", "norms evict"],
)
def test_whatever_becomes_of_rounds(kernels, kind, seed):
    """In place, in copies, after a trial, or not at all; failed halfway and readmitted; other updates, means, lookups;
    with evictions: each value is the one of whole updates."""
    server, rng = kind(kernels), np.random.default_rng(seed)
    plans = server.plans
    for turn in range(60):
        what = rng.choice(["go"] * 4 + ["fails", "lazy", "mean", "halve", *server.others])
        ids, rate = server.keys(rng, turn), rng.random()
        if what in server.others:
            server.other(what, plans(heavy), ids, rate, rng)
        elif what == "fails":
            plan, before = plans(heavy, fails=True), server.table and server.table.keys().tolist()
            with pytest.raises(ProgramError):
                server.go(plan, ids, rate, power=-1)
            assert before is None or server.table.keys().tolist() == before
            server.go(plan, ids, rate, power=1)
        elif what in ("halve", "lazy"):
            server.go(plans(halved, sparse="lazy" if what == "lazy" else "exact"), ids, rate)
        else:
            asked = server.asked(rng)
            found = server.go(plans(heavy, "mean" if what == "mean" else "sum"), ids, rate, lookups=asked)
            expected = [server.row(key) for key in asked]
            assert same_bits(found[0], np.array(expected, "f4"))
        if rng.random() < 0.3:
            server.look()
    server.look()


@pytest.mark.parametrize("kind", [Arrays, Keyed])
def test_the_numbers_of_updates_are_forgotten(kernels, monkeypatch, kind):
    """They do not grow without end: each row is made up in its turn, and values stay right."""
    monkeypatch.setattr(module, "RING", 16)
    monkeypatch.setattr(module, "FIRST", 4)
    server, rng = kind(kernels), np.random.default_rng(0)
    for step in range(120):
        key = step if kind is Keyed else SIZE - 1  # a table that grows, or rows that rest
        server.go(server.plans(heavy), [[key], []] if step % 3 else [[], []], rng.random())
        assert server.missed.count <= 16
        assert kind is Keyed or all(len(kept) <= 32 for kept in server.missed._kept)
        if step % 40 == 39:
            server.look()


@pytest.mark.parametrize("kernels", ["compiled"], indirect=True, scope="module")
def test_a_policy_judges_rows_with_all_their_updates(kernels):
    """Rows that have missed what made them small leave as those do that were touched."""
    server = evicting(L2WeightEvict(1.0))(kernels)
    server.go(server.plans(halved), [list(range(100)), []])
    rounds = 0
    while len(server.table):
        server.go(server.plans(halved), [[], []])
        rounds += 1
        assert rounds < 500


def test_a_compiled_round_makes_up_what_rows_have_missed(kernels):
    """Where something else updates the same tables as a whole, again and again: first each row has all its updates."""
    server, added = Arrays(kernels), np.full(TABLE.shape, 1.5, "f4")
    program = Program((Input("variable", TABLE), Input("value", TABLE)), (Node("add", (0, 1)),), ((0, 2),), ())
    applies = tuple(Apply(0, (0,), (table, Ref("reduction", n))) for n, table in enumerate((V, M)))
    plan = Plan((Reduction("sum", TABLE, (0,)),) * 2, (), (program,), applies)
    whole = round_of(plan, share(0, plan, [added, added], []))
    for turn in range(8):
        server.go(server.plans(heavy), [[turn], [3]])
        server.step(Execution(whole, kernels))
        server.dense = {id: dense + added for id, dense in server.dense.items()}
        server.look()
        kernels.compiler.wait()
    assert all(isinstance(each, CompiledRound) for each in whole.prepared.compiled.values())
