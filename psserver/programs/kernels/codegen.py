"""The text of kernels, generated from the table of ops and from nothing else.

A kernel computes one element after the other: it reads every input once, and then writes assigned variables, in place,
and outputs. Of received data only rows of `OPS`, dtypes that are keys of `_C`, and numbers of values reach the text; no
name, no attribute, no shape. So programs that differ only in these share one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from pswire.model.plan import ReduceOp
from pswire.model.program import OPS, Node, Program

_C = {
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float32": "float",
    "float64": "double",
}
"""Dtypes of kernels, and their names in CUDA. Numba's names are the dtypes'."""

CUDA_PREAMBLE = """
template <typename T> __device__ T where(bool c, T a, T b) { return c ? a : b; }
template <typename T> __device__ T maximum(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <typename T> __device__ T minimum(T a, T b) { return (a < b) | (a != a) ? a : b; }
template <typename T> __device__ T sign(T a) { return a > 0 ? T(1) : a < 0 ? T(-1) : a == 0 ? T(0) : a; }
"""
"""Functions of the expressions that CUDA lacks."""


@dataclass(frozen=True)
class SumTerm:
    """The combination of contributions that makes an input inside a kernel.

    Attributes:
        op: "sum" or "mean".
        count: number of contributions.
    """

    op: ReduceOp
    count: int


@dataclass(frozen=True)
class Form:
    """The computation of a kernel.

    Attributes:
        program: an elementwise program, as of `fusion.Step`.
        sums: the inputs, by index, that combine contributions.
    """

    program: Program
    sums: Mapping[int, SumTerm] = field(default_factory=dict)

    @property
    def read(self) -> frozenset[int]:
        """Numbers of the values that have a reader."""
        program = self.program
        nodes = (arg for node in program.nodes for arg in node.args)
        return frozenset((*nodes, *(value for _, value in program.assigns), *program.outputs))

    @cached_property
    def numba(self) -> str:
        """The text for Numba."""
        return numba_source(self)

    @cached_property
    def cuda(self) -> tuple[str, str, str, str]:
        """Arguments of `cupy.ElementwiseKernel`: inputs, outputs, operation, preamble."""
        return (*cuda_source(self), CUDA_PREAMBLE)

    @cached_property
    def targets(self) -> frozenset[int]:
        """Inputs that are assigned."""
        return frozenset(target for target, _ in self.program.assigns)


SUMS, ASSIGNED = 1, 2
"""Flags that a kernel on the CPU returns: NaN or infinity in a sum of contributions, and in an assigned value."""

WATCHED = ("float32", "float64")
"""Dtypes of kernels that have NaN and infinities."""


WRAPPING = ("add", "subtract", "multiply", "negative", "square")
"""Ops that may overflow. Integers narrower than an `int` are computed as `int` and truncated."""

UNSIGNED = {"int32": "uint32", "int64": "uint64"}

IN_HALVES = {"maximum": "first_maximum({0}, {1})", "minimum": "first_minimum({0}, {1})"}
"""Expressions of ops that are others for float16."""

Role = Literal["array", "scalar", "part", "total", "output", "room", "kept", "bits"]


@dataclass(frozen=True)
class Parameter:
    """One pointer that a kernel takes.

    Attributes:
        role: an input, whole or a scalar; one contribution to an input; the sum of weights of a mean; an output. For
            rows of tables also room for the sum of an input's rows, a value kept of a row, and a table's bits.
        value: index of the input or output, or number of the value.
        dtype: dtype of its elements.
        place: index of the contribution.
        written: True if it is written.
    """

    role: Role
    value: int
    dtype: str
    place: int = 0
    written: bool = False

    @property
    def name(self) -> str:
        """Its name in the text."""
        return f"{_LETTERS[self.role]}{self.value}" + (f"_{self.place}" if self.role == "part" else "")

    @property
    def single(self) -> bool:
        """True if it has a single element, shared by all."""
        return self.role in ("scalar", "total")


_LETTERS: dict[Role, str] = {
    "array": "a",
    "scalar": "a",
    "part": "c",
    "total": "t",
    "output": "o",
    "room": "b",
    "kept": "x",
    "bits": "z",
}


def parameters(form: Form) -> list[Parameter]:
    """Returns a kernel's parameters in order: inputs, a mean's total after its contributions, then outputs."""
    found = []
    for index, item in enumerate(form.program.inputs):
        dtype, combined = item.spec.dtype, form.sums.get(index)
        if combined is None:
            role: Role = "array" if item.spec.shape else "scalar"
            found.append(Parameter(role, index, dtype, written=index in form.targets))
            continue
        found += [Parameter("part", index, dtype, place) for place in range(combined.count)]
        found += [Parameter("total", index, dtype)] * (combined.op == "mean")
    outputs = enumerate(form.program.output_specs)
    return [*found, *(Parameter("output", index, spec.dtype, written=True) for index, spec in outputs)]


@dataclass(frozen=True)
class Dialect:
    """Templates for the syntax in which the two languages differ.

    Attributes:
        types: the names of dtypes.
        cast: casts a `text` to a `type`.
        let: defines a `name` as a `text` of a `type`.
        at: suffix of an array's name, for one element.
        target: prefix of the name of an assigned variable.
        casts: casts to dtypes that have a way of their own.
    """

    types: Mapping[str, str]
    cast: str
    let: str
    at: str
    target: str
    casts: Mapping[str, str] = field(default_factory=dict)


HALVES = {"float16": "half(float32({text}))", "bfloat16": "brain(float32({text}))"}
"""Dtypes whose numbers kernels for Numba compute with as float32, and how they are rounded."""

NUMBA = Dialect(
    {name: name for name in _C} | dict.fromkeys(HALVES, "float32"),
    "{type}({text})",
    "{name} = {text}",
    "[i]",
    "a",
    HALVES,
)
CUDA = Dialect(_C, "(({type})({text}))", "{type} {name} = {text}", "", "w")


def numba_source(form: Form) -> str:
    """Writes a function `kernel(n, *pointers)` over `n` elements for Numba. `where` and the like are its globals.

    The function returns `SUMS` and `ASSIGNED`, added, for NaN or infinity that it saw.
    """
    taken = parameters(form)
    lines = [f"def kernel(n, {', '.join(f'p_{p.name}' for p in taken)}):"]
    lines += [f"    {p.name} = carray(p_{p.name}, {'1)[0]' if p.single else 'n)'}" for p in taken]
    seen = list(_seen(form))
    lines += [f"    {name} = {dtype}(0)" for name, dtype in dict.fromkeys((name, dtype) for name, dtype, _ in seen)]
    lines += ["    for i in range(n):"]
    lines += ["        " + line for line in _body(form, NUMBA)]
    lines += [f"        {name} = watch({name}, {text})" for name, _, text in seen]
    lines += ["    found = 0"]
    for flag, letter in ((SUMS, "s"), (ASSIGNED, "w")):
        names = sorted({name for name, _, _ in seen if name[0] == letter})
        lines += [f"    if {' or '.join(f'{name} != 0' for name in names)}:", f"        found += {flag}"] * bool(names)
    return "\n".join([*lines, "    return found"]) + "\n"


def _seen(form: Form) -> Iterator[tuple[str, str, str]]:
    """Yields the watched values of one element: the name of their accumulator, its dtype, and the value.

    The accumulator adds zero times the value. It stays zero unless a value is NaN or infinite, and takes one
    instruction, where a comparison and its memory would take three.
    """
    program, specs = form.program, form.program.specs
    for index in form.sums:
        if index in form.read and (dtype := specs[index].dtype) in WATCHED:
            yield f"s_{dtype}", dtype, f"v{index}"
    for target, value in program.assigns:
        if (dtype := specs[target].dtype) in WATCHED:
            yield f"w_{dtype}", dtype, cast(NUMBA, dtype, f"v{value}")


def looked_at(form: Form) -> frozenset[int]:
    """Returns the inputs in which a kernel on a GPU looks for NaN and infinity, by index: contributions among them."""
    items = ((index, item) for index, item in enumerate(form.program.inputs) if index in form.read)
    return frozenset(i for i, item in items if item.kind == "value" and item.spec.shape and item.spec.dtype in WATCHED)


def cuda_source(form: Form) -> tuple[str, str, str]:
    """Writes a kernel for CuPy: inputs; outputs, assigned variables first, then `seen`; and statements.

    Of `seen`, two bools that are False before, the first becomes True for NaN or infinity in what is `looked_at`, the
    second for those in assigned values. All threads write the same, and none reads it.
    """
    program = form.program
    assigned = [value for target, value in program.assigns if program.specs[target].dtype in WATCHED]
    looks = [
        f"if (!({' && '.join(f'isfinite(v{number})' for number in numbers)})) seen[{place}] = true"
        for place, numbers in enumerate((sorted(looked_at(form)), assigned))
        if numbers
    ]
    taken = parameters(form)
    outputs = [p for p in taken if p.role == "output"]
    inputs = taken[: len(taken) - len(outputs)]
    written = [f"{form.program.inputs[target].spec.dtype} w{target}" for target, _ in form.program.assigns]
    return (
        ", ".join(f"{p.dtype} {p.name}" for p in inputs),
        ", ".join([*written, *(f"{p.dtype} {p.name}" for p in outputs), "raw bool seen"]),
        "\n".join(f"{line};" for line in (*_body(form, CUDA), *looks)),
    )


def _body(form: Form, dialect: Dialect) -> Iterator[str]:
    """Yields the statements for one element: reads, ops, writes."""
    program, specs, at = form.program, form.program.specs, dialect.at

    def let(number: int, text: str) -> str:
        return dialect.let.format(type=dialect.types[specs[number].dtype], name=f"v{number}", text=text)

    for index, item in enumerate(program.inputs):
        if index in form.read:
            array = f"a{index}{at if item.spec.shape else ''}"
            yield let(
                index, _combined(index, form.sums[index], item.spec.dtype, dialect) if index in form.sums else array
            )
    for number, node in enumerate(program.nodes, len(program.inputs)):
        yield let(number, cast(dialect, specs[number].dtype, expression(program, node, dialect)))
    for target, value in program.assigns:
        yield f"{dialect.target}{target}{at} = {cast(dialect, specs[target].dtype, f'v{value}')}"
    for index, value in enumerate(program.outputs):
        yield f"o{index}{at} = v{value}"


def _combined(index: int, combined: SumTerm, dtype: str, dialect: Dialect) -> str:
    """Returns an expression for contributions in the order given, rounded after each as in the reducer."""
    text = f"c{index}_0{dialect.at}"
    for n in range(1, combined.count):
        text = cast(dialect, dtype, wrapping(dialect, "{0} + {1}", dtype, text, f"c{index}_{n}{dialect.at}"))
    return cast(dialect, dtype, f"{text} / t{index}") if combined.op == "mean" else text


def expression(program: Program, node: Node, dialect: Dialect) -> str:
    """Returns the expression of an elementwise node, of values `v0`, `v1` and so on; not yet cast to its dtype."""
    specs, row = program.specs, OPS[node.op]
    loop = row.loop([specs[arg] for arg in node.args], dict(node.attrs))
    args = [
        f"v{arg}" if specs[arg].dtype == dtype else cast(dialect, dtype, f"v{arg}")
        for arg, dtype in zip(node.args, loop, strict=True)
    ]
    if node.op in WRAPPING:
        return wrapping(dialect, row.kernel, loop[0], *args)
    if "float16" in (loop[0], dict(node.attrs).get("dtype")):
        return _in_halves(node.op, loop[0]).format(*args)
    return row.kernel.format(*args)


def _in_halves(op: str, dtype: str) -> str:
    """Returns the expression of an op of numbers of a dtype, where that or the result is float16."""
    if op == "astype" and dtype == "float64":
        return "odd({0})"  # which is rounded once more
    return IN_HALVES.get(op, OPS[op].kernel)


def wrapping(dialect: Dialect, kernel: str, dtype: str, *args: str) -> str:
    """Returns an expression of numbers of one dtype that wraps as NumPy's does: signed overflow is undefined in C."""
    return kernel.format(*[cast(dialect, UNSIGNED[dtype], arg) if dtype in UNSIGNED else arg for arg in args])


def cast(dialect: Dialect, dtype: str, text: str) -> str:
    """Returns an expression as one of another dtype."""
    text = f"({text}) != 0" if dtype == "bool" else text
    return dialect.casts.get(dtype, dialect.cast).format(type=dialect.types[dtype], text=text)
