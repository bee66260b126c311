"""Workers that serve a coordinator: when they begin, what they say of errors, and variables that functions create."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import until
from tests.kit.strategies import refused
from tests.kit.workers import SECONDS, coordinated, here


def counter():
    return {"v": ps.Variable(0.0, name="v")}


def count():
    here().v.assign_add(1.0)


@pytest.mark.parametrize("came", [0, 1], ids=["none has come", "one has come"])
def test_a_coordinator_may_end_before_its_workers_have_come(came):
    """It has nothing to schedule, and leaves; workers that come later end well, too, as there is nothing to do."""
    with coordinated(counter, count, workers=2, started=came) as job:
        assert job.coordinator.done()
        ends = threading.Thread(target=job.strategy.close)
        ends.start()
        sessions = lambda: job.cluster.cores[0].status().sessions  # noqa: E731
        left = lambda: any(each.state != "open" and each.member.task.job == "chief" for each in sessions())  # noqa: E731
        until(left, SECONDS, lambda: f"{sessions()}")
        for worker in range(came, 2):
            job.start(worker)
        ends.join(SECONDS)


def no_more():
    return next(iter(ps.ArrayDataset(np.zeros(0)).batch(4)))


def no_more_in_replicas():
    ps.get_strategy().run(lambda: next(iter(())))


def no_more_of_a_loop():
    next(batch for batch in [1, 2] if batch > 2)


def checks():
    raise AssertionError


def no_text():
    raise ValueError


def blank():
    raise LookupError("  \n")


def ends_with_words():
    raise StopIteration("page 7 was the last")


def begins_with_a_bracket():
    raise KeyError((1, 2))


TEXTS = {
    no_more: "StopIteration: the iterator has ended, because its dataset has no more batches",
    no_more_in_replicas: "StopIteration: the iterator has ended, because its dataset has no more batches",
    no_more_of_a_loop: "StopIteration: the iterator has ended, because its dataset has no more batches",
    checks: "AssertionError: in `raise AssertionError`",
    no_text: "ValueError: in `raise ValueError`",
    blank: "LookupError: in `raise LookupError",
    ends_with_words: "StopIteration: page 7 was the last",
    begins_with_a_bracket: r"KeyError: \(1, 2\)",
}


@pytest.fixture(scope="module")
def job():
    """A coordinator with a worker."""
    with coordinated(counter, count, *TEXTS) as job:
        yield job


@pytest.mark.parametrize("fn", TEXTS, ids=lambda fn: fn.__name__)
def test_a_failed_function_says_what_happened_and_where(job, fn):
    """Where an error has no text, as StopIteration or an assert, the text is what it means, or the line's code."""
    job.coordinator.schedule(fn)
    with pytest.raises(ps.errors.ClosureError, match=rf"{fn.__name__} failed: {TEXTS[fn]}.* \(test_served.py:\d+\)$"):
        job.coordinator.join()
    assert job.run(count) is None


def model():
    v = ps.Variable(np.zeros(3), name="v")
    return {"v": v, "adam": ps.optimizers.Adam(1.0), "sgd": ps.optimizers.SGD(1.0, momentum=0.9)}


def step(which):
    getattr(here(), which).apply_gradients([(np.ones(3), here().v)])
    return [x.name for x in here().adam.variables + here().sgd.variables]


def make(name, size):
    return ps.Variable(np.full(size, 7.0), name=name).numpy().tolist()


