"""Contributions of workers that cannot be: rows that are none, NaN and infinity.

The worker is told, and nothing of it is applied. Or all of it is, where that is asked for.
"""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.script import add_all
from tests.kit.cases import pairwise
from tests.kit.workers import in_threads

SIZE, WIDTH = 6, 2
LARGE = 700_000
"""Elements of a variable of which a round streams."""


def rows(*ids, value=1.0, width=WIDTH):
    return ps.IndexedSlices(np.full((len(ids), width), value, "float32"), list(ids))


BAD = {
    "an id too large": (rows(SIZE), ValueError, "'emb' on {w1}.*id 6 at index 0 is not a row of 6"),
    "an id below 0": (rows(-1), ValueError, "'emb' on {w1}.*id -1 at index 0 is not a row of 6"),
    "a row too wide": (rows(1, width=3), ValueError, r"'emb' on {w1}.*each row has shape \(3,\), but must have \(2,\)"),
    "a NaN": (rows(3, value=np.nan), ps.errors.NonfiniteError, "{w1}.*'emb'"),
}
"""What worker 1 gives, and what it is told; of NaN with nonfinite="raise" both are."""


@pytest.mark.parametrize("bad", BAD)
def test_the_worker_is_told_and_the_round_has_what_it_gives_then(bad):
    """The error names the variable and the worker, and no row, key or count changes; whoever gives right rows
    afterwards has missed nothing. Repeated and unsorted ids count each time, and no rows are fine."""
    given, kind, words = BAD[bad]

    def make(strategy, worker):
        with strategy.scope():
            emb = ps.Variable(np.zeros((SIZE, WIDTH), "float32"), name="emb")
            users = ps.dynamic_embedding.get_variable("users", dim=WIDTH, initializer=0)
        optimizer = ps.optimizers.SGD(1.0)

        def step(some):
            strategy.run(lambda: optimizer.apply_gradients([(rows(7), users), (some, emb)]))
            emb.numpy()

        if worker == 1 or kind is not ValueError:
            with pytest.raises(kind, match=words.format(w1="/job:worker/task:1")):
                step(given if worker == 1 else rows(1))
        step(rows(5, 0, 5) if worker else rows())
        return emb.numpy()[:, 0].tolist(), users.lookup([7]).numpy().tolist(), int(optimizer.iterations)

    found = in_threads(make, consistency=ps.Sync(nonfinite="raise"))
    assert found == [([-1.0, 0, 0, 0, 0, -2.0], [[-2.0, -2.0]], 1)] * 2


# ---- NaN and infinity ----


@pytest.mark.parametrize("consistency", [ps.Sync(), ps.Async()], ids=str)
def test_a_poisoned_variable_is_told_once_by_each_process(caplog, consistency):
    """The worker and the variable are named exactly, and nothing else is; all go on.

    The rounds of an asynchronous worker are its own, and so is the warning.
    """

    def poison(strategy, worker):
        with strategy.scope():
            three = [ps.Variable(np.zeros(4), name=name) for name in "uvt"]
        for number in range(4):
            values = [np.full(4, np.nan if (worker, number, name) == (1, 1, "v") else 1.0) for name in "uvt"]
            strategy.run(lambda values=values: add_all(list(zip(three, values, strict=True))))
        return [bool(np.isfinite(each.numpy()).all()) for each in three]

    assert in_threads(poison, servers=1, consistency=consistency)[1] == [True, False, True]
    told = [(record.name.partition(".")[0], record.getMessage()) for record in caplog.records]
    told = [(process, words) for process, words in told if "NaN" in words]
    assert sorted(process for process, _ in told) == ["psclient"] * (1 + (consistency == ps.Sync())) + ["psserver"]
    (words,) = {words for _, words in told}
    said = [name for name in ("'v'", "/job:worker/task:1", "round 1", "'u'", "'t'", "worker/task:0") if name in words]
    assert said == ["'v'", "/job:worker/task:1", "round 1"]


def train(strategy, bad, size, dtype):
    """Three steps of Adam on two variables; in the second, one gradient has a bad value.

    Returns, after each step, an element of each variable, of each slot, and the count of steps; and the errors.
    """
    after, errors = [], []
    with strategy.scope():
        variables = [ps.Variable(np.zeros(size, dtype), name=name) for name in "wv"]
        optimizer = ps.optimizers.Adam(0.5)
    for step in range(3):
        gradients = [np.full(size, step + 1.0, dtype) for _ in variables]
        gradients[0][-1] = bad if step == 1 else gradients[0][-1]
        try:
            strategy.run(lambda g: optimizer.apply_gradients(list(zip(g, variables, strict=True))), (gradients,))
        except ps.errors.NonfiniteError as error:
            errors.append(error.message)
        seen = [
            np.asarray(each.numpy(), "float64") for each in (*variables, *optimizer.variables, optimizer.iterations)
        ]
        after.append([float(value.reshape(-1)[0]) for value in seen])
    return after, errors


@pairwise(
    choice=["skip", "raise"],
    kind=[ps.Sync, ps.Async],
    bad=[np.nan, np.inf, -np.inf],
    servers=[1, 2],
    dtype=["float32", "float16", "float64"],
    size=[3, LARGE],
)
def test_a_skipped_or_refused_round_changes_nothing(choice, kind, bad, servers, dtype, size):
    """Neither the variable with the bad gradient, nor another one, nor a slot, nor the count; then all goes on.

    The error names the variable and the worker, and can be caught.
    """
    consistency = kind(nonfinite=choice)
    ((after, errors),) = in_threads(lambda s, _: train(s, bad, size, dtype), 1, servers, consistency=consistency)
    assert after[1] == after[0]
    assert after[2][-1] == 2
    assert all(np.isfinite(after[2]))
    assert after[2] != after[1]
    assert len(errors) == (choice == "raise")
    for message in errors:
        assert [word in message for word in ("'w'", "/job:worker/task:0", "'v'")] == [True, True, False]
