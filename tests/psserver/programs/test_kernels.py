"""Kernels: the same bits as the interpreter, made of the table of ops alone, in the background."""

import ast
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

import psclient
import psserver
import pswire
from psserver.devices import ServerDevice
from psserver.programs.kernels import compiler as compiled
from psserver.programs.kernels import machine_code
from psserver.programs.kernels.codegen import Form, SumTerm, cuda_source, numba_source, parameters
from psserver.programs.kernels.compiler import Compiler, compile_numba
from psserver.programs.kernels.fusion import KERNEL_DTYPES, fused_shape, split, whole
from psserver.programs.kernels.kernels import Kernels
from psserver.programs.kernels.launch import Crew
from pswire.limits import MAX_NODES
from pswire.model.program import OPS, Input, Node, Program
from pswire.model.tensor import DTYPES, TensorSpec, address_of
from tests.kit.programs import adam, each_op, expected, job_of, numbers, plan_of, programs, run, same_bits, traced

N = 1003
VECTOR = TensorSpec("float32", (N,))


def clipped(w, m, g):
    g = g / np.sqrt(np.sum(g * g))
    m.assign(0.9 * m + g)
    w.assign_sub(0.1 * np.exp(m))


def floats(count, size=N, dtype="float32"):
    rng = np.random.default_rng(count)
    return [rng.random(size).astype(dtype) for _ in range(count)]


@pytest.fixture
def kernels():
    made = Kernels(ServerDevice(), patience=1, smallest=0)
    yield made
    made.close()


def run_twice(kernels, job, values):
    """The outcome while there is no kernel, and when there is one."""
    first = run(job, kernels, values)
    kernels.compiler.wait()
    return first, run(job, kernels, values)


# ---- The same bits ----


def every_op(dtype):
    """A program with each op of the table that a kernel can have for a dtype, each given back."""
    spec = TensorSpec(dtype, (N,))
    inputs = (Input("value", spec), Input("value", spec), Input("value", TensorSpec("bool", (N,))))
    ops = each_op(inputs, (0, 1))
    nodes = tuple(node for node, made in ops if fused_shape(node, [inputs[arg].spec for arg in node.args], made))
    return Program(inputs, nodes, (), tuple(range(3, 3 + len(nodes))))


AT_ONCE = ("bool", "float32", "float64", "int32", "uint16")
"""Dtypes of each kind and size; all of them are compiled in the soak."""


@pytest.mark.parametrize(
    "dtype", [d if d in AT_ONCE else pytest.param(d, marks=pytest.mark.soak) for d in sorted(KERNEL_DTYPES)]
)
def test_each_op_of_a_kernel_gives_the_interpreters_bits(dtype):
    """For every dtype that kernels know, zeros of both signs, infinities, NaN and the ends of integers included; so
    does machine code that was kept, of which none needs Numba or Python to run."""
    program = every_op(dtype)
    (step,) = split(program)
    form = Form(step.program)
    taken = parameters(form)
    made = compile_numba(numba_source(form), 1, [parameter.dtype for parameter in taken])
    code = machine_code.object_code(made.compiled.inspect_llvm(), 1, len(taken))
    assert code is not None
    inputs = [numbers(dtype, N, 1), numbers(dtype, N, 2), numbers("bool", N, 3)]
    _, wanted = expected(program, inputs)
    flags, crew = [], Crew(1)
    for kernel in (made, machine_code.loaded(code, 1, len(taken))):
        found = [np.empty_like(array) for array in wanted]
        arrays = [[inputs[arg]] for arg in step.args] + [[array] for array in found]
        flags.append(crew.launch(kernel, N, arrays, [False] * len(arrays)))
        results = zip(program.nodes, found, wanted, strict=True)
        assert [node for node, one, other in results if not same_bits(one, other)] == []
        table = np.array([[N, *(address_of(array) for (array,) in arrays)]] * 2, "int64")
        rows = crew.run_table(kernel, table, [0] * len(arrays))
        assert rows == [(0, flags[0]), (1, flags[0])][: 2 * bool(flags[0])]
    assert flags[0] == flags[1]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_wrap_in_kernels(kernels, dtype):
    """An op after an overflow sees the number that NumPy has: a compiler may not assume that there is none."""
    spec, info = TensorSpec(dtype, (N,)), np.iinfo(dtype)
    high, low, summed = range(3)
    wraps = [("add", high, high), ("subtract", low, high), ("multiply", high, high), ("negative", low), ("square", low)]
    nodes = [Node("sign", (summed,))]
    for op, *args in wraps:
        nodes += [Node(op, tuple(args)), Node("sign", (3 + len(nodes),))]
    signs = tuple(3 + n for n, node in enumerate(nodes) if node.op == "sign")
    program = Program((Input("value", spec),) * 3, tuple(nodes), (), signs)
    contributions = [[np.full(N, value, dtype) for value in of] for of in ((info.max, info.min, info.max), (0, 0, 1))]
    plain, compiled = run_twice(kernels, job_of(plan_of(program), contributions), {})
    assert len(kernels.compiler.texts) == 1
    assert all(map(same_bits, plain.given, compiled.given))


