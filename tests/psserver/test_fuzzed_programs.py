"""Programs from the network: whatever the bytes, they are refused, or run within the memory that was foreseen."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
from programs import expected, job_of, numbers, plan_of, programs

from psserver import executor
from psserver.arrays import Device
from psserver.interpreter import peak_bytes
from psserver.kernels.kernels import Kernels
from pswire import codec
from pswire.errors import PSError
from pswire.pb import parameter_server_pb2 as pb
from pswire.program import Program
from pswire.wire import parse

LIMIT = 1 << 26
"""Bytes that a server would give to a program and to its inputs."""

SLACK = 1 << 18
"""Bytes of Python's own, and of NumPy's buffers."""

BIG = ((100_000,), (320, 320))


def mutated(data: bytes, changes) -> bytes:
    """Some bytes replaced, inserted or left out."""
    out = bytearray(data)
    for at, byte, kind in changes:
        at %= len(out) + 1
        out[at : at + (kind > 0)] = bytes([byte])[: kind < 2]
    return bytes(out)


CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255), st.integers(0, 2)), max_size=4)


def inputs_of(program: Program):
    return [
        numbers(item.spec.dtype, item.spec.size, place).reshape(item.spec.shape)
        for place, item in enumerate(program.inputs)
    ]


@given(program=programs(BIG), changes=CHANGES)
def test_a_fuzzed_message_is_refused_or_runs_within_its_bound(program, changes):
    """Decoding, verifying and running raise nothing but errors of ours, and take no more than was computed before."""
    data = mutated(codec.program_to_pb(program).SerializeToString(), changes)
    try:
        received = codec.program_from_pb(parse(pb.Program, data))
        bound = peak_bytes(received)
    except PSError:
        return
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


class Ready(Kernels):
    """Kernels that do nothing, at once: what is measured is the memory around them."""

    def __init__(self) -> None:
        super().__init__(Device(), smallest=0)
        self.compiler.elementwise = lambda form: lambda *_: None  # type: ignore[method-assign, assignment]


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
    for _ in range(2):  # the second time nothing is remembered anew
        tracemalloc.start()
        try:
            executor.run(job, 0, kernels, variables)
        except PSError:
            pass
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak <= peak_bytes(program) + SLACK
