"""Rounds of dynamic tables: whatever becomes of them, each row is what whole updates of all rows would have made it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from psserver.devices import Device
from psserver.execution.execution import Execution, StepTables
from psserver.state import missed as module
from psserver.state.variables import Store
from psserver.tables.native import Native
from pswire.api import RowRead
from pswire.errors import ProgramError
from pswire.model.plan import PlacedVariable, VariableSpec
from pswire.model.rows import Rows
from pswire.model.tables import Constant, GlobalStepEvict, L2WeightEvict, SlotTensor, TableSpec
from tests.kit.contributions import WHOLE, part_of, round_of, share
from tests.kit.programs import kept_kernels, same_bits
from tests.psserver.execution.test_exact_rounds import NUMBERS, halved, heavy
from tests.psserver.execution.test_exact_rounds import plan_of as plan_of_rows

MOMENT = SlotTensor("m", "float32", (2,), 0.5)
SPEC = TableSpec((2,), initializer=Constant(3.0))
HEAVY, HALVED = heavy(WHOLE), halved(WHOLE)
plan_of = partial(plan_of_rows, form="keys")


class Server:
    """A store whose rounds are run as the runner runs them, beside rows that have every update at once."""

    def __init__(self, kernels, spec=SPEC):
        self.kernels, self.spec = kernels, spec
        self.store = Store(0, Device(), 0, Native(kernels.compiler))
        self.store.declare(part_of(0, spec))
        self.store.declare(part_of(1, spec, slot=MOMENT))
        self.store.declare(PlacedVariable(2, VariableSpec("other", NUMBERS), (0,)))
        self.store.initialize(2, np.full(3, 2))
        self.rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def table(self):
        return self.store.tables_of([0])[0].stored.table

    def go(self, plan, keys, rate=0.5, *, trial=None, power=None, lookups=()):
        """Runs a round of two members, on trial and then applied or not; returns what the first has looked up."""
        heavy = plan.programs[0] is HEAVY
        given = [np.arange(2 * len(own), dtype="f4").reshape(-1, 2) for own in keys]
        ids = [np.array([own, [1] * len(own)], np.int64) for own in keys]
        operands = [np.asarray(number, "f4") for number in ((rate, 0.75) if heavy else (0.5,))]
        more = [] if power is None else [np.full(3, power)]
        shares = [share(n, plan, [Rows(ids[n], given[n]), *more], operands) for n in range(2)]
        job = round_of(plan, *shares)
        if lookups:
            object.__setattr__(job.parts[0].said, "lookups", (RowRead.of(0, np.array(lookups, np.int64)),))
        execution, store = Execution(job, self.kernels), self.store
        reads = execution.reads()
        tensors = store.tables_of([*reads, *job.prepared.tables])
        tables = StepTables(tensors, -1, trial is not None)
        alone = frozenset() if trial is not None else store.alone(reads)
        assigned, _ = execution.step(store.values_of(reads), alone, store.take_spare, tables=tables)
        assert execution.open == (trial is not None)
        assert not assigned.keys() & {0, 1}
        if trial is not None:
            execution.finish(trial)
        if trial is not False:
            store.commit(assigned, execution.missed)
            self._apply(plan, heavy, keys, given, np.float32(rate))
        return execution.lookups.found.get(1)

    def _apply(self, plan, heavy, keys, given, rate):
        total = {}
        for own, values in zip(keys, given, strict=True):
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
        assert {*self.table.keys().tolist()} == self.rows.keys()
        keys = np.array(sorted(self.rows), np.int64)
        for id in (0, 1):
            found = self.store.tables_of([id])[id].rows(keys)
            assert same_bits(found, np.array([self.rows[key][id] for key in keys.tolist()], "f4").reshape(-1, 2))


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def kernels(request):
    made = kept_kernels(2, patience=1 if request.param == "compiled" else 10**9, smallest=0)
    if request.param == "compiled":
        warm = Server(made)  # asks for the kernels
        for keys in ([[1], [2]], [[3], [1]], [[2], [1]]):
            warm.go(plan_of(HEAVY), keys)
            made.compiler.wait()
    yield made
    made.close()


def draw(rng, many=40):
    return [rng.choice(many, rng.integers(0, 6), replace=False).tolist() for _ in range(2)]


@pytest.mark.parametrize("eviction", [None, GlobalStepEvict(12), L2WeightEvict(4.0)], ids=["all stay", "steps", "norm"])
def test_whatever_becomes_of_rounds(kernels, eviction):
    """Applied at once, after a trial, or not at all; failed halfway; other updates, means, lookups; with evictions."""
    server = Server(kernels, replace(SPEC, eviction=eviction))
    rng = np.random.default_rng(0)
    for turn in range(60):
        what = rng.choice(["go"] * 4 + ["trial", "dropped", "fails", "lazy", "mean", "halve"])
        keys, rate = draw(rng, 40 + turn), rng.random()
        if what == "trial":
            server.go(plan_of(HEAVY), keys, rate, trial=True)
        elif what == "dropped":
            server.go(plan_of(HEAVY), keys, rate, trial=False)
        elif what == "fails":
            plan, before = plan_of(HEAVY, fails=True), server.table.state()
            with pytest.raises(ProgramError):
                server.go(plan, keys, rate, power=-1)
            assert server.table.state().keys.tolist() == before.keys.tolist()
            server.go(plan, keys, rate, power=1)
        elif what == "halve":
            server.go(plan_of(HALVED), keys, rate)
        elif what == "lazy":
            server.go(plan_of(HALVED, sparse="lazy"), keys, rate)
        else:
            asked = rng.integers(0, 200, 3).tolist()
            found = server.go(plan_of(HEAVY, "mean" if what == "mean" else "sum"), keys, rate, lookups=asked)
            expected = [server.rows[key][0] if key in server.rows else np.full(2, 3, "f4") for key in asked]
            assert same_bits(found[0], np.array(expected, "f4"))
        if rng.random() < 0.3:
            server.look()
    server.look()


def test_the_numbers_of_updates_are_forgotten(kernels, monkeypatch):
    """They do not grow without end while a table does: each row is made up in its turn, and values stay right."""
    monkeypatch.setattr(module, "RING", 16)
    monkeypatch.setattr(module, "FIRST", 4)
    server = Server(kernels)
    for step in range(120):
        server.go(plan_of(HEAVY), [[step], []] if step % 3 else [[], []])
        assert server.store.tables_of([0])[0].stored.missed.count <= 16
        if step % 30 == 29:
            server.look()


@pytest.mark.parametrize("kernels", ["compiled"], indirect=True, scope="module")
def test_a_policy_judges_rows_with_all_their_updates(kernels):
    """Rows that have missed what made them small leave as those do that were touched."""
    server = Server(kernels, replace(SPEC, eviction=L2WeightEvict(1.0)))
    server.go(plan_of(HALVED), [list(range(100)), []])
    rounds = 0
    while len(server.table):
        server.go(plan_of(HALVED), [[], []])
        rounds += 1
        assert rounds < 500