SUMS = [("sum", "float32", 1), ("sum", "float64", 2), ("sum", "float32", 3)]
SUMS += [("mean", "float64", 1), ("mean", "float32", 2), ("mean", "float64", 3)]
"""Each pair of an op, a dtype and a number of workers."""


@pytest.mark.parametrize(("op", "dtype", "workers"), SUMS)
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.soak), 3])  # one runs what three share
def test_contributions_are_summed_in_the_kernel(op, dtype, workers, threads):
    """By any number of threads, in the order of tasks, weighed as the reducer does, without joining pieces."""
    size = 300_000
    spec = TensorSpec(dtype, (size,))
    program, operands = traced(adam, [spec] * 3, [spec])
    contributions = [[np.random.default_rng(place).random(size).astype(dtype)] for place in range(workers)]
    job = job_of(plan_of(program, op), contributions, operands, part_bytes=1 << 18)
    values = dict(enumerate(floats(3, size, dtype)))
    kernels = Kernels(ServerDevice(), threads, patience=1)
    first, second = run_twice(kernels, job, values)
    assert all(same_bits(second.assigned[id], first.assigned[id]) for id in range(3))
    kernels.close()


# ---- Steps ----


def shapes(program):
    return [step.shape for step in split(program)]


def test_an_elementwise_program_is_one_kernel():
    """After a step for its scalars, if it has any to compute. A matrix product, scalars alone, and what is too long for
    a compiler stay whole."""
    program, _ = traced(adam, [VECTOR] * 3, [VECTOR])
    assert shapes(program) == [(N,)]
    count = TensorSpec("int64", ())
    program, _ = traced(lambda w, t: w.assign_sub(1 / (1 - 0.9 ** t.astype("float32"))), [VECTOR, count], [])
    assert shapes(program) == [None, (N,)]

    def long(w):
        for _ in range(300):
            w.assign(w * w + w)

    square, number = TensorSpec("float32", (4, 4)), TensorSpec("float32", ())
    for fn, spec in ((lambda w: w.assign(w @ w), square), (lambda w: w.assign_add(1.0), number), (long, VECTOR)):
        assert shapes(traced(fn, [spec], [])[0]) == [None]


def test_reductions_and_rounding_of_their_own_lie_between_kernels():
    """A norm and an exponential are interpreted; what comes before and after is not."""
    program, _ = traced(clipped, [VECTOR] * 2, [VECTOR])
    assert shapes(program) == [(N,), None, (N,), None, (N,)]
    half = TensorSpec("bfloat16", (N,))
    program, _ = traced(lambda w, m, g: m.assign(0.9 * m + g.astype("float32")), [half, VECTOR], [half])
    assert shapes(program) == [None, (N,)]


# ---- Compiling ----


