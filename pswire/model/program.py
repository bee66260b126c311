"""Update programs: an update function as data, and the rules by which both ends check it.

A program is a list of inputs, a list of nodes in order, and what it assigns and returns. Values are
numbered: first the inputs, then the nodes. Ops are named as in the Python array API standard. The
table `OPS` gives for each op its arity, its dtype rule, its shape rule and how it runs; the tracer reads it
to know what it records, the server to verify what it received, to interpret it, and to make kernels of it.
Nothing in a program is a name to look up anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeGuard

import numpy as np

from pswire.errors import ProgramError
from pswire.limits import MAX_NODES
from pswire.model.tensor import DTYPES, TensorSpec

Attr = bool | int | float | str | tuple[int, ...] | None
InputKind = Literal["variable", "value", "operand"]


@dataclass(frozen=True)
class Input:
    """One input of a program.

    Attributes:
        kind: "variable" may be assigned; "value" is a reduction's or an earlier program's result;
            "operand" is a Python scalar or an array that every process has.
        spec: its dtype and shape.
    """

    kind: InputKind
    spec: TensorSpec


@dataclass(frozen=True)
class Node:
    """One application of an op.

    Attributes:
        op: a key of `OPS`.
        args: value numbers, all smaller than the node's own.
        attrs: named constants, sorted by name, such as `axis`.
    """

    op: str
    args: tuple[int, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()


@dataclass(frozen=True)
class Program:
    """A traced update function.

    Attributes:
        inputs: the inputs, numbered from 0.
        nodes: the computed values, numbered after the inputs.
        assigns: `(input, value)`: the input, a variable, becomes the value when the program ends.
        outputs: values that the program gives back.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    assigns: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The spec of every value; verifies the program on the way.

        Raises:
            ProgramError: for an unknown op, a wrong arity, dtype or shape, or a value out of place.
        """
        if len(self.nodes) > MAX_NODES:
            raise ProgramError(f"the update function has {len(self.nodes)} operations; at most {MAX_NODES} are allowed")
        specs = [item.spec.check() for item in self.inputs]
        for node in self.nodes:
            if not all(0 <= arg < len(specs) for arg in node.args):
                raise ProgramError(f"{node.op} reads a value that is not computed yet")
            specs.append(infer(node.op, [specs[arg] for arg in node.args], dict(node.attrs)))
        for target, value in self.assigns:
            if not (0 <= target < len(self.inputs) and self.inputs[target].kind == "variable"):
                raise ProgramError(f"the update function assigns to value {target}, which is not a variable")
            if not 0 <= value < len(specs):
                raise ProgramError("the update function assigns a value that does not exist")
            if specs[value] != specs[target]:
                raise ProgramError(f"{specs[value]} cannot be assigned to a variable of {specs[target]}")
        if len({target for target, _ in self.assigns}) < len(self.assigns):
            raise ProgramError("the update function assigns twice to one variable")
        if not all(0 <= value < len(specs) for value in self.outputs):
            raise ProgramError("the update function returns a value that does not exist")
        return tuple(specs)

    @cached_property
    def may_refuse(self) -> bool:
        """True if an op may refuse a value that comes to it."""
        return any(
            DTYPES[self.specs[arg].dtype].kind in OPS[node.op].refuses for node in self.nodes for arg in node.args
        )

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        """The specs of what the program gives back."""
        return tuple(self.specs[value] for value in self.outputs)


Rule = Callable[[Sequence[TensorSpec], Mapping[str, Attr]], TensorSpec]
Loop = Callable[[Sequence[TensorSpec], Mapping[str, Attr]], "tuple[str, ...]"]
Call = Callable[[Any, Sequence[Any], Mapping[str, Attr]], Any]


def _no_loop(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Op:
    """A row of the table of ops: all that the tracer, the verifier, the interpreter and the kernels know of it.

    Attributes:
        name: its name in the Python array API standard.
        arity: number of arguments.
        rule: returns the spec of the result, from those of the arguments and the attributes.
        numpy: the NumPy function that means the same, for the tracer and as the oracle of tests.
        attrs: the names of the attributes that it takes.
        call: runs it over an array namespace; None calls the namespace's function of the name `numpy`.
        kernel: one element of the result, as an expression that is both Python for Numba and CUDA C, `{0}` being
            the first argument; "" where no kernel can have it, or would round differently from NumPy.
        loop: the dtypes that the arguments have when `kernel` reads them; () where it does not take these.
        view: True if the result may share its argument's memory.
        refuses: kinds of dtypes of which it may refuse a value.
        casts: True if arguments of another dtype than the result's are converted as a whole, and not in small pieces.
    """

    name: str
    arity: int
    rule: Rule
    numpy: str
    attrs: tuple[str, ...] = ()
    call: Call | None = None
    kernel: str = ""
    loop: Loop = _no_loop
    view: bool = False
    refuses: str = ""
    casts: bool = False

    @property
    def elementwise(self) -> bool:
        """True if each element of the result depends on the arguments' elements in its place alone."""
        return self.loop is not _no_loop


