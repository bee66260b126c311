"""Updates of rows for tests: random ones, and what they make of whole tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from psserver.programs.kernels.row_steps import ROW_DTYPES, split_rows
from pswire.errors import ProgramError
from pswire.model.program import OPS, Input, Node, Program, infer
from pswire.model.row_updates import ALONG_ROWS, refusal, row_shape
from pswire.model.tensor import DTYPES, Array, TensorSpec
from tests.kit.programs import expected, numbers

TABLE, SECOND, ROWS, NUMBER = range(4)
"""The inputs of a random update: two tables, rows, and a number."""

OFTEN = ("add", "subtract", "multiply", "divide", "square", "sqrt", "maximum", "where", "astype", "broadcast_to")
WITH_KERNELS = tuple(name for name, op in OPS.items() if op.kernel)


def along(shape: tuple[int, ...]) -> tuple[tuple[str, Any], ...]:
    """The attributes of a reduction that makes one number of each row."""
    return (("axis", tuple(range(1, len(shape)))), ("keepdims", True))


@st.composite
def row_programs(draw: Any, shapes: Sequence[tuple[int, ...]]) -> Program:
    """A random update of rows with kernels for all its ops; many make one number of each row."""
    shape, dtypes = draw(st.sampled_from(shapes)), st.sampled_from(sorted(ROW_DTYPES))
    own = draw(st.sampled_from(["float32", "float64", "float16", "bfloat16", "float32", "int32", "uint8"]))
    some = st.one_of(st.just(own), st.just(own), dtypes)
    second = draw(st.sampled_from([shape, row_shape(shape)]))
    inputs = (
        Input("variable", TensorSpec(own, shape)),
        Input("variable", TensorSpec(draw(some), second)),
        Input("value", TensorSpec(draw(some), shape)),
        Input("operand", TensorSpec(draw(some), ())),
    )
    specs, nodes = [item.spec for item in inputs], list[Node]()
    ops = st.one_of(st.sampled_from(ALONG_ROWS), st.sampled_from(OFTEN), st.sampled_from(WITH_KERNELS))
    for name in draw(st.lists(ops, min_size=2, max_size=9)):
        recent = st.integers(max(0, len(specs) - 3), len(specs) - 1)
        args = tuple(draw(st.one_of(recent, st.integers(0, len(specs) - 1))) for _ in range(OPS[name].arity))
        attrs = {"astype": (("dtype", draw(some)),), "broadcast_to": (("shape", shape),)}.get(name, ())
        attrs = along(shape) if name in ALONG_ROWS else attrs
        try:
            spec = infer(name, [specs[arg] for arg in args], dict(attrs))
        except ProgramError:
            continue  # These do not go together; another one comes.
        if spec.dtype in ROW_DTYPES:
            specs.append(spec)
            nodes.append(Node(name, args, attrs))
    assigns = []
    for target in (TABLE, SECOND):
        fitting = [n for n, spec in enumerate(specs) if spec == specs[target]]
        assigns.append((target, draw(st.one_of(st.just(fitting[-1]), st.sampled_from(fitting)))))
    program = Program(inputs, tuple(nodes), tuple(assigns), ())
    assume(refusal(program, [ROWS]) is None and split_rows(program)[-1].shape is not None)
    return program


def values(spec: TensorSpec, seed: int) -> Array:
    """Numbers of a dtype: any bits in half precision, else strange ones, and plain ones with many digits."""
    rng, dtype = np.random.default_rng(seed), DTYPES[spec.dtype]
    if dtype.itemsize == 2 and dtype.kind in "fV":
        return rng.integers(0, 1 << 16, spec.shape).astype(np.uint16).view(dtype)
    found = numbers(spec.dtype, spec.size, seed).reshape(spec.shape)
    return np.where(rng.random(spec.shape) < 0.5, found, plain(spec, seed)) if dtype.kind == "f" else found


def plain(spec: TensorSpec, seed: int) -> Array:
    """Numbers of a dtype between 1 and 2, or as near as it has them."""
    found: Array = (1 + np.random.default_rng(seed).random(spec.shape)).astype(DTYPES[spec.dtype])
    return found


def dense(program: Program, inputs: Sequence[Array], ids: Sequence[int]) -> Mapping[int, Array]:
    """What the interpreter makes of the whole tables, the rows summed one by one into a gradient of zeros."""
    whole = []
    for item, array in zip(program.inputs, inputs, strict=True):
        if item.kind == "value":
            gradient, first = np.zeros(item.spec.shape, array.dtype), set()
            for row, id in zip(array, ids, strict=True):
                with np.errstate(all="ignore"):
                    gradient[id] = gradient[id] + row if id in first else row
                first.add(id)
            array = gradient
        whole.append(array.copy())
    return expected(program, whole)[0]
