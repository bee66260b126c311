"""Updates and measurements of which a gradient of some rows is given: whether they may run on these rows alone.

An update means what it means for the whole gradient, which is zero in all other rows. So it may run on the given rows
if it leaves a row as it is whose gradient is zero: SGD does, momentum does not. That is found out by computing the
program once with what is known of the values of such a row. A measurement, such as the gradient's norm, assigns
nothing; it may run on the given rows if all others add nothing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from pswire.model.program import OPS, Attr, Node, Program

Known = Literal["zero", "true"] | int | None
"""What is known of a value in a row whose gradient is zero: it is zero, or false; it is true; it is that input's;
nothing.
"""


def refusal(program: Program, given: Collection[int]) -> str | None:
    """Returns why a program cannot run on some rows, in words; None if it can.

    Args:
        program: the program, verified.
        given: its inputs of which rows are given.
    """
    shapes = {spec.shape for spec in program.specs}
    shape = table_shape(program)
    if not shape or not shapes <= {shape, row_shape(shape), ()} or program.outputs:
        return (
            "an update of rows can use only tables of one shape, one number per row, and scalars, and cannot "
            "return results"
        )
    for node in program.nodes:
        if not (OPS[node.op].elementwise or _is_along_rows(node, program)):
            return f"{node.op} works neither elementwise nor along each row, so it cannot be used in an update of rows"
    for number, item in enumerate(program.inputs):
        if not item.spec.shape or item.kind == "variable":
            continue
        if item.kind == "operand":
            return "an update of rows can take only tables and rows"
        if number not in given:
            return "an update of rows cannot mix rows with whole arrays"
        if item.spec.shape != shape:
            return "an update of rows needs rows of the same shape as its tables"
    if any(not program.specs[target].shape for target, _ in program.assigns):
        return "an update of rows can assign only tables, not scalars"
    return None


def measures(program: Program, given: Collection[int]) -> bool:
    """Returns True if a program computes numbers of the whole, to which rows that are zero add nothing.

    It assigns nothing, takes no array but the given ones, and sums up what is zero in such rows, or asks whether all is
    true that is true in them. Numbers are taken to be finite, as in `keeps_rows`.

    Args:
        program: the program, verified.
        given: its inputs of which rows are given.
    """
    shape = table_shape(program)
    arrays = {number for number, item in enumerate(program.inputs) if item.spec.shape}
    if program.assigns or not given or arrays != set(given) or {spec.shape for spec in program.specs} - {shape, ()}:
        return False
    known = _known_of(program, given)
    return all(
        OPS[node.op].elementwise
        or (not program.specs[number].shape and (node.op, known[node.args[0]]) in _SUMS_OF_ROWS)
        for number, node in enumerate(program.nodes, len(program.inputs))
        if any(program.specs[arg].shape for arg in node.args)
    ) and not any(program.specs[number].shape for number in program.outputs)


_SUMS_OF_ROWS = {("sum", "zero"), ("any", "zero"), ("all", "true")}
"""Ops that make one number of an array, with what has to be known of rows that add nothing to it."""


def table_shape(program: Program) -> tuple[int, ...]:
    """Returns the shape of the largest tables of an update of rows; () if it has none."""
    return max((spec.shape for spec in program.specs), key=lambda shape: (len(shape), shape[1:]), default=())


def row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a table with one number for each row of a table of another shape."""
    return (*shape[:1], *(1 for _ in shape[1:]))


ALONG_ROWS = ("sum", "mean", "max", "min")
"""Ops that may make one number of each row."""


def _is_along_rows(node: Node, program: Program) -> bool:
    """Returns True if a node makes one number of each row: of all axes but the first, which all stay."""
    attrs, rank = dict(node.attrs), len(program.specs[node.args[0]].shape)
    axes = attrs.get("axis")
    reduced = {axis % rank for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, int)}
    return node.op in ALONG_ROWS and attrs.get("keepdims") is True and reduced == set(range(1, rank))


