"""Update programs and rows for tests: random ones, rounds that run them, kernels compiled once in a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from psclient._src.tracing.recorder import Recording, trace
from psserver.execution.execution import Execution
from psserver.execution.nonfinite import NonfiniteValues
from psserver.programs import interpreter
from psserver.programs.kernels.row_steps import ROW_DTYPES, split_rows
from psserver.values.dense import Dense
from psserver.values.step import StepVariables
from pswire.model.row_updates import ALONG_ROWS, refusal, row_shape
from tests.conftest import KERNELS
from tests.kit import internals as inside
from tests.kit.contributions import round_of, share
from tests.kit.internals import DTYPES, OPS, Array, Attr, Input, Kernels, Node, Plan, Program, ProgramError, TensorSpec
from tests.kit.internals import ServerDevice as Device

FLOATS = [0.0, -0.0, 1.0, -1.5, 3.25, 0.1, -7.0, 1e-30, 1e30, np.inf, -np.inf, np.nan]
COMPLEX = [*FLOATS, 1j, 3 - 4j, complex(-0.0, 1e30), complex(np.inf, -2.0), complex(0.5, np.nan)]
DTYPES_OF_VALUES = ["float32", "float64", "int32", "int64", "bfloat16", "complex64"]
DTYPES_OF_PROGRAMS = list(DTYPES)


def adam(w: Any, m: Any, s: Any, g: Any, rate: float = 0.001) -> None:
    """An update of a variable and its two moments."""
    m.assign_add(0.1 * (g - m))
    s.assign_add(0.001 * (g * g - s))
    w.assign_sub(rate * m / (np.sqrt(s) + 1e-7))


def numbers(dtype: str, size: int, seed: int) -> Array:
    """Numbers of a dtype, the strange ones among them."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        if DTYPES[dtype].kind in "iu":
            info = np.iinfo(dtype)
            pool = np.array([0, 1, 2, 7, info.max, info.min, info.max // 3]).astype(dtype)
        else:
            pool = np.array(COMPLEX if DTYPES[dtype].kind == "c" else FLOATS).astype(DTYPES[dtype])
        return rng.choice(pool, size)


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are equal to the last bit and sign; any NaN is as good as another."""
    if inside.spec_of(one) != inside.spec_of(other):
        return False
    if one.dtype.kind in "biu":
        return one.tobytes() == other.tobytes()
    if one.dtype.kind == "c":
        return same_bits(*(np.ascontiguousarray(x).view(x.real.dtype) for x in (one, other)))
    bits = np.dtype(f"u{one.itemsize}")
    nan = (one != one) & (other != other)
    return bool(np.all(nan | (np.ascontiguousarray(one).view(bits) == np.ascontiguousarray(other).view(bits))))


def traced(
    fn: Callable[..., object], variables: Sequence[TensorSpec], values: Sequence[TensorSpec]
) -> tuple[Program, list[Array]]:
    """A function of variables and values as a program, and the operands that it has met, in order."""
    recording = Recording()
    args: list[Any] = [recording.variable(spec, f"v{i}", ("variable", i)) for i, spec in enumerate(variables)]
    args += [recording.value(spec, ("value", i)) for i, spec in enumerate(values)]
    found = trace(recording, fn, args)
    return found.program, [origin for origin in found.origins if isinstance(origin, np.ndarray)]


def updates(*programs: Program, op: inside.ReduceOp = "sum") -> Plan:
    """A plan of updates, each of which has variables and reductions of its own, by number; they share operands."""
    distinct, own = tuple(dict.fromkeys(programs)), {"variable": count(), "value": count()}
    kinds: dict[str, Any] = {"variable": "variable", "value": "reduction", "operand": "operand"}
    applies = []
    for program in programs:
        places = own | {"operand": count()}
        refs = tuple(inside.Ref(kinds[item.kind], next(places[item.kind])) for item in program.inputs)
        applies.append(inside.Apply(distinct.index(program), (0,), refs))
    values = [item.spec for program in programs for item in program.inputs if item.kind == "value"]
    operands = tuple(inside.Operand(item.spec, (0,)) for item in programs[0].inputs if item.kind == "operand")
    return Plan(tuple(inside.Reduction(op, spec, (0,)) for spec in values), operands, distinct, tuple(applies))


def plan_of(program: Program, op: inside.ReduceOp = "sum") -> Plan:
    """A plan of one update, of which everything is returned."""
    results = tuple(inside.Ref("result", n) for n in range(len(program.outputs)))
    return replace(updates(program, op=op), returned=results)


def job_of(
    plan: Plan,
    contributions: Sequence[Sequence[Array | None]],
    operands: Sequence[Array] = (),
    part_bytes: int = 1 << 20,
) -> inside.ReadyRound:
    """A round of a plan: for each worker what it contributes to each reduction, or None, cut into parts."""
    given = [tuple(float((place + 1) * (a is not None)) for a in own) for place, own in enumerate(contributions)]
    sent = zip(contributions, given, strict=True)
    return round_of(plan, *(share(n, plan, own, operands, each, part_bytes) for n, (own, each) in enumerate(sent)))


@dataclass(frozen=True)
class Outcome:
    """What a round that ran all at once has made: as `Execution.step` and its attributes say."""

    assigned: dict[int, Array]
    given: list[Array]
    wanted: dict[int, Array]
    found: NonfiniteValues


def step(
    execution: Execution, values: Mapping[int, Array], alone: Set[int] = frozenset()
) -> tuple[dict[int, Array], dict[Any, Array]]:
    """Runs the next step of a round; returns the arrays that it assigns, and what is ready."""
    before = {id: Dense(values[id]) if id in values else None for id in execution.reads()}
    made, ready = execution.step(StepVariables(before, alone, alone), lambda id: None)
    return {id: value.array for id, value in made.items()}, ready


def run(
    job: inside.ReadyRound, kernels: Kernels, values: Mapping[int, Array], alone: Set[int] = frozenset()
) -> Outcome:
    """Runs a round that commits all at the end; kernels may write into the arrays of variables that are `alone`."""
    execution = Execution(job, kernels)
    assigned, ready = step(execution, values, alone)
    assert execution.done
    wanted = {id: array for id, array in ready.items() if isinstance(id, int)}
    return Outcome(assigned, list(execution.given.arrays), wanted, execution.found)


def _reduced(draw: Any, spec: TensorSpec, shape: tuple[int, ...]) -> dict[str, Attr]:
    axes: list[Attr] = [None, (), *range(-len(spec.shape), len(spec.shape)), tuple(range(len(spec.shape)))]
    return {"axis": draw(st.sampled_from(axes)), "keepdims": draw(st.booleans())}


_ATTRS: dict[str, Callable[[Any, TensorSpec, Any], dict[str, Attr]]] = {
    "astype": lambda draw, spec, shape: {"dtype": draw(st.sampled_from(DTYPES_OF_PROGRAMS))},
    "broadcast_to": lambda draw, spec, shape: {"shape": draw(st.sampled_from([shape, (2, *shape)]))},
    **dict.fromkeys(("sum", "mean", "max", "min", "all", "any"), _reduced),
}


@st.composite
def programs(draw: Any, shapes: Sequence[tuple[int, ...]] = ((7,), (2, 3), (0,), (3, 0), ())) -> Program:
    """A random verified program on arrays of one shape, on what broadcasts to it, and on scalars; of any ops."""
    shape = draw(st.sampled_from(shapes))
    narrow = draw(st.sampled_from([(), shape, (1,) * len(shape), shape[-1:]]))
    kinds: Any = ["variable", "variable", "value", "operand"]
    inputs = []
    for kind, of in zip(kinds, (shape, draw(st.sampled_from([shape, narrow])), shape, narrow), strict=True):
        dtype = draw(st.sampled_from(DTYPES_OF_VALUES if kind == "value" else DTYPES_OF_PROGRAMS))
        inputs.append(Input(kind, TensorSpec(dtype, of)))
    specs, nodes = [item.spec for item in inputs], list[Node]()
    for name in draw(st.lists(st.sampled_from(tuple(OPS)), min_size=1, max_size=10)):
        args = tuple(draw(st.integers(0, len(specs) - 1)) for _ in range(OPS[name].arity))
        attrs = _ATTRS.get(name, lambda *_: {})(draw, specs[args[0]], shape)
        try:
            specs.append(inside.infer(name, [specs[arg] for arg in args], attrs))
            nodes.append(Node(name, args, tuple(sorted(attrs.items()))))
        except ProgramError:
            pass  # These do not go together; another one comes.
    assigns = []
    for target in (0, 1):
        fitting = [number for number, spec in enumerate(specs) if spec == specs[target] and number != target]
        if fitting:
            assigns.append((target, draw(st.sampled_from(fitting))))
    outputs = draw(st.lists(st.integers(0, len(specs) - 1), max_size=2))
    return Program(tuple(inputs), tuple(nodes), tuple(assigns), tuple(outputs))


def expected(program: Program, inputs: Sequence[Array]) -> tuple[dict[int, Array], list[Array]]:
    """What the interpreter makes of a program."""
    return interpreter.run(program, inputs, np)


def plain(program: Program, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What a user would write for a program: calls of NumPy on arrays, or on tracers.

    Returns:
        What is assigned, in the order of `program.assigns`, and the outputs.
    """
    values = list(arrays)
    with np.errstate(all="ignore"):
        for node in program.nodes:
            args, attrs = [values[arg] for arg in node.args], dict(node.attrs)
            if node.op == "astype":
                with warnings.catch_warnings(action="ignore", category=np.exceptions.ComplexWarning):
                    values.append(args[0].astype(attrs["dtype"]))
            else:
                values.append(getattr(np, OPS[node.op].numpy)(*args, **attrs))
            if node.op in ("max", "min") and isinstance(values[-1], np.ndarray | np.generic):
                values[-1] = _without_negative_zero(values[-1])
    return [values[value] for _, value in program.assigns], [values[value] for value in program.outputs]


def _without_negative_zero(value: Any) -> Any:
    """Of zeros of both signs NumPy takes one or the other, by the processor; a program takes the positive one."""
    return value + value.dtype.type(0) if value.dtype.kind in "fV" else value


TABLE, SECOND, ROWS, NUMBER = range(4)
"""The inputs of a random update: two tables, rows, and a number."""

OFTEN = ("add", "subtract", "multiply", "divide", "square", "sqrt", "maximum", "where", "astype", "broadcast_to")
WITH_KERNELS = tuple(name for name, op in OPS.items() if op.kernel)


def along(shape: tuple[int, ...]) -> tuple[tuple[str, Any], ...]:
    """The attributes of a reduction that makes one number of each row."""
    return (("axis", tuple(range(1, len(shape)))), ("keepdims", True))


def each_op(inputs: Sequence[Input], two: tuple[int, int]) -> Iterator[tuple[Node, TensorSpec]]:
    """The ops that go together with some inputs, and what they make: of `two` of them, or one, chosen by input 2."""
    shape = inputs[0].spec.shape
    for name, row in OPS.items():
        args = (2, 0, 1) if name == "where" else two[: row.arity]
        attrs = {"astype": [(("dtype", each),) for each in DTYPES], "broadcast_to": [(("shape", shape),)]}
        for own in [along(shape)] if name in ALONG_ROWS else attrs.get(name, [()]):
            node = Node(name, args, own)
            try:
                made = Program(tuple(inputs), (node,), (), ()).specs[-1]
            except ProgramError:
                continue
            yield node, made


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
            spec = inside.infer(name, [specs[arg] for arg in args], dict(attrs))
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
    return np.where(rng.random(spec.shape) < 0.5, found, plain_numbers(spec, seed)) if dtype.kind == "f" else found


def plain_numbers(spec: TensorSpec, seed: int) -> Array:
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


def kept_kernels(threads: int = 1, **more: Any) -> Kernels:
    """Returns kernels for the host, whose machine code other processes of the run take over."""
    return Kernels(Device(), threads, folder=os.environ[KERNELS], **more)
