"""Buffers of modules: BatchNorm's means are each worker's own, or means over all, and in checkpoints."""

from __future__ import annotations

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import batches, job, seeded, share, steps


def net(seed=0, dtype=torch.float64):
    """A network with BatchNorm, and a buffer that is no part of its state."""
    layers = lambda: [torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)]  # noqa: E731
    module = torch.nn.Sequential(*seeded(seed, layers)).to(dtype)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    return module


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def trained(mode, workers=2, count=4):
    """The buffers of each worker after some steps."""

    def work(strategy, worker):
        module = net()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.0, buffers=mode, strategy=strategy)
        steps(module, optimizer, share(batches(count), worker, workers))
        return buffers(module)

    return job(work, workers, 2)


def test_buffers_are_each_workers_own():
    """By default: each sees its part of the batches, so that they differ."""
    one, other = trained("own")
    assert not torch.equal(one["1.running_mean"], other["1.running_mean"])
    assert int(one["1.num_batches_tracked"]) == int(other["1.num_batches_tracked"]) == 4


def test_buffers_are_means_over_workers():
    """After each step, to the same bits: the mean of a batch is that of the workers' parts of it."""
    one, other = trained("mean")
    assert all(torch.equal(one[name], other[name]) for name in one)
    (alone,) = trained("mean", 1)
    assert (one["1.running_mean"] - alone["1.running_mean"]).abs().max() < 1e-6
    assert int(one["1.num_batches_tracked"]) == 4


def test_workers_begin_with_those_of_the_first():
    """As with parameters; what is no part of the module's state is nobody else's concern."""

    def work(strategy, worker):
        module = net()
        with torch.no_grad():
            for buffer in module.buffers():
                buffer.fill_(worker + 3)
        pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
        return {name: buffer.flatten()[0].item() for name, buffer in module.named_buffers()}

    one, other = job(work, 2)
    assert set(one.values()) == {3}
    assert other.pop("scratch") == 4
    assert set(other.values()) == {3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_checkpoints_have_those_of_the_first_worker(tmp_path, dtype):
    """And give them to all: to the module's own memory, where they are restored."""

    def saving(strategy, worker):
        module = net(dtype=dtype)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
        steps(module, optimizer, share(batches(3, dtype=dtype), worker, 2))
        ps.train.Checkpoint(optimizer=optimizer).write("saved")
        return buffers(module)

    def restoring(strategy, worker):
        module = net(dtype=dtype)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
        places = [buffer.data_ptr() for buffer in module.buffers()]
        steps(module, optimizer, share(batches(1, dtype=dtype), worker, 3))
        ps.train.Checkpoint(optimizer=optimizer).restore("saved").assert_existing_objects_matched()
        assert [buffer.data_ptr() for buffer in module.buffers()] == places
        return buffers(module)

    saved, _ = job(saving, 2, 2, tmp_path)
    for found in job(restoring, 3, 1, tmp_path):
        assert all(torch.equal(saved[name], found[name]) for name in saved)


def test_another_word_is_refused():
    """It is 'own' or 'mean'."""

    def work(strategy, worker):
        with pytest.raises(ValueError, match="buffers is 'sum'; it is one of 'own' and 'mean'"):
            pst.Optimizer(net(), torch.optim.SGD, lr=0.01, buffers="sum", strategy=strategy)

    job(work)


def test_a_buffer_that_servers_do_not_have():
    """Is named, with its dtype; one that is not persistent stays this worker's own."""

    def work(strategy, worker):
        for persistent in (True, False):
            module = torch.nn.Linear(2, 2)
            module.register_buffer("scales", torch.ones(2).to(torch.float8_e4m3fn), persistent)
            if persistent:
                with pytest.raises(ValueError, match=r"buffer 'scales' is torch\.float8_e4m3fn, which servers do not"):
                    pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
            else:
                pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)

    job(work)
