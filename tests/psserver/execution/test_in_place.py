"""Kernels write into the memory of variables, and nobody can tell; and array work: one piece after another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from psserver.devices import ServerDevice
from psserver.execution.array_queue import ArrayQueue
from psserver.execution.execution import Execution
from psserver.programs.interpreter import Script
from psserver.programs.kernels.kernels import SMALLEST, Kernels
from psserver.state.variables import Store
from psserver.values.dense import Dense
from pswire.errors import ProgramError
from pswire.model.plan import Apply, PlacedVariable, Plan, Reduction, Ref, VariableSpec
from pswire.model.program import Node
from pswire.model.tensor import TensorSpec, as_bytes
from pswire.network.parts import parts_of
from pswire.network.payload import Payload
from tests.kit import rig
from tests.kit.contributions import streaming
from tests.kit.programs import job_of, plan_of, run, same_bits, traced, updates

N = SMALLEST
SPEC, NUMBER = TensorSpec("float32", (N,)), TensorSpec("int64", ())
ADD = rig.adding(SPEC)


def store(value):
    held = Store(0, ServerDevice(), 0)
    held.declare(PlacedVariable(0, VariableSpec("v", TensorSpec(value.dtype.name, value.shape)), (0,)))
    held.initialize(0, value)
    return held


HOLDERS = {
    "the array": lambda array: array,
    "a view": lambda array: array[1:],
    "a view of a view": lambda array: array.reshape(2, -1)[0].view("uint8"),
    "a memoryview": memoryview,
    "its bytes in a payload": lambda array: Payload.pack([array]),
    "one part of a payload": lambda array: next(parts_of(Payload.pack([array])))[1],
    "bytes as they travel": as_bytes,
    "an array over its buffer": lambda array: np.frombuffer(memoryview(array)),
    "DLPack": lambda array: np.from_dlpack(array),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_somebody_holds_is_not_alone(holder):
    """However it is held; once it is let go it is. Only memory of its own is alone: of a view nobody can say who else
    looks at it; what may not be written, or lies otherwise, is not either."""
    held = store(np.zeros(64))
    kept = HOLDERS[holder](held.find(0).array)
    assert held.exclusive([0]) == frozenset()
    del kept
    assert held.exclusive([0]) == {0}
    assert held.exclusive([7]) == frozenset()
    locked = np.zeros(4)
    locked.flags.writeable = False
    for value in (np.zeros(8)[2:], np.zeros((2, 3)).T, np.frombuffer(bytes(16)), locked):
        other = store(value)
        del value
        assert other.exclusive([0]) == frozenset()


@pytest.fixture
def kernels():
    made = Kernels(ServerDevice(), patience=1)
    yield made
    made.close()


def warmed(kernels, job, values):
    """A round for whose kernels one need not wait."""
    run(job, kernels, values)
    kernels.compiler.wait()
    return job


def ones(count=1):
    return [np.ones(N, "float32") for _ in range(count)]


def test_what_is_lent_is_written_and_what_is_not_is_replaced(kernels):
    """The new value is the same; two programs on one variable see each other, in place or not."""
    job = warmed(kernels, job_of(plan_of(ADD), [ones(), ones()]), {0: ones()[0]})
    value = np.zeros(N, "float32")
    kept = run(job, kernels, {0: value})
    assert not value.any()
    written = run(job, kernels, {0: value}, frozenset([0]))
    assert written.assigned[0] is value
    assert same_bits(value, kept.assigned[0])
    assert value[0] == 2
    applies = tuple(Apply(0, (0,), (Ref("variable", 0), Ref("reduction", n))) for n in (0, 1))
    plan = Plan((Reduction("sum", SPEC, (0,)),) * 2, (), (ADD,), applies)
    job = warmed(kernels, job_of(plan, [ones(2)]), {0: ones()[0]})
    for lent in (frozenset(), frozenset([0])):
        assert run(job, kernels, {0: ones()[0]}, lent).assigned[0].tolist() == [3.0] * N


def test_a_round_that_fails_later_has_changed_nothing(kernels):
    """A kernel comes first, and a power that is refused second: the first variable is as it was. What comes after the
    last thing that may fail is written in place, and what comes before it is not, however many programs there are."""
    plan = updates(ADD, rig.power(NUMBER), ADD)
    values = {0: ones()[0], 1: np.array(2), 2: ones()[0]}
    good = warmed(kernels, job_of(plan, [[*ones(), np.array(3), *ones()]]), values)
    with pytest.raises(ProgramError, match="pow"):
        run(job_of(plan, [[*ones(), np.array(-1), *ones()]]), kernels, values, frozenset(values))
    assert values[0].tolist() == values[2].tolist() == [1.0] * N
    found = run(good, kernels, values, frozenset(values))
    assert (found.assigned[0][0], int(found.assigned[1])) == (2.0, 8)
    assert [found.assigned[id] is values[id] for id in values] == [False, False, True]


@pytest.mark.parametrize("size", [N, 3])
def test_memory_that_is_short_later_has_changed_nothing(kernels, monkeypatch, size):
    """A kernel comes first; a program that needs memory second, compiled or not."""
    spec = TensorSpec("float32", (size,))
    second, _ = traced(lambda w, g: w.assign(np.exp(g)), [spec], [spec])
    plan = updates(ADD, second)
    values = {0: ones()[0], 1: np.ones(size, "float32")}
    job = warmed(kernels, job_of(plan, [[*ones(), np.ones(size, "float32")]]), values)

    def short(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(Script, "run", short)
    with pytest.raises(Exception, match="no more"):
        run(job, kernels, values, frozenset([0, 1]))
    assert values[0].tolist() == [1.0] * N


def test_what_is_missing_later_has_changed_nothing(kernels):
    """A variable without a value, or with another one than the program was verified for."""
    plan = updates(ADD, ADD)
    values = {0: ones()[0], 1: ones()[0]}
    job = warmed(kernels, job_of(plan, [ones(2)]), values)
    for wrong in ({0: values[0]}, {0: values[0], 1: np.ones(N)}, {0: values[0], 1: np.ones(N - 1, "float32")}):
        with pytest.raises(ProgramError, match=r"variable 1 must have a value of float32"):
            run(job, kernels, wrong, frozenset([0, 1]))
    assert values[0].tolist() == [1.0] * N


def test_what_is_given_back_is_not_the_variables_own_memory(kernels):
    """An old value, a new one, and a reduced one; this one is copied at the end, so nothing is written in place."""

    def fn(w, g):
        old = w + 0.0
        w.assign(g + old)
        return old, w + 0.0, g

    program, operands = traced(fn, [SPEC], [SPEC])
    job = warmed(kernels, job_of(plan_of(program), [ones()], operands), {0: ones()[0]})
    value = ones()[0]
    found = run(job, kernels, {0: value}, frozenset([0]))
    assert [array[0] for array in found.given] == [1.0, 2.0, 1.0]
    assert value[0] == 1.0
    for array in found.given:
        assert not any(np.shares_memory(array, other) for other in (value, found.assigned[0]))


@pytest.fixture
def job(tmp_path: Path):
    """A job on one core, whose array work has a thread, with kernels for its rounds."""
    with rig.serving("thread", 1, tmp_path) as servers:
        yield rig.Job(servers)


def address(job, variable):
    with job.servers.cores[0]._lock:
        return job.servers.cores[0].machine.job.store.find(variable.id).array.__array_interface__["data"][0]


def trained(job, rounds=4):
    """A worker, a variable, and a plan whose kernel is compiled and has been used."""
    (worker,) = job.join(rig.WORKERS[0])
    variable = job.variable(worker, np.zeros(N, "float32"), (0,), "v")
    plan = job.approve(rig.sum_into(variable, returned=False), worker)
    compiler = rig.compiler_of(job.servers.cores[0])
    for _ in range(rounds):
        worker.make(plan, ones())
        compiler.wait()
    return worker, variable, plan


@pytest.mark.parametrize(("transport", "streams"), [("thread", False), ("thread", True), ("grpc", False)])
def test_rounds_use_the_same_memory(tmp_path, monkeypatch, transport, streams):
    """Nothing is allocated for a variable that nobody reads; an answer that was sent is held by nobody."""
    if streams:
        streaming(monkeypatch)
    with rig.serving(transport, 1, tmp_path) as servers:
        job = rig.Job(servers)
        worker, variable, plan = trained(job)
        assert bool(plan.streams) == streams
        before = address(job, variable)
        for _ in range(3):
            worker.make(plan, ones(), want=(variable.id,) if transport == "grpc" else ())
        assert address(job, variable) == before


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_keeps_its_value(job, monkeypatch, streams):
    """While somebody holds it, rounds go on elsewhere in memory."""
    if streams:
        streaming(monkeypatch)
    worker, variable, plan = trained(job)
    reply = worker.make(plan, ones(), want=(variable.id,))
    held = reply.payload.tensors([SPEC])[0]
    value = float(held[0])
    before = address(job, variable)
    for _ in range(3):
        worker.make(plan, ones())
    assert held.tolist() == [value] * N
    assert address(job, variable) != before


def test_a_snapshot_keeps_its_value(job, monkeypatch):
    """What a checkpoint's round left is what is written, however many rounds come in between."""
    worker, _, plan = trained(job)
    later = []
    monkeypatch.setattr(job.servers.cores[0], "_files", later.append)
    order = job.approve(rig.checkpoint("here", (0,)), worker)
    worker.make(order)
    for _ in range(3):
        worker.make(plan, ones())
    (write,) = later
    write()
    (shard,) = job.servers.root.rglob("shard-*")
    assert load_file(shard)["v"].tolist() == [4.0] * N


