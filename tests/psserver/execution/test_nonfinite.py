"""NaN and infinity in contributions and variables: found exactly, named exactly, told once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from psserver.devices import ServerDevice
from psserver.execution.execution import Execution
from psserver.execution.nonfinite import finite_flag
from psserver.plans.round import Commit
from psserver.programs.kernels.kernels import SMALLEST, Kernels
from psserver.rounds.nonfinite import MAX_LINES
from pswire.errors import ProgramError
from pswire.model.finite import CHUNK, SMALL, is_finite, may_be_nonfinite
from pswire.model.plan import Apply, Plan, Reduction, Ref
from pswire.model.program import Node
from pswire.model.tensor import DTYPES, TensorSpec
from pswire.network.payload import Payload
from tests.kit.programs import job_of, kept_kernels, plan_of, run, same_bits, step, traced, updates
from tests.kit.rig import SOON, WORKERS, Job, adding, compiler_of, serving, sgd, sum_into, together, turn
from tests.psserver.test_server_metrics import page

A, B, C = WORKERS[:3]
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
FLOATS = [name for name, dtype in DTYPES.items() if may_be_nonfinite(dtype)]
N = 1003


def truth(array: Any) -> bool:
    wide = array.astype("complex128" if array.dtype.kind == "c" else "float64")
    return bool(np.isfinite(wide).all())


def descent(w, g):
    w.assign_sub(w.dtype.type(0.5) * g)


@pytest.fixture(params=["interpreted", "compiled"], scope="module")
def kernels(request):
    made = kept_kernels(2, patience=10**9 if request.param == "interpreted" else 1, smallest=0)
    yield made
    made.close()


def ran(kernels, job, values, in_place=True):
    """What a round finds, with its kernels ready."""
    with contextlib.suppress(ProgramError):
        run(job, kernels, {id: array.copy() for id, array in values.items()})
    kernels.compiler.wait()
    return run(job, kernels, values, frozenset(values) if in_place else frozenset())


# ---- Arrays ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 100, SMALL + 1, CHUNK + 1])
def test_an_array_is_judged_as_numpy_judges_it(dtype, size):
    """Of every dtype, wherever the one value is, and the largest numbers are finite."""
    array = np.ones(size, DTYPES[dtype])
    if dtype in FLOATS and size:
        with np.errstate(all="ignore"):
            array[-1] = np.float64(1e300) if dtype in ("float64", "complex128") else {"float16": 6e4}.get(dtype, 3e38)
    assert truth(array)
    assert is_finite(array)
    assert is_finite(array.reshape(1, size))
    if dtype not in FLOATS or not size:
        return
    assert finite_flag(array, np)
    for value in BAD.values():
        for at in {0, size // 2, size - 1}:
            bad = array.copy()
            bad[at] = value
            assert not is_finite(bad)
            assert not finite_flag(bad, np)
            assert not is_finite(bad[at].reshape(()) if size == 1 else bad.reshape(size, 1))


# ---- Rounds ----


SPEC = TensorSpec("float32", (N,))
FEW = TensorSpec("float32", (4,))


def ones(*at, of=np.nan, size=N):
    """Ones, with something else in some places."""
    array = np.ones(size, "float32")
    array[... if at == (...,) else list(at)] = of
    return array


def updating(fn, count=1, op="sum", spec=SPEC):
    """A plan of a function of variables and a gradient, and its operands."""
    program, operands = traced(fn, [spec] * count, [spec])
    return plan_of(program, op), operands


def kept_out():
    """A contribution that a choice drops is found, and the variable is as finite as it is."""
    made = updating(lambda w, g: w.assign(np.where(np.isfinite(g), w - g, w)))
    yield *made, [[ones()], [ones(-1)]], [(0, B)], {}


def made_good():
    """A variable that is not finite in between is so again at the end, if something else is assigned."""
    programs = (adding(SPEC), replace(adding(SPEC), nodes=(), assigns=((0, 1),)))
    applies = tuple(Apply(n, (0,), (Ref("variable", 0), Ref("reduction", n))) for n in range(2))
    plan = Plan((Reduction("sum", SPEC, (0,)),) * 2, (), programs, applies)
    yield plan, (), [[ones(...), ones()]], [(0, A)], {}
    yield plan, (), [[ones(), ones(...)]], [(1, A)], {0}


def batched():
    """Of many applications that one kernel makes together, by whichever thread."""
    sizes = [N, 5, 400, N]
    made = [traced(descent, [spec], [spec]) for spec in (TensorSpec("float32", (size,)) for size in sizes)]
    plan = updates(*(program for program, _ in made))
    good = [ones(size=size) for size in sizes]
    yield plan, made[0][1], [good, [*good[:2], ones(399, of=np.inf, size=400), good[3]]], [(2, B)], {2}


def given_back():
    """A loss that is NaN poisons no variable; one that is also applied does."""
    bad = [[ones(1, size=4)]]
    yield Plan((Reduction("sum", FEW, (0,)),), returned=(Ref("reduction", 0),)), (), bad, [], {}
    plan, operands = updating(descent, spec=FEW)
    yield replace(plan, returned=(Ref("reduction", 0),)), operands, bad, [(0, A)], {0}


def first_of_all():
    """Of a first contribution the first alone counts: the others are looked at by nobody."""
    made = updating(descent, op="first", spec=FEW)
    yield *made, [[ones(size=4)], [ones(..., size=4)]], [], {}
    yield *made, [[ones(..., size=4)]] * 2, [(0, A)], {0}


def of_any_dtype():
    """In sums and means, wherever it is in a contribution that came in pieces."""
    for dtype, op in (("float64", "mean"), ("bfloat16", "mean"), ("complex64", "sum")):
        made, good = updating(descent, op=op, spec=TensorSpec(dtype, (N,))), np.ones(N, DTYPES[dtype])
        for at, bad in ((0, np.nan), (N // 2, np.inf), (N - 1, -np.inf)):
            poisoned = good.copy()
            poisoned[at] = bad
            yield *made, [[good], [poisoned], [good]], [(0, B)], {0}


@pytest.mark.parametrize("rounds", [kept_out, made_good, batched, given_back, first_of_all, of_any_dtype])
def test_what_a_round_finds(kernels, rounds):
    """Contributions that are not finite, and those variables that are not at the end."""
    for plan, operands, contributions, poisoned, wrong in rounds():
        specs = [
            (ref, item.spec)
            for a in plan.applies
            for ref, item in zip(a.args, plan.programs[a.program].inputs, strict=True)
        ]
        values = {ref.index: np.ones(spec.shape, DTYPES[spec.dtype]) for ref, spec in specs if ref.kind == "variable"}
        outcome = ran(kernels, job_of(plan, contributions, operands, part_bytes=1 << 10), values)
        assert outcome.found.contributions == poisoned
        assert {*outcome.found.variables} == {id for id, v in outcome.assigned.items() if not truth(v)} == {*wrong}


def test_more_contributions_than_a_kernel_sums_are_told_apart(kernels, monkeypatch):
    """The reducer's sum is judged."""
    monkeypatch.setattr("psserver.execution.contributions.MAX_PARTS", 2)
    monkeypatch.setattr("psserver.plans.batches.MAX_PARTS", 2)
    plan, operands = updating(descent)
    outcome = ran(kernels, job_of(plan, [[ones()], [ones(3, of=-np.inf)], [ones()]], operands), {0: ones()})
    assert outcome.found.contributions == [(0, B)]
    assert set(outcome.found.variables) == {0}


