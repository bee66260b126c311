"""Loss scales: an overflow of one worker is one of all, and scales stay the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, batches, job, mlp, share, values

SCALES = {"init_scale": 1024.0, "growth_interval": 3}


def train(module, optimizer, scaler, data, overflows=(), unscales=False):
    """A step for each batch; those of the numbers given overflow. Returns the scales after them."""
    scales = []
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = (module(x) - y).square().mean()
        scaler.scale(loss * (float("inf") if number in overflows else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(("servers", "options"), [(1, {}), (2, {"global_clipnorm": 1e6})])
def test_an_overflow_of_one_is_one_of_all(unscales, servers, options):
    """The step changes nothing anywhere, each worker halves its scale, and all go on as one process would."""

    def work(strategy, worker):
        module, scaler = mlp(), pst.GradScaler("cpu", **SCALES)
        optimizer = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy, **options)
        overflows = (2,) if worker else (5,)
        scales = train(module, optimizer, scaler, share(batches(12), worker, 2), overflows, unscales)
        return scales, values(module), [int(own["step"]) for own in optimizer.state_dict()["state"].values()]

    alone, theirs = mlp(), torch.amp.GradScaler("cpu", **SCALES)
    expected = train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), theirs, batches(12), (2, 5))
    for scales, found, counts in job(work, 2, servers):
        assert scales == expected
        assert apart(found, alone) < 1e-6
        assert set(counts) == {10}


def test_torchs_own_scaler_is_refused():
    """It would decide for each worker alone."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy)
        with pytest.raises(RuntimeError, match=r"take psclient\.torch\.GradScaler, which decides for all of them"):
            train(module, optimizer, torch.amp.GradScaler("cpu"), batches(1))

    job(work)


def test_a_scaler_that_is_off_does_nothing():
    """As torch's: a step is a step."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        train(module, optimizer, pst.GradScaler("cpu", enabled=False), batches(3))
        return values(module)

    alone = mlp()
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    train(alone, theirs, torch.amp.GradScaler("cpu", enabled=False), batches(3))
    assert apart(job(work)[0], alone) < 1e-12


def test_clipping_after_unscaling_is_refused():
    """The gradients are this worker's own, scaled or not."""

    def work(strategy, worker):
        module, scaler = mlp(), pst.GradScaler("cpu")
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        scaler.scale(module(batches(1)[0][0]).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        with pytest.raises(RuntimeError, match="give the optimizer global_clipnorm"):
            scaler.step(optimizer)

    job(work)


def test_a_scaler_in_half_precision():
    """float16 gradients that overflow at 65,504 halve the scale until they do not."""

    def work(strategy, worker):
        module = torch.nn.Linear(4, 1, bias=False).half()
        with torch.no_grad():
            module.weight.fill_(1.0)
        scaler = pst.GradScaler("cpu", init_scale=2.0**18, growth_interval=100)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.5, strategy=strategy)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(module(torch.ones(1, 4).half()).float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), module.weight.tolist()

    assert job(work, 2) == [(2.0**15, [[0.5] * 4])] * 2


def rows_after(strategy, scaler, count, overflows=(), unscales=False):
    """Trains two rows of a table and nothing else, by 1 in each step; returns them, and the scale after each step."""
    with strategy.scope():
        module = pst.Embedding(ps.Variable(np.zeros((2, 3), "f4"), name="rows"))
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1.0, strategy=strategy)
    scales = []
    for number in range(count):
        optimizer.zero_grad()
        loss = module(torch.tensor([0, 1])).sum()
        scaler.scale(loss * (float("inf") if number in overflows else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return module.table.numpy(), scales


@pytest.mark.parametrize("unscales", [False, True])
def test_rows_are_unscaled_as_parameters_are(unscales):
    """Whether the script unscales or the step does: a row moves by its gradient, whatever the scale."""

    def work(strategy, worker):
        return rows_after(strategy, pst.GradScaler("cpu", **SCALES), 3, unscales=unscales)[0].tolist()

    assert job(work, 2) == [[[-3.0] * 3] * 2] * 2


@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_of_rows_alone_is_read_back(unscales):
    """Gradients of rows that overflow on one worker halve the scale of all, and change nothing."""

    def work(strategy, worker):
        overflows = (0, 2) if worker else ()
        found, scales = rows_after(strategy, pst.GradScaler("cpu", **SCALES), 4, overflows, unscales)
        return found.tolist(), scales

    assert job(work, 2) == [([[-2.0] * 3] * 2, [512.0, 512.0, 256.0, 256.0])] * 2
