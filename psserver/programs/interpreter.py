"""The interpreter: runs update programs op by op over NumPy or CuPy. No state, no locks: callable from any thread.

It is the reference for the fused kernels, and runs programs that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pswire.errors import ProgramError
from pswire.model.program import OPS, Attr, Node, Op, Program
from pswire.model.tensor import DTYPES, TensorSpec

Copied = tuple[int, bool]
"""The number of a value, and True if a result copies it, as its memory may be an input's or another result's."""


class Script:
    """A program ready to run.

    Args:
        program: a verified program, or one that is verified here.

    Raises:
        ProgramError: the program is not valid.
    """

    def __init__(self, program: Program) -> None:
        specs, dead = program.specs, _dead_after(program)
        first = len(program.inputs)
        self.program = program
        self._inputs = [(DTYPES[item.spec.dtype], item.spec.shape) for item in program.inputs]
        self._steps = [
            (OPS[node.op], node.args, dict(node.attrs), DTYPES[specs[number].dtype], dead[number])
            for number, node in enumerate(program.nodes, first)
        ]
        gone = {number for numbers in dead for number in numbers}
        own = {number for number, node in enumerate(program.nodes, first) if not OPS[node.op].view} - gone
        self._assigns = [(target, self._copied(value, own)) for target, value in program.assigns]
        self._outputs = [self._copied(value, own) for value in program.outputs]

    @staticmethod
    def _copied(value: int, own: set[int]) -> Copied:
        mine = value in own
        own.discard(value)
        return value, not mine

    def run(self, inputs: Sequence[Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
        """Runs the program; arguments, results and errors as of the function `run`."""
        self._check(inputs)
        with np.errstate(all="ignore"):
            return self.compute(inputs, xp)

    def compute(self, inputs: Sequence[Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
        """Runs the program as `run`, on inputs that are known to fit, where NumPy does not warn."""
        values: list[Any] = list(inputs)
        for op, args, attrs, dtype, dead in self._steps:
            values.append(_step(op, list(map(values.__getitem__, args)), attrs, dtype, xp))
            for number in dead:
                values[number] = None
        assigned = {target: _result(values[value], copy, xp) for target, (value, copy) in self._assigns}
        return assigned, [_result(values[value], copy, xp) for value, copy in self._outputs]

    def _check(self, inputs: Sequence[Any]) -> None:
        expected = self.program.inputs
        if len(inputs) != len(expected):
            raise ProgramError(f"the program has {len(expected)} inputs, but got {len(inputs)}")
        for index, ((dtype, shape), array) in enumerate(zip(self._inputs, inputs, strict=True)):
            if array.dtype != dtype or array.shape != shape:
                given = TensorSpec(array.dtype.name, tuple(array.shape))
                raise ProgramError(f"input {index} of the program must be {expected[index].spec}, but got {given}")


def run(program: Program, inputs: Sequence[Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
    """Runs a program.

    Args:
        program: a verified program, or one that is verified here.
        inputs: arrays of `xp`, of the shapes and dtypes of `program.inputs`; they are only read.
        xp: the array namespace, `numpy` or `array_api_compat.cupy`.

    Returns:
        The new value of each assigned input, by the input's index, and the outputs. All are arrays in C order, of the
        shapes and dtypes of `program.specs`; none shares memory with another or an input.

    Raises:
        ProgramError: the program or an input is not valid, or an op refuses these values, such as a negative power of
            an integer. Nothing has changed then.
    """
    return Script(program).run(inputs, xp)


def peak_bytes(program: Program) -> int:
    """Returns the most memory that `run` needs beside its inputs, in bytes; to be checked before a run.

    The result of `broadcast_to` counts whole, although it is only a view: its readers take that long.
    """
    sizes = [spec.nbytes for spec in program.specs]
    dead = _dead_after(program)
    first = len(program.inputs)
    held = peak = 0
    for number, node in enumerate(program.nodes, first):
        held += sizes[number]
        peak = max(peak, held + _cast_bytes(node, program.specs, number))
        held -= sum(sizes[gone] for gone in dead[number] if gone >= first)
    results = [*(value for _, value in program.assigns), *program.outputs]
    return max(peak, held + sum(sizes[value] for value in results))


def _cast_bytes(node: Node, specs: Sequence[TensorSpec], number: int) -> int:
    """Returns the bytes of arguments cast to the result's dtype, or of a result cast to another one."""
    if node.op == "mean" and specs[number].dtype == "float16":
        return 4 * specs[number].size  # NumPy sums float16 in float32
    if not OPS[node.op].casts:
        return 0
    dtype = specs[number].dtype
    return sum(specs[arg].size * DTYPES[dtype].itemsize for arg in node.args if specs[arg].dtype != dtype)


def _dead_after(program: Program) -> list[list[int]]:
    """Returns, for each value, the values that have no reader left once it is computed."""
    count = len(program.inputs) + len(program.nodes)
    last = list(range(count))
    for number, node in enumerate(program.nodes, len(program.inputs)):
        for arg in node.args:
            last[arg] = number
    kept = {*(value for _, value in program.assigns), *program.outputs}
    dead: list[list[int]] = [[] for _ in range(count)]
    for number, user in enumerate(last):
        if number not in kept:
            dead[user].append(number)
    return dead


def _result(value: Any, copy: bool, xp: Any) -> Any:
    """Returns a value in C order, in memory that no input and no other result shares; `copy` where it may be shared."""
    return xp.array(value, copy=copy or None, order="C") if copy or not value.flags.c_contiguous else value


def _step(op: Op, args: Sequence[Any], attrs: Mapping[str, Attr], dtype: np.dtype[Any], xp: Any) -> Any:
    try:
        value = op.call(xp, args, attrs) if op.call else getattr(xp, op.numpy)(*args)
    except (TypeError, ValueError) as error:
        raise ProgramError(f"{op.name} of {', '.join(str(a.dtype) for a in args)}: {error}") from None
    if isinstance(value, np.generic):
        value = np.asarray(value)  # NumPy returns scalars for arrays without dimensions
    return value if value.dtype == dtype else value.astype(dtype)
