"""Random functions: the same bits from NumPy, traced and interpreted, and compiled, whatever shares memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from psclient._src.tracing.recorder import Recording, trace
from psserver.devices import Device
from psserver.plans.prepared import PreparedPlan
from psserver.programs.kernels.kernels import Kernels
from pswire.errors import ProgramError
from pswire.model.plan import Apply
from pswire.model.program import Program
from tests.kit.cases import search
from tests.kit.programs import expected, job_of, numbers, plain, plan_of, programs, run, same_bits
from tests.kit.rig import WORKERS

INTERPRETED = Kernels(Device(), patience=10**9)


@pytest.fixture(scope="module")
def kernels():
    made = Kernels(Device(), 2, patience=1, smallest=0)
    yield made
    made.close()


def inputs_of(program, seed):
    specs = enumerate(item.spec for item in program.inputs)
    return [numbers(spec.dtype, spec.size, seed + i).reshape(spec.shape) for i, spec in specs]


def all_same(ones, others):
    return len(ones) == len(others) and all(map(same_bits, ones, others))


def finite(array):
    return np.isfinite(array.astype("complex128" if array.dtype.kind == "c" else "float64"))


@search(2)
@given(program=programs(), seed=st.integers(0, 1000))
def test_the_interpreter_gives_what_numpy_gives(program, seed):
    """A program is run on arrays as the function would be that it was made of, and as its trace is."""
    inputs = inputs_of(program, seed)
    try:
        assigned, outputs = expected(program, inputs)
    except ProgramError:
        assume(False)
    wanted = plain(program, inputs)
    targets = [target for target, _ in program.assigns]
    assert all_same([assigned[target] for target in targets], [np.asarray(value) for value in wanted[0]])
    assert all_same(outputs, [np.asarray(value) for value in wanted[1]])

    again, used, places = traced_again(program)
    assigned, outputs = expected(again, [inputs[place] for place in used])
    targets = [used.index(target) for target, _ in program.assigns]
    assert all_same([assigned[target] for target in targets], [np.asarray(value) for value in wanted[0]])
    assert all_same([outputs[place] for place in places], [np.asarray(value) for value in wanted[1]])


def traced_again(program):
    """The trace of the function that a program could be made of, which of its inputs it uses, and its outputs."""
    recording = Recording()
    specs = [item.spec for item in program.inputs]
    variables = [recording.variable(spec, f"v{n}", ("variable", n)) for n, spec in enumerate(specs[:2])]
    values = [recording.value(spec, ("value", n)) for n, spec in enumerate(specs[2:], 2)]

    def function():
        made, given_back = plain(program, [*(variable.value() for variable in variables), *values])
        for (target, _), value in zip(program.assigns, made, strict=True):
            variables[target].assign(value)
        return given_back

    found = trace(recording, function, ())
    return found.program, [number for _, number in found.origins], [leaf.index for leaf in found.result]


@search(0.5)
@given(
    program=programs(), seed=st.integers(0, 1000), double=st.booleans(), workers=st.integers(1, 3), bad=st.booleans()
)
def test_kernels_give_what_numpy_gives(kernels, program, seed, double, workers, bad):
    """However contributions are cut, also where a program reads one variable or one reduction by two names, and where
    it writes in place; variables and contributions that are not finite are found, and no others."""
    two = double and program.inputs[0].spec == program.inputs[1].spec
    program = replace(program, assigns=program.assigns[:1]) if two else program
    inputs = inputs_of(program, seed)
    for array in inputs if not bad else ():
        array[~finite(array)] = 1
    plan = plan_of(program)
    (apply,) = plan.applies
    if two:
        plan = replace(plan, applies=(Apply(0, (0,), (apply.args[0], apply.args[0], *apply.args[2:])),))
        inputs[1] = inputs[0]
    values, before = dict(enumerate(inputs[:2])), [array.copy() for array in inputs]
    contributions = [[np.roll(inputs[2], place)] for place in range(workers)]
    job = job_of(plan, contributions, inputs[3:], part_bytes=16 * seed % 112 + 16)
    summed = plan_of(Program(program.inputs, (), (), (2,)))
    (reduced,) = run(replace(job, prepared=PreparedPlan(summed, 0)), INTERPRETED, values).given
    try:
        with np.errstate(all="ignore"):
            wanted = plain(program, [*inputs[:2], reduced, inputs[3]])
        interpreted = run(job, INTERPRETED, values)
        run(job, kernels, values)
    except (ProgramError, ValueError):
        assume(False)
    poisoned = [(0, WORKERS[place]) for place in range(workers) if not finite(inputs[2]).all()]
    assert interpreted.found.contributions == poisoned
    kernels.compiler.wait()
    runs = [run(job, kernels, {n: array.copy() for n, array in values.items()}, frozenset(plan.writes(0)))]
    for found in (interpreted, run(job, kernels, values), *runs):
        places = [apply.args[target].index for target, _ in program.assigns]
        assert all_same([found.assigned[place] for place in places], [np.asarray(value) for value in wanted[0]])
        assert all_same(found.given, [np.asarray(value) for value in wanted[1]])
        assert {*found.found.variables} == {id for id, value in found.assigned.items() if not finite(value).all()}
        assert {*found.found.contributions} <= {*poisoned}  # kernels do not look at what nothing comes of
    assert all_same(inputs, before)
