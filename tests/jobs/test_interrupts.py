"""Ctrl-C in a loop, a scope or a pass over data: the same process goes on, with the values of whole rounds."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading

import numpy as np
import pytest

import psclient as ps
from psclient._src.interpreter import interrupts
from pstesting.in_process import InProcessCluster
from pstesting.processes import W0, W1, ProcessCluster
from pstesting.script import ME, say
from tests.kit.interrupted import TIMES, check_alone, check_beside, check_idle, check_opens
from tests.kit.shell import free_port
from tests.kit.strategies import opened, variable


def twice(*args, **kwargs):
    """Ctrl-C, and once more."""
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def train(strategy):
    """Returns what makes one more step of training."""
    with strategy.scope():
        v = ps.Variable(np.zeros(1, "float32"))
        optimizer = ps.optimizers.SGD(1.0)

    def step():
        strategy.run(lambda: optimizer.apply_gradients([(-np.ones(1, "float32"), v)]))
        v.numpy()

    return step


def test_a_second_interrupt_while_a_round_is_sent_ends_the_session():
    """The others wait for what this process has not sent: it says what is lost, and goes on no more."""
    with opened("embedded-1") as strategy:
        step = train(strategy)
        step()
        pushes = strategy.backend.exchange

        pushes._said, said = twice, pushes._said
        with pytest.raises(KeyboardInterrupt):
            step()
        pushes._said = said
        with pytest.raises(ps.errors.PSError, match=r"interrupted twice in round \d+; .*is lost, .*Restart"):
            step()


# ---- Strategies that are dropped ----


def test_a_strategy_that_nothing_refers_to_is_closed():
    """As in a notebook, whose cell makes another one: its server ends."""
    import gc

    def cell():
        strategy = ps.ParameterServerStrategy(transport="tcp")
        train(strategy)()
        return strategy._embedded._process

    processes = [cell() for _ in range(2)]
    gc.collect()
    for process in processes:
        process.wait(30)


# ---- Random moments ----


@pytest.mark.parametrize("kind", ["plain", "data"])
@pytest.mark.parametrize("times", TIMES)
def test_a_process_goes_on_after_interrupts_at_any_moment(tmp_path, kind, times):
    """It has a server of its own, and the values of whole rounds."""
    check_alone(kind, times, tmp_path)


@pytest.mark.parametrize("kind", ["plain", "data"])
@pytest.mark.parametrize("times", TIMES)
def test_a_worker_goes_on_after_interrupts_at_any_moment(tmp_path, kind, times):
    """The other one makes the same steps, and has the same values."""
    check_beside(kind, times, tmp_path)


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_a_strategy_that_is_opened_or_closed_may_be_interrupted(tmp_path, times):
    """Closing it works, another one may be opened, and no server is left."""
    check_opens(times, tmp_path)


# ---- Waits, and code of the user ----


def nobody():
    """An address at which nothing listens."""
    return f"127.0.0.1:{free_port()}"


def to_open(*servers, workers=1, worker=0):
    spec = ps.ClusterSpec({"ps": servers, "worker": ["127.0.0.1:0"] * workers})
    resolver = ps.SimpleClusterResolver(spec, task_type="worker", task_id=worker)
    return ps.ParameterServerStrategy(cluster_resolver=resolver, devices=["cpu:0"])


@contextlib.contextmanager
def two_workers():
    """The second of them; the first does nothing."""
    with InProcessCluster(workers=2) as cluster, to_open(*cluster.addresses, workers=2):
        worker = to_open(*cluster.addresses, workers=2, worker=1)
        yield worker
        interrupt = KeyboardInterrupt()
        worker.__exit__(type(interrupt), interrupt, None)  # as at the end of its `with` block: it waits for nobody


@contextlib.contextmanager
def a_server_that_is_not_there():
    yield lambda: to_open(nobody())


@contextlib.contextmanager
def a_second_server_that_is_not_there():
    with InProcessCluster() as cluster:
        yield lambda: to_open(*cluster.addresses, nobody())


@contextlib.contextmanager
def another_process_of_the_task():
    """Its cluster has another name of the host: to have a task twice in one process is refused at once."""
    with InProcessCluster() as one, to_open(*(at.replace("127.0.0.1", "localhost") for at in one.addresses)):
        yield lambda: to_open(*one.addresses)


@contextlib.contextmanager
def a_first_value():
    with two_workers() as worker:
        yield lambda: variable(worker).numpy()


@contextlib.contextmanager
def batches():
    event = threading.Event()

    class Data:
        def __iter__(self):
            event.wait()
            yield np.ones((2, 1), "float32")

    with opened("embedded-1") as strategy:
        yield lambda: list(strategy.experimental_distribute_dataset(Data()))


@contextlib.contextmanager
def replicas():
    event = threading.Event()
    with opened("servers-2x2") as strategy:
        try:
            yield lambda: strategy.run(event.wait)
        finally:
            event.set()


@contextlib.contextmanager
def a_worker():
    with two_workers() as worker:
        yield lambda: worker.reduce("SUM", np.float32(1), axis=None).numpy()


WAITS = [
    *(a_server_that_is_not_there, a_second_server_that_is_not_there, another_process_of_the_task, a_first_value),
    *(batches, replicas, a_worker),
]


@pytest.mark.parametrize("what", WAITS, ids=lambda what: what.__name__)
def test_what_waits_for_long_may_be_interrupted(what, monkeypatch):
    """Once, whatever is waited for."""
    monkeypatch.setattr(interrupts, "PATIENCE", 0.2)
    with what() as call:
        ctrl_c = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        ctrl_c.start()
        faulthandler.dump_traceback_later(20, exit=True)
        with pytest.raises(KeyboardInterrupt):
            call()
        faulthandler.cancel_dump_traceback_later()
        ctrl_c.join()


# ---- A worker that stands ----


def test_a_worker_that_stands_after_an_error_is_named(tmp_path):
    """The others wait for it, and a wait may be interrupted; its next step is that of all."""
    check_idle("plain", tmp_path)


def notebook(how):
    import code
    import sys

    from tests.kit.interrupted import Plain

    strategy = ps.ParameterServerStrategy()
    loop = Plain(strategy)
    loop.step()
    if ME == 1:
        code.InteractiveConsole({"strategy": strategy}).push("strategy.run(lambda: [][0])")
        assert isinstance(sys.last_value, IndexError)
    loop.step()
    say("made", loop.made())
    if how == "closes":
        strategy.close()
    else:
        sys.ps1 = "In [2]: "


@pytest.mark.parametrize("how", ["closes", "ends"])
def test_an_error_of_an_earlier_cell_is_not_the_end(tmp_path, how):
    """The worker goes on after it, and leaves as if it had not been: it does not end the job of the others."""
    with ProcessCluster(notebook, tmp_path, (how,), workers=2) as job:
        job.finish()
        assert job.said(W0, "made") == job.said(W1, "made") == [4]
        assert "IndexError" in job.errors(W1)


def gives_up():
    with ps.ParameterServerStrategy() as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(2, "float32"), name="v")
        errors = [ValueError(), KeyboardInterrupt()] if ME == 1 else []

        def merge(strategy, value):
            total = strategy.extended.reduce_to("sum", value, v)
            if errors and v.numpy()[0] > 2:
                raise errors.pop()
            strategy.extended.update(v, lambda v, total: v.assign_add(total), (total,))

        while v.numpy()[0] < 20:
            try:
                strategy.run(lambda: ps.get_replica_context().merge_call(merge, (np.ones(2, "float32"),)))
            except (ValueError, KeyboardInterrupt) as error:
                say("caught", type(error).__name__)
        say("v", v.numpy())


def test_a_section_that_one_worker_gives_up_is_made_by_its_next_one(tmp_path):
    """An error, or an interrupt, of what it gave to `merge_call` leaves no gap in which the others wait for good."""
    with ProcessCluster(gives_up, tmp_path, workers=2) as job:
        job.finish()
        assert job.said(W1, "caught") == ["KeyboardInterrupt", "ValueError"]
        assert job.said(W0, "v") == job.said(W1, "v") == [[20, 20]]