@dataclass(frozen=True)
class Pretended(ServerDevice):
    """The host's memory as if it were a GPU's: what a round does there for want of one."""

    @property
    def xp(self) -> Any:
        return np

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def put(self, array: Any) -> Any:
        return np.array(array)

    def get(self, array: Any) -> Any:
        return np.asarray(array)

    def get_all(self, arrays: Any) -> Any:
        return list(map(np.asarray, arrays))

    def room(self, shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_is_asked_once_in_a_round(dtype, monkeypatch):
    """Contributions and variables are judged there, and are the same as on the host."""
    spec = TensorSpec(dtype, (N,))
    program, operands = traced(descent, [spec], [spec])
    contributions = [[np.ones(N, spec.dtype if dtype == "float32" else DTYPES[dtype])] for _ in range(3)]
    contributions[2][0][0] = np.nan
    kernels, asked, own = Kernels(Pretended(0), patience=10**9), [], Pretended.get
    monkeypatch.setattr(Pretended, "get", lambda self, array: asked.append(array.dtype) or own(self, array))
    for count, poisoned, variables in ((3, [(0, C)], {0: False}), (2, [], {})):
        job = job_of(plan_of(program), contributions[:count], operands)
        outcome = run(job, kernels, {0: np.ones(N, DTYPES[dtype])})
        assert (outcome.found.contributions, outcome.found.variables) == (poisoned, variables)
        assert asked.count(np.dtype(bool)) == 1 + len(variables), "one for the round, one for what a variable was"
        asked.clear()
    kernels.close()


# ---- What is told ----


def metrics(job: Job) -> tuple[float, float]:
    """How many contributions were not finite, and how many variables are not."""
    found = page(job)
    return found("server_nonfinite_pushes_total"), found("server_nonfinite_variables")


def make_round(plan, pushes, **said):
    """A round of each worker's values; returns what they are told, which is the same for all."""
    told = {reply.warnings for reply in together(*(w.push(plan, values, **said) for w, values in pushes))}
    turn(*(worker for worker, _ in pushes))
    assert len(told) == 1
    return told.pop()


def test_a_poisoned_variable_is_told_of_once_with_its_worker(job, caplog):
    """To all members and in the log; not again while it is so; and again once it was finite in between."""
    one, two = job.join(A, B)
    v, u = (job.variable(one, np.zeros(4)) for _ in range(2))
    plan = job.approve(sum_into(v, u), one)
    good, bad = np.ones(4), np.array([1, np.nan, 1, 1])
    assert make_round(plan, [(one, [good, good]), (two, [good, good])]) == ()
    assert metrics(job) == (0, 0)
    (words,) = make_round(plan, [(one, [good, good]), (two, [bad, good])])
    assert "round 1" in words
    assert repr(v.spec.name) in words
    assert str(B) in words
    assert str(A) not in words
    assert repr(u.spec.name) not in words
    assert caplog.text.count(words) == 1
    assert make_round(plan, [(one, [good, good]), (two, [good, good])]) == ()
    assert make_round(plan, [(one, [bad, good]), (two, [bad, good])]) == ()
    assert metrics(job) == (3, 1)
    assigning = replace(adding(v.spec.tensor), nodes=(), assigns=((0, 1),))
    reset = job.approve(replace(sum_into(v), programs=(assigning,)), one)
    assert make_round(reset, [(one, [good]), (two, [good])]) == ()
    assert metrics(job) == (3, 0)
    (words,) = make_round(plan, [(one, [bad, good]), (two, [good, good])])
    assert str(A) in words
    assert len(caplog.records) == 2


def test_a_kernel_that_writes_in_place_tells_once(job):
    """What the variable was before is gone by then; that it was told of is not."""
    (one,) = job.join(A)
    v = job.variable(one, np.zeros(SMALLEST))
    plan = job.approve(sum_into(v, returned=False), one)
    bad = np.ones(SMALLEST)
    bad[-1] = np.nan
    compiler = compiler_of(job.servers.cores[0])
    for _ in range(3):
        assert make_round(plan, [(one, [np.ones(SMALLEST)])]) == ()
        compiler.wait()
    assert compiler.compiled + compiler.loaded == 1
    assert len(make_round(plan, [(one, [bad])])) == 1
    assert make_round(plan, [(one, [bad])]) == ()
    assert metrics(job) == (2, 1)


@pytest.fixture(params=[1, 2], ids="{}-servers".format)
def restored(request, tmp_path) -> Iterator[Job]:
    """A job whose servers restore together."""
    with serving("core", request.param, tmp_path) as servers:
        yield Job(servers)


def test_a_restored_variable_is_told_of_anew(restored):
    """It is finite, as the checkpoint is; and what the last job's variables were is forgotten in a new one."""
    job = restored
    (one,) = job.join(A)
    v, plan = job.adder(one, np.zeros(4))
    job.save(one)
    assert len(make_round(plan, [(one, [np.full(4, np.inf)])])) == 1
    job.restore(one)
    assert len(make_round(plan, [(one, [np.full(4, np.inf)])])) == 1
    assert metrics(job) == (2, 1)
    job.begin()
    assert metrics(job)[1] == 0
    (one,) = job.join(A)
    again, plan = job.adder(one, np.zeros(4))
    assert again.id == v.id
    assert make_round(plan, [(one, [np.full(4, np.nan)])])


def test_an_overflow_is_told_without_a_worker(job):
    """All contributions were finite, and the variable alone is named; so it is with an operand, such as a learning
    rate, which every process has sent. A variable that was infinite before is no news, such as the best loss so far."""
    one, two = job.join(A, B)
    v, plan = job.adder(one, np.full(4, 3e38, "float32"))
    u, (_, infinite) = job.variable(one, np.ones(4)), job.adder(one, np.inf)
    assert make_round(infinite, [(w, [np.array(1.0)]) for w in (one, two)]) == ()
    assert metrics(job) == (0, 0)
    (words,) = make_round(plan, [(w, [np.full(4, 2e38)]) for w in (one, two)])
    assert repr(v.spec.name) in words
    assert "from finite gradients" in words
    assert "worker" not in words
    assert metrics(job) == (0, 1)
    (words,) = make_round(job.approve(sgd(u), one), [(w, [np.ones(4)]) for w in (one, two)], operands=[np.nan])
    assert "a learning rate that is not finite" in words


def test_what_an_update_keeps_out_is_counted_and_not_told(job):
    """A step with a loss scale drops gradients that are not finite: that is no mistake."""
    (one,) = job.join(A)
    v = job.variable(one, np.zeros(4))
    nodes = (Node("isfinite", (1,)), Node("where", (2, 1, 0)))
    program = replace(adding(v.spec.tensor), nodes=nodes, assigns=((0, 3),))
    plan = job.approve(replace(sum_into(v), programs=(program,)), one)
    assert make_round(plan, [(one, [np.array([1, np.nan, 1, 1])])]) == ()
    assert metrics(job) == (1, 0)
    np.testing.assert_array_equal(job.value(one, v), [1, 0, 1, 1])


def test_an_asynchronous_worker_is_told_of_its_own(job):
    """A round is its sender's alone; a resend is told the same, since its answer was recorded."""
    one, two = job.join(A, B, mode="async")
    _, plan = job.adder(one, np.zeros(4))
    assert make_round(plan, [(one, [np.ones(4)])]) == ()
    first, again = (two.push(plan, [np.full(4, np.nan)]).result(SOON) for _ in range(2))
    (words,) = first.warnings
    assert str(B) in words
    assert again.warnings == first.warnings
    assert make_round(plan, [(one, [np.full(4, np.nan)])]) == ()


def test_very_many_variables_are_told_of_in_few_lines(job):
    """A number stands for the rest."""
    (one,) = job.join(A)
    variables = [job.variable(one, np.zeros(2)) for _ in range(MAX_LINES + 5)]
    plan = job.approve(sum_into(*variables), one)
    told = make_round(plan, [(one, [np.full(2, np.nan)] * len(variables))])
    assert len(told) == MAX_LINES + 1
    assert "5 more variables" in told[-1]
    assert metrics(job) == (len(variables), len(variables))
    assert make_round(plan, [(one, [np.full(2, np.nan)] * len(variables))]) == ()


# ---- Rounds that stream ----


@pytest.mark.parametrize("how", ["interpreted", "compiled", "on a device"])
def test_a_stream_finds_it_before_contributions_are_gone(how):
    """Each variable is judged when it is updated; the memory of what it was made of is then let go."""
    device = Pretended(0) if how == "on a device" else ServerDevice()
    kernels = Kernels(device, patience=1 if how == "compiled" else 10**9, smallest=0)
    spec = TensorSpec("float32", (N,))
    program, operands = traced(descent, [spec], [spec])
    contributions = [[np.ones(N, "float32") for _ in range(3)] for _ in range(2)]
    contributions[1][1][500] = np.nan
    whole = job_of(updates(*[program] * 3), contributions, operands)
    ran(kernels, whole, {n: np.ones(N, "float32") for n in range(3)})
    job = replace(whole, parts=tuple(replace(part, payload=Payload((), part.payload.size)) for part in whole.parts))
    stream = Execution(replace(job, commit=Commit.PROGRESSIVE), kernels)
    values = {n: np.ones(N, "float32") for n in range(3)}
    found = []
    for end in range(0, whole.parts[0].payload.size + 1024, 1024):
        for part, source in zip(job.parts, whole.parts, strict=True):
            chunk = bytes(source.payload.chunks[0][1])[end : end + 1024]
            if chunk:
                part.payload.add(end, memoryview(chunk))
        while not (stream.done or stream.awaits()):
            assigned, _ = step(stream, values, frozenset(values))
            values |= assigned
            found.append(list(stream.found.contributions))
    assert stream.done
    assert job.parts[1].payload.begin > 0, "the contributions are still held"
    assert (stream.found.contributions, set(stream.found.variables)) == ([(1, B)], {1})
    assert [] in found
    assert same_bits(values[0], values[2])
    kernels.close()
