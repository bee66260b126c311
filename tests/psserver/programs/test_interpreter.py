"""The interpreter: every op gives what NumPy gives, inputs stay as they are, nothing is half done."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from psserver.programs.interpreter import peak_bytes, run
from pswire.errors import ProgramError
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.tensor import DTYPES, spec_of

A = np.array([[0.5, -1.25, 3.0], [2.5, 0.0, -0.75]], "float32")
B = np.array([1.5, 2.0, 0.25], "float64")
I8 = np.array([3, -2, 7], "int8")
NAN = np.array([np.nan, np.inf, -1.0, 0.0], "float32")
TRUE = np.array([True, False, True])

COMPLEX = np.array([0, -2j, 3 - 4j, complex(np.inf, 1), complex(0, np.nan)], "complex64")
UNARY = [(A,), (I8,), (np.float32(2.5).reshape(()),), (NAN,), (np.zeros((0, 2), "float16"),)]
BINARY = [(A, B), (B, I8), (I8, np.array(2)), (np.array(7.0), np.array(2, "int64")), (A, A.sum())]
LOGICAL = [(TRUE, TRUE[::-1]), (A, I8)]
REDUCE = [
    ((A,), {}), ((A,), {"axis": 0, "keepdims": False}), ((I8,), {"axis": -1, "keepdims": True}),
    ((A,), {"axis": (0, 1)}), ((A.astype("float16"),), {"axis": None}), ((TRUE,), {}),
]  # fmt: skip

CASES: dict[str, list[tuple[tuple[np.ndarray, ...], dict[str, object]]]] = {
    **{name: [(args, {}) for args in UNARY] for name, row in OPS.items() if row.arity == 1 and not row.attrs},
    **{name: [(args, {}) for args in BINARY] for name, row in OPS.items() if row.arity == 2},
    "logical_not": [((TRUE,), {}), ((A,), {})],
    "sign": [*((args, {}) for args in UNARY), ((COMPLEX,), {}), ((COMPLEX.astype("complex128"),), {})],
    "logical_and": [(args, {}) for args in LOGICAL],
    "logical_or": [(args, {}) for args in LOGICAL],
    "pow": [((np.abs(A), B), {}), ((I8, np.array(2)), {}), ((A, np.float32(2).reshape(())), {})],
    "matmul": [((A, A.T.copy()), {}), ((I8[None], I8[:, None]), {}), ((A[:, :0], np.ones((0, 2), "int8")), {})],
    "where": [((TRUE, A, B), {}), ((TRUE, I8, np.float32(1).reshape(())), {})],
    "astype": [((A,), {"dtype": name}) for name in DTYPES],
    "broadcast_to": [((I8,), {"shape": (2, 3)}), ((np.array(1.0),), {"shape": (4,)})],
    **dict.fromkeys(("sum", "mean", "max", "min", "all", "any"), REDUCE),
}


def numpy_result(op, args, attrs):
    with np.errstate(all="ignore"):
        if op == "astype":
            return args[0].astype(DTYPES[attrs["dtype"]])
        return np.asarray(getattr(np, OPS[op].numpy)(*args, **attrs))


def single(op, args, attrs):
    inputs = tuple(Input("value", spec_of(a)) for a in args)
    node = Node(op, tuple(range(len(args))), tuple(sorted(attrs.items())))
    return Program(inputs, (node,), (), (len(args),))


@pytest.mark.parametrize("op", OPS)
def test_each_op_gives_what_numpy_gives(op):
    """Same bits, dtype and shape as NumPy's function; always an array, of the spec that was verified."""
    for args, attrs in CASES[op]:
        args = tuple(np.asarray(a) for a in args)
        program = single(op, args, attrs)
        (value,) = run(program, args, np)[1]
        expected = numpy_result(op, args, attrs)
        assert isinstance(value, np.ndarray)
        assert spec_of(value) == spec_of(expected) == program.output_specs[0]
        np.testing.assert_array_equal(value, expected)


def test_warnings_are_silent(recwarn):
    """Division by zero, overflow and invalid casts give their values without a word, as a kernel's do."""
    zero, big = np.zeros(2, "float32"), np.full(2, 3e38, "float32")
    for op, args in {"divide": (zero, zero), "multiply": (big, big), "log": (zero,)}.items():
        run(single(op, args, {}), args, np)
    nothing = np.zeros((0, 2), "int8")
    run(single("mean", (nothing,), {"axis": 0}), (nothing,), np)
    for value, dtype in ((NAN, "int32"), (COMPLEX, "float32"), (COMPLEX, "bfloat16")):
        run(single("astype", (value,), {"dtype": dtype}), (value,), np)
    assert not recwarn.list


