"""What becomes of a round with NaN or infinity: applied, skipped, or an error in every process."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting import InProcessCluster
from pstesting.processes import W0, W1
from tests.kit.workers import in_threads

LARGE = 700_000
"""Elements of a variable of which a round would stream."""


def train(servers, consistency, bad, size=3, dtype="float32"):
    """Three steps of Adam on two variables; in the second, one gradient has a bad value.

    Returns, after each step, an element of each variable, of each slot, and the count of steps; and the errors.
    """
    after, errors = [], []
    with (
        InProcessCluster(servers=servers) as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), consistency=consistency) as strategy,
    ):
        with strategy.scope():
            variables = [ps.Variable(np.zeros(size, dtype), name=name) for name in "wv"]
            optimizer = ps.optimizers.Adam(0.5)
        for step in range(3):
            gradients = [np.full(size, step + 1.0, dtype) for _ in variables]
            gradients[0][-1] = bad if step == 1 else gradients[0][-1]

            def apply(gradients=gradients):
                optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

            try:
                strategy.run(apply)
            except ps.errors.NonfiniteError as error:
                errors.append(error.message)
            everything = *variables, *optimizer.variables, optimizer.iterations
            seen = [np.asarray(each.numpy(), "float64") for each in everything]
            after.append([float(value.reshape(-1)[0]) for value in seen])
    return after, errors


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("size", [3, pytest.param(LARGE, marks=pytest.mark.soak)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("kind", [ps.Sync, ps.Async])
def test_a_skipped_round_changes_nothing(kind, bad, size, servers):
    """Neither the variable with the bad gradient, nor another one, nor a slot, nor the count; then all goes on."""
    after, errors = train(servers, kind(nonfinite="skip"), bad, size)
    assert errors == []
    assert after[1] == after[0]
    assert after[2][-1] == 2
    assert all(np.isfinite(after[2]))
    assert after[2] != after[1]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("kind", [ps.Sync, ps.Async])
def test_a_refused_round_is_an_error_and_changes_nothing(kind, servers):
    """It names the variable and the worker, and can be caught; the next round runs."""
    after, (message,) = train(servers, kind(nonfinite="raise"), np.nan)
    assert after[1] == after[0]
    assert "'w'" in message
    assert "'v'" not in message
    assert str(W0) in message
    assert after[2][-1] == 2


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_every_floating_dtype_is_looked_at(dtype):
    """Half precision, too, whose infinity is a sum that is too large in many models."""
    after, _ = train(1, ps.Sync(nonfinite="skip"), np.inf, dtype=dtype)
    assert after[1] == after[0]


def test_a_round_is_applied_unless_something_else_is_asked_for():
    """The default: the variable is spoilt, the other one is updated."""
    after, errors = train(1, ps.Sync(), np.nan)
    assert errors == []
    assert after[1] != after[0]
    assert after[2][-1] == 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ps.Sync(nonfinite="ignore"),
        lambda: ps.Async(nonfinite=None),
        lambda: ps.Sync(whole_rounds=False, nonfinite="skip"),
    ],
)
def test_impossible_choices_are_refused(wrong):
    """Before anything is connected."""
    with pytest.raises(ValueError, match=r"nonfinite|whole"):
        wrong()


@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_every_process_is_told(choice, caplog):
    """Two servers and two workers: nothing of the round is applied anywhere, and both learn whose fault it was."""

    def poisoned(strategy, worker):
        """Worker 1 contributes NaN in the second step."""
        with strategy.scope():
            v, u = ps.Variable(np.zeros(3), name="v"), ps.Variable(np.zeros(3), name="u")
            optimizer = ps.optimizers.SGD(1.0)
        assert strategy.last_round is None
        errors = []
        for step in range(3):
            gradient = np.full(3, np.nan if (worker, step) == (1, 1) else 1.0)
            try:
                strategy.run(lambda gradient=gradient: optimizer.apply_gradients([(gradient, v), (np.ones(3), u)]))
            except ps.errors.NonfiniteError as error:
                errors.append(error.message)
            last = strategy.last_round
        assert (last.contributors, last.left_out) == ((str(W0), str(W1)), ())
        return [float(v.numpy()[0]), float(u.numpy()[0])], errors

    found = in_threads(poisoned, consistency=ps.Sync(nonfinite=choice))
    warned = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    for values, errors in found:
        assert values == [-4.0, -4.0]
        told = errors if choice == "raise" else warned
        assert len(errors) == (choice == "raise")
        assert all("'v'" in words and str(W1) in words for words in told)
    assert choice == "raise" or len(warned) >= 2
