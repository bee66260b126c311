"""A round compiled: it has the same bits as without, and computes numbers once. What else rounds that repeat meet, such
as other weights, `core/test_repeated_rounds.py` shows."""

from dataclasses import replace

import numpy as np
import pytest

from psserver.devices import ServerDevice
from psserver.execution import execution
from psserver.execution.compiled import CompiledRound
from psserver.programs.kernels.kernels import Kernels
from pswire.model.plan import Apply, Operand, Plan, Reduction, Ref
from pswire.model.tensor import TensorSpec, spec_of
from tests.kit.programs import job_of, run, same_bits, traced

SIZES = (8, 9, 30)
NUMBER = TensorSpec("float32", ())
STEP, FIRST = 0, 1
"""Numbers of the variable that counts steps, and of the first one that is trained; its momentum comes after it."""


def adam(v, m, t, g):
    m.assign(0.9 * m + 0.1 * g)
    v.assign_sub(0.01 * m / (1 - 0.9**t))


def adam_alone(v, m, t, g):
    """As `adam`, with a number of steps of its own."""
    step = t.assign_add(1.0)
    m.assign(0.9 * m + 0.1 * g)
    v.assign_sub(0.01 * m / (1 - 0.9**step))


class Steps:
    """A plan that trains variables as Adam does, and gives back a number. Args: sizes: of the variables; op: how
    gradients are reduced; alone: True if each variable has its own number of steps, and is left out where nobody has a
    gradient. Attributes: plan: the plan; operands: the numbers of its programs; values: its variables."""

    def __init__(self, sizes=SIZES, op="sum", alone=False):
        self.operands, self._programs, self._applies = [], [], []
        self.values = {STEP: np.float32(0).reshape(())}
        self._add(lambda t: t.assign_add(1.0), [Ref("variable", STEP)], [NUMBER], [])
        reductions = [Reduction("mean", NUMBER, (0,))]
        for place, size in enumerate(sizes):
            spec, first = TensorSpec("float32", (size,)), FIRST + 2 * place
            number = Ref("variable", 100 + place if alone else STEP)
            self.values.setdefault(number.index, np.float32(0).reshape(()))
            refs = [*(Ref("variable", n) for n in (first, first + 1)), number, Ref("reduction", len(reductions))]
            self._add(adam_alone if alone else adam, refs, [spec, spec, NUMBER], [spec], alone)
            reductions.append(Reduction(op, spec, (0,)))
            self.values |= {first: random(size, 99), first + 1: random(size, 98)}
        operands = tuple(Operand(spec_of(array), (0,)) for array in self.operands)
        parts = tuple(reductions), operands, tuple(self._programs), tuple(self._applies)
        self.plan, self.sizes = Plan(*parts, (Ref("reduction", 0),)), sizes

    def _add(self, fn, refs, variables, values, optional=False):
        program, met = traced(fn, variables, values)
        rest, operands = iter(refs), map(self._operand, met)
        args = [next(operands if item.kind == "operand" else rest) for item in program.inputs]
        self._programs.append(program)
        self._applies.append(Apply(len(self._programs) - 1, (0,), tuple(args), optional=optional))

    def _operand(self, array):
        same = [n for n, each in enumerate(self.operands) if same_bits(each, array)]
        if not same:
            self.operands.append(array)
        return Ref("operand", same[0] if same else len(self.operands) - 1)

    def fresh(self):
        return {id: np.array(value) for id, value in self.values.items()}

    def job(self, members=2, seed=0):
        """A round of it."""
        return job_of(self.plan, sent(members, seed, self.sizes), self.operands)


def random(size, seed):
    return np.random.default_rng(seed).normal(size=size).astype("float32")


def sent(members=2, seed=0, sizes=SIZES):
    """What each member contributes: a number, and gradients, which are others with each seed."""
    return [[np.float32(n).reshape(()), *(random(size, 7 * seed + n) for size in sizes)] for n in range(members)]


def train(kernels, jobs, values):
    """Runs rounds, one after the other, with the plan of the first; returns the last outcome."""
    for job in jobs:
        found = run(replace(job, prepared=jobs[0].prepared), kernels, values, frozenset(values))
        values.update(found.assigned)
    return found


