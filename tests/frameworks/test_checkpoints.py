"""Checkpoints of a front end: a job goes on from them, on other servers and with other workers."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from tests.kit.workers import in_threads

rng = np.random.default_rng(7)
X = rng.normal(size=(60, 5)).astype("f4")
Y = X[:, :3] * X[:, 1:4]


@pytest.mark.parametrize("front_end", ["torch", "jax"], indirect=True)
@pytest.mark.parametrize(("workers", "servers"), [(2, 3), (1, 1)])
def test_a_job_goes_on_where_it_stood(tmp_path, front_end, workers, servers):
    """In the middle of an epoch, on other servers to the last bit; with another number of workers to 1e-6."""

    def trained(strategy, restores=False, stop=None):
        model = front_end(strategy, ps.optimizers.Adam(0.01, epsilon=1e-3))
        batches, checkpoint, count = model.batches(ps.ArrayDataset((X, Y)).shuffle(0).batch(12)), model.checkpoint(), 0
        if restores:
            checkpoint.restore("run").assert_existing_objects_matched()
        for _ in batches.epochs(3):
            for x, y in batches:
                model.step(x, y)
                count += 1
                if count == stop:
                    checkpoint.save("run/ckpt")
                    checkpoint.sync()
                    return model.values()
        return model.values()

    expected = in_threads(lambda strategy, worker: trained(strategy), root=tmp_path)[0]
    in_threads(lambda strategy, worker: trained(strategy, stop=8), root=tmp_path)
    for found in in_threads(lambda strategy, worker: trained(strategy, restores=True), workers, servers, root=tmp_path):
        for name, own in expected.items():
            np.testing.assert_allclose(found[name], own, rtol=0 if workers == 2 else 1e-6, atol=0)
