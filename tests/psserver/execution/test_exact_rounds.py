"""Rounds of updates that are made up later: whatever becomes of a round, each value is the one of whole updates."""

from __future__ import annotations

import numpy as np
import pytest

from psserver.devices import Device
from psserver.execution.execution import Execution
from psserver.state import missed as module
from psserver.state.missed import MissedUpdates, pieces, whole
from psserver.state.variables import Store
from pswire.api import RowRead
from pswire.errors import ProgramError
from pswire.model.plan import Apply, Operand, PlacedVariable, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from tests.kit.contributions import round_of, rows, share
from tests.kit.programs import kept_kernels, same_bits

SIZE = 9
TABLE, NUMBER, NUMBERS = TensorSpec("float32", (SIZE, 2)), TensorSpec("float32", ()), TensorSpec("int64", (3,))
V, M, OTHER = (Ref("variable", n) for n in range(3))
POWER = Program((Input("variable", NUMBERS), Input("value", NUMBERS)), (Node("pow", (0, 1)),), ((0, 2),), ())


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


HEAVY, HALVED = heavy(TABLE), halved(TABLE)


def plan_of(program, op="sum", sparse="exact", *, fails=False, form="rows"):
    """A plan that updates the tables by rows or keys; one that may fail raises numbers to a power after it."""
    variables = [V, M][: [item.kind for item in program.inputs].count("variable")]
    operands = [Ref("operand", n) for n in range(len(program.inputs) - len(variables) - 1)]
    reductions = [Reduction(op, program.inputs[0].spec, (0,), "", form)]
    applies = [Apply(0, (0,), (*variables, Ref("reduction", 0), *operands), sparse)]
    programs = [program]
    if fails:
        reductions.append(Reduction("sum", NUMBERS, (0,)))
        programs.append(POWER)
        applies.append(Apply(1, (0,), (OTHER, Ref("reduction", 1))))
    return Plan(tuple(reductions), tuple(Operand(NUMBER, (0,)) for _ in operands), tuple(programs), tuple(applies))


class Server:
    """A store whose rounds are run as the runner runs them, beside arrays that have every update at once."""

    def __init__(self, kernels):
        self.kernels = kernels
        self.store = Store(0, Device(), 0)
        self.dense = {}
        for id, spec in enumerate([TABLE, TABLE, NUMBERS]):
            self.store.declare(PlacedVariable(id, VariableSpec(f"v{id}", spec, True), (0,)))
            first = np.full(spec.shape, 2, spec.dtype) if id else np.arange(spec.size, dtype="f4").reshape(spec.shape)
            self.store.initialize(id, first.copy())
            self.dense[id] = first

    def go(self, plan, ids, rate, *, alone=True, commit=True, power=None, lookups=()):
        """Runs a round of two members; returns what the first has looked up."""
        given = [rows(*ids[n], of=np.arange(2 * len(ids[n]), dtype="f4").reshape(-1, 2)) for n in range(2)]
        heavy = plan.programs[0] is HEAVY
        operands = [np.asarray(number, "f4") for number in ((rate, 0.75) if heavy else (0.5,))]
        more = [] if power is None else [np.full(3, power)]
        job = round_of(plan, *(share(n, plan, [given[n], *more], operands) for n in range(2)))
        if lookups:
            object.__setattr__(job.parts[0].said, "lookups", (RowRead.of(0, np.array(lookups, np.int64)),))
        execution, store = Execution(job, self.kernels), self.store
        reads = frozenset(store.missed_of(execution.reads())).union(execution.reads())
        free = store.alone(reads) if alone else frozenset()
        held = store.held_of(reads, free) if alone else {}
        store.note_tables(execution.job.prepared.row_tables)
        assigned, _ = execution.step(store.values_of(reads), free, store.take_spare, store.missed_of(reads), held)
        if not commit:
            return None
        store.commit(assigned, execution.missed)
        total = np.zeros(TABLE.shape, "f4")
        for one in given:
            total[one.ids] += one.values
        if plan.reductions[0].op == "mean":
            total /= np.float32(2)
        if heavy:
            self.dense[1] = np.float32(0.75) * self.dense[1] + total
            self.dense[0] = self.dense[0] - np.float32(rate) * self.dense[1]
        elif plan.applies[0].sparse == "lazy":
            at = sorted({*ids[0], *ids[1]})
            self.dense[0][at] = self.dense[0][at] * np.float32(0.5) + total[at]
        else:
            self.dense[0] = self.dense[0] * np.float32(0.5) + total
        return execution.lookups.found.get(1)

    def look(self):
        for id, value in enumerate(self.store.views([0, 1])):
            assert same_bits(np.asarray(whole(value)), self.dense[id])

    @property
    def missed(self) -> MissedUpdates:
        return self.store.missed_of([0])[0]


