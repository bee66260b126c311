"""What is left of a round's answers in a client."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import psclient as ps
from pstesting import InProcessCluster
from pswire.api import RoundReply
from pswire.limits import PART_BYTES


@pytest.mark.parametrize("elements", [4, PART_BYTES // 4], ids=["small", "streamed"])
def test_a_round_s_values_are_let_go_at_once(tmp_path, elements):
    """Not when the garbage collector comes: until then servers have no room in shared memory for the next ones."""
    errors = []

    def train(cluster, worker):
        try:
            with ps.ParameterServerStrategy(["cpu:0"], cluster_resolver=cluster.resolver(worker)) as strategy:
                with strategy.scope():
                    variables = [ps.Variable(np.zeros(elements, "float32")) for _ in range(4)]
                    optimizer = ps.optimizers.SGD(1.0)
                gradients = [np.ones(elements, "float32") for _ in variables]
                for _ in range(6):
                    strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
        except BaseException as error:
            errors.append(error)

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with InProcessCluster(servers=2, workers=2, checkpoint_root=tmp_path) as cluster:
            workers = [threading.Thread(target=train, args=(cluster, worker)) for worker in range(2)]
            for thread in workers:
                thread.start()
            for thread in workers:
                thread.join()
            gc.collect()
            kept = [one for one in gc.garbage if isinstance(one, RoundReply)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not errors
    assert not kept
