"""The text of kernels, generated from the table of ops and from nothing else.

A kernel computes one element after the other: it reads every input once, and then writes assigned variables, in place,
and outputs. Of received data only rows of `OPS`, dtypes that are keys of `_C`, and numbers of values reach the text; no
name, no attribute, no shape. So programs that differ only in these share one kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from pswire.model.plan import ReduceOp
from pswire.model.program import OPS, Node, Program
from pswire.model.row_updates import resting
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

    @cached_property
    def rested(self) -> tuple[int, ...]:
        """The tables of which a row that is zero stays as it is, in all tables, while these sums are zero."""
        return resting(self.program, self.sums)

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
    def rows(self) -> str:
        """The text for rows of tables, for Numba."""
        return rows_source(self)

    @cached_property
    def replay(self) -> str:
        """The text for updates that rows of tables have missed, for Numba."""
        return replay_source(self)

    @cached_property
    def cuda(self) -> tuple[str, str, str, str]:
        """Arguments of `cupy.ElementwiseKernel`: inputs, outputs, operation, preamble."""
        return (*cuda_source(self), CUDA_PREAMBLE)

    @property
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

Role = Literal["array", "scalar", "part", "total", "output"]


@dataclass(frozen=True)
class Parameter:
    """One pointer that a kernel takes.

    Attributes:
        role: an input, whole or a scalar; one contribution to an input; the sum of weights of a mean; an output.
        value: index of the input or output.
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


_LETTERS: dict[Role, str] = {"array": "a", "scalar": "a", "part": "c", "total": "t", "output": "o"}


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
    """

    types: Mapping[str, str]
    cast: str
    let: str
    at: str
    target: str


NUMBA = Dialect({name: name for name in _C}, "{type}({text})", "{name} = {text}", "[i]", "a")
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
            yield f"w_{dtype}", dtype, _cast(NUMBA, dtype, f"v{value}")


FAR, NEAR = 16, 4
"""Rows between a prefetch and its use, into the second-level cache and into the first.

Rows lie anywhere, so the processor cannot guess them. If they went into the first cache at once, most would come too
late.
"""

LINE = 64
"""Bytes of a cache line."""

FETCHED = 256
"""Most elements of a row that are fetched; the processor itself fetches the rest of a long one."""


def rows_source(form: Form) -> str:
    """Writes the same function on rows of tables; each input of `form.sums` is an array of rows, some for one place.

    `kernel(n, width, size, count, ids, starts, order, *pointers, *buffers)`: for each r below n, row `ids[r]` of every
    table, of `size` elements in all, meets the sum of the rows `order[starts[r]:starts[r + 1]]` of each of those
    inputs, which have `count` rows. There is a buffer of one row for each such sum. There are no outputs.
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


def replay_source(form: Form) -> str:
    """Writes a function that makes up updates which rows of tables have missed; in these, `form.sums` are zero.

    `kernel(n, width, size, count, kept, ids, first, *pointers, *bits)`: for each r below n, row `ids[r]` of every
    table, of `size` elements in all, has the updates from `first[r]` on, below `count`; number k takes element k of
    each scalar, of which `kept` are there. `bits` are the tables that may be zero, as unsigned numbers: a row that is
    zero in all of them stays as it is. There are no outputs.
    """
    taken = [p for p in parameters(form) if p.role != "part"]
    tables = [p for p in taken if p.role == "array"]
    bits = bit_parameters(form)
    pointers = [f"p_{p.name}" for p in taken] + [f"p_z{p.value}" for p in bits]
    lines = [f"def kernel(n, width, size, count, kept, p_ids, p_first, {', '.join(pointers)}):"]
    lines += ["    ids, first = carray(p_ids, n), carray(p_first, n)"]
    lines += [f"    all_{p.name} = carray(p_{p.name}, kept if {p.single} else size)" for p in taken]
    lines += [f"    z{p.value} = carray(p_z{p.value}, size)" for p in bits]
    lines += ["    for r in range(n):"]
    lines += ["        " + line for line in _fetching(tables)]
    lines += ["        base = ids[r] * width"]
    if bits:
        lines += [f"        found{p.value} = {p.dtype}(0)" for p in bits]
        lines += ["        for i in range(base, base + width):"]
        lines += [f"            found{p.value} |= z{p.value}[i]" for p in bits]
        lines += [f"        if {' and '.join(f'found{p.value} == 0' for p in bits)}:", "            continue"]
    lines += [f"        {p.name} = all_{p.name}[base : base + width]" for p in tables]
    lines += ["        for k in range(first[r], count):"]
    lines += [f"            {p.name} = all_{p.name}[k]" for p in taken if p.single]
    lines += ["            for i in range(width):"]
    lines += ["                " + line for line in _body(form, NUMBA, absent=form.sums)]
    return "\n".join([*lines, "    return 0"]) + "\n"


