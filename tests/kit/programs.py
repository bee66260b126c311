"""Update programs for tests: random ones, rounds that run them, and whether two results have the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from psclient._src.tracing.recorder import Recording, trace
from psserver.execution.execution import Execution
from psserver.execution.nonfinite import NonfiniteValues
from psserver.plans.prepared import PreparedPlan
from psserver.plans.round import MemberShare, ReadyRound
from psserver.programs import interpreter
from psserver.programs.kernels.kernels import Kernels
from pswire.api import Contribution
from pswire.errors import ProgramError
from pswire.model.log import Member
from pswire.model.plan import Apply, Operand, Plan, ReduceOp, Reduction, Ref
from pswire.model.program import OPS, Attr, Input, Node, Program, infer
from pswire.model.tensor import DTYPES, Array, TensorSpec, spec_of
from pswire.transport.parts import parts_of
from pswire.transport.payload import Payload
from tests.kit.rig import WORKERS

FLOATS = [0.0, -0.0, 1.0, -1.5, 3.25, 0.1, -7.0, 1e-30, 1e30, np.inf, -np.inf, np.nan]
COMPLEX = [*FLOATS, 1j, 3 - 4j, complex(-0.0, 1e30), complex(np.inf, -2.0), complex(0.5, np.nan)]
DTYPES_OF_VALUES = ["float32", "float64", "int32", "int64", "bfloat16", "complex64"]
DTYPES_OF_PROGRAMS = list(DTYPES)


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
    if spec_of(one) != spec_of(other):
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


def plan_of(program: Program, op: ReduceOp = "sum", returned: bool = True) -> Plan:
    """A plan of one update: variables by number, values as reductions, operands, everything returned."""
    counts = {"variable": 0, "value": 0, "operand": 0}
    kinds: dict[str, Any] = {"variable": "variable", "value": "reduction", "operand": "operand"}
    refs = []
    for item in program.inputs:
        refs.append(Ref(kinds[item.kind], counts[item.kind]))
        counts[item.kind] += 1
    reductions = tuple(Reduction(op, item.spec, (0,)) for item in program.inputs if item.kind == "value")
    operands = tuple(Operand(item.spec, (0,)) for item in program.inputs if item.kind == "operand")
    results = tuple(Ref("result", n) for n in range(len(program.outputs))) if returned else ()
    return Plan(reductions, operands, (program,), (Apply(0, (0,), tuple(refs)),), results)


def job_of(
    plan: Plan,
    contributions: Sequence[Sequence[Array | None]],
    operands: Sequence[Array] = (),
    part_bytes: int = 1 << 20,
) -> ReadyRound:
    """A round of a plan: for each worker what it contributes to each reduction, or None, cut into parts."""
    parts = []
    for place, arrays in enumerate(contributions):
        packed = Payload.pack([*operands, *(array for array in arrays if array is not None)])
        chunks = [(at, memoryview(b"".join(buffers))) for at, buffers in parts_of(packed, part_bytes)]
        said = Contribution(place + 1, 1, 4, plan.id, tuple(float((place + 1) * (a is not None)) for a in arrays))
        parts.append(MemberShare(Member(WORKERS[place], place + 1, 1), said, Payload(chunks, packed.size)))
    return ReadyRound(4, PreparedPlan(plan, 0), tuple(parts), (), lambda: "the section")


@dataclass(frozen=True)
class Outcome:
    """What a round that ran all at once has made: as `Execution.step` and its attributes say."""

    assigned: dict[int, Array]
    given: list[Array]
    wanted: dict[int, Array]
    found: NonfiniteValues


def run(job: ReadyRound, kernels: Kernels, values: Mapping[int, Array], alone: Set[int] = frozenset()) -> Outcome:
    """Runs a round that commits all at the end; kernels may write into the arrays of variables that are `alone`."""
    execution = Execution(job, kernels)
    assigned, ready = execution.step({id: values.get(id) for id in execution.reads()}, alone, lambda id: None)
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
            specs.append(infer(name, [specs[arg] for arg in args], attrs))
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