V = Input("variable", spec_of(A))


def test_inputs_are_only_read_and_results_are_the_callers_own():
    """Writing into any result changes no input and no other result, views and plain copies included."""
    scalar = np.array(2.0, "float32")
    program = Program(
        (V, V, Input("operand", spec_of(scalar))),
        (Node("broadcast_to", (2,), (("shape", (2, 3)),)), Node("multiply", (0, 3))),
        ((0, 1), (1, 4)),
        (0, 3, 4, 4),
    )
    inputs = [A.copy(), A + 1, scalar.copy()]
    for array in inputs:
        array.flags.writeable = False
    assigned, outputs = run(program, inputs, np)
    results = [*assigned.values(), *outputs]
    for expected, value in zip([A + 1, A * 2, A, np.full_like(A, 2), A * 2, A * 2], results, strict=True):
        np.testing.assert_array_equal(value, expected)
        assert value.flags.c_contiguous
        value[...] = -1  # What is checked later was not touched by this.
    np.testing.assert_array_equal(inputs[0], A)
    view = Program((V,), (Node("broadcast_to", (0,), (("shape", (1, 2, 3)),)),), (), (1,))
    assert not np.shares_memory(run(view, [A], np)[1][0], A)  # it may be contiguous


def test_an_op_that_refuses_its_values_leaves_everything_as_it_was():
    """The error names the op; there is no half of a result."""
    base, power = np.array([2, 3]), np.array([1, -1])
    program = Program(
        (Input("variable", spec_of(base)), Input("value", spec_of(power))),
        (Node("add", (0, 1)), Node("pow", (0, 1))),
        ((0, 2),),
        (3,),
    )
    with pytest.raises(ProgramError, match=r"pow of int64, int64: Integers to negative"):
        run(program, [base, power], np)
    assert base.tolist() == [2, 3]


def test_inputs_that_are_not_what_the_program_was_verified_for_are_refused():
    program = Program((V,), (), (), (0,))
    with pytest.raises(ProgramError, match="has 1 inputs, but got 2"):
        run(program, [A, A], np)
    with pytest.raises(ProgramError, match=r"input 0 of the program must be float32\[2,3\], but got float64\[2,3\]"):
        run(program, [A.astype("float64")], np)
    with pytest.raises(ProgramError, match=r"but got float32\[3\]"):
        run(program, [A[0]], np)
    with pytest.raises(ProgramError, match="not computed yet"):
        run(Program((V,), (Node("sqrt", (1,)),), (), ()), [A], np)


class Watching:
    """A namespace that counts, at each square root, how many results are alive."""

    def __init__(self):
        self.alive, self.most = weakref.WeakSet(), 0

    def __getattr__(self, name):
        return getattr(np, name)

    def sqrt(self, value):
        held = np.sqrt(np.asarray(value)).view(type("Held", (np.ndarray,), {"__hash__": object.__hash__}))
        self.alive.add(held)
        self.most = max(self.most, len(self.alive))
        return held


def test_intermediates_are_freed_after_their_last_use():
    """A chain of 50 ops holds two values at a time, and `peak_bytes` says so."""
    chain = Program((V,), tuple(Node("sqrt", (n,)) for n in range(50)), ((0, 50),), ())
    watching = Watching()
    run(chain, [A], watching)
    assert watching.most == 2
    assert peak_bytes(chain) == 2 * A.nbytes


def test_peak_bytes_sees_results_that_a_small_program_would_blow_up_to():
    """An outer product of empty matrices, or a broadcast, counts in full."""
    row = Input("value", spec_of(np.zeros((1 << 16, 0), "float32")))
    column = Input("value", spec_of(np.zeros((0, 1 << 16), "float32")))
    assert peak_bytes(Program((row, column), (Node("matmul", (0, 1)),), (), ())) >= 4 << 32
    wide = Node("broadcast_to", (0,), (("shape", (1 << 20, 2, 3)),))
    assert peak_bytes(Program((V,), (wide, Node("sum", (1,))), (), (2,))) >= A.nbytes << 20