@pytest.fixture
def queued():
    return rig.Deferred()


def test_a_brief_piece_runs_at_once_and_overtakes_nothing(queued):
    """In the thread that asks for it; another piece goes to the thread, and a brief one behind it while it is queued or
    runs; once that is over it runs at once again. One that fails blocks nothing."""
    ran, queue = [], ArrayQueue(queued)
    queue.run(lambda: ran.append(threading.get_ident()), True)
    assert ran == [threading.get_ident()]
    assert not queued.queue
    with pytest.raises(ZeroDivisionError):
        queue.run(lambda: 1 / 0, True)
    queue.run(lambda: ran.append("next"), True)
    queue.run(lambda: (ran.append("first"), queue.run(lambda: ran.append("within"), True)), False)
    queue.run(lambda: ran.append("second"), True)
    assert ran[1:] == ["next"]
    queued.run()
    assert ran[2:] == ["first", "second", "within"]
    queue.run(lambda: ran.append("third"), True)
    assert ran[-1] == "third"


@pytest.mark.parametrize("brief", [True, False])
def test_what_is_asked_for_during_a_brief_piece_comes_after_it(queued, brief):
    """In the thread for arrays: nobody waits for the piece, and none runs within another."""
    ran, queue = [], ArrayQueue(queued)

    def piece() -> None:
        queue.run(lambda: ran.append("asked for"), brief)
        queued.run()
        ran.append("piece")

    queue.run(piece, True)
    assert ran == ["piece"]
    queued.run()
    assert ran == ["piece", "asked for"]


