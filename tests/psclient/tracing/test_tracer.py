"""The tracer: a traced and interpreted function gives what the same function gives on plain arrays."""

from __future__ import annotations

import inspect
import math
import operator
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psclient import ops
from psclient._src.arrays import nest
from psclient._src.tracing.recorder import AssignedLeaf, OutputLeaf, Recording, trace
from psclient._src.tracing.tracer import Tracer, VariableTracer
from psclient._src.variables.indexed_slices import IndexedSlices
from psserver.programs.interpreter import run
from pswire.encoding import messages
from pswire.errors import ProgramError
from pswire.model.program import OPS, Input, Node
from pswire.model.tensor import DTYPES, TensorSpec, spec_of
from tests.kit.cases import search
from tests.kit.programs import same_bits
from tests.kit.strategies import refused


class Plain(np.ndarray):
    """The oracle's variable: an array that NumPy itself assigns to, in place."""

    value = read_value = np.ndarray.copy

    def assign(self, value):
        np.copyto(self, np.broadcast_to(value, self.shape), casting="same_kind")
        return self

    def assign_add(self, delta):
        return self.assign(self + delta)

    def assign_sub(self, delta):
        return self.assign(self - delta)


@dataclass(frozen=True)
class Var:
    """Marks an argument as a variable."""

    array: np.ndarray


@dataclass(frozen=True)
class Val:
    """Marks an argument as a reduced value."""

    array: np.ndarray


def traced(fn, *args):
    """Traces as a section does: origins are places in `args`; unmarked arguments stay what they are."""
    recording = Recording()
    made = []
    for place, arg in enumerate(args):
        if isinstance(arg, Var):
            made.append(recording.variable(spec_of(arg.array), f"w{place}", place))
        else:
            made.append(recording.value(spec_of(arg.array), place) if isinstance(arg, Val) else arg)
    return trace(recording, fn, made)


def execute(found, args):
    """Runs what was traced: `({place of variable: array}, result)`."""
    inputs = [o if isinstance(o, np.ndarray) else args[o].array for o in found.origins]
    codec = messages.MAPPER.pairs[type(found.program)]
    program = codec.from_pb(codec.to_pb(found.program))
    assigned, outputs = run(program, inputs, np)

    def leaf(value):
        if isinstance(value, OutputLeaf):
            return outputs[value.index]
        if isinstance(value, AssignedLeaf):
            return assigned.get(value.input, inputs[value.input])
        return [leaf(v) for v in value] if isinstance(value, list | tuple) else value

    return {found.origins[i]: value for i, value in assigned.items()}, leaf(found.result)


def plain(fn, args):
    made = [
        a.array.copy().view(Plain) if isinstance(a, Var) else a.array.copy() if isinstance(a, Val) else a for a in args
    ]
    with np.errstate(all="ignore"):
        result = fn(*made)
    return {place: made[place] for place, a in enumerate(args) if isinstance(a, Var)}, result


def same(left, right):
    """Whether nests of arrays are bit-equal with equal dtypes; any NaN is as good as another."""
    if isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return same_bits(np.asarray(left), np.asarray(right))


def check(fn, *args):
    """The law of this module; gives the program for a closer look."""
    found = traced(fn, *args)
    variables, result = execute(found, args)
    expected_variables, expected = plain(fn, args)
    assert same(result, expected), f"{result!r} != {expected!r}"
    for place, value in expected_variables.items():
        assert same(variables.get(place, args[place].array), value), f"variable {place}"
    return found.program


F = np.array([[0.5, -1.25, 3.0], [2.5, 0.0, -0.75]], "float32")
D = np.array([1.5, 2.0, 0.25])
I = np.array([3, -2, 7])  # noqa: E741


# Update functions as people write them.


def sgd_momentum(v, m, grad, rate, momentum=0.9):
    m.assign(momentum * m + grad)
    return v.assign_sub(rate * m)


def operands(found):
    return [origin for origin in found.origins if isinstance(origin, np.ndarray)]


