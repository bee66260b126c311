"""The text of kernels, generated from the table of ops and from nothing else.

A kernel computes one element after the other: it reads every input once, and then writes what is assigned, in place,
and what is given back. What reaches the text of what came over the network are rows of `OPS`, dtypes that are keys of
`_C`, and numbers of values; no name, no attribute, no shape. So programs that differ only in these share one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from pswire.model.plan import ReduceOp
from pswire.model.program import OPS, Node, Program
from pswire.model.tensor import DTYPES

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
"""Functions of the expressions that CUDA does not have."""


@dataclass(frozen=True)
class SumTerm:
    """How an input comes to be in the kernel: from this many contributions.

    Attributes:
        op: "sum" or "mean".
        count: how many.
    """

    op: ReduceOp
    count: int


@dataclass(frozen=True)
class Form:
    """What a kernel is to do.

    Attributes:
        program: an elementwise program, as `steps.Step` has them.
        sums: the inputs, by index, that are contributions to be combined.
    """

    program: Program
    sums: Mapping[int, SumTerm] = field(default_factory=dict)

    @property
    def read(self) -> frozenset[int]:
        """Values that something reads."""
        program = self.program
        nodes = (arg for node in program.nodes for arg in node.args)
        return frozenset((*nodes, *(value for _, value in program.assigns), *program.outputs))

    @cached_property
    def numba(self) -> str:
        """The text for Numba."""
        return numba_source(self)

    @cached_property
    def rows(self) -> str:
        """The text for rows of tables, for Numba."""
        return rows_source(self)

    @cached_property
    def cuda(self) -> tuple[str, str, str, str]:
        """What `cupy.ElementwiseKernel` takes: inputs, outputs, operation, preamble."""
        return (*cuda_source(self), CUDA_PREAMBLE)

    @property
    def targets(self) -> frozenset[int]:
        """Inputs that are assigned."""
        return frozenset(target for target, _ in self.program.assigns)


SUMS, ASSIGNED = 1, 2
"""What a kernel on the CPU returns, together: a sum of contributions has NaN or infinity, or what it assigned has."""

WATCHED = ("float32", "float64")
"""Dtypes of kernels that have these."""


WRAPPING = ("add", "subtract", "multiply", "negative", "square")
"""Ops that may overflow. Integers narrower than an `int` are computed as one, and cut."""

UNSIGNED = {"int32": "uint32", "int64": "uint64"}

Role = Literal["array", "scalar", "part", "total", "output"]


@dataclass(frozen=True)
class Parameter:
    """One pointer that a kernel takes.

    Attributes:
        role: an input, whole or a scalar; one contribution to an input; the sum of weights of a mean; an output.
        value: which input, or which output.
        dtype: what it points to.
        place: which contribution.
        written: whether it is written.
    """

    role: Role
    value: int
    dtype: str
    place: int = 0
    written: bool = False

    @property
    def name(self) -> str:
        """What it is called in the text."""
        return f"{_LETTERS[self.role]}{self.value}" + (f"_{self.place}" if self.role == "part" else "")

    @property
    def single(self) -> bool:
        """Whether it has one element, for all."""
        return self.role in ("scalar", "total")


_LETTERS: dict[Role, str] = {"array": "a", "scalar": "a", "part": "c", "total": "t", "output": "o"}


def parameters(form: Form) -> list[Parameter]:
    """Returns what a kernel takes, in order: inputs, a mean's total after its contributions, then outputs."""
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
    """How a language writes what the two do not have in common.

    Attributes:
        types: the names of dtypes.
        cast: `text` as a `type`.
        let: a `name` for a `text` of a `type`.
        at: what follows the name of an array.
        target: begins the name of what is assigned.
    """

    types: Mapping[str, str]
    cast: str
    let: str
    at: str
    target: str


NUMBA = Dialect({name: name for name in _C}, "{type}({text})", "{name} = {text}", "[i]", "a")
CUDA = Dialect(_C, "(({type})({text}))", "{type} {name} = {text}", "", "w")


