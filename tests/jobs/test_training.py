"""Workers that cannot train together are told so, all of them: norms that would mix, and programs that differ."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from pstesting.processes import W0, W1, W2
from pstesting.script import add
from tests.kit.workers import in_threads


def test_asynchronous_workers_do_not_mix_their_norms():
    """On several servers what a norm is taken of could be another worker's by the second round."""
    with (
        InProcessCluster(2) as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), consistency=ps.Async()) as strategy,
    ):
        with strategy.scope():
            pairs = [(np.full(n, 3.0), ps.Variable(np.ones(n), name=f"w{n}")) for n in (2, 3)]
        with pytest.raises(ValueError, match="asynchronous workers update several servers"):
            strategy.run(lambda: ps.optimizers.SGD(1.0, global_clipnorm=1.0).apply_gradients(pairs))


# ---- Other programs ----

QUICKLY = 30.0
"""Seconds within which everyone knows: a few heartbeats; less than a lease, on a machine that others use."""

FIRST = ("'first'", "'second'")


@pytest.mark.parametrize(
    ("kind", "servers", "words"),
    [
        pytest.param("sections", 2, FIRST, id="on different servers, so that only heartbeats can tell"),
        pytest.param("operands", 1, ("update variable 'first'", "[0 0 0]", "[1 1 1]"), id="operands that differ"),
        pytest.param("variable", 2, ("'extra'", "'second'"), id="a variable that others lack"),
        pytest.param("reductions", 1, ("float64[2]", "float64[3]"), id="other shapes"),
        pytest.param("functions", 1, ("'first'", "= add(#", "= subtract(#"), id="other functions"),
    ],
)
def test_everyone_is_told_where_the_others_are(kind, servers, words):
    """Each process gets `Diverged` within a few heartbeats; it names two processes, and what each of them does.

    A script that catches it, and ends, ends its process: nobody waits for a job that cannot go on.
    """
    alike = threading.Barrier(3)

    def diverge(strategy, worker):
        with strategy.scope():
            v, u = (ps.Variable(np.zeros(3), name=name) for name in ("first", "second"))
            extra = ps.Variable(np.zeros(2), name="extra") if kind == "variable" and not worker else u
        for _ in range(2):
            strategy.run(lambda: add(v, np.ones(3)))
        assert v.numpy()[0] == 6
        alike.wait()  # else a slow worker would hear of it where all still do the same
        sections = {
            "sections": lambda: strategy.run(lambda: add(u if worker == 1 else v, np.ones(3))),
            "variable": lambda: strategy.run(lambda: add(extra, np.ones(extra.shape))),
            "reductions": lambda: strategy.reduce("sum", np.ones(2 if worker == 1 else 3), None),
            "functions": lambda: v.assign_add(1.0) if worker == 1 else v.assign_sub(1.0),
            "operands": lambda: v.assign_add(np.full(3, worker)),
        }

        def make():
            sections[kind]()
            v.numpy(), u.numpy()  # a round is told of where its values are looked at

        began = time.monotonic()
        with pytest.raises(ps.errors.Diverged) as told:
            make()
        text, odd = str(told.value), W0 if kind == "variable" else W1
        assert str(odd) in text
        assert any(str(other) in text for other in (W0, W1, W2) if other != odd)
        assert all(word in text for word in words), text
        assert time.monotonic() - began < QUICKLY
        with contextlib.suppress(ps.errors.Diverged):  # the round of which it was told, or one that it did not wait for
            strategy.close()

    in_threads(diverge, 3, servers)