def test_the_first_calls_are_interpreted_and_the_later_ones_compiled(monkeypatch):
    """Nobody waits for a compiler; what runs once never meets it."""
    may, compiling = threading.Event(), threading.Event()

    def slow(*args):
        compiling.set()
        may.wait(20)
        return compile_numba(*args)

    monkeypatch.setattr(compiled, "compile_numba", slow)
    kernels = Kernels(ServerDevice(), smallest=0)
    program, _ = traced(adam, [VECTOR] * 3, [VECTOR])
    (step,) = split(program)
    assert [kernels.kernel(step, {}) for _ in range(2)] == [None, None]
    assert compiling.wait(20)
    assert kernels.kernel(step, {}) is None
    may.set()
    kernels.compiler.wait()
    assert kernels.kernel(step, {}) is not None
    kernels.close()


def test_what_differs_in_operands_and_shapes_shares_a_kernel(kernels):
    """A new learning rate compiles nothing, nor does another variable."""
    for rate, size in ((0.1, 10), (0.2, 10), (0.1, 11)):
        spec = TensorSpec("float32", (size,))
        program, _ = traced(lambda *args, r=rate: adam(*args, r), [spec] * 3, [spec])
        kernels.kernel(kernels.steps(program)[0], {})
    kernels.compiler.wait()
    assert len(kernels.compiler.texts) == 1
    wide = TensorSpec("float64", (10,))
    kernels.kernel(kernels.steps(traced(adam, [wide] * 3, [wide])[0])[0], {})
    assert len(kernels.compiler.texts) == 2


@pytest.mark.parametrize("op", ["isfinite", "logical_not", "astype"])
def test_one_text_over_several_dtypes_is_several_kernels(kernels, op):
    """The text does not name the dtypes of its inputs, which the machine code reads all the same."""
    for dtype in ("float64", "float32", "int8", "float64"):
        spec = TensorSpec(dtype, (N,))
        node = Node(op, (0,), (("dtype", "int8"),) if op == "astype" else ())
        program = Program((Input("value", spec),), (node,), (), (1,))
        values = np.arange(N).astype(dtype)
        job = job_of(plan_of(program), [[values]], [])
        first, second = run_twice(kernels, job, {})
        assert same_bits(first.given[0], second.given[0])


def test_a_kernel_of_very_many_arrays_is_not_compiled(kernels):
    """It would take the compiler long, and more than a foreign function takes; the interpreter does it."""
    spec = TensorSpec("float32", (N,))
    inputs = tuple(Input("value", spec) for _ in range(compiled.MAX_POINTERS + 1))
    nodes, last = [], 0
    for number in range(1, len(inputs)):
        nodes.append(Node("add", (last, number)))
        last = len(inputs) + number - 1
    program = Program(inputs, tuple(nodes), (), (last,))
    for step in kernels.steps(program):
        if step.shape is not None and len(step.args) > compiled.MAX_POINTERS:
            assert kernels.kernel(step, {}) is None
    kernels.compiler.wait()
    assert kernels.compiler.texts == ()


def test_a_compiler_that_fails_is_told_of_once(monkeypatch, caplog):
    """And everything goes on interpreted; small arrays are not worth a kernel."""

    def broken(*args):
        raise RuntimeError("what the compiler says")

    monkeypatch.setattr(compiled, "compile_numba", broken)
    for smallest, told in ((None, 0), (0, 1)):
        kernels = Kernels(ServerDevice(), patience=1, **({} if smallest is None else {"smallest": smallest}))
        for fn in (adam, lambda w, m, s, g: w.assign(m + s + g), lambda w, m, s, g: w.assign(m - s - g)):
            program, operands = traced(fn, [VECTOR] * 3, [VECTOR])
            job = job_of(plan_of(program), [floats(1)], operands)
            first, second = run_twice(kernels, job, dict(enumerate(floats(3))))
            assert same_bits(first.assigned[0], second.assigned[0])
        kernels.close()
        assert len(caplog.records) == told
        assert told or kernels.compiler.texts == ()
    assert "what the compiler says" in caplog.text


