"""The text of kernels on rows of tables, for Numba: each row is gone over as often as its reductions need it.

A value is wide, with a number for each element of a row, or it is one number for each row. A reduction makes one number
of a wide value: its pass over the row ends before the next one begins, which may use the number. What a pass computes
and a later one reads is kept in an array of one row. Tables are written in the last pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from psserver.programs.kernels.codegen import HALVES, NUMBA, Form, Parameter, cast, expression, parameters, wrapping
from psserver.programs.kernels.functions import DEPTH
from pswire.model.program import Node
from pswire.model.row_updates import ALONG_ROWS, resting
from pswire.model.tensor import DTYPES

_READ = {"float16": "from_half({text})", "bfloat16": "from_brain({text})"}
_STORED = {"float16": "to_half({text})", "bfloat16": "to_brain({text})"}

_EXACT = frozenset(("positive", "abs", "negative", "sign", "floor", "ceil", "round", "where", "maximum", "minimum"))
"""Ops of numbers in half precision that need no rounding."""

_REDUCED = {"sum": "row_sum", "mean": "row_sum", "max": "row_max", "min": "row_min"}


@dataclass(frozen=True)
class RowPass:
    """One pass over a row.

    Attributes:
        before: nodes that are one number for each row, computed before it.
        kept: wide values that it reads where an earlier pass has kept them.
        nodes: wide nodes that it computes.
        sinks: wide values that are reduced after it, or assigned in it.
        reduced: the reductions after it.
    """

    before: tuple[int, ...]
    kept: tuple[int, ...]
    nodes: tuple[int, ...]
    sinks: tuple[int, ...]
    reduced: tuple[int, ...]


@dataclass(frozen=True)
class RowForm(Form):
    """The computation of a kernel on rows.

    Attributes:
        program: as of `row_steps.split_rows`; it has no outputs.
        sums: the inputs that are rows; where several are for one place, these are summed.
        shape: shape of the tables.
    """

    shape: tuple[int, ...] = ()

    @cached_property
    def rows(self) -> str:
        """The text for an update of rows."""
        return rows_source(self)

    @cached_property
    def replay(self) -> str:
        """The text for updates that rows have missed."""
        return replay_source(self)

    @cached_property
    def once(self) -> str:
        """The text for one update, by numbers that are each row's own."""
        return replay_source(self, once=True)

    @cached_property
    def rested(self) -> tuple[int, ...]:
        """The tables of which a row that is zero stays as it is, in all tables, while these sums are zero."""
        return resting(self.program, self.sums)

    @cached_property
    def rooms(self) -> list[Parameter]:
        """The arrays that an update takes for one row and `functions.DEPTH` elements, for one call at a time."""
        sums = [p for p in parameters(self) if p.role == "part"]
        return [*(Parameter("room", p.value, p.dtype, written=True) for p in sums), *self.replay_rooms]

    @cached_property
    def replay_rooms(self) -> list[Parameter]:
        """The arrays that updates that rows have missed take, as `rooms`."""
        specs = self.program.specs
        return [Parameter("kept", n, NUMBA.types[specs[n].dtype], written=True) for n in self.kept]

    @cached_property
    def nodes(self) -> dict[int, Node]:
        """The nodes by number."""
        return dict(enumerate(self.program.nodes, len(self.program.inputs)))

    @cached_property
    def wide(self) -> tuple[bool, ...]:
        """One flag per value; True if it has a number for each element of a row."""
        specs = self.program.specs
        found = [item.spec.shape == self.shape for item in self.program.inputs]
        for number, node in self.nodes.items():
            spread = node.op == "broadcast_to" and specs[number].shape == self.shape
            found.append(node.op not in ALONG_ROWS and (spread or any(found[arg] for arg in node.args)))
        return tuple(found)

    def reduces(self, number: int) -> bool:
        """Returns True if a value is one number of all in a row."""
        node = self.nodes.get(number)
        return node is not None and node.op in ALONG_ROWS and self.wide[node.args[0]]

    @cached_property
    def passes(self) -> tuple[RowPass, ...]:
        """The passes over a row, in order."""
        return tuple(_passes(self))

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The wide values that have an array of one row."""
        reduced = {self.nodes[number].args[0] for each in self.passes for number in each.reduced}
        return tuple(sorted(reduced.union(*(each.kept for each in self.passes))))


def _passes(form: RowForm) -> Iterator[RowPass]:
    program, wide = form.program, form.wide
    levels = [0] * len(program.inputs)  # the pass that a value is there for, at the earliest
    for number, node in form.nodes.items():
        levels.append(max((levels[arg] for arg in node.args), default=0) + form.reduces(number))
    needed = _needed(form, [value for _, value in program.assigns], form.nodes)
    last = max((levels[number] for number in needed), default=0)
    left = {number for number in needed if wide[number]}
    for level in range(last + 1):
        now = [number for number in needed if levels[number] == level and not wide[number]]
        reduced = [number for number in needed if levels[number] == level + 1 and form.reduces(number)]
        sinks = {form.nodes[number].args[0] for number in reduced}
        if level == last:
            sinks |= {value for target, value in program.assigns if wide[target]}
        nodes = _needed(form, sinks, left)
        left -= set(nodes)
        read = sinks.union(*(form.nodes[number].args for number in nodes))
        kept = {number for number in read if number in form.nodes and wide[number]} - left - set(nodes)
        before = [number for number in now if not form.reduces(number)]
        yield RowPass(*(tuple(sorted(found)) for found in (before, kept, nodes, sinks, reduced)))


def _needed(form: RowForm, sinks: Collection[int], among: Collection[int]) -> list[int]:
    """Returns the nodes, of those among some, that have to be computed for these values; in order."""
    found: set[int] = set()
    rest = [number for number in sinks if number in among]
    while rest:
        number = rest.pop()
        if number not in found:
            found.add(number)
            rest += [arg for arg in form.nodes[number].args if arg in among]
    return sorted(found)


# ---- Parameters ----


def tables(form: RowForm) -> list[Parameter]:
    """Returns the tables that a kernel takes."""
    return [p for p in parameters(form) if p.role == "array"]


def bits(form: RowForm) -> list[Parameter]:
    """Returns the tables that may be zero in a row that no update changes, as parameters of unsigned numbers."""
    sizes = {n: DTYPES[form.program.inputs[n].spec.dtype].itemsize for n in form.rested}
    return [Parameter("bits", n, f"uint{8 * size}") for n, size in sizes.items()]


# ---- The texts ----

FAR, NEAR = 16, 4
"""Rows between a prefetch and its use, into the second-level cache and into the first.