def bit_parameters(form: Form) -> list[Parameter]:
    """Returns the tables that may be zero in a row that no update changes, as parameters of unsigned numbers."""
    rested = form.rested
    return [Parameter("array", n, f"uint{8 * DTYPES[form.program.inputs[n].spec.dtype].itemsize}") for n in rested]


def _fetching(tables: Sequence[Parameter], rows: Sequence[Parameter] = ()) -> Iterator[str]:
    """Yields the lines that prefetch rows of tables, and the first of the received ones for each."""
    step = LINE // max(DTYPES[p.dtype].itemsize for p in (*tables, *rows))
    lines = f"for i in range(0, min(width, {FETCHED}), {step}):"
    yield f"far, near = min(r + {FAR}, n - 1), min(r + {NEAR}, n - 1)"
    yield "later, soon = ids[far] * width, ids[near] * width"
    if rows:
        yield "given = order[starts[far]] * width"
    yield lines
    yield from (f"    fetch(all_{p.name}, later + i)" for p in tables)
    yield from (f"    fetch(all_{p.name}, given + i)" for p in rows)
    yield lines
    yield from (f"    prepare(all_{p.name}, soon + i)" for p in tables)


def _row_sum(p: Parameter) -> Iterator[str]:
    """Yields the lines that take one row, where it lies, or sum several into a buffer."""
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
    """Writes a kernel for CuPy: inputs; outputs, assigned variables first; and statements."""
    taken = parameters(form)
    outputs = [p for p in taken if p.role == "output"]
    inputs = taken[: len(taken) - len(outputs)]
    written = [f"{form.program.inputs[target].spec.dtype} w{target}" for target, _ in form.program.assigns]
    return (
        ", ".join(f"{p.dtype} {p.name}" for p in inputs),
        ", ".join([*written, *(f"{p.dtype} {p.name}" for p in outputs)]),
        "\n".join(f"{line};" for line in _body(form, CUDA)),
    )


def _body(form: Form, dialect: Dialect, absent: Collection[int] = ()) -> Iterator[str]:
    """Yields the statements for one element: reads, ops, writes; `absent` inputs are zero."""
    program, specs, at = form.program, form.program.specs, dialect.at

    def let(number: int, text: str) -> str:
        return dialect.let.format(type=dialect.types[specs[number].dtype], name=f"v{number}", text=text)

    for index, item in enumerate(program.inputs):
        if index in form.read:
            array = f"a{index}{at if item.spec.shape else ''}"
            text = _combined(index, form.sums[index], item.spec.dtype, dialect) if index in form.sums else array
            yield let(index, _cast(dialect, item.spec.dtype, "0") if index in absent else text)
    for number, node in enumerate(program.nodes, len(program.inputs)):
        yield let(number, _cast(dialect, specs[number].dtype, _expression(program, node, dialect)))
    for target, value in program.assigns:
        yield f"{dialect.target}{target}{at} = {_cast(dialect, specs[target].dtype, f'v{value}')}"
    for index, value in enumerate(program.outputs):
        yield f"o{index}{at} = v{value}"


def _combined(index: int, combined: SumTerm, dtype: str, dialect: Dialect) -> str:
    """Returns an expression for contributions in the order given, rounded after each as in the reducer."""
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
    """Returns an expression of numbers of one dtype that wraps as NumPy's does: signed overflow is undefined in C."""
    return kernel.format(*[_cast(dialect, UNSIGNED[dtype], arg) if dtype in UNSIGNED else arg for arg in args])


def _cast(dialect: Dialect, dtype: str, text: str) -> str:
    text = f"({text}) != 0" if dtype == "bool" else text
    return dialect.cast.format(type=dialect.types[dtype], text=text)
