"""The program IR: its table of ops agrees with NumPy, and hostile programs are refused."""

import itertools
import math

import numpy as np
import pytest

from pswire.errors import InvalidRequest, ProgramError
from pswire.limits import MAX_NODES
from pswire.model.program import OPS, Input, Node, Program, infer
from pswire.model.tensor import DTYPES, TensorSpec, spec_of

V = Input("variable", TensorSpec("float32", (2, 3)))
X = Input("value", TensorSpec("float32", (2, 3)))
S = Input("operand", TensorSpec("float32", ()))
USUAL = ("bool", "int8", "int32", "int64", "uint8", "float16", "float32", "float64", "complex64")
SHAPES = {1: [((2, 3),), ((),)], 2: [((2, 3), (3,)), ((), (2, 1)), ((0, 3), (1,))]}


def program(nodes=(), assigns=(), outputs=(), inputs=(V, X, S)):
    return Program(tuple(inputs), tuple(nodes), tuple(assigns), tuple(outputs))


def ones(dtype, shape):
    return np.ones(shape, DTYPES[dtype])


def agrees(op, arrays, function, **attrs):
    """Whether the table and NumPy give the same spec, or both refuse."""
    try:
        with np.errstate(all="ignore"):
            expected = spec_of(np.asarray(function(*arrays, **attrs)))
    except (TypeError, ValueError):
        with pytest.raises(ProgramError, match=op):
            infer(op, [spec_of(a) for a in arrays], attrs)
    else:
        assert infer(op, [spec_of(a) for a in arrays], attrs) == expected


@pytest.mark.parametrize("op", [op for op in OPS.values() if not op.attrs and op.arity <= 2], ids=lambda o: o.name)
def test_the_table_infers_what_numpy_gives_for_every_pair_of_dtypes(op):
    """dtype and shape of a result are NumPy's, and what NumPy refuses the table refuses."""
    shapes = [((2, 3), (3, 4)), ((2, 2), (2, 2))] if op.name == "matmul" else SHAPES[op.arity]
    for dtypes in itertools.product(USUAL, repeat=op.arity):
        for shape in shapes:
            agrees(op.name, [ones(*pair) for pair in zip(dtypes, shape, strict=True)], getattr(np, op.numpy))


@pytest.mark.filterwarnings("ignore:Mean of empty", "ignore:invalid value")
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "all", "any"])
def test_reductions_infer_what_numpy_gives(op):
    """For every dtype, axis and keepdims; an axis without elements has no maximum."""
    for dtype, axis, keep in itertools.product(USUAL, (None, 0, -1, (0, 2), (), 3, (1, 1)), (False, True)):
        agrees(op, [ones(dtype, (2, 3, 4))], getattr(np, op), axis=axis, keepdims=keep)
    for axis in (None, 0, 1):
        agrees(op, [ones("float32", (0, 3))], getattr(np, op), axis=axis)


def test_where_astype_and_broadcast_to_infer_what_numpy_gives():
    """The remaining rows of the table."""
    for left, right in itertools.product(USUAL, USUAL):
        agrees("where", [ones("bool", (2, 1)), ones(left, (3,)), ones(right, ())], np.where)
    for source, target in itertools.product(USUAL, DTYPES):
        assert infer("astype", [TensorSpec(source, (2,))], {"dtype": target}) == TensorSpec(target, (2,))
    for shape in ((2, 3), (3,), (4, 2, 3), (2, 1), (0, 3)):
        agrees("broadcast_to", [ones("int8", (1, 3))], np.broadcast_to, shape=shape)
    with pytest.raises(ProgramError, match="int8, not bool"):
        infer("where", [TensorSpec("int8", ())] * 3, {})


HOSTILE = {
    "reads a value that is not computed yet": program([Node("add", (0, 3))]),
    "unknown op 'system'": program([Node("system", (0,))]),
    "add takes 2 arguments": program([Node("add", (0,))]),
    r"sqrt takes 1 arguments and the attributes \[\]": program([Node("sqrt", (0,), (("axis", 0),))]),
    "assigns to value 1, which is not a variable": program(assigns=[(1, 0)]),
    "assigns to value 2, which is not a variable": program(assigns=[(2, 2)]),
    "assigns to value 3, which is not a variable": program([Node("sqrt", (0,))], assigns=[(3, 0)]),
    "assigns to value -3, which is not a variable": program(assigns=[(-3, 0)]),
    "assigns a value that does not exist": program(assigns=[(0, 7)]),
    "assigns twice": program(assigns=[(0, 1), (0, 0)]),
    r"float32\[\] cannot be assigned to a variable of float32\[2,3\]": program(assigns=[(0, 2)]),
    "returns a value that does not exist": program(outputs=[3]),
    "at most": program([Node("sqrt", (0,))] * (MAX_NODES + 1)),
    "invalid shape": program([Node("broadcast_to", (2,), (("shape", (1 << 25, 1 << 25)),))]),
    "dimension": program([Node("broadcast_to", (2,), (("shape", (1 << 70,)),))]),
    "32 dimensions": program([Node("broadcast_to", (2,), (("shape", (1,) * 40),))]),
    "negative": program([Node("broadcast_to", (2,), (("shape", (-1,)),))]),
    "'shape'": program([Node("broadcast_to", (2,))]),
    "unknown dtype": program([Node("astype", (0,), (("dtype", "object"),))]),
    "too large": program([Node("sum", (0,), (("axis", 1 << 70),))]),
    "axis 2 is out of bounds": program([Node("max", (0,), (("axis", 2),))]),
    "'0' must be an int": program([Node("sum", (0,), (("axis", "0"),))]),
    "False must be an int": program([Node("sum", (0,), (("axis", False),))]),
    r"\(0, True\) must be an int": program([Node("sum", (0,), (("axis", (0, True)),))]),
    "keepdims must be True or False, not 1": program([Node("sum", (0,), (("keepdims", 1),))]),
    "keepdims must be True or False, not nan": program([Node("sum", (0,), (("keepdims", math.nan),))]),
    "dtype True is not a name": program([Node("astype", (0,), (("dtype", True),))]),
    "'dtype'": program([Node("astype", (0,))]),
    r"broadcast to \(True, 2, 3\)": program([Node("broadcast_to", (0,), (("shape", (True, 2, 3)),))]),
    "shape mismatch": program([Node("add", (0, 3))], inputs=(V, X, S, Input("value", TensorSpec("int8", (5,))))),
    "two matrices": program([Node("matmul", (0, 1))]),
    "invalid shape (-1,)": program(inputs=(Input("value", TensorSpec("float32", (-1,))),)),
    "unknown dtype 'float33'": program(inputs=(Input("value", TensorSpec("float33", ())),)),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_programs_are_refused_before_they_run(text):
    """Every value out of place, wrong arity, dtype, shape or size is refused, and the message says which."""
    with pytest.raises((ProgramError, InvalidRequest), match=text.replace("(-1,)", r"\(-1,\)")):
        _ = HOSTILE[text].specs