def test_a_program_is_what_was_done_and_nothing_else():
    """Inputs first and in order, then nodes; a new learning rate makes no new one, as Python scalars are operands."""
    slow, fast = (traced(sgd_momentum, Var(F), Var(F), Val(F), rate) for rate in (0.1, 0.25))
    assert slow.program == fast.program
    assert [float(a) for a in operands(slow)] == [float(np.float32(0.9)), float(np.float32(0.1))]
    assert [a.dtype.name for a in operands(fast)] == ["float32", "float32"]
    assert [i.kind for i in slow.program.inputs] == ["variable", "variable", "value", "operand", "operand"]

    def fn(v, unused, g):
        _ = g.sum(axis=0) * 5.0
        v.assign_add(2.0 * g)

    found = traced(fn, Var(D), Var(D), Val(D))
    spec = TensorSpec("float64", (3,))
    two = Input("operand", TensorSpec("float64", ()))
    assert found.program.inputs == (Input("variable", spec), Input("value", spec), two)
    assert found.program.nodes == (Node("multiply", (2, 1)), Node("add", (0, 3)))
    assert (found.program.assigns, found.program.outputs, found.result) == (((0, 4),), (), None)
    assert found.origins[:2] == (0, 2)


# Random programs on tracers are in psserver/programs/test_random_programs.py.