def test_pieces_of_many_threads_never_run_at_once():
    """Whichever threads ask for them, and whichever run them."""
    inside, most, done = 0, 0, 0

    def piece() -> None:
        nonlocal inside, most, done
        inside += 1
        most = max(most, inside)
        done += 1
        threading.Event().wait(0.0002)  # lets another thread begin
        inside -= 1

    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(4) as askers:
        queue = ArrayQueue(pool.submit)
        list(askers.map(lambda number: queue.run(piece, number % 3 > 0), range(300)))
    assert (most, done) == (1, 300)


def _threads(monkeypatch) -> list[str]:
    """Names of the threads that have run steps, from now on."""
    names: list[str] = []
    step = Execution.step

    def noted(*args):
        names.append(threading.current_thread().name)
        return step(*args)

    monkeypatch.setattr(Execution, "step", noted)
    return names


def _turn(job, plan, value, *workers):
    """A round, after which the thread for arrays has nothing to do."""
    rig.together(*[worker.push(plan, [value]) for worker in workers])
    rig.turn(*workers)
    rig.eventually(lambda: not job.servers.cores[0]._arrays._ahead)


def test_a_small_round_runs_where_its_last_contribution_comes(job, monkeypatch):
    """From the second on: the first one finds out which kernels there are."""
    names, here = _threads(monkeypatch), threading.current_thread().name
    workers = job.join(*rig.WORKERS[:2])
    plan = job.approve(rig.reduce_only(NUMBER), workers[0])
    for _ in range(3):
        _turn(job, plan, 1, *workers)
    assert names[0] != here
    assert names[1:] == [here, here]


@pytest.mark.parametrize(("mode", "limit"), [("sync", "BRIEF_BYTES"), ("async", "BRIEF_ALONE_BYTES")])
@pytest.mark.parametrize(("elements", "here"), [(8, True), (9, False)])
def test_a_large_round_does_not(job, monkeypatch, mode, limit, elements, here):
    names = _threads(monkeypatch)
    (worker,) = job.join(rig.WORKERS[0], mode=mode)
    plan = job.approve(rig.reduce_only(TensorSpec("int64", (elements,))), worker)
    monkeypatch.setattr(f"psserver.plans.round.{limit}", 64)
    monkeypatch.setattr("psserver.plans.round.BRIEF_INTERPRETED_BYTES", 0)
    for _ in range(2):
        _turn(job, plan, np.ones(elements), worker)
    assert (names[-1] == threading.current_thread().name) == here


def test_what_the_interpreter_runs_is_brief_only_where_it_is_less(job, monkeypatch):
    names, here = _threads(monkeypatch), threading.current_thread().name
    (worker,) = job.join(rig.WORKERS[0])
    square = TensorSpec("float32", (4, 4))
    job.variable(worker, np.eye(4, dtype="float32"))
    plan = job.approve(updates(replace(rig.adding(square), nodes=(Node("matmul", (0, 1)),))), worker)
    for limit in (1 << 10, 1 << 10, 1 << 10, 1 << 7):
        monkeypatch.setattr("psserver.plans.round.BRIEF_INTERPRETED_BYTES", limit)
        _turn(job, plan, np.eye(4), worker)
    assert [name == here for name in names] == [False, False, True, False]


def test_a_small_round_fails_as_any_other(job, monkeypatch):
    """Its members are told, and the next one runs. One that orders a checkpoint runs in the thread for arrays."""
    (worker,) = job.join(rig.WORKERS[0])
    variable, plan = job.adder(worker, 1)
    worker.make(plan, [1])
    job.servers.cores[0].machine.job.store.commit({variable.id: Dense(np.zeros(2))})
    with pytest.raises(ProgramError, match="must have a value of int64"):
        worker.push(plan, [1]).result(rig.SOON)
    worker.round += 1
    job.servers.cores[0].machine.job.store.commit({variable.id: Dense(np.array(5))})
    worker.make(plan, [1])
    assert int(job.value(worker, variable)) == 6
    names = _threads(monkeypatch)
    job.save(worker)
    assert threading.current_thread().name not in names
