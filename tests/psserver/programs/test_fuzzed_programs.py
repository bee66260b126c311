"""Programs from the network: whatever the bytes, they are refused, or run within the memory that was foreseen."""

from __future__ import annotations

import ast
import tracemalloc

from hypothesis import example, given
from hypothesis import strategies as st

from psserver.devices import Device
from psserver.programs.interpreter import peak_bytes
from psserver.programs.kernels.codegen import Form, cuda_source, numba_source
from psserver.programs.kernels.fusion import split
from psserver.programs.kernels.kernels import Kernels, row_form
from psserver.programs.kernels.row_steps import split_rows
from pswire.encoding import messages
from pswire.encoding.verbs import parse
from pswire.errors import PSError
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.row_updates import refusal
from pswire.model.tensor import DTYPES, TensorSpec
from pswire.pb import parameter_server_pb2 as pb
from tests.kit.programs import expected, job_of, numbers, plan_of, programs, run

LIMIT = 1 << 26
"""Bytes that a server would give to a program and to its inputs."""

SLACK = 1 << 19
"""Bytes of Python's own, and of NumPy's buffers: 8192 elements of each array of an op, of up to 16 bytes."""

BIG = ((100_000,), (320, 320))


def mutated(data: bytes, changes) -> bytes:
    out = bytearray(data)
    for at, byte, kind in changes:
        at %= len(out) + 1
        out[at : at + (kind > 0)] = bytes([byte])[: kind < 2]
    return bytes(out)


CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255), st.integers(0, 2)), max_size=4)


WORDS = [*OPS, *DTYPES, "", "axis", "keepdims", "shape", "dtype", "__class__"]
SIZES = [0, 1, 2, 3, 7, 63, 320, 100_000, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
HUGE = [*SIZES, 1 << 40, (1 << 63) - 1]


@st.composite
def altered(draw, programs):
    """A message of a program in which some fields have other values, each of its own type."""
    message = messages.PROGRAM.to_pb(draw(programs))
    for _ in range(draw(st.integers(1, 4))):
        node = draw(st.sampled_from(message.nodes or [pb.Node()]))
        spec = draw(st.sampled_from(message.inputs)).spec
        match draw(st.sampled_from(["op", "args", "attr", "attrs", "dtype", "shape", "assign", "output", "node"])):
            case "op":
                node.op = draw(st.sampled_from(WORDS))
            case "args":
                node.args[:] = draw(st.lists(st.sampled_from(SIZES), max_size=4))
            case "attr" if node.attrs:
                values(draw, draw(st.sampled_from(node.attrs)))
            case "attrs":
                values(draw, node.attrs.add(name=draw(st.sampled_from(WORDS))))
            case "dtype":
                spec.dtype = draw(st.sampled_from(WORDS))
            case "shape":
                spec.shape[:] = draw(st.lists(st.sampled_from(HUGE), max_size=4))
            case "assign":
                message.assigns.add(target=draw(st.sampled_from(SIZES)), value=draw(st.sampled_from(SIZES)))
            case "output":
                message.outputs.append(draw(st.sampled_from(SIZES)))
            case "node":
                message.nodes.add().CopyFrom(node)
    return message.SerializeToString()


def values(draw, attr):
    number = st.sampled_from([*HUGE, -1, -2, -(1 << 63)])
    match draw(st.sampled_from(["flag", "number", "real", "text", "numbers", "none"])):
        case "flag":
            attr.flag = True
        case "number":
            attr.number = draw(number)
        case "real":
            attr.real = draw(st.floats())
        case "text":
            attr.text = draw(st.sampled_from(WORDS))
        case "numbers":
            attr.numbers.values[:] = draw(st.lists(number, max_size=40))
        case "none":
            attr.ClearField(attr.WhichOneof("value") or "flag")


def inputs_of(program: Program):
    return [
        numbers(item.spec.dtype, item.spec.size, place).reshape(item.spec.shape)
        for place, item in enumerate(program.inputs)
    ]


MUTATED = st.builds(
    lambda program, changes: mutated(messages.PROGRAM.to_pb(program).SerializeToString(), changes),
    programs(BIG),
    CHANGES,
)


ASSIGNS_NOTHING = bytes.fromhex(
    "0a0f0801120b0a04626f6f6c1203a08d060a0f0801120b0a04696e74381203a08d060a120802120e0a07666c6f6174333212"
    "03a08d060a0a080312060a04626f6f6c12200a0373756d1201001a080a046178697332001a0c0a086b65657064696d731001"
    "2801"
)


@given(data=MUTATED | altered(programs(BIG)))
@example(data=ASSIGNS_NOTHING)
def test_a_fuzzed_message_is_refused_or_runs_within_its_bound(data):
    """Decoding, verifying and running raise nothing but errors of ours, and take no more than was computed before."""
    try:
        received = messages.PROGRAM.from_pb(parse(pb.Program, data))
        bound = peak_bytes(received)
    except PSError:
        return
    for step in split(received):
        if step.shape is not None:
            numba_source(Form(step.program))
            cuda_source(Form(step.program))
    given = [number for number, item in enumerate(received.inputs) if item.kind == "value"]
    last = split_rows(received)[-1] if refusal(received, given) is None else None
    if last is not None and last.shape is not None:
        assert all(ast.parse(text) for text in (row_form(last).rows, row_form(last).replay))
    if bound + sum(item.spec.nbytes for item in received.inputs) > LIMIT:
        return
    inputs = inputs_of(received)
    tracemalloc.start()
    try:
        expected(received, inputs)
    except PSError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= bound + SLACK


HALF = TensorSpec("float16", (400_000,))
HALVES = Program((Input("variable", HALF),), (Node("mean", (0,), (("axis", ()),)),), ((0, 1),), ())
"""NumPy takes the mean of half precision in another one."""


class Ready(Kernels):
    """Kernels that do nothing, at once: what is measured is the memory around them."""

    def __init__(self) -> None:
        super().__init__(Device(), smallest=0)
        self.compiler.elementwise = lambda form, now=False: lambda *_: 0  # type: ignore[method-assign, assignment]


@example(program=HALVES)
@given(program=programs(BIG))
def test_steps_take_no_more_memory_than_the_whole(program):
    """With nothing written in place, and values let go as soon as the interpreter would let them go."""
    plan = plan_of(program, returned=False)
    arrays = inputs_of(program)
    kinds = [item.kind for item in program.inputs]
    variables = dict(enumerate(a for a, kind in zip(arrays, kinds, strict=True) if kind == "variable"))
    values, operands = ([a for a, k in zip(arrays, kinds, strict=True) if k == kind] for kind in ("value", "operand"))
    job = job_of(plan, [values], operands, part_bytes=1 << 30)
    kernels = Ready()
    peaks = []
    for _ in range(3):  # the first remembers things anew; in any one the interpreter may enlarge its table of strings
        tracemalloc.start()
        try:
            run(job, kernels, variables)
        except PSError:
            pass
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    compared = 2 * sum(operand.nbytes for operand in operands)
    assert min(peaks) <= peak_bytes(program) + compared + SLACK
