"""Processes that do not run the same program are told so, all of them, with both positions; none hangs."""

from __future__ import annotations

import time

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, W2, ProcessCluster
from pstesting.script import ME, add, say

SOON = 30.0
"""Seconds within which everyone knows: a few beats; less than a lease, on a machine that others use."""


def diverge(kind):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(3), name="first")
        u = ps.Variable(np.zeros(3), name="second")
        extra = ps.Variable(np.zeros(2), name="extra") if kind == "variable" and not ME else u
    for _ in range(2):
        strategy.run(lambda: add(v, np.ones(3)))
    sections = {
        "sections": lambda: add(u if ME == 1 else v, np.ones(3)),
        "reductions": lambda: strategy.reduce("sum", np.ones(2 if ME == 1 else 3), None),
        "functions": lambda: v.assign_add(1.0) if ME == 1 else v.assign_sub(1.0),
        "operands": lambda: v.assign_add(np.full(3, ME)),
        "variable": lambda: add(extra, np.ones(extra.shape)),
    }
    began = time.monotonic()
    try:
        if kind in ("sections", "variable"):
            strategy.run(sections[kind])
        else:
            with strategy.scope():
                sections[kind]()
        v.numpy(), u.numpy()  # a round is told of where its values are looked at
    except ps.errors.Diverged as error:
        say("diverged", [str(error), time.monotonic() - began])


@pytest.mark.parametrize(
    ("kind", "servers", "words"),
    [
        pytest.param("sections", 1, ("'first'", "'second'"), id="on one server", marks=pytest.mark.soak),
        pytest.param("sections", 2, ("'first'", "'second'"), id="on different servers, so that only beats can tell"),
        pytest.param(
            "operands",
            1,
            ("update variable 'first'", "[0 0 0]", "[1 1 1]"),
            id="operands that differ",
            marks=pytest.mark.soak,
        ),
        pytest.param("variable", 2, ("'extra'", "'second'"), id="a variable that others lack"),
        pytest.param("reductions", 1, ("float64[2]", "float64[3]"), id="other shapes", marks=pytest.mark.soak),
        pytest.param(
            "functions", 1, ("'first'", "= add(#", "= subtract(#"), id="other functions", marks=pytest.mark.soak
        ),
    ],
)
def test_everyone_is_told_where_the_others_are(tmp_path, kind, servers, words):
    """Each process gets `Diverged` within a few beats; it names two processes, and what each of them does.

    A script that catches it, and ends, ends its process: nobody waits for a job that cannot go on.
    """
    with ProcessCluster(diverge, tmp_path, (kind,), ps=servers, workers=3) as job:
        for task in (W0, W1, W2):
            text, seconds = job.hear(task, "diverged")
            odd = W0 if kind == "variable" else W1
            assert str(odd) in text
            assert any(str(other) in text for other in (W0, W1, W2) if other != odd)
            assert all(word in text for word in words), text
            assert seconds < SOON
        for task in (W0, W1, W2):
            assert job.exited(task, SOON) == 0


def fail_in_the_third(failing):
    """Adds 1 in each of six sections, all alike; in the third what these workers run in merge_call fails."""
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(()), name="v")

    def merge(strategy, fails):
        total = strategy.extended.reduce_to("sum", 1.0, v)
        strategy.extended.update(v, lambda v, total: v.assign_add(total), (total,))
        if fails:
            raise ValueError("an accident")

    for n in range(6):
        fails = n == 2 and ME in failing
        try:
            strategy.run(lambda fails=fails: ps.get_replica_context().merge_call(merge, (fails,)))
            v.numpy()
        except ValueError:
            say("failed", strategy.round)
        except ps.errors.Diverged as error:
            say("diverged", str(error))
            return
    say("sums", [v.numpy(), strategy.round])


def test_who_leaves_a_section_out_cannot_go_on_with_the_next(tmp_path):
    """Though all sections are alike: the one after that which failed is not taken for it."""
    with ProcessCluster(fail_in_the_third, tmp_path, ([1],), workers=2) as job:
        assert job.hear(W1, "failed") == 3
        for task in (W0, W1):
            text = job.hear(task, "diverged")
            assert str(W0) in text
            assert str(W1) in text
            assert job.exited(task) == 0


def test_a_section_that_fails_everywhere_is_left_out_by_all(tmp_path):
    """They go on together, and nothing of it has counted."""
    with ProcessCluster(fail_in_the_third, tmp_path, ([0, 1],), workers=2) as job:
        for task in (W0, W1):
            assert job.hear(task, "sums") == [5 * 2.0, 6]
        job.finish()
