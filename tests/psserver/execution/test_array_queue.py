"""Array work: one piece after another, and the brief ones where they are asked for."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from psserver.execution.array_queue import ArrayQueue
from psserver.execution.execution import Execution
from pswire.errors import ProgramError
from pswire.model.plan import Apply, Plan, Reduction, Ref
from pswire.model.program import Input, Node, Program
from pswire.model.tensor import TensorSpec
from tests.kit.rig import SOON, WORKERS, Job, eventually, reduce_only, serving, sum_into, together

NUMBER = TensorSpec("int64", ())


class Queued:
    """A queue whose work is done when a test says so."""

    def __init__(self) -> None:
        self.pieces: deque = deque()

    def __call__(self, piece) -> None:
        self.pieces.append(piece)

    def run(self) -> None:
        while self.pieces:
            self.pieces.popleft()()


@pytest.fixture
def queued():
    return Queued()


def test_a_brief_piece_runs_at_once(queued):
    """In the thread that asks for it."""
    ran = []
    ArrayQueue(queued).run(lambda: ran.append(threading.get_ident()), True)
    assert ran == [threading.get_ident()]
    assert not queued.pieces


def test_another_piece_goes_to_the_thread(queued):
    ran = []
    ArrayQueue(queued).run(lambda: ran.append(1), False)
    assert not ran
    queued.run()
    assert ran == [1]


def test_a_brief_piece_overtakes_nothing(queued):
    """While one is queued or runs, it goes behind it; once that is over it runs at once again."""
    ran, queue = [], ArrayQueue(queued)
    queue.run(lambda: (ran.append("first"), queue.run(lambda: ran.append("within"), True)), False)
    queue.run(lambda: ran.append("second"), True)
    assert ran == []
    queued.run()
    assert ran == ["first", "second", "within"]
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


def test_a_piece_that_fails_blocks_nothing(queued):
    queue, ran = ArrayQueue(queued), []
    with pytest.raises(ZeroDivisionError):
        queue.run(lambda: 1 / 0, True)
    queue.run(lambda: ran.append(1), True)
    assert ran == [1]


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


# ---- Rounds ----


@pytest.fixture
def job(tmp_path):
    with serving("thread", 1, tmp_path) as servers:
        yield Job(servers)


def _threads(monkeypatch) -> list[str]:
    """Names of the threads that have run steps, from now on."""
    names: list[str] = []
    step = Execution.step

    def noted(*args):
        names.append(threading.current_thread().name)
        return step(*args)

    monkeypatch.setattr(Execution, "step", noted)
    return names


def _turn(plan, *workers):
    together(*[worker.push(plan, [1]) for worker in workers])
    for worker in workers:
        worker.round += 1


def test_a_small_round_runs_where_its_last_contribution_comes(job, monkeypatch):
    """From the second on: the first one finds out which kernels there are."""
    names, here = _threads(monkeypatch), threading.current_thread().name
    workers = job.join(*WORKERS[:2])
    plan = job.approve(reduce_only(NUMBER), workers[0])
    for _ in range(3):
        _turn(plan, *workers)
        eventually(lambda: not job.servers.cores[0]._arrays._ahead)
    assert names[0] != here
    assert names[1:] == [here, here]


@pytest.mark.parametrize(("mode", "limit"), [("sync", "BRIEF_BYTES"), ("async", "BRIEF_ALONE_BYTES")])
@pytest.mark.parametrize(("elements", "here"), [(8, True), (9, False)])
def test_a_large_round_does_not(job, monkeypatch, mode, limit, elements, here):
    """It would hold up what else comes."""
    names = _threads(monkeypatch)
    (worker,) = job.join(WORKERS[0], mode=mode)
    plan = job.approve(reduce_only(TensorSpec("int64", (elements,))), worker)
    monkeypatch.setattr(f"psserver.plans.round.{limit}", 64)
    monkeypatch.setattr("psserver.plans.round.BRIEF_INTERPRETED_BYTES", 0)
    for _ in range(2):
        together(worker.push(plan, [np.ones(elements, "int64")]))
        worker.round += 1
        eventually(lambda: not job.servers.cores[0]._arrays._ahead)
    assert (names[-1] == threading.current_thread().name) == here


def test_what_the_interpreter_runs_is_brief_only_where_it_is_less(job, monkeypatch):
    """Of a product of matrices a byte takes long."""
    names, here = _threads(monkeypatch), threading.current_thread().name
    (worker,) = job.join(WORKERS[0])
    square = TensorSpec("float32", (4, 4))
    variable = job.variable(worker, np.eye(4, dtype="float32"))
    product = Program((Input("variable", square), Input("value", square)), (Node("matmul", (0, 1)),), ((0, 2),), ())
    plan = job.approve(
        Plan(
            reductions=(Reduction("sum", square, (0,), "'g'"),),
            programs=(product,),
            applies=(Apply(0, (0,), (Ref("variable", variable.id), Ref("reduction", 0))),),
        ),
        worker,
    )
    for limit in (1 << 10, 1 << 10, 1 << 10, 1 << 7):
        monkeypatch.setattr("psserver.plans.round.BRIEF_INTERPRETED_BYTES", limit)
        together(worker.push(plan, [np.eye(4)]))
        worker.round += 1
        eventually(lambda: not job.servers.cores[0]._arrays._ahead)
    assert [name == here for name in names] == [False, False, True, False]


def test_a_round_that_orders_a_checkpoint_runs_in_the_thread_for_arrays(job, monkeypatch):
    names = _threads(monkeypatch)
    (worker,) = job.join(WORKERS[0])
    job.variable(worker, np.zeros(3))
    job.save(worker)
    assert threading.current_thread().name not in names


def test_a_small_round_fails_as_any_other(job):
    """Its members are told, and the next one runs."""
    (worker,) = job.join(WORKERS[0])
    variable = job.variable(worker, np.array(1))
    plan = job.approve(sum_into(variable), worker)
    _turn(plan, worker)
    job.servers.cores[0].machine.store.commit({variable.id: np.zeros(2)})
    with pytest.raises(ProgramError, match="should have a value of int64"):
        worker.push(plan, [1]).result(SOON)
    worker.round += 1
    job.servers.cores[0].machine.store.commit({variable.id: np.array(5)})
    _turn(plan, worker)
    assert int(job.value(worker, variable)) == 6