Rows lie anywhere, so the processor cannot guess them. If they went into the first cache at once, most would come too
late.
"""

LINE = 64
"""Bytes of a cache line."""

LOOK = 16
"""Updates after which a row is looked at again: it may have come to rest. What a look costs is little beside them."""

FETCHED = 256
"""Most elements of a row that are fetched; the processor itself fetches the rest of a long one."""


def rows_source(form: RowForm) -> str:
    """Writes a function that updates rows; each input of `form.sums` is an array of rows, some for one place.

    `kernel(n, width, size, count, ids, starts, order, *pointers, *rooms)`: for each r below n, row `ids[r]` of every
    table meets the sum of the rows `order[starts[r]:starts[r + 1]]` of each of those inputs, which have `count` rows of
    `width` elements. Wide tables have `size` elements.
    """
    taken, own = parameters(form), form.rooms
    rows = [p for p in taken if p.role == "part"]
    pointers = ", ".join(f"p_{p.name}" for p in (*taken, *own))
    lines = [f"def kernel(n, width, size, count, p_ids, p_starts, p_order, {pointers}):"]
    lines += ["    ids, starts, order = carray(p_ids, n), carray(p_starts, n + 1), carray(p_order, count)"]
    lines += [f"    v{p.value} = {_read(p.dtype, f'carray(p_{p.name}, 1)[0]')}" for p in taken if p.single]
    lines += _arrays(form, own)
    lines += [f"    all_{p.name} = carray(p_{p.name}, count * width)" for p in rows]
    lines += ["    for r in range(n):"]
    lines += ["        " + line for line in _fetching(form, rows)]
    lines += ["        first, low, high = order[starts[r]] * width, starts[r] + 1, starts[r + 1]"] * bool(rows)
    for p in rows:
        lines += ["        " + line for line in _row_sum(p)]
    lines += ["        " + line for line in _place(form)]
    lines += ["        " + line for line in _row(form)]
    return "\n".join([*lines, "    return 0"]) + "\n"


def replay_source(form: RowForm, once: bool = False) -> str:
    """Writes a function that makes up updates which rows of tables have missed; in these, `form.sums` are zero.

    `kernel(n, width, size, count, kept, ids, first, *pointers, *rooms, *bits)`: for each r below n, row `ids[r]` of
    every table has the updates from `first[r]` on, below `count`; number k takes element k of each scalar, of which
    `kept` are there. `bits` are the tables that may be zero, as unsigned numbers: a row that is zero in all of them
    stays as it is, which is looked at before its first update and after each `LOOK`. With `once` each row has one
    update, number `first[r]`.
    """
    taken = [p for p in parameters(form) if p.role != "part"]
    own, zero = form.replay_rooms, bits(form)
    pointers = ", ".join(f"p_{p.name}" for p in (*taken, *own, *zero))
    lines = [f"def kernel(n, width, size, count, kept, p_ids, p_first, {pointers}):"]
    lines += ["    ids, first = carray(p_ids, n), carray(p_first, n)"]
    lines += [f"    all_{p.name} = carray(p_{p.name}, kept)" for p in taken if p.single]
    lines += _arrays(form, (*own, *zero))
    lines += ["    for r in range(n):"]
    lines += ["        " + line for line in (*_fetching(form), *_place(form))]
    if zero:
        lines += ["        " + line for line in _zero(form, zero, "continue")]
    lines += [f"        for k in range(first[r], {'first[r] + 1' if once else 'count'}):"]
    lines += [f"            v{p.value} = {_read(p.dtype, f'all_{p.name}[k]')}" for p in taken if p.single]
    lines += ["            " + line for line in _row(form, absent=form.sums)]
    if zero and not once:
        lines += [f"            if (k - first[r]) % {LOOK} == {LOOK - 1}:"]
        lines += ["                " + line for line in _zero(form, zero, "break")]
    return "\n".join([*lines, "    return 0"]) + "\n"


def _arrays(form: RowForm, others: Sequence[Parameter]) -> Iterator[str]:
    """Yields the lines that make arrays of the pointers to tables and rooms."""
    for p in tables(form):
        yield f"    all_{p.name} = carray(p_{p.name}, {'size' if form.wide[p.value] else 'size // width'})"
    for p in others:
        length = ("size" if form.wide[p.value] else "size // width") if p.role == "bits" else f"width + {DEPTH}"
        yield f"    {p.name} = carray(p_{p.name}, {length})"


def _place(form: RowForm) -> Iterator[str]:
    """Yields the lines that find a row of the tables."""
    yield "place, base = ids[r], ids[r] * width"
    yield from (f"{p.name} = all_{p.name}[base : base + width]" for p in tables(form) if form.wide[p.value])


def _zero(form: RowForm, zero: Sequence[Parameter], then: str) -> Iterator[str]:
    """Yields the lines that do something if a row is zero."""
    for p in zero:
        yield f"found{p.value} = {p.dtype}(0)" if form.wide[p.value] else f"found{p.value} = {p.name}[place]"
    wide = [p for p in zero if form.wide[p.value]]
    if wide:
        yield "for i in range(base, base + width):"
        yield from (f"    found{p.value} |= {p.name}[i]" for p in wide)
    yield f"if {' and '.join(f'found{p.value} == 0' for p in zero)}:"
    yield f"    {then}"


def _fetching(form: RowForm, rows: Sequence[Parameter] = ()) -> Iterator[str]:
    """Yields the lines that prefetch rows of tables, and the first of the received ones for each."""
    wide = [p for p in tables(form) if form.wide[p.value]]
    narrow = [p for p in tables(form) if not form.wide[p.value]]
    yield f"far, near = min(r + {FAR}, n - 1), min(r + {NEAR}, n - 1)"
    yield from (f"fetch(all_{p.name}, ids[far])" for p in narrow)
    yield from (f"prepare(all_{p.name}, ids[near])" for p in narrow)
    if not (wide or rows):
        return
    step = LINE // max(DTYPES[p.dtype].itemsize for p in (*wide, *rows))
    lines = f"for i in range(0, min(width, {FETCHED}), {step}):"
    yield "later, soon = ids[far] * width, ids[near] * width"
    if rows:
        yield "given = order[starts[far]] * width"
    yield lines
    yield from (f"    fetch(all_{p.name}, later + i)" for p in wide)
    yield from (f"    fetch(all_{p.name}, given + i)" for p in rows)
    if wide:
        yield lines
        yield from (f"    prepare(all_{p.name}, soon + i)" for p in wide)


def _row_sum(p: Parameter) -> Iterator[str]:
    """Yields the lines that take one row, where it lies, or sum several into a room."""
    room = f"b{p.value}"
    yield f"{p.name} = all_{p.name}[first : first + width]"
    yield "if low < high:"
    yield "    for i in range(width):"
    yield f"        {room}[i] = {p.name}[i]"
    yield "    for k in range(low, high):"
    yield "        at = order[k] * width"
    yield f"        more = all_{p.name}[at : at + width]"
    yield "        for i in range(width):"
    terms = (_read(p.dtype, text) for text in (f"{room}[i]", "more[i]"))
    yield f"            {room}[i] = {_written(p.dtype, wrapping(NUMBA, '{0} + {1}', p.dtype, *terms))}"
    yield f"    {p.name} = {room}[0:width]"


# ---- One row ----


def _row(form: RowForm, absent: Collection[int] = ()) -> Iterator[str]:
    """Yields the lines that update one row; `absent` inputs are zero."""
    program = form.program
    for p in tables(form):
        if not form.wide[p.value] and p.value in form.read:
            yield f"v{p.value} = {_read(p.dtype, f'all_{p.name}[place]')}"
    for each in form.passes:
        yield from (f"v{number} = {_value(form, number)}" for number in each.before)
        if each.sinks:
            yield "for i in range(width):"
            yield from ("    " + line for line in _element(form, each, absent))
        yield from (f"v{number} = {_reduced(form, number)}" for number in each.reduced)
    for target, value in program.assigns:
        if not form.wide[target]:
            yield f"all_a{target}[place] = {_written(program.specs[target].dtype, f'v{value}')}"


def _element(form: RowForm, each: RowPass, absent: Collection[int]) -> Iterator[str]:
    """Yields the lines of a pass for one element."""
    program, specs = form.program, form.program.specs
    read = set(each.sinks).union(*(form.nodes[number].args for number in each.nodes))
    given = sorted(number for number in read if number < len(program.inputs) and form.wide[number])
    for number in given:
        letter = f"c{number}_0" if number in form.sums else f"a{number}"
        dtype = specs[number].dtype
        yield f"v{number} = {cast(NUMBA, dtype, '0') if number in absent else _read(dtype, f'{letter}[i]')}"
    yield from (f"v{number} = x{number}[i]" for number in each.kept)
    yield from (f"v{number} = {_value(form, number)}" for number in each.nodes)
    stored = {*each.nodes, *(form.nodes[number].args[0] for number in each.reduced)}
    yield from (f"x{number}[i] = v{number}" for number in form.kept if number in stored)
    if each is form.passes[-1]:
        for target, value in program.assigns:
            if form.wide[target]:
                yield f"a{target}[i] = {_written(specs[target].dtype, f'v{value}')}"


def _value(form: RowForm, number: int) -> str:
    """Returns an expression for a node that is no reduction of several numbers."""
    specs, node = form.program.specs, form.nodes[number]
    dtype = specs[number].dtype
    if node.op in ALONG_ROWS:
        return cast(NUMBA, dtype, _plus_zero(specs[node.args[0]].dtype, f"v{node.args[0]}"))
    text = expression(form.program, node, NUMBA)
    exact = node.op in _EXACT or node.op == "broadcast_to"
    return (
        NUMBA.cast.format(type=NUMBA.types[dtype], text=text) if exact and dtype in HALVES else cast(NUMBA, dtype, text)
    )


def _reduced(form: RowForm, number: int) -> str:
    """Returns an expression for a reduction of what is kept of a row."""
    specs, node = form.program.specs, form.nodes[number]
    (arg,), dtype = node.args, specs[node.args[0]].dtype
    call = f"{_REDUCED[node.op]}(x{arg}, width)"
    if node.op in ("sum", "mean"):
        call = {"bfloat16": f"brain_sum(x{arg}, width)"}.get(dtype, call)
        call = call if DTYPES[dtype].kind in "fV" else f"row_total(x{arg}, width)"
    text = _plus_zero(dtype, call)
    return cast(NUMBA, specs[number].dtype, f"float64({text}) / float64(width)" if node.op == "mean" else text)


def _plus_zero(dtype: str, text: str) -> str:
    """Returns a real number that is no negative zero: sums begin with zero, and of a greatest one either will do."""
    return f"{text} + {NUMBA.types[dtype]}(0)" if DTYPES[dtype].kind in "fV" else text


def _read(dtype: str, text: str) -> str:
    return _READ.get(dtype, "{text}").format(text=text)


def _written(dtype: str, text: str) -> str:
    return _STORED[dtype].format(text=text) if dtype in _STORED else cast(NUMBA, dtype, text)