def later_refusal(program: Program) -> str | None:
    """Returns why an update that a row has missed cannot be made up later, in words; None if it can.

    Args:
        program: the program, verified; `refusal` has nothing against it.
    """
    targets = {target for target, _ in program.assigns}
    read = (n for n, item in enumerate(program.inputs) if item.kind == "variable" and item.spec.shape)
    if any(number not in targets for number in read):
        return (
            "it reads a table that it does not assign, whose values may have changed when a delayed update is applied"
        )
    return None


def keeps_rows(program: Program, given: Collection[int]) -> bool:
    """Returns True if a program leaves each row as it is in which the given inputs are zero.

    Numbers are taken to be finite, and divisors not to be zero: zero times infinity is not zero.

    Args:
        program: the program, verified; `refusal` has nothing against it.
        given: its inputs of which rows are given.
    """
    return _rests(program, given)


def resting(program: Program, given: Collection[int]) -> tuple[int, ...]:
    """Returns the assigned tables of which a row that is zero stays as it is, and its rows in the other tables as well.

    So it is with the moments of a row that never had a gradient.

    Args:
        program, given: as for `keeps_rows`, which holds of the program in such a row.

    Returns:
        The inputs, some of those that are assigned, none that is not needed; empty if there are none.
    """
    targets = [target for target, _ in program.assigns]
    found = (tuple(n for n in targets if n != other) for other in targets)
    zero = next((zero for zero in found if zero and _rests(program, {*given, *zero})), ())
    for one in zero:  # a row of a gradient that is accumulated rests whatever its momentum is
        fewer = tuple(n for n in zero if n != one)
        if fewer and _rests(program, {*given, *fewer}):
            zero = fewer
    return zero


def _rests(program: Program, zero: Collection[int]) -> bool:
    """Returns True if a program leaves a row as it is in which these inputs are zero."""
    known = _known_of(program, zero)
    return all(known[value] == ("zero" if target in zero else target) for target, value in program.assigns)


def _known_of(program: Program, zero: Collection[int]) -> list[Known]:
    """Returns what is known of each value in a row in which these inputs are zero."""
    known: list[Known] = ["zero" if number in zero else number for number in range(len(program.inputs))]
    for number, node in enumerate(program.nodes, len(known)):
        rule = _RULES.get(node.op)
        found = None if rule is None else rule([known[arg] for arg in node.args], dict(node.attrs))
        # What is an input's in another dtype or shape is not what can be assigned to it.
        same = not isinstance(found, int) or program.specs[found] == program.specs[number]
        of_all = not OPS[node.op].elementwise and not program.specs[number].shape  # a number that other rows made, too
        known.append(found if same and not of_all else None)
    return known


Rule = Callable[[Sequence[Known], Mapping[str, Attr]], Known]


def _passes(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return args[0]


def _keeps_zero(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return "zero" if args[0] == "zero" else None


def _add(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    one, other = args
    return other if one == "zero" else one if other == "zero" else None


def _subtract(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return args[0] if args[1] == "zero" else None


def _multiply(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return "zero" if "zero" in args else None


def _divide(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return "zero" if args[0] == "zero" and args[1] != "zero" else None  # 0 / 0 is NaN


def _is_finite(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return "true" if args[0] == "zero" else None


def _both(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return "zero" if "zero" in args else "true" if args[0] == args[1] == "true" else None


def _less(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return "zero" if args[0] == args[1] == "zero" else None


def _where(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    chosen, one, other = args
    return other if chosen == "zero" else one if chosen == "true" else _equal_arms(args, attrs)


def _equal_arms(args: Sequence[Known], attrs: Mapping[str, Attr]) -> Known:
    return args[-1] if args[-1] == args[-2] else None


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("positive", "astype", "broadcast_to"), _passes),
    **dict.fromkeys(ALONG_ROWS, _keeps_zero),
    **dict.fromkeys(
        ("abs", "negative", "sqrt", "square", "sign", "floor", "ceil", "round", "expm1", "log1p", "sin", "tanh"),
        _keeps_zero,
    ),
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "isfinite": _is_finite,
    "logical_and": _both,
    "less": _less,
    "where": _where,
    **dict.fromkeys(("maximum", "minimum"), _equal_arms),
}
