"""Closed forms of updates that rows have missed: what many of them make is computed at once, within a millionth.

With a gradient of zero many optimizers multiply their tables by numbers, and change one of them, w, besides by a
multiple of another, m, which may be divided by a root of a third, s:

    m <- a m        s <- t s        w <- b w + c m + d m / (k sqrt(s) + f)

The letters are numbers of each update, such as a learning rate. Which they are is read off the program. After updates
i, i + 1, ... n - 1, with products over these, and x = sqrt(s) before them:

    m <- A m        s <- T s        w <- B w + G m + m (e_i / (g_i x + f) + ... + e_(n-1) / (g_(n-1) x + f))

where g_i = k_i, and the later ones are smaller, slowly: by sqrt(t) for each update. With y = g_i x, u = y / (y + f),
which is between 0 and 1, and z_j = 1 - g_j / g_i, a term is e_j / (y + f) / (1 - u z_j), so that the sum is

    (C_0 + C_1 u + C_2 u^2 + ...) / (y + f)        C_p = e_i z_i^p + ... + e_(n-1) z_(n-1)^p

It needs few terms, since e decreases faster than z grows: for Adam's defaults C_p is below p! / 200^p of C_0. Where
`TERMS` of them are not enough, updates are made up one by one.

    closed_form    finds the form of a program
    ClosedForm     the program that makes many updates at once, and the numbers that it takes
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from psserver.programs.kernels.compiler import NumbaKernel, Tools
from pswire.model.program import Input, Node, Program
from pswire.model.rows import Int64s
from pswire.model.tensor import Array, TensorSpec, address_of

Floats = npt.NDArray[np.float64]
Number = Callable[[Sequence[Floats]], Floats]
"""A number of each update, computed from those that the program takes."""

TERMS = 6
ERROR = 1e-8
"""Most that the first term that is left out may be of the first one."""

DTYPES = ("float32", "float64")
"""Dtypes of tables. Half precision rounds in each update, which many at once do not."""


def one(given: Sequence[Floats]) -> Floats:
    """The number 1, by which nothing is multiplied."""
    return np.ones(())


# ---- What a value of a program is ----


@dataclass(frozen=True)
class Root:
    """`scale * sqrt(table) + plus`."""

    table: int
    scale: Number
    plus: Number | None = None


@dataclass(frozen=True)
class Quotient:
    """`number * table / root`."""

    table: int
    number: Number
    root: Root


@dataclass(frozen=True)
class TableSum:
    """Tables, each multiplied by a number, and at most one quotient. Without any of these it is zero."""

    parts: Mapping[int, Number] = field(default_factory=dict)
    over: Quotient | None = None

    @property
    def is_zero(self) -> bool:
        """True if it is zero."""
        return not self.parts and self.over is None


@dataclass(frozen=True)
class Plain:
    """A number."""

    number: Number


Value = TableSum | Root | Plain | None
"""None where nothing of use is known."""


def _times(a: Number, b: Number) -> Number:
    return b if a is one else a if b is one else lambda given: a(given) * b(given)


def _per(a: Number, b: Number) -> Number:
    return a if b is one else lambda given: a(given) / b(given)


def _plus(a: Number, b: Number) -> Number:
    return lambda given: a(given) + b(given)


def _less(a: Number) -> Number:
    return lambda given: -a(given)


def _root(a: Number) -> Number:
    return one if a is one else lambda given: np.sqrt(a(given))


def _scaled(value: Value, number: Number, by: Callable[[Number, Number], Number]) -> Value:
    """Returns a value multiplied by a number, or divided by it."""
    if isinstance(value, TableSum):
        over = value.over and Quotient(value.over.table, by(value.over.number, number), value.over.root)
        return TableSum({table: by(part, number) for table, part in value.parts.items()}, over)
    if isinstance(value, Root):
        return Root(value.table, by(value.scale, number), value.plus and by(value.plus, number))
    return Plain(by(value.number, number)) if isinstance(value, Plain) else None


def _negative(a: Value) -> Value:
    return _scaled(a, lambda given: -np.ones(()), _times)


def _add(a: Value, b: Value) -> Value:
    if isinstance(a, Plain) and isinstance(b, Plain):
        return Plain(_plus(a.number, b.number))
    if isinstance(b, Root):
        a, b = b, a
    if isinstance(a, Root):
        if isinstance(b, TableSum) and b.is_zero:
            return a
        fits = isinstance(b, Plain) and a.plus is None
        return Root(a.table, a.scale, b.number) if fits and isinstance(b, Plain) else None
    if not (isinstance(a, TableSum) and isinstance(b, TableSum)) or (a.over and b.over):
        return None
    parts = dict(a.parts)
    for table, part in b.parts.items():
        parts[table] = _plus(parts[table], part) if table in parts else part
    return TableSum(parts, a.over or b.over)


def _subtract(a: Value, b: Value) -> Value:
    return a if isinstance(b, TableSum) and b.is_zero else _add(a, _negative(b))


def _multiply(a: Value, b: Value) -> Value:
    if any(isinstance(each, TableSum) and each.is_zero for each in (a, b)):
        return TableSum()
    if isinstance(a, Plain):
        a, b = b, a
    return _scaled(a, b.number, _times) if isinstance(b, Plain) else None


def _divide(a: Value, b: Value) -> Value:
    if isinstance(b, Plain):
        return _scaled(a, b.number, _per)
    if isinstance(a, TableSum) and a.is_zero and not (isinstance(b, TableSum) and b.is_zero):
        return a  # a divisor that is not known is taken to be no zero, as in `row_updates.keeps_rows`
    if not (isinstance(a, TableSum) and isinstance(b, Root)) or a.over or len(a.parts) != 1:
        return None
    ((table, number),) = a.parts.items()
    return TableSum({}, Quotient(table, number, b))


def _square(a: Value) -> Value:
    return a if isinstance(a, TableSum) and a.is_zero else None


def _sqrt(a: Value) -> Value:
    if isinstance(a, Plain):
        return Plain(_root(a.number))
    if not isinstance(a, TableSum) or a.over or len(a.parts) > 1:
        return None
    return next((Root(table, _root(number)) for table, number in a.parts.items()), a)


def _same(a: Value) -> Value:
    return a


_RULES: Mapping[str, Callable[..., Value]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "square": _square,
    "sqrt": _sqrt,
    "negative": _negative,
    "positive": _same,
    "astype": _same,
}


# ---- The form of a program ----


@dataclass(frozen=True)
class ClosedForm:
    """Many updates of one program as one.

    Attributes:
        program: makes them: its inputs are the tables, in order, then `numbers`; it assigns all tables.
        numbers: what the program's numbers are, by the letters of this module.
        tables: the tables, as inputs of the program whose updates these are.
        factors: by table, what each update multiplies it by.
        weight: w; None if tables are multiplied alone.
        along: m and the number c; None if there is no such term.
        over: m, the number d, and the root.
    """

    program: Program
    numbers: tuple[str, ...]
    tables: tuple[int, ...]
    factors: Mapping[int, Number]
    weight: int | None
    along: tuple[int, Number] | None
    over: Quotient | None

    def numbers_of(
        self, scalars: Sequence[Array], first: Int64s, count: int, function: NumbaKernel | None = None
    ) -> tuple[list[Array], npt.NDArray[np.bool_]]:
        """Returns the numbers that the program takes, and whether they are known, for each row.

        Args:
            scalars: for each number that the updates take its value in each update.
            first: int64[n], the first update that each row has missed.
            count: the number after the last one.
            function: `recurring`, compiled; None for Python.

        Returns:
            For each of `numbers` an array (n,) of the tables' dtype; bool[n].
        """
        low = int(first.min(initial=count))
        size, place = count - low, first - low
        given = [np.asarray(scalar[low:count], np.float64) for scalar in scalars]
        found: dict[str, Floats] = {}
        with np.errstate(all="ignore"):
            for n, table in enumerate(self.tables):
                found[f"A{n}"] = _products(_each(self.factors[table], given, size))
            known = np.ones(size, bool)
            if self.along:
                table, times = self.along
                found["G"] = self._sum(table, self._after(found, given, size, times), 1.0, given, function)
            if self.over:
                known = self._expand(self.over, found, given, size, function)
            known &= np.logical_and.reduce([np.isfinite(found[name]) for name in self.numbers])
            dtype = self.program.inputs[0].spec.dtype
            return [found[name][place].astype(dtype) for name in self.numbers], known[place]

    def _after(self, found: Mapping[str, Floats], given: Sequence[Floats], size: int, number: Number) -> Floats:
        """Returns a number of each update, times what the later ones multiply w by."""
        after = found[f"A{self.tables.index(self.weight)}"] if self.weight is not None else np.ones(size)
        times: Floats = _each(number, given, size) * np.append(after[1:], 1.0)
        return times

    def _sum(
        self, table: int, terms: Floats, ratio: Floats | float, given: Sequence[Floats], function: NumbaKernel | None
    ) -> Floats:
        """Returns the sums of terms from each update on, of which each is multiplied by the factors before it."""
        factors = _each(self.factors[table], given, terms.size) * ratio
        return recur(np.ascontiguousarray(terms), np.ascontiguousarray(factors), function)

    def _expand(
        self,
        over: Quotient,
        found: dict[str, Floats],
        given: Sequence[Floats],
        size: int,
        function: NumbaKernel | None,
    ) -> npt.NDArray[np.bool_]:
        """Finds C_0 to C_(TERMS - 1), k and f; returns for each first update whether these are enough."""
        scale = _each(over.root.scale, given, size)
        plus = np.zeros(size) if over.root.plus is None else _each(over.root.plus, given, size)
        factor = np.sqrt(_each(self.factors[over.root.table], given, size))
        ratio = factor * np.append(scale[1:], 0.0) / scale
        terms = self._after(found, given, size, over.number)
        powers = [self._sum(over.table, terms, ratio**power, given, function) for power in range(TERMS + 1)]
        sums = [np.dot([(-1) ** n * comb(p, n) for n in range(p + 1)], powers[: p + 1]) for p in range(TERMS + 1)]
        found |= {"k": scale, "f": plus} | {f"C{p}": sums[p] for p in range(TERMS)}
        constant = np.logical_and.accumulate((plus == plus[-1:])[::-1])[::-1]
        known: npt.NDArray[np.bool_] = (scale > 0) & (plus >= 0) & constant
        known &= np.abs(sums[TERMS]) <= ERROR * np.abs(sums[0])
        return known


def closed_form(program: Program, sums: Collection[int], tables: Sequence[int]) -> ClosedForm | None:
    """Returns the closed form of updates with gradients of zero; None if the program has none that is known here.

    Args:
        program: an update of rows, as of `row_steps.split_rows`.
        sums: its inputs that are gradients.
        tables: its inputs that are tables, in the order in which they are wanted.
    """
    shapes = {program.specs[n] for n in tables}
    if len(shapes) != 1 or next(iter(shapes)).dtype not in DTYPES or {t for t, _ in program.assigns} != set(tables):
        return None
    assigned = {target: _evaluate(program, sums)[value] for target, value in program.assigns}
    factors: dict[int, Number] = {}
    moved: dict[int, TableSum] = {}
    for table, value in assigned.items():
        if not isinstance(value, TableSum) or not (value.parts.keys() <= {table} and not value.over):
            if not isinstance(value, TableSum):
                return None
            moved[table] = value
        factors[table] = value.parts.get(table, _zero)
    if len(moved) > 1:
        return None
    weight = next(iter(moved), None)
    made = moved[weight] if weight is not None else TableSum()
    along = [(table, number) for table, number in made.parts.items() if table != weight]
    uses = {*(table for table, _ in along), *((made.over.table, made.over.root.table) if made.over else ())}
    if len(along) > 1 or weight in uses or (made.over and made.over.root.table == made.over.table):
        return None
    return _form(next(iter(shapes)), tuple(tables), factors, weight, along[0] if along else None, made.over)


def _zero(given: Sequence[Floats]) -> Floats:
    return np.zeros(())


def _evaluate(program: Program, sums: Collection[int]) -> list[Value]:
    """Returns what is known of all values of a program, where the gradients are zero."""
    values: list[Value] = []
    numbers = 0
    for n, item in enumerate(program.inputs):
        if not item.spec.shape:
            values.append(Plain(_given(numbers)))
            numbers += 1
        else:
            values.append(TableSum() if n in sums else TableSum({n: one}))
    for n, node in enumerate(program.nodes, len(values)):
        rule = _RULES.get(node.op)
        spec, read = program.specs[n], [program.specs[arg] for arg in node.args]
        exact = node.op != "astype" or {spec.dtype, read[0].dtype} <= {*DTYPES, "int64", "int32"}
        values.append(rule(*(values[arg] for arg in node.args)) if rule and exact else None)
    return values


def _given(place: int) -> Number:
    return lambda given: given[place]


def _form(
    spec: TensorSpec,
    tables: tuple[int, ...],
    factors: Mapping[int, Number],
    weight: int | None,
    along: tuple[int, Number] | None,
    over: Quotient | None,
) -> ClosedForm:
    """Writes the program of a form."""
    numbers = [f"A{n}" for n, table in enumerate(tables) if factors[table] is not one]
    numbers += ["G"] * bool(along) + (["k", "f", *(f"C{p}" for p in range(TERMS))] if over else [])
    inputs = [Input("variable", spec)] * len(tables) + [Input("operand", TensorSpec(spec.dtype, ()))] * len(numbers)
    nodes: list[Node] = []

    def node(op: str, *args: int) -> int:
        nodes.append(Node(op, args, ()))
        return len(inputs) + len(nodes) - 1

    place = {name: n for n, name in enumerate(numbers, len(tables))}
    value = {table: n for n, table in enumerate(tables)}
    made = {t: node("multiply", place[f"A{n}"], n) if factors[t] is not one else n for n, t in enumerate(tables)}
    if along:
        made[weight or 0] = node("add", made[weight or 0], node("multiply", place["G"], value[along[0]]))
    if over:
        y = node("multiply", place["k"], node("sqrt", value[over.root.table]))
        below = node("add", y, place["f"])
        u, series = node("divide", y, below), place[f"C{TERMS - 1}"]
        for p in reversed(range(TERMS - 1)):
            series = node("add", node("multiply", series, u), place[f"C{p}"])
        step = node("multiply", value[over.table], node("divide", series, below))
        made[weight or 0] = node("add", made[weight or 0], step)
    assigns = tuple((value[table], made[table]) for table in tables)
    program = Program(tuple(inputs), tuple(nodes), assigns, ())
    return ClosedForm(program, tuple(numbers), tables, factors, weight, along, over)


# ---- Numbers of many updates ----


def _each(number: Number, given: Sequence[Floats], size: int) -> Floats:
    return np.broadcast_to(number(given), (size,))


def _products(factors: Floats) -> Floats:
    """Returns for each factor the product of it and all later ones; from the last on, so it is the same for all."""
    return np.multiply.accumulate(factors[::-1])[::-1]


def recur(terms: Floats, factors: Floats, function: NumbaKernel | None = None) -> Floats:
    """Returns y with `y[i] = terms[i] + factors[i] * y[i + 1]`.

    Args:
        terms, factors: float64[n], contiguous.
        function: `recurring`, compiled; None for Python.
    """
    found = np.empty(terms.size)
    if function is None:
        now = 0.0
        for n in range(terms.size - 1, -1, -1):
            now = found[n] = terms[n] + factors[n] * now
    else:
        function(terms.size, *map(address_of, (terms, factors, found)))
    return found


def recurring(tools: Tools) -> Callable[..., None]:
    """Returns `recur(n, terms, factors, found)` for Numba: the same as `recur`."""
    carray = tools.carray

    def recur(n: Any, p_terms: Any, p_factors: Any, p_found: Any) -> None:
        terms, factors, found = carray(p_terms, n), carray(p_factors, n), carray(p_found, n)
        now = 0.0
        for i in range(n - 1, -1, -1):
            now = terms[i] + factors[i] * now
            found[i] = now

    return recur