FUNCTIONS = {
    "sum of dtype": lambda x: [np.sum(x, dtype="float64"), x.sum(-1), np.sum(x, 0, keepdims=True)],
    "reductions": lambda x: [np.mean(x), x.mean(axis=(0, 1)), np.max(x, axis=1), x.min(), np.amax(x), np.amin(x)],
    "truth": lambda x: [np.all(x > 0), np.any(x > 0, axis=0), (x > 0).all(), x.any()],
    "where": lambda x: [np.where(x > 0, x, 0.0), np.where(x, 1, 2.5), np.where(x > 0, -x, x.astype("float64"))],
    "where scalar": lambda x: np.where(True, x, 0),
    "clip": lambda x: [np.clip(x, 0.25, 1), np.clip(x, None, 1.0), np.clip(x, min=-1), x.clip(-1, 1.0)],
    "clip wide": lambda x: np.clip(x, np.float64(-0.5), D),
    "round": lambda x: [np.round(x), np.around(x), np.rint(x), x.round(), np.floor(x), np.ceil(x)],
    "matmul": lambda x: [
        x @ np.ones((3, 2)),
        np.matmul(np.ones((4, 2), "float32"), x),
        np.dot(x, x.dtype.type(1) * np.eye(3)),
    ],
    "like": lambda x: [np.zeros_like(x), np.ones_like(x), np.full_like(x, 2), np.zeros_like(x, dtype=int)],
    "shapes": lambda x: [np.shape(x), np.ndim(x), np.size(x), x.shape, x.ndim, x.size, len(x)],
    "broadcast": lambda x: [np.broadcast_to(x, (4, 2, 3)), np.broadcast_to(x.sum(), 2)],
    "powers": lambda x: [
        x**2,
        x**0.5,
        x**-1.0,
        2**x,
        x**3,
        (x > 0) ** 2,
        (x * 1j) ** 0.5,
        np.power(x, 2),
        x ** np.float64(2),
    ],
    "operators": lambda x: [-x, +x, abs(x), 1 - x, 1 / x, x // 0.5, x % 2, 3.5 % x, x <= 0, x != 0, x >= 0.5],
    "logic": lambda x: [np.logical_and(x > 0, x < 1), np.logical_or(x, False), np.logical_not(x)],
    "logic of bools": lambda x: [(x > 0) & (x < 1), (x > 0) | True, ~(x > 0), (x > 0) ^ (x < 1)],
    "norms": lambda x: [
        np.linalg.norm(x, axis=1),
        np.linalg.norm(x, ord=1, axis=0, keepdims=True),
        np.linalg.vector_norm(x, ord=np.inf),
        np.linalg.vector_norm(x, ord=-np.inf, axis=1),
        ops.vector_norm(x, axis=0),
        np.linalg.norm((x > 0).astype("int64"), axis=0),
    ],
    "copies": lambda x: [x.copy() + 1, np.copy(x), ops.clip(x, -1, 0.5), ops.clip(x, max=1.0)],
    "lists": lambda x: [x * [1, 2, 3], np.subtract((1.0, 2.0, 3.0), x)],
    "complex": lambda x: x * 2j,
    "ops": lambda x: [ops.where(x > 0, x, 0), ops.pow(x, 2), ops.sum(x, axis=0), ops.astype(x, "float16")],
    "ops too": lambda x: [ops.broadcast_to(x, (1, 2, 3)), ops.matmul(x, np.ones((3, 1))), ops.round(x)],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_numpy_functions_work_on_tracers(name, dtype):
    """Functions, methods and operators give what they give on arrays."""
    check(FUNCTIONS[name], Val(F.astype(dtype)))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64"])
def test_powers_and_products_have_numpys_dtypes(dtype):
    """Of whole numbers, so that no rounding tells orders of summation apart; squares and roots go short ways."""
    a, b = np.array([1, 0, 3]).astype(dtype), np.array([[1, 1, 1], [0, 1, 1]]).astype(dtype)
    check(lambda a: [a**2, a**2.0, a**0.5, a**3, a ** np.float32(2)], Val(a))
    check(lambda a, b: [np.dot(a, a), np.dot(b, a), np.dot(b, b.dtype.type(1)), np.dot(a, 2.0)], Val(a), Val(b))


@pytest.mark.parametrize("ord", [None, 1, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_any_dtype_is_numpys(dtype, ord):
    """Computed in NumPy's dtype: what has no kind of floating numbers is squared and summed in float64."""
    x = np.full(7, 20.3).astype(dtype)
    expected = np.linalg.norm(x, ord)
    found = execute(traced(lambda x: np.linalg.norm(x, ord), Val(x)), [Val(x)])[1]
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(expected.dtype).eps)


OPERATORS = [
    *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "eq")),
    *(np.maximum, np.minimum, lambda a, b: np.where(a > 0, a, b), lambda a, b: np.where(a, 1, b)),
]


@pytest.mark.parametrize("scalar", [2, -1.5, True, 3.0, np.float64(2), np.int8(3), np.float16(0.1), 1j])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float16", "float32", "complex64"])
def test_scalars_are_weak_as_in_numpy(scalar, dtype):
    """A Python scalar on either side of an array of any dtype gives NumPy's dtype and value, or both refuse it."""
    array = np.array([1, 0, 1], dtype)
    for fn in OPERATORS:
        for ordered in (lambda x, fn=fn: fn(x, scalar), lambda x, fn=fn: fn(scalar, x)):
            try:
                with np.errstate(all="ignore"):
                    expected = ordered(array)
            except TypeError:
                refused((TypeError, ValueError), "", lambda ordered=ordered: traced(ordered, Val(array)))
            else:
                assert same(execute(traced(ordered, Val(array)), [Val(array)])[1], expected), fn


INTEGERS = ["int8", "uint8", "int16", "uint32", "int64", "uint64"]
WIDE = st.sampled_from([-(2**70), -(2**63), -129, -128, -5, 0, 3, 127, 128, 255, 300, 2**63, 2**64, 2**70])
COMPARISONS = [np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal]


def test_bfloat16_follows_numpy_and_is_assigned_back():
    """NumPy promotes it beside a Python float, and `assign` casts back."""
    half = np.dtype("bfloat16")
    check(lambda v, g: [v.assign_sub(0.5 * g), ops.astype(v, "bfloat16") + g], Var(D.astype(half)), Val(D.astype(half)))


@search(2)
@given(dtype=st.sampled_from(INTEGERS), compare=st.sampled_from(COMPARISONS), k=WIDE, low=st.none() | WIDE)
def test_integers_beside_any_whole_number(dtype, compare, k, low):
    """They are compared with one that their dtype does not have, on either side. As a bound to clip by, that is none,
    or no bound can be; then NumPy refuses it as well."""
    info = np.iinfo(dtype)
    x = np.array([info.min, 3, info.max], dtype)
    check(lambda x: [compare(x, k), compare(k, x)], Val(x))
    try:
        np.clip(x, low, k)
    except OverflowError:
        refused(ProgramError, r"out of bounds|too large", lambda: traced(lambda x: np.clip(x, low, k), Val(x)))
    else:
        check(lambda x: np.clip(x, low, k), Val(x))


# Variables.


def test_a_variable_denotes_its_new_value_after_an_assignment():
    """`value()`, also clipped without bounds, keeps the one of its time; the same variable twice is one variable."""

    def fn(v, g):
        old, before, clipped = v.value(), v * 2, np.clip(v, None, np.inf)
        v.assign(g).assign_add(1)
        return [old, before, clipped, v * 2, v.read_value()]

    check(fn, Var(D), Val(D + 5))

    recording = Recording()
    v, w = recording.variable(spec_of(D), "w", 7), recording.variable(spec_of(D), "w", 7)
    assert v is w
    assert (v.name, v.shape, v.dtype, v.ndim, v.size) == ("w", (3,), np.dtype(float), 1, 3)
    assert recording.finish([v, v.assign(w), w.assign_add(1)]).result == [AssignedLeaf(0)] * 3


def test_assign_casts_and_broadcasts_as_in_place_operations_do():
    """Within a kind, and to the variable's shape; nothing else."""
    check(lambda v, g: v.assign(g), Var(F), Val(D))
    check(lambda v: v.assign(1), Var(F))
    check(lambda v, g: v.assign_add(g * 2), Var(F.astype("float16")), Val(D))
    check(lambda v: v.assign_sub(1), Var(I.astype("int8")))
    check(lambda v, g: v.assign(g), Var(I.astype("int8")), Val(I))
    refused = {
        "variable 'w0': float64 cannot be assigned to int64; write value.astype('int64')": lambda v: v.assign_add(0.5),
        "variable 'w0': broadcast_to(int64[2,3]) is not possible": lambda v: v.assign(np.ones((2, 3), int)),
        "variable 'w0': broadcast_to(int64[2,3]) is not": lambda v: v.assign_sub(np.ones((2, 3), int)),
        "variable 'w0': add(int64[3], float64[2]) is not possible": lambda v: v.assign_add(np.ones(2)),
        "variable 'w0': float64 cannot": lambda v: v.assign(D),
    }
    for text, fn in refused.items():
        with pytest.raises(ProgramError) as caught:
            traced(fn, Var(I))
        assert text in str(caught.value)


def test_results_keep_their_nest():
    """Of variables, values, constants; operands are copied, and what `lift` knows becomes what it says."""
    Pair = namedtuple("Pair", "a b")

    def fn(v, g):
        double = g * 2
        return {"x": (double, 3), "y": [Pair(v.assign(g), double), None, "text"], "z": g}

    found = traced(fn, Var(D), Val(D))
    assert found.result == {
        "x": (OutputLeaf(0), 3),
        "y": [Pair(AssignedLeaf(0), OutputLeaf(0)), None, "text"],
        "z": OutputLeaf(1),
    }
    assert len(found.program.outputs) == 2
    assert nest.flatten(found.result)[0] == OutputLeaf(0)
    assert traced(lambda: 5).program.inputs == ()
    array, thing = D.copy(), object()
    recording = Recording(lift=lambda value: made if value is thing else None)
    made = recording.variable(spec_of(D), "w", "w")
    v = recording.value(spec_of(D), 0)
    found = recording.finish(v * array + thing)
    array[:] = 0
    assert [o for o in found.origins if not isinstance(o, np.ndarray)] == ["w", 0]
    np.testing.assert_array_equal(operands(found)[0], D)


# What cannot be traced. Each function is one line, so that its line is the one to be named.


def iterates(v):
    return [x for x in v]  # noqa: C416


def sets_an_item(v):
    v[0] = 1


def in_place(v):
    v += 1


def loops(v):
    for _ in range(6000):
        v = v * 2 + 1


REFUSED = [
    (lambda v: 1 if v > 0 else 2, "write np.where(condition, a, b) (or ps.ops.where)"),
    (lambda v: v > 0 and v < 1, "`and`"),
    (lambda v: float(v.sum()), "float() of Tracer(float64[]): the update function is being traced"),
    (lambda v: math.sqrt(v), "write np.sqrt(x) for math.sqrt(x)"),
    (lambda v: int(v), "int() of"),
    (lambda v: complex(v), "complex() of"),
    (lambda v: [1, 2, 3][v.sum()], "as an index"),
    (lambda v: np.asarray(v), "it is an array already"),
    (lambda v: np.array([v, v]), ""),
    (iterates, "write array operations, such as np.sum(x, axis=0)"),
    (lambda v: v[0], "indexing of"),
    (sets_an_item, "write np.where(mask, new, old), or v.assign(value)"),
    (in_place, "write x = x + y, or v.assign_add(y)"),
    (lambda v: np.add(v, 1, out=v), "cannot be changed in place"),
    (lambda v: np.sum(v, out=v), "cannot be changed in place"),
    (lambda v: np.linalg.svd(v), "np.linalg.svd is not supported in update functions; use one of"),
    (lambda v: np.linalg.norm(v, ord=3), "the norm with ord=3 is not supported in update functions; use 1, 2"),
    (lambda v: np.linalg.norm(np.broadcast_to(v, (2, 3)), 2), "of matrices with ord=2 is not supported"),
    (lambda v: v & 1, "np.bitwise_and is not supported"),
    (lambda v: np.arctan(v), "np.arctan is not supported in update functions; use one of"),
    (lambda v: np.add.reduce(v), "np.add.reduce is not supported"),
    (lambda v: np.add(v, 1, dtype="float32"), "np.add does not support dtype"),
    (lambda v: np.sum(v, where=v > 0), "np.sum in an update function: got an unexpected keyword argument 'where'"),
    (lambda v: np.round(v, 2), "does not support decimals"),
    (lambda v: np.where(v > 0), "in an update function needs a condition and two values"),
    (lambda v: np.clip(1.0, v, v), "the first argument of np.clip"),
    (lambda v: v + np.ones(2), "add(float64[3], float64[2]) is not possible"),
    (lambda v: v.sum(axis=3), "sum(float64[3]) is not possible: axis 3 is out of bounds"),
    (lambda v: v @ v, "matmul takes two matrices with matching dimensions, not shapes (3,) and (3,)"),
    (lambda v: v + None, "NoneType cannot be used in an update function"),
    (lambda v: v * "a", "str cannot be used"),
    (lambda v: v.astype("S3"), "unknown dtype"),
    (lambda v: v.astype("uint8") + 300, "300 out of bounds for uint8"),
    (lambda v: v.T, "has no 'T' in an update function: only reductions and broadcasting change"),
    (lambda v: v.reshape(1, 3), "has no 'reshape' in an update function: only reductions and broadcasting change"),
    (lambda v: v.sum().item(), "the update function is being traced and this value is not known yet; keep it an array"),
    (lambda v: v.numpy(), "the update function is being traced and this value is not known"),
    (lambda v: v.std(), "write np.sqrt(np.mean(np.square(x - np.mean(x))))"),
    (lambda v: v.sqrt(), "write np.sqrt(x)"),
    (lambda v: v.to("cuda"), "write x.astype(dtype)"),
    (lambda v: (v * 2).assign(v), "variables are assigned"),
    (lambda v: v.relu(), "write NumPy functions or ps.ops"),
    (lambda v: f"{v:.3f}", "cannot be formatted as '.3f'"),
    (lambda v: round(v), "write np.round(x)"),
    (lambda v: v.astype("float8"), "dtype 'float8' is not supported; use one of bool, int8"),
    (lambda v: np.dot(v, np.ones(1)), "np.dot of VariableTracer(float64[3]) and Tracer(float64[1]) is not supported"),
    (loops, "more than 10000 operations; replace loops by array operations"),
]


@pytest.mark.parametrize(("fn", "text"), REFUSED)
def test_what_cannot_be_traced_says_what_to_write_and_where(fn, text):
    """One line: the user's file and line, what is wrong, what to write instead."""
    with pytest.raises(ProgramError) as caught:
        traced(fn, Var(D))
    lines, first = inspect.getsourcelines(fn)
    last = first + len(lines) - 1
    assert str(caught.value).startswith(tuple(f"{__file__}:{n}: " for n in range(first, last + 1)))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_do_not_outlive_their_function():
    """Kept in a closure, or in another function; what a tracer has not is missing to `hasattr`, and for libraries."""

    def fn(v):
        assert (hasattr(v, "numpy"), hasattr(v, "__cuda_array_interface__"), getattr(v, "T", 3)) == (False, False, 3)
        assert (f"{v}", str(v.sum())) == ("VariableTracer(float64[3])", "Tracer(float64[])")
        return v + 1

    assert traced(fn, Var(D)).program.nodes
    kept = []
    traced(lambda v: kept.append(v), Var(D))
    refused(ProgramError, "returned", lambda: kept[0] + 1)
    refused(ProgramError, "another update function", lambda: traced(lambda v: v + kept[0], Var(D)))
    refused(TypeError, "no dimensions", lambda: traced(lambda v: len(v.sum()), Var(D)))
    assert issubclass(VariableTracer, Tracer)


# CuPy calls one hook for its ufuncs and for kernels that users wrote.


@dataclass(frozen=True)
class Kernel:
    """What the hook sees of a CuPy kernel."""

    name: str

    def __call__(self, *args, **kwargs):
        tracer = next(a for a in args if isinstance(a, Tracer))
        return tracer.__cupy_override_elementwise_kernel__(self, *args, **kwargs)


CUPY = [
    ("cupy_sqrt", np.sqrt, ()),
    ("cupy_absolute", np.abs, ()),
    ("cupy_true_divide", np.divide, (2.0,)),
    ("cupy_divide", np.divide, (2.0,)),
    ("cupy_power", np.power, (2,)),
    ("cupy_maximum", np.maximum, (0,)),
    ("cupy_rint", np.rint, ()),
    ("cupy_clip", np.clip, (0.0, 1.0)),
]


def test_cupy_ufuncs_are_known_by_their_names():
    """Each becomes the op of the NumPy function that means the same. A user's kernel may have any name and mean
    anything, and is refused; an output array cannot be written."""

    def fn(x):
        if isinstance(x, Tracer):
            return [Kernel("cupy_where")(x > 0, x, 0), *(Kernel(name)(x, *rest) for name, _, rest in CUPY)]
        return [np.where(x > 0, x, 0), *(function(x, *rest) for _, function, rest in CUPY)]

    check(fn, Val(F))
    for name, args in {"add": (1,), "cupy_arctan": (), "my_kernel": ()}.items():
        with pytest.raises(ProgramError, match=f"cupy.{name.removeprefix('cupy_')} is not supported"):
            traced(lambda x: Kernel(name)(x, *args), Val(F))  # noqa: B023
    refused(ProgramError, "in place", lambda: traced(lambda x: Kernel("cupy_add")(x, 1, x), Val(F)))


def test_real_cupy_calls_the_hook():
    """CuPy's own ufuncs, where CuPy is installed; no device is touched."""
    cupy = pytest.importorskip("cupy")
    found = traced(lambda x: [cupy.sqrt(x), cupy.where(x > 0, x, 0), cupy.maximum(x, 0), cupy.sum(x)], Val(F))
    assert [node.op for node in found.program.nodes] == ["sqrt", "greater", "where", "maximum", "sum"]
    with pytest.raises(ProgramError, match="not known"):
        traced(lambda x: cupy.ElementwiseKernel("T x", "T y", "y = x", "add")(x), Val(F))


# ps.ops.


CLIPPING = {"clip_by_value", "clip_by_norm", "global_norm", "clip_by_global_norm"}


def test_ops_has_one_function_for_each_op():
    """The module, its `__all__` and the table agree; reductions take axis and keepdims by name."""
    assert set(ops.__all__) == set(OPS) | {"clip", "vector_norm"} | CLIPPING
    for name in ops.__all__:
        function = getattr(ops, name)
        assert function.__name__ == name
        assert function.__doc__
    for name in ("sum", "mean", "max", "min", "all", "any"):
        check(lambda x: getattr(ops, name)(x, axis=1, keepdims=True), Val(F))  # noqa: B023
        check(getattr(ops, name), Val(F))


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if not op.attrs])
def test_ops_work_alike_on_arrays_and_tracers(name):
    """The same call on tracers and on arrays gives the same."""
    row = OPS[name]
    args = [F > 0, F, F * 2][-row.arity :] if row.arity < 3 else [F > 0, F, F * 2]
    if name == "matmul":
        args = [F, np.ones((3, 2), "float32")]
    program = check(getattr(ops, name), *map(Val, args))
    assert [node.op for node in program.nodes] == [name]
    with np.errstate(all="ignore"):
        assert same(getattr(ops, name)(*args), getattr(np, row.numpy)(*args))