def warmed(kernels, steps, members=2):
    """A job whose next rounds are compiled."""
    job = steps.job(members)
    for _ in range(3):
        run(job, kernels, steps.fresh())
        kernels.compiler.wait()
    return job


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("members", [1, 3])
def test_a_compiled_round_has_the_bits_of_any_other(kernels, monkeypatch, op, members):
    """Over several rounds, in place; numbers that all variables need alike are computed once."""
    steps = Steps(op=op)
    jobs = [warmed(kernels, steps, members=members), *(steps.job(members, seed) for seed in range(1, 5))]
    assert len(jobs[0].prepared.outline.applications) == 2 + len(SIZES)
    values, before = steps.fresh(), kernels.interpretations
    arrays = dict(values)
    found = train(kernels, jobs, values)
    assert [bool(each) for each in jobs[0].prepared.compiled.values()] == [True]
    assert kernels.interpretations - before == 2 * len(jobs)
    assert all(values[id] is arrays[id] for id in values if id != STEP)
    monkeypatch.setattr(execution, "compiled", lambda *_: None)
    expected = steps.fresh()
    other = train(kernels, jobs, expected)
    assert all(same_bits(values[id], expected[id]) for id in values)
    assert [each.tolist() for each in found.given] == [each.tolist() for each in other.given]
    assert values[STEP] == len(jobs)
    plain = steps.fresh()
    train(Kernels(ServerDevice()), [steps.job(members, seed) for seed in range(5)], plain)
    assert all(same_bits(values[id], plain[id]) for id in values)


def test_what_is_left_out_counts_no_step(kernels):
    """Where each variable has its own number of steps, of which its corrections are computed."""
    steps = Steps(alone=True)
    job = warmed(kernels, steps)
    assert len(job.prepared.outline.applications) == 1 + 2 * len(SIZES)
    without = job_of(steps.plan, [[loss, first, None, last] for loss, first, _, last in sent()], steps.operands)
    values, expected = steps.fresh(), steps.fresh()
    train(kernels, [job, without] * 2 + [job], values)
    train(Kernels(ServerDevice()), [steps.job(), without] * 2 + [job], expected)
    assert all(same_bits(values[id], expected[id]) for id in values)
    assert [float(values[100 + place]) for place in range(len(SIZES))] == [5.0, 3.0, 5.0]
    assert [type(each) for each in job.prepared.compiled.values()] == [CompiledRound, type(None)]


def test_nan_is_found_and_its_sender_named(kernels):
    """As without: which variables have it, and who has sent it."""
    steps, given = Steps(), sent()
    job, values = warmed(kernels, steps), steps.fresh()
    given[1][2][4] = np.nan
    poisoned = replace(job_of(steps.plan, given, steps.operands), prepared=job.prepared)
    found = run(poisoned, kernels, values, frozenset(values)).found
    assert found.contributions == [(2, poisoned.parts[1].member.task)]
    assert set(found.variables) == {FIRST + 2, FIRST + 3}


def test_numbers_of_a_variable_that_was_assigned_since_are_computed_anew():
    """Not those that were computed of its value of before."""
    steps = Steps((4, 4))
    tick = steps.plan.applies[0]
    first, second = steps.plan.applies[1:]
    plan = replace(steps.plan, applies=(first, tick, second))
    job = job_of(plan, [[np.float32(0).reshape(()), random(4, 1), random(4, 2)]], steps.operands)
    assert len(job.prepared.outline.applications) == 5
    values = steps.fresh() | {STEP: np.float32(1).reshape(())}
    found = run(job, Kernels(ServerDevice()), values).assigned
    expected = [values[FIRST + 2 * n] - _moved(values[FIRST + 2 * n + 1], random(4, n + 1), n + 1) for n in range(2)]
    assert [found[FIRST + 2 * n].tolist() for n in range(2)] == [each.tolist() for each in expected]


def _moved(m, g, t):
    f = np.float32
    return f(0.01) * (f(0.9) * m + f(0.1) * g) / (f(1) - f(0.9) ** f(t))