def numba_source(form: Form) -> str:
    """A function `kernel(n, *pointers)` over `n` elements, for Numba; `where` and its like are globals of it.

    It returns whether it saw NaN or infinity, as `SUMS` and `ASSIGNED`.
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
    """Returns what is watched of one element: the name of what keeps it in mind, its dtype, and the value.

    Zero times the value is added up there: that stays zero, unless the value is NaN or infinite, and takes one
    instruction, where a comparison and its memory would take three.
    """
    program, specs = form.program, form.program.specs
    for index in form.sums:
        if index in form.read and (dtype := specs[index].dtype) in WATCHED:
            yield f"s_{dtype}", dtype, f"v{index}"
    for target, value in program.assigns:
        if (dtype := specs[target].dtype) in WATCHED:
            yield f"w_{dtype}", dtype, _cast(NUMBA, dtype, f"v{value}")


FAR, NEAR = 16, 4
"""Rows that are fetched before it is their turn, into the second cache and into the first: they lie anywhere, so the
processor cannot guess them. Going into the first at once, most of them come too late."""

LINE = 64
"""Bytes of a cache line."""

FETCHED = 256
"""Elements of a row that are fetched at most; the processor sees by itself how a long one goes on."""


def rows_source(form: Form) -> str:
    """The same on rows of tables, for Numba; each input of `form.sums` is one array of rows, some for the same place.

    `kernel(n, width, size, count, ids, starts, order, *pointers, *buffers)`: for each r below n, row `ids[r]` of every
    table, of `size` elements in all, meets the sum of the rows `order[starts[r]:starts[r + 1]]` of each of those
    inputs, which have `count` rows. There is a buffer of one row for each such sum. Nothing is given back.
    """
    taken = parameters(form)
    rows = [p for p in taken if p.role == "part"]
    tables = [p for p in taken if p.role == "array"]
    pointers = [f"p_{p.name}" for p in taken] + [f"p_b{p.value}" for p in rows]
    lines = [f"def kernel(n, width, size, count, p_ids, p_starts, p_order, {', '.join(pointers)}):"]
    lines += ["    ids, starts, order = carray(p_ids, n), carray(p_starts, n + 1), carray(p_order, count)"]
    lines += [f"    {p.name} = carray(p_{p.name}, 1)[0]" for p in taken if p.single]
    lines += [f"    all_{p.name} = carray(p_{p.name}, size)" for p in tables]
    lines += [f"    all_{p.name} = carray(p_{p.name}, count * width)" for p in rows]
    lines += [f"    b{p.value} = carray(p_b{p.value}, width)" for p in rows]
    lines += ["    for r in range(n):"]
    lines += ["        " + line for line in _fetching(tables, rows)]
    lines += ["        base, first, low, high = ids[r] * width, order[starts[r]] * width, starts[r] + 1, starts[r + 1]"]
    lines += [f"        {p.name} = all_{p.name}[base : base + width]" for p in tables]
    for p in rows:
        lines += ["        " + line for line in _row_sum(p)]
    lines += ["        for i in range(width):"]
    lines += ["            " + line for line in _body(form, NUMBA)]
    return "\n".join([*lines, "    return 0"]) + "\n"


def _fetching(tables: Sequence[Parameter], rows: Sequence[Parameter]) -> Iterator[str]:
    """Yields the lines that bring nearer what will be read."""
    step = LINE // max(DTYPES[p.dtype].itemsize for p in (*tables, *rows))
    lines = f"for i in range(0, min(width, {FETCHED}), {step}):"
    yield f"far, near = min(r + {FAR}, n - 1), min(r + {NEAR}, n - 1)"
    yield "later, soon, given = ids[far] * width, ids[near] * width, order[starts[far]] * width"
    yield lines
    yield from (f"    fetch(all_{p.name}, later + i)" for p in tables)
    yield from (f"    fetch(all_{p.name}, given + i)" for p in rows)
    yield lines
    yield from (f"    prepare(all_{p.name}, soon + i)" for p in tables)


def _row_sum(p: Parameter) -> Iterator[str]:
    """One row, where it lies; or the sum of several, in a buffer."""
    yield f"{p.name} = all_{p.name}[first : first + width]"
    yield "if low < high:"
    yield "    for i in range(width):"
    yield f"        b{p.value}[i] = {p.name}[i]"
    yield "    for k in range(low, high):"
    yield "        at = order[k] * width"
    yield "        for i in range(width):"
    text = _wrapping(NUMBA, "{0} + {1}", p.dtype, f"b{p.value}[i]", f"all_{p.name}[at + i]")
    yield f"            b{p.value}[i] = {p.dtype}({text})"
    yield f"    {p.name} = b{p.value}[0:width]"


def cuda_source(form: Form) -> tuple[str, str, str]:
    """A kernel for CuPy: inputs, outputs, which are what is assigned and then the program's, and statements."""
    taken = parameters(form)
    outputs = [p for p in taken if p.role == "output"]
    inputs = taken[: len(taken) - len(outputs)]
    written = [f"{form.program.inputs[target].spec.dtype} w{target}" for target, _ in form.program.assigns]
    return (
        ", ".join(f"{p.dtype} {p.name}" for p in inputs),
        ", ".join([*written, *(f"{p.dtype} {p.name}" for p in outputs)]),
        "\n".join(f"{line};" for line in _body(form, CUDA)),
    )