# TensorFlow's functions that clip gradients.

CLIPS = {
    "by value": lambda x, y: ops.clip_by_value(x, 1.0, 3.0),
    "by values": lambda x, y: ops.clip_by_value(x, np.array([0, 1, 2], x.dtype), y),
    "by norm": lambda x, y: ops.clip_by_norm(x, 2.0),
    "by norms of rows": lambda x, y: ops.clip_by_norm(x, 2.0, axes=[1]),
    "by norms of columns": lambda x, y: ops.clip_by_norm(x, 2.0, axes=0),
    "norm": lambda x, y: ops.global_norm([x, None, y]),
    "by global norm": lambda x, y: ops.clip_by_global_norm((x, None, y), 2.0)[0][::2],
    "by a norm that is known": lambda x, y: ops.clip_by_global_norm([x, y], 2.0, use_norm=np.float32(8))[0],
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", CLIPS)
def test_clips_work_alike_on_arrays_and_tracers(name, dtype):
    """In update functions too, and an array keeps its dtype."""
    x, y = F.astype(dtype), (F * 2).astype(dtype)
    check(CLIPS[name], Val(x), Val(y))
    found = CLIPS[name](x, y)
    for array in found if isinstance(found, list) else [found]:
        assert array.dtype == (np.float32 if (name, dtype) == ("norm", "float16") else dtype)


def test_clips_are_those_of_tensorflow():
    """Its documents' examples, and their formulas by hand; larger bounds, no list and no array are refused."""
    t = np.array([[-10.0, -1.0, 0.0], [0.0, 2.0, 10.0]], "float32")
    assert ops.clip_by_value(t, -1, 1).tolist() == [[-1, -1, 0], [0, 1, 1]]
    assert ops.clip_by_value(t, [[-5], [-1]], [2, 3, 5]).tolist() == [[-5, -1, 0], [0, 2, 5]]
    assert ops.clip_by_value(np.arange(4), 1, 2).tolist() == [1, 1, 2, 2]
    assert ops.clip_by_value([0.5, 7], 1, 2).dtype == np.float32
    np.testing.assert_allclose(ops.clip_by_norm([1, 2, 3, 4, 5.0], 2.0), np.arange(1, 6) * 2 / 55**0.5, rtol=1e-6)
    np.testing.assert_allclose(ops.clip_by_norm(t, 5.0, [1]), [[-10 / 2.01, -1 / 2.01, 0], t[1] * 5 / 104**0.5], 1e-3)
    assert ops.clip_by_norm(np.float32([3, 4]), 7.0).tolist() == [3, 4]
    assert ops.clip_by_norm(np.zeros(3), 1.0).tolist() == [0, 0, 0]
    assert ops.global_norm([np.float32([3]), None, np.float32([[4]])]) == 5
    assert ops.global_norm([np.full(2, 200, "float16")]) == pytest.approx(200 * 2**0.5)
    clipped, norm = ops.clip_by_global_norm([np.float32([3]), None, np.float32([[4]])], 2.5)
    assert ([clipped[0].tolist(), clipped[1], clipped[2].tolist()], norm) == ([[1.5], None, [[2.0]]], 5)
    assert ops.clip_by_global_norm([np.float32([3, 4])], 8.0)[0][0].tolist() == [3, 4]
    rows = IndexedSlices(np.float32([[-2.0], [4.0]]), [3, 1], (5, 1))
    (dense, slices), norm = ops.clip_by_global_norm([np.float32([4.0]), rows], 3.0)
    assert (dense.tolist(), slices.values.tolist(), norm) == ([2.0], [[-1.0], [2.0]], 6.0)
    for each in (slices, ops.clip_by_value(rows, -1, 1), ops.clip_by_norm(rows, 1.0)):
        assert (each.indices.tolist(), each.dense_shape) == ([3, 1], (5, 1))
        assert np.abs(each.values).max() <= 2
    assert ops.clip_by_global_norm([np.zeros(2)], 8.0)[0][0].tolist() == [0, 0]
    assert ops.clip_by_global_norm([np.float32([3, 4])], 2.5, use_norm=10.0)[0][0].tolist() == [0.75, 1.0]
    for bad in (np.inf, np.nan):
        (found,), norm = ops.clip_by_global_norm([np.array([1.0, bad])], 1.0)
        assert np.isnan(found).all()
        assert not np.isfinite(norm)
    with pytest.raises(ValueError, match=r"have shape \(2, 3\), which cannot clip an array of shape \(3,\)"):
        ops.clip_by_value(np.zeros(3), np.zeros((2, 3)), 1)
    for function in (ops.global_norm, lambda x: ops.clip_by_global_norm(x, 1.0)):
        refused(TypeError, "takes a list of arrays, not a ndarray", lambda function=function: function(np.zeros(3)))
        for nothing in ([], [None]):
            with pytest.raises(ValueError, match="pass at least one that is not None"):
                function(nothing)
