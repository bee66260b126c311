"""Random programs: the same bits from NumPy, traced and interpreted, and compiled; what is verified runs, and whatever
bytes come from a network, they are refused, or run within the memory that was foreseen."""

from __future__ import annotations

import ast
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from psclient._src.tracing.recorder import Recording, trace
from psserver.devices import ServerDevice
from psserver.plans.prepared import PreparedPlan
from psserver.programs.interpreter import peak_bytes
from psserver.programs.kernels.codegen import Form, cuda_source, numba_source
from psserver.programs.kernels.fusion import split
from psserver.programs.kernels.kernels import Kernels, row_form
from psserver.programs.kernels.row_steps import split_rows
from pswire.encoding import messages
from pswire.encoding.verbs import parse
from pswire.errors import ProgramError, PSError
from pswire.model.plan import Apply
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.row_updates import refusal
from pswire.model.tensor import DTYPES, TensorSpec, spec_of
from pswire.pb import parameter_server_pb2 as pb
from tests.kit.attacks import mutated, spoil
from tests.kit.cases import search
from tests.kit.programs import expected, job_of, numbers, plain, plan_of, programs, run, same_bits
from tests.kit.rig import WORKERS

INTERPRETED = Kernels(ServerDevice(), patience=10**9)


@pytest.fixture(scope="module")
def kernels():
    made = Kernels(ServerDevice(), 2, patience=1, smallest=0)
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


SHAPES = [(), (3,), (0,), (1, 3), (2, 1), (2, 3), (3, 2), (3, 0, 2), (1,) * 32]
INTEGERS = [0, 1, 2, -1, -2, 31, 32, 1 << 31, (1 << 63) - 1, -(1 << 63)]
WORDS = [*DTYPES, "", "0", "object", "axis", "float33"]
SMALL = 1 << 20

integers = st.sampled_from(INTEGERS)
shapes = st.lists(integers, max_size=4).map(tuple) | st.sampled_from([*SHAPES, (0, 1), (1, 1), (1,) * 40])
floats = st.floats() | st.sampled_from([math.nan, math.inf])
attributes = st.one_of(st.none(), st.booleans(), integers, floats, st.sampled_from(WORDS), shapes)


@st.composite
def applied_ops(draw):
    """A program of one op, with attributes of its names and of any values."""
    row = draw(st.sampled_from(tuple(OPS.values())))
    shape = st.sampled_from(SHAPES)
    inputs = [Input("value", TensorSpec(draw(st.sampled_from(tuple(DTYPES))), draw(shape))) for _ in range(row.arity)]
    attrs = {name: draw(attributes) for name in sorted(row.attrs) if draw(st.integers(0, 9))}
    return Program(tuple(inputs), (Node(row.name, tuple(range(row.arity)), tuple(attrs.items())),), (), (row.arity,))


@search(4)
@given(program=applied_ops() | programs())
def test_what_is_verified_runs(program):
    """And gives what was foreseen; a value that an op refuses, and memory, are all that may stop it."""
    try:
        received = messages.MAPPER.pairs[Program].from_pb(messages.MAPPER.pairs[Program].to_pb(program))
        specs = received.output_specs
    except PSError:
        return
    assume(not received.may_refuse and sum(spec.size for spec in received.specs) < SMALL)
    inputs = [numbers(item.spec.dtype, item.spec.size, n) for n, item in enumerate(received.inputs)]
    shaped = [array.reshape(item.spec.shape) for array, item in zip(inputs, received.inputs, strict=True)]
    _, outputs = expected(received, shaped)
    assert tuple(map(spec_of, outputs)) == specs


LIMIT = 1 << 26
"""Bytes that a server would give to a program and to its inputs."""

SLACK = 1 << 19
"""Bytes of Python's own, and of NumPy's buffers: 8192 elements of each array of an op, of up to 16 bytes."""

BIG, LONGEST = ((100_000,), (320, 320)), 1 << 12


@st.composite
def spoilt(draw):
    """A program's message in which some fields have other values, each of its own type, and some bytes are others."""
    message = messages.MAPPER.pairs[Program].to_pb(draw(programs(BIG)))
    for _ in range(draw(st.integers(0, 4))):
        spoil(draw, message)
    assume(message.ByteSize() < LONGEST)
    return mutated(draw, message.SerializeToString())


def message_of(program):
    return messages.MAPPER.pairs[Program].to_pb(program).SerializeToString()


HALF = Input("variable", TensorSpec("float16", (400_000,)))
HALVES = Program((HALF,), (Node("mean", (0,), (("axis", ()),)),), ((0, 1),), ())
"""NumPy takes the mean of half precision in another one."""
NO_AXES = Program((HALF,), (Node("max", (0,), (("axis", ()),)),), ((0, 1),), ())
"""The greatest over no axis is as large as its argument."""
ASSIGNS_NOTHING = bytes.fromhex(
    "0a0f0801120b0a04626f6f6c1203a08d060a0f0801120b0a04696e74381203a08d060a120802120e0a07666c6f6174333212"
    "03a08d060a0a080312060a04626f6f6c12200a0373756d1201001a080a046178697332001a0c0a086b65657064696d731001"
    "2801"
)


@given(data=spoilt())
@example(data=ASSIGNS_NOTHING)
@example(data=message_of(HALVES))
@example(data=message_of(NO_AXES))
def test_a_fuzzed_message_is_refused_or_runs_within_its_bound(data):
    """Decoding, verifying and running raise nothing but errors of ours, and take no more than was computed before."""
    try:
        program = messages.MAPPER.pairs[Program].from_pb(parse(pb.Program, data))
        bound = peak_bytes(program)
    except PSError:
        return
    for step in split(program):
        if step.shape is not None:
            numba_source(Form(step.program))
            cuda_source(Form(step.program))
    given = [number for number, item in enumerate(program.inputs) if item.kind == "value"]
    last = split_rows(program)[-1] if refusal(program, given) is None else None
    if last is not None and last.shape is not None:
        assert all(ast.parse(text) for text in (row_form(last).rows, row_form(last).replay))
    if bound + sum(item.spec.nbytes for item in program.inputs) > LIMIT:
        return
    inputs = inputs_of(program, 0)
    tracemalloc.start()
    try:
        expected(program, inputs)
    except PSError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= bound + SLACK