def _body(form: Form, dialect: Dialect) -> Iterator[str]:
    """The statements for one element: reads, ops, writes."""
    program, specs, at = form.program, form.program.specs, dialect.at

    def let(number: int, text: str) -> str:
        return dialect.let.format(type=dialect.types[specs[number].dtype], name=f"v{number}", text=text)

    for index, item in enumerate(program.inputs):
        if index in form.read:
            array = f"a{index}{at if item.spec.shape else ''}"
            text = _combined(index, form.sums[index], item.spec.dtype, dialect) if index in form.sums else array
            yield let(index, text)
    for number, node in enumerate(program.nodes, len(program.inputs)):
        yield let(number, _cast(dialect, specs[number].dtype, _expression(program, node, dialect)))
    for target, value in program.assigns:
        yield f"{dialect.target}{target}{at} = {_cast(dialect, specs[target].dtype, f'v{value}')}"
    for index, value in enumerate(program.outputs):
        yield f"o{index}{at} = v{value}"


def _combined(index: int, combined: SumTerm, dtype: str, dialect: Dialect) -> str:
    """Contributions in the order given, rounded after each as the reducer does."""
    text = f"c{index}_0{dialect.at}"
    for n in range(1, combined.count):
        text = _cast(dialect, dtype, _wrapping(dialect, "{0} + {1}", dtype, text, f"c{index}_{n}{dialect.at}"))
    return _cast(dialect, dtype, f"{text} / t{index}") if combined.op == "mean" else text


def _expression(program: Program, node: Node, dialect: Dialect) -> str:
    specs, row = program.specs, OPS[node.op]
    loop = row.loop([specs[arg] for arg in node.args], dict(node.attrs))
    args = [
        f"v{arg}" if specs[arg].dtype == dtype else _cast(dialect, dtype, f"v{arg}")
        for arg, dtype in zip(node.args, loop, strict=True)
    ]
    if node.op in WRAPPING:
        return _wrapping(dialect, row.kernel, loop[0], *args)
    return row.kernel.format(*args)


def _wrapping(dialect: Dialect, kernel: str, dtype: str, *args: str) -> str:
    """An expression of numbers of one dtype that wraps as NumPy's does: of signed ones overflow is undefined."""
    return kernel.format(*[_cast(dialect, UNSIGNED[dtype], arg) if dtype in UNSIGNED else arg for arg in args])


def _cast(dialect: Dialect, dtype: str, text: str) -> str:
    text = f"({text}) != 0" if dtype == "bool" else text
    return dialect.cast.format(type=dialect.types[dtype], text=text)