def test_a_coordinator_saves_what_functions_have_created(tmp_path):
    """Its checkpoint has the optimizer's state of its workers, though it has built none; a later job goes on with it.

    Without a built optimizer the coordinator cannot read a count, and is told to build it; then it reads the workers'.
    """
    with coordinated(model, step, root=tmp_path) as job:
        for _ in range(3):
            job.run(step, "adam")
        refused(RuntimeError, r"call optimizer.build\(variables\)", lambda: job.mine.adam.iterations)
        saved = ps.train.Checkpoint(v=job.mine.v, optimizer=job.mine.adam)
        assert saved.save("run/ckpt") == "run/ckpt-1"
        job.run(step, "sgd")  # which finds its place behind the coordinator's
        job.mine.adam.build([job.mine.v])
        assert int(job.mine.adam.iterations) == 3
        assert saved.save("run/ckpt") == "run/ckpt-2"
    with coordinated(model, step, root=tmp_path) as job:
        ps.train.Checkpoint(v=job.mine.v, optimizer=job.mine.adam).restore("run/ckpt-1").expect_partial()
        assert job.mine.v.numpy().tolist() == pytest.approx([-3.0] * 3, abs=1e-4)
        job.run(step, "adam")
        job.mine.adam.build([job.mine.v])
        assert int(job.mine.adam.iterations) == 4


def test_functions_create_variables_in_any_order():
    """Each worker runs other functions first, and all find the variables by their names."""
    with coordinated(model, step, make, workers=2) as job:
        with job.holding():
            first = job.run(step, "adam")
            assert job.run(make, "u", 2) == [7.0, 7.0]
        with job.strategy.scope():
            assert ps.Variable(np.zeros(2), name="u").numpy().tolist() == [7.0, 7.0]
            ps.Variable(0.0, name="own")
        waits = [job.coordinator.schedule(step, (which,)) for which in ("sgd", "adam") * 8]
        found = {name for each in job.coordinator.fetch(waits) for name in each}
        assert found > set(first)
        for optimizer, steps in ((job.mine.sgd, 8), (job.mine.adam, 9)):
            optimizer.build([job.mine.v])
            assert int(optimizer.iterations) == steps


def test_a_name_with_another_shape_is_refused():
    """Two functions may not mean different variables by one name."""
    with coordinated(model, make) as job:
        job.run(make, "u", 2)
        with pytest.raises(ps.errors.VariableMismatch, match="'u'"), job.strategy.scope():
            ps.Variable(np.zeros(3), name="u")
        assert job.run(make, "w", 1) == [7.0]


def double(array):
    return array * 2


def fails(text):
    raise LookupError(text)


def coordinates():
    ps.coordinator.ClusterCoordinator(ps.get_strategy())


def test_results_are_arguments_and_an_error_cancels_what_waits(caplog):
    """It reaches one call, with its text and the worker, and then all is well. A worker coordinates nothing."""
    with coordinated(counter, count, double, fails, coordinates) as job:
        coordinator = job.coordinator
        assert coordinator is ps.coordinator.ClusterCoordinator(job.strategy)
        chain = coordinator.schedule(double, (coordinator.schedule(double, (np.ones((3, 400_000)),)),))
        assert (coordinator.fetch({"x": [chain, 7]})["x"][0] == 4).all()  # in several pieces, there and back
        with job.holding():
            failing = coordinator.schedule(fails, ("no such thing",))
            behind = [coordinator.schedule(count) for _ in range(5)]
            assert not coordinator.done()
        with pytest.raises(ps.errors.ClosureError) as told:
            coordinator.join()
        assert (told.value.kind, told.value.task) == ("LookupError", "/job:worker/task:0")
        assert str(told.value).startswith("/job:worker/task:0: fails failed: LookupError: no such thing (test_served")
        assert "LookupError: no such thing" in caplog.text, "it has no traceback"
        assert coordinator.done()
        for each, kind in [(failing, ps.errors.ClosureError), *((one, ps.errors.ClosureCancelled) for one in behind)]:
            refused(kind, "no such thing", each.fetch)
            refused(kind, "no such thing", each.get)
        job.run(count)
        assert job.mine.v.numpy() == 1.0
        refused(ps.errors.ClosureError, "no such row", coordinator.schedule(fails, ("no such row",)).fetch)
        refused(ps.errors.ClosureError, "no such row", lambda: coordinator.schedule(count))  # if `join` was not called
        coordinator.schedule(coordinates)
        refused(ps.errors.ClosureError, "task:0 is not the coordinator: the chief schedules", coordinator.join)
