"""What the verifier lets pass runs: a kernel may have written in place before, and could not take it back."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from pswire.encoding import messages
from pswire.errors import PSError
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.tensor import DTYPES, TensorSpec, spec_of
from tests.kit.cases import search
from tests.kit.programs import expected, numbers, programs

SHAPES = [(), (3,), (0,), (1, 3), (2, 1), (2, 3), (3, 2), (3, 0, 2), (1,) * 32]
INTEGERS = [0, 1, 2, -1, -2, 31, 32, 1 << 31, (1 << 63) - 1, -(1 << 63)]
WORDS = [*DTYPES, "", "0", "object", "axis", "float33"]
SMALL = 1 << 20

integers = st.sampled_from(INTEGERS)
attributes = st.one_of(
    st.none(),
    st.booleans(),
    integers,
    st.floats() | st.sampled_from([math.nan, math.inf]),
    st.sampled_from(WORDS),
    st.lists(integers, max_size=4).map(tuple),
    st.sampled_from([*SHAPES, (0, 1), (1, 1), (1,) * 40]),
)


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
        received = messages.PROGRAM.from_pb(messages.PROGRAM.to_pb(program))
        specs = received.output_specs
    except PSError:
        return
    assume(not received.may_refuse and sum(spec.size for spec in received.specs) < SMALL)
    inputs = [numbers(item.spec.dtype, item.spec.size, n) for n, item in enumerate(received.inputs)]
    shaped = [array.reshape(item.spec.shape) for array, item in zip(inputs, received.inputs, strict=True)]
    _, outputs = expected(received, shaped)
    assert tuple(map(spec_of, outputs)) == specs