@pytest.fixture(params=["interpreted", "compiled"])
def server(request):
    kernels = kept_kernels(2, patience=1 if request.param == "compiled" else 10**9, smallest=0)
    made = Server(kernels)
    if request.param == "compiled":
        warm = Server(kernels)  # asks for the kernels
        for ids in ([[1], [2]], [[3], [1]], [[2], [1]]):
            warm.go(plan_of(HEAVY), ids, 0.5)
            kernels.compiler.wait()
    yield made
    kernels.close()


def draw(rng):
    return [sorted(rng.choice(SIZE, rng.integers(0, 3), replace=False).tolist()) for _ in range(2)]


def save(server, plan, rng):
    """A checkpoint that is read while rounds go on has the values of its round, and the tables stay where they are."""
    server.go(plan, draw(rng), rng.random())  # which the tables are noted by
    before, places = [server.dense[n].copy() for n in (0, 1)], [id(server.store.value(n)) for n in (0, 1)]
    values = server.store.hold([0, 1])
    for _ in range(2):
        server.go(plan, draw(rng), rng.random())
    assert places == [id(server.store.value(n)) for n in (0, 1)]
    found = [np.concatenate(list(pieces(value))) for value in values]
    assert all(map(same_bits, found, before))
    server.go(plan, draw(rng), rng.random())


@pytest.mark.parametrize("seed", range(3))
def test_whatever_becomes_of_rounds(server, seed):
    """In place, in copies, on trial and dropped, failed halfway and taken back; other updates, means, lookups."""
    rng = np.random.default_rng(seed)
    for _ in range(60):
        what = rng.choice(["go"] * 4 + ["held", "saved", "dropped", "fails", "lazy", "mean", "halve"])
        ids, rate = draw(rng), rng.random()
        if what == "saved":
            save(server, plan_of(HEAVY), rng)
        elif what == "held":
            views, values = server.store.views([0, 1]), [server.dense[id].copy() for id in (0, 1)]
            server.go(plan_of(HEAVY), ids, rate)
            assert all(same_bits(np.asarray(whole(view)), value) for view, value in zip(views, values, strict=True))
            del views
        elif what == "dropped":
            server.go(plan_of(HEAVY), ids, rate, alone=False, commit=False)
        elif what == "fails":
            plan = plan_of(HEAVY, fails=True)
            with pytest.raises(ProgramError):
                server.go(plan, ids, rate, power=-1)
            server.go(plan, ids, rate, power=1)
        elif what == "halve":
            server.go(plan_of(HALVED), ids, rate)
        elif what == "lazy":
            server.go(plan_of(HALVED, sparse="lazy"), ids, rate)
        else:
            asked = rng.integers(0, SIZE, 3).tolist()
            found = server.go(plan_of(HEAVY, "mean" if what == "mean" else "sum"), ids, rate, lookups=asked)
            assert same_bits(found[0], server.dense[0][asked])
        if rng.random() < 0.3:
            server.look()
    server.look()


def test_the_numbers_of_updates_are_forgotten(server, monkeypatch):
    """They do not grow without end: each row is made up in its turn, and values stay right."""
    monkeypatch.setattr(module, "RING", 16)
    monkeypatch.setattr(module, "FIRST", 4)
    rng = np.random.default_rng(0)
    for step in range(200):
        server.go(plan_of(HEAVY), [[8], []] if step % 3 else [[], []], rng.random())
        assert server.missed.count <= 16
        assert all(len(kept) <= 32 for kept in server.missed._kept)
        if step % 50 == 49:
            server.look()
