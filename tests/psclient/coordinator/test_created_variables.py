"""Variables that scheduled functions create on workers, and a coordinator beside them."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.strategies import refused
from tests.kit.workers import coordinated, here


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