def _elementwise(function: str) -> Rule:
    ufunc: np.ufunc = getattr(np, function)

    def rule(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> TensorSpec:
        dtypes = ufunc.resolve_dtypes((*(DTYPES[s.dtype] for s in specs), None))
        return TensorSpec(dtypes[-1].name, np.broadcast_shapes(*(s.shape for s in specs)))

    return rule


def _ufunc_loop(function: str, kinds: str) -> Loop:
    """NumPy's own choice, as long as all arguments get one dtype, of one of these kinds."""
    ufunc: np.ufunc = getattr(np, function)

    def loop(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> tuple[str, ...]:
        *dtypes, _ = ufunc.resolve_dtypes((*(DTYPES[s.dtype] for s in specs), None))
        kind = dtypes[0].kind.replace("V", "f")  # Of bfloat16 NumPy knows no kind.
        return tuple(d.name for d in dtypes) if len(set(dtypes)) == 1 and kind in kinds else ()

    return loop


def _where(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> TensorSpec:
    if specs[0].dtype != "bool":
        raise TypeError(f"the condition is {specs[0].dtype}, not bool")
    dtype = np.result_type(DTYPES[specs[1].dtype], DTYPES[specs[2].dtype])
    return TensorSpec(dtype.name, np.broadcast_shapes(*(s.shape for s in specs)))


def _where_loop(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> tuple[str, ...]:
    dtype = _where(specs, attrs).dtype
    return ("bool", dtype, dtype)


def _astype(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> TensorSpec:
    dtype = attrs["dtype"]
    if not isinstance(dtype, str):
        raise TypeError(f"dtype {dtype!r} is not a name")
    return TensorSpec(dtype, specs[0].shape).check()


def _astype_loop(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> tuple[str, ...]:
    # What a real number beyond the range of integers becomes is up to the machine.
    unsure = DTYPES[specs[0].dtype].kind in "fV" and DTYPES[str(attrs["dtype"])].kind in "iu"
    return () if unsure else (specs[0].dtype,)


def _call_astype(xp: Any, args: Sequence[Any], attrs: Mapping[str, Attr]) -> Any:
    (array,), dtype = args, DTYPES[str(attrs["dtype"])]
    # NumPy warns that the imaginary part is lost, which who wrote the program knows.
    return (array.real if array.dtype.kind == "c" and dtype.kind in "fV" else array).astype(dtype)


def _call_sign(xp: Any, args: Sequence[Any], attrs: Mapping[str, Attr]) -> Any:
    # Of complex numbers the namespace makes something else than NumPy. CuPy's sign of NaN is 0, which it mends.
    return np.sign(args[0]) if isinstance(args[0], np.ndarray | np.generic) else xp.sign(args[0])


def _are_numbers(value: Attr) -> TypeGuard[tuple[int, ...]]:
    """Returns whether an attribute is a tuple of numbers; NumPy does not take bools for numbers everywhere."""
    return isinstance(value, tuple) and all(type(number) is int for number in value)


def _broadcast_to(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> TensorSpec:
    shape = attrs["shape"]
    if not _are_numbers(shape) or np.broadcast_shapes(specs[0].shape, shape) != shape:
        raise ValueError(f"{specs[0].shape} does not broadcast to {shape}")
    return TensorSpec(specs[0].dtype, shape).check()


def _same_loop(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> tuple[str, ...]:
    return (specs[0].dtype,)


def _call_broadcast_to(xp: Any, args: Sequence[Any], attrs: Mapping[str, Attr]) -> Any:
    return xp.broadcast_to(args[0], attrs["shape"])


def _reduction(function: str) -> Rule:
    numpy = getattr(np, function)

    def rule(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> TensorSpec:
        axis, keep = attrs.get("axis"), attrs.get("keepdims", False)
        if not (axis is None or type(axis) is int or _are_numbers(axis)):
            raise TypeError(f"axis {axis!r} must be an int, a tuple of ints, or None")
        if not isinstance(keep, bool):
            raise TypeError(f"keepdims must be True or False, not {keep!r}")
        probe = np.zeros((1,) * len(specs[0].shape), DTYPES[specs[0].dtype])
        dtype = numpy(probe).dtype
        drop = np.lib.array_utils.normalize_axis_tuple(tuple(range(probe.ndim)) if axis is None else axis, probe.ndim)
        shape = tuple(1 if i in drop else n for i, n in enumerate(specs[0].shape) if keep or i not in drop)
        if function in ("max", "min") and any(specs[0].shape[i] == 0 for i in drop):
            raise ValueError(f"{function} of an empty array")
        return TensorSpec(dtype.name, shape)

    return rule


def _call_reduction(function: str) -> Call:
    def call(xp: Any, args: Sequence[Any], attrs: Mapping[str, Attr]) -> Any:
        return getattr(xp, function)(args[0], axis=attrs.get("axis"), keepdims=attrs.get("keepdims", False))

    return call


def _call_extreme(function: str) -> Call:
    reduce = _call_reduction(function)

    def call(xp: Any, args: Sequence[Any], attrs: Mapping[str, Attr]) -> Any:
        found = reduce(xp, args, attrs)
        if found.dtype.kind in "fV":
            # Of zeros of both signs NumPy takes the one that the processor's vectors happen to end with. It is
            # replaced in place: over no axis the result is as large as the argument.
            found += found.dtype.type(0)
        return found

    return call


def _call_mean(xp: Any, args: Sequence[Any], attrs: Mapping[str, Attr]) -> Any:
    if args[0].size:
        return _call_reduction("mean")(xp, args, attrs)
    total = _call_reduction("sum")(xp, args, attrs)
    return total / total  # NumPy warns of a mean of nothing, whatever `errstate` says.


_CALLS = {"mean": _call_mean, "max": _call_extreme("max"), "min": _call_extreme("min")}


def _matmul(specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> TensorSpec:
    left, right = (spec.shape for spec in specs)
    if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
        raise ValueError(f"matmul takes two matrices with matching dimensions, not shapes {left} and {right}")
    dtypes = np.matmul.resolve_dtypes((*(DTYPES[s.dtype] for s in specs), None))
    return TensorSpec(dtypes[-1].name, (left[0], right[1]))


def _ufunc(
    name: str, numpy: str, kernel: str = "", kinds: str = "iuf", refuses: str = "", call: Call | None = None
) -> Op:
    """An elementwise op.

    Args:
        name, numpy, kernel, refuses, call: as in `Op`.
        kinds: kinds of dtypes of arguments for which the kernel holds.
    """
    arity = getattr(np, numpy).nin
    return Op(name, arity, _elementwise(numpy), numpy, (), call, kernel, _ufunc_loop(numpy, kinds), refuses=refuses)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        _ufunc("abs", "absolute", "abs({0})", "if"),
        _ufunc("negative", "negative", "-{0}", "if"),
        _ufunc("positive", "positive", "{0}"),
        _ufunc("sqrt", "sqrt", "sqrt({0})", "f"),
        _ufunc("square", "square", "{0} * {0}"),
        # NumPy's own versions of these differ from Numba's and CUDA's in the last bits.
        *(_ufunc(name, name) for name in ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh")),
        _ufunc("sign", "sign", "sign({0})", "if", call=_call_sign),
        _ufunc("floor", "floor", "floor({0})", "f"),
        _ufunc("ceil", "ceil", "ceil({0})", "f"),
        _ufunc("round", "rint", "rint({0})", "f"),
        _ufunc("isfinite", "isfinite", "{0} - {0} == {0} - {0}", "f"),
        _ufunc("isnan", "isnan", "{0} != {0}", "f"),
        _ufunc("logical_not", "logical_not", "{0} == 0", "biuf"),
        _ufunc("add", "add", "{0} + {1}"),
        _ufunc("subtract", "subtract", "{0} - {1}"),
        _ufunc("multiply", "multiply", "{0} * {1}"),
        _ufunc("divide", "true_divide", "{0} / {1}", "f"),
        _ufunc("floor_divide", "floor_divide"),
        _ufunc("remainder", "remainder"),
        _ufunc("pow", "power", refuses="iu"),
        _ufunc("maximum", "maximum", "maximum({0}, {1})"),
        _ufunc("minimum", "minimum", "minimum({0}, {1})"),
        _ufunc("equal", "equal", "{0} == {1}", "biuf"),
        _ufunc("not_equal", "not_equal", "{0} != {1}", "biuf"),
        _ufunc("less", "less", "{0} < {1}", "biuf"),
        _ufunc("less_equal", "less_equal", "{0} <= {1}", "biuf"),
        _ufunc("greater", "greater", "{0} > {1}", "biuf"),
        _ufunc("greater_equal", "greater_equal", "{0} >= {1}", "biuf"),
        _ufunc("logical_and", "logical_and", "({0} != 0) & ({1} != 0)", "biuf"),
        _ufunc("logical_or", "logical_or", "({0} != 0) | ({1} != 0)", "biuf"),
        Op("where", 3, _where, "where", kernel="where({0}, {1}, {2})", loop=_where_loop, casts=True),
        Op("astype", 1, _astype, "astype", ("dtype",), _call_astype, "{0}", _astype_loop),
        Op("broadcast_to", 1, _broadcast_to, "broadcast_to", ("shape",), _call_broadcast_to, "{0}", _same_loop, True),
        *(
            Op(name, 1, _reduction(name), name, ("axis", "keepdims"), call)
            for name in ("sum", "mean", "max", "min", "all", "any")
            for call in [_CALLS.get(name) or _call_reduction(name)]
        ),
        Op("matmul", 2, _matmul, "matmul", casts=True),
    )
}
"""Every op that a program may use."""


def infer(op: str, specs: Sequence[TensorSpec], attrs: Mapping[str, Attr]) -> TensorSpec:
    """The spec of an op's result.

    Raises:
        ProgramError: with the op and the shapes in it, if there is no such op or it does not take these.
    """
    row = OPS.get(op)
    if row is None:
        raise ProgramError(f"unknown op {op!r}; known are {', '.join(OPS)}")
    if len(specs) != row.arity or not set(attrs) <= set(row.attrs):
        raise ProgramError(f"{op} takes {row.arity} arguments and the attributes {list(row.attrs)}")
    try:
        return row.rule(specs, attrs).check()
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        # NumPy says so with any of these when sizes, axes or dtypes from the network are absurd.
        given = ", ".join(map(str, specs))
        raise ProgramError(f"{op}({given}) is not possible: {error}") from None