def test_a_server_that_ends_does_not_wait_for_a_compiler(monkeypatch):
    """What is being compiled is broken off at its next pass, and whatever does not end soon is left alone."""
    before = set(threading.enumerate())
    compiling, closed = threading.Event(), threading.Event()

    def held(*args):
        compiling.set()
        closed.wait(20)
        return compile_numba(*args)

    monkeypatch.setattr(compiled, "compile_numba", held)
    monkeypatch.setattr(compiled, "STOP_SECONDS", 0)
    compiler = Compiler(ServerDevice(), patience=1)
    forms = [Form(split(traced(fn, [VECTOR] * 3, [VECTOR])[0])[-1].program) for fn in (adam, lambda w, *_: w * w)]
    assert [compiler.elementwise(form) for form in forms] == [None, None]
    assert compiling.wait(20)
    compiler.close()
    closed.set()
    compiler.wait()
    assert [compiler.elementwise(form) for form in forms] == [None, None]
    for thread in [thread for thread in set(threading.enumerate()) - before if thread.name == "kernels"]:
        thread.join(20)
        assert not thread.is_alive()


def test_a_server_starts_without_numba():
    """It costs 90 MB and half a second; who asks for no kernel pays neither."""
    program = (
        "import sys, psserver.cli, psserver.core.core; sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---- The text ----


def test_nothing_received_reaches_the_text():
    """Numbers, ops and dtypes are all that there is of a program; attributes are looked up, never pasted."""
    hostile = "import os"
    assert hostile not in {*OPS, *DTYPES}
    for program in (
        Program((Input("value", VECTOR),), (Node(hostile, (0,)),), (), (1,)),
        Program((Input("value", VECTOR),), (Node("astype", (0,), (("dtype", hostile),)),), (), (1,)),
        Program((Input("value", TensorSpec(hostile, (3,))),), (Node("sqrt", (0,)),), (), (1,)),
    ):
        with pytest.raises(Exception, match=hostile):
            split(program)


OURS = {"def", "kernel", "for", "in", "range", "carray", "i", "n", "0", "1", *DTYPES}
OURS |= {"watch", "found", "if", "or", "return", "2"}
CALLED = {"where", "maximum", "minimum", "sign", "sqrt", "floor", "ceil", "rint", "abs"}


@given(program=programs())
def test_the_text_has_no_other_words(program):
    """Every word of a generated text is one of ours, a function of the table's, or a numbered name."""
    for step in split(program):
        if step.shape is not None:
            words = set(re.findall(r"\w+", numba_source(Form(step.program)))) - OURS - CALLED
            assert [word for word in words if not re.fullmatch(r"(p_)?[aov]\d+|[sw]_float(32|64)", word)] == []


def test_text_is_run_in_one_place():
    """In no other module of the packages is there a call of `exec`, `eval` or `compile`."""
    found, runs = set(), {"exec", "eval", "compile", "__import__"}
    for package in (pswire, psserver, psclient):
        root = Path(package.__file__).parent
        for path in root.rglob("*.py"):
            text = path.read_text("utf-8")
            if not re.search(rf"(?<![\w.])({'|'.join(runs)})\s*\(", text):
                continue
            calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            if {call.id for call in calls if isinstance(call, ast.Name)} & runs:
                found.add(path.relative_to(root.parent).as_posix())
    assert found == {"psserver/programs/kernels/compiler.py"}


def test_the_text_for_a_gpu():
    """Inputs, what is assigned beside its input, and statements in C, which look for NaN and infinity at the end."""
    spec = TensorSpec("float32", (8,))
    program, _ = traced(lambda w, g: w.assign(np.where(g > 0, w - 0.5 * g, w)), [spec], [spec])
    form = Form(split(program)[-1].program)
    inputs, outputs, operation = cuda_source(form)
    assert (inputs, outputs) == ("float32 a0, float32 a1, float32 a2, float32 a3", "float32 w0, raw bool seen")
    value = f"v{len(form.program.specs) - 1}"
    (gradient,) = (n for n, item in enumerate(form.program.inputs) if item.kind == "value" and item.spec.shape)
    assert operation.splitlines()[-3:] == [
        f"w0 = ((float)({value}));",
        f"if (!(isfinite(v{gradient}))) seen[0] = true;",
        f"if (!(isfinite({value}))) seen[1] = true;",
    ]
    assert "((float)(where(" in operation
    summed = Form(form.program, {1: SumTerm("mean", 2)})
    assert "((float)(((float)(c1_0 + c1_1)) / t1))" in cuda_source(summed)[2]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_runs_once_for_each_row_of_a_table(threads):
    """With the row's arguments; the rows with flags are told, each with its own."""
    calls, crew = [], Crew(threads)
    function = machine_code.prototype(1, 2, returns=True)(lambda n, a, b: calls.append((n, a, b)) or n % 4)
    kernel = machine_code.with_rows(function, 1, 2)
    table = np.array([[4, 64, 128], [5, 192, 1 << 40], [7, 1, 2], [8, 8, 8]], "int64")
    assert sorted(crew.run_table(kernel, table, [4, 4])) == [(1, 1), (2, 3)]
    assert sorted(calls) == sorted(map(tuple, table.tolist()))
    assert crew.run_table(kernel, table[:0], [4, 4]) == []
    assert crew.run_table(kernel, table[:1], [4, 4]) == []
    assert len(calls) == 5
    assert crew.seconds > 0
    crew.close()


WIDE = TensorSpec("float32", (300, 400))
WIDE_INPUT = Input("variable", WIDE)


def alternating():
    """A reduction, and what is done with it, as often as can be."""
    nodes = []
    for _ in range(MAX_NODES // 2):
        current = len(nodes)
        nodes += [Node("sum", (current,)), Node("multiply", (current, current + 1))]
    return Program((WIDE_INPUT,), tuple(nodes), ((0, len(nodes)),), ())


def rotated(count=20_000):
    """Many variables, each of which becomes the one before it, and is given back."""
    assigns = tuple((n, (n + 1) % count) for n in range(count))
    return Program((WIDE_INPUT,) * count, (Node("negative", (0,)),), assigns, tuple(range(count)))


@pytest.mark.parametrize("make", [alternating, rotated])
def test_a_long_program_is_cut_in_time(make):
    """However many steps or variables it has; one of very many steps stays whole."""
    program = make()
    _ = program.specs
    begun = time.process_time()
    steps = split(program)
    assert time.process_time() - begun < 2
    assert steps == (whole(program),) or len(steps) <= 2


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_only_looked_at_takes_no_memory(compiled):
    """A scalar that is broadcast to be summed is a view, in the interpreter and beside kernels."""

    def fn(v):
        v.assign(v * 2)
        return np.sum(np.broadcast_to(np.sum(v), (4000, 4000)))

    program, operands = traced(fn, [WIDE], [])
    kernels, value = Kernels(ServerDevice(), patience=1 if compiled else 10**9), np.ones(WIDE.shape, "float32")
    job = job_of(plan_of(program), [[]], operands)
    run(job, kernels, {0: value})
    kernels.compiler.wait()
    tracemalloc.start()
    try:
        (found,) = run(job, kernels, {0: value}).given
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        kernels.close()
    assert not any(step.may_fail for step in split(program))
    assert found == np.float32(WIDE.size * 2 * 4000 * 4000)
    assert peak < 3 * value.nbytes
    assert bool(kernels.compiler.texts) == compiled


def test_what_a_kernel_reads_is_made_in_it():
    """A broadcast value that is also assigned or computed with is no array of its own before."""
    program, _ = traced(lambda v: v.assign(np.broadcast_to(np.sum(v), WIDE.shape) + v), [WIDE], [])
    (kernel,) = [step for step in split(program) if step.shape is not None]
    assert [node.op for node in kernel.program.nodes] == ["broadcast_to", "add"]
