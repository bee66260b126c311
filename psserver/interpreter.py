"""Runs update programs op by op over NumPy or CuPy. No state, no locks: callable from any thread.

The reference for the fused kernels, and what runs where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pswire.errors import ProgramError
from pswire.program import OPS, Attr, Node, Program
from pswire.tensor import DTYPES, TensorSpec


def run(program: Program, inputs: Sequence[Any], xp: Any) -> tuple[dict[int, Any], list[Any]]:
    """Runs a program.

    Args:
        program: a verified program, or one that is verified here.
        inputs: arrays of `xp`, of the shapes and dtypes of `program.inputs`; they are only read.
        xp: the array namespace, `array_api_compat.numpy` or `array_api_compat.cupy`.

    Returns:
        The new value of each assigned input, by the input's index, and the outputs. All are arrays in C
        order, of the shapes and dtypes of `program.specs`; none shares memory with another or an input.

    Raises:
        ProgramError: the program or an input is not what it should be, or an op refuses these values, such
            as a negative power of an integer. Nothing has changed then.
    """
    specs = program.specs
    _check_inputs(program, inputs)
    values: list[Any] = list(inputs)
    dead = _dead_after(program)
    with np.errstate(all="ignore"):
        for node in program.nodes:
            values.append(_step(node, [values[arg] for arg in node.args], specs[len(values)], xp))
            for number in dead[len(values) - 1]:
                values[number] = None
    own = {
        number
        for number, node in enumerate(program.nodes, len(program.inputs))
        if not OPS[node.op].view and values[number] is not None
    }

    def result(number: int) -> Any:
        if number not in own:
            return xp.array(values[number], copy=True, order="C")
        own.discard(number)
        value = values[number]
        return value if value.flags.c_contiguous else xp.array(value, order="C")

    assigned = {target: result(value) for target, value in program.assigns}
    return assigned, [result(value) for value in program.outputs]


def peak_bytes(program: Program) -> int:
    """Memory that `run` needs at most beside its inputs, in bytes; to be checked before it runs.

    What `broadcast_to` gives counts whole, although it is only a view: what reads it takes that long.
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
    """Memory for arguments in the result's dtype, or for a result in another one."""
    if node.op == "mean" and specs[number].dtype == "float16":
        return 4 * specs[number].size  # NumPy sums these in float32.
    if not OPS[node.op].casts:
        return 0
    dtype = specs[number].dtype
    return sum(specs[arg].size * DTYPES[dtype].itemsize for arg in node.args if specs[arg].dtype != dtype)


def _check_inputs(program: Program, inputs: Sequence[Any]) -> None:
    if len(inputs) != len(program.inputs):
        raise ProgramError(f"the program has {len(program.inputs)} inputs, and {len(inputs)} are given")
    for index, (item, array) in enumerate(zip(program.inputs, inputs, strict=True)):
        given = TensorSpec(array.dtype.name, tuple(array.shape))
        if given != item.spec:
            raise ProgramError(f"input {index} of the program is {item.spec}, and {given} is given")


def _dead_after(program: Program) -> list[list[int]]:
    """For each value, the values that nothing reads once it is there."""
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


def _step(node: Node, args: Sequence[Any], spec: TensorSpec, xp: Any) -> Any:
    try:
        value = xp.asarray(_call(node.op, args, dict(node.attrs), xp))
    except (TypeError, ValueError) as error:
        raise ProgramError(f"{node.op} of {', '.join(str(a.dtype) for a in args)}: {error}") from None
    dtype = DTYPES[spec.dtype]
    return value if value.dtype == dtype else value.astype(dtype)


def _call(op: str, args: Sequence[Any], attrs: Mapping[str, Attr], xp: Any) -> Any:
    row = OPS[op]
    return row.call(xp, args, attrs) if row.call else getattr(xp, row.numpy)(*args)
