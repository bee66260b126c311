"""Batches that workers share, and loss scales that stay the same everywhere."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.children import METHODS
from tests.kit.modules import apart, batches, job, mlp, seeded, share, steps, values
from tests.kit.strategies import refused

EXAMPLES = 45


def data():
    source = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 5, generator=source, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x[:, :3] * x[:, 1:4])


def loader(size=16, seed=5, **options):
    """Batches of 16, 16 and 13 examples, in another order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(data(), batch_size=size, shuffle=True, generator=generator, **options)


def until_told(data, strategy, worker, count=1, begin=lambda epoch: None):
    """Trains with the data of a worker until it is told that the other's are not the same: steps, and what was said."""
    module = mlp()
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1e-3, strategy=strategy)
    shared, made = pst.Loader(data(worker), optimizer), 0
    try:
        for epoch in shared.epochs(count):
            begin(epoch)
            for batch in shared:
                optimizer.zero_grad()
                module(batch if isinstance(batch, torch.Tensor) else batch[0]).square().mean().backward()
                optimizer.step()
                made += 1
    except ps.errors.Diverged as error:
        return made, str(error)
    return made, ""


def unseeded(worker):
    """A loader as scripts of one process have it; torch's source of chance is another one in each worker."""
    return seeded(worker, lambda: torch.utils.data.DataLoader(data(), batch_size=16, shuffle=True))


def weighted(worker):
    generator = torch.Generator().manual_seed(worker)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * EXAMPLES, EXAMPLES, generator=generator)
    return torch.utils.data.DataLoader(data(), 16, sampler=sampler)


@pytest.mark.parametrize(
    ("make", "named", "servers"),
    [
        (unseeded, "RandomSampler", 1),
        (weighted, "WeightedRandomSampler", 2),
        (lambda worker: loader(seed=worker), "RandomSampler", 2),
        (lambda worker: loader(16 + worker), "has 16 examples", 1),
        (lambda worker: loader(drop_last=bool(worker)), "of 2 batches", 2),
        (lambda worker: [x for x, _ in batches(3 + worker)], "of 4 batches", 1),
    ],
)
def test_workers_that_read_different_batches_are_told(make, named, servers):
    """In the first step, on both workers: who they are, what differs, and what to do."""
    for made, told in job(partial(until_told, make), 2, servers):
        assert made == 0
        assert "/job:worker/task:0 and /job:worker/task:1 read different global batches: " in told
        assert named in told
        assert "generator=torch.Generator().manual_seed(0)" in told


@pytest.mark.parametrize(("since", "reached"), [(2, 6), (21, 100)])
def test_a_difference_that_comes_later_is_told(since, reached):
    """Seeds differ from some epoch on: told at once in the first ten rounds, then in the next one of a hundred."""

    def work(strategy, worker):
        sampler = torch.utils.data.RandomSampler(data(), generator=torch.Generator().manual_seed(0))

        def begin(epoch):
            if epoch >= since:
                sampler.generator = torch.Generator().manual_seed(epoch * 2 + worker)

        loader = torch.utils.data.DataLoader(data(), 16, sampler=sampler)
        return until_told(lambda _: loader, strategy, worker, 40, begin)

    for made, told in job(work, 2):
        assert made == reached
        assert f"batch {reached % 3} of epoch {reached // 3}" in told


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda worker: loader(), {}),
        (lambda worker: weighted(0), {}),
        (lambda worker: loader(seed=worker), {"consistency": ps.Async()}),
        (lambda worker: loader(16 + worker), {"consistency": ps.BoundedStaleness(2)}),
        (lambda worker: loader(), {"consistency": ps.Sync(backup_workers=1)}),
    ],
)
def test_equal_batches_and_workers_that_go_on_alone_hear_nothing(make, options, caplog):
    """A common seed is enough; and who makes rounds alone, or may be left out of one, is not compared."""
    assert all(made >= 15 and not told for made, told in job(partial(until_told, make, count=5), 2, **options))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


class Reading:
    """Examples of which each reads a variable."""

    def __init__(self, variable):
        self.variable = variable

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(float(self.variable.numpy()[0]))


@pytest.mark.parametrize("method", METHODS)
def test_a_loader_has_processes_of_its_own(method):
    """However they are started, and kept or not: batches and steps are the same; one that reads a variable fails."""

    def work(strategy, worker):
        found = []
        ways = [(0, False), (2, True)]  # each process that is not forked imports torch
        for count, kept in [*ways, (2, False)] if method == "fork" else ways:
            module, sizes = mlp(), []
            optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy, prefix=f"{count}{kept}/")
            options = {"multiprocessing_context": method, "persistent_workers": kept} if count else {}
            shared = pst.Loader(loader(num_workers=count, **options), optimizer)
            for _ in shared.epochs(2):
                for batch in shared:
                    sizes.append(len(batch[0]))
                    steps(module, optimizer, [batch])
            found.append((sizes, values(module)))
        with strategy.scope():
            v = ps.Variable(np.ones(1, "float32"))
        reading = torch.utils.data.DataLoader(Reading(v), num_workers=2, multiprocessing_context=method)
        error, says = (ps.PSError, "is a fork.*num_workers=0") if method == "fork" else (TypeError, "cannot be pickled")
        refused(error, f"(?s){says}", lambda: next(iter(reading)))
        assert v.numpy() == 1
        return found

    (found,) = job(work)
    assert all(sizes == [16, 16, 13] * 2 for sizes, _ in found)
    assert all(apart(own, found[0][1]) == 0 for _, own in found)


def test_several_optimizers_have_one_loader():
    """Each has parameters of its own, and weighs their gradients by the part of the batch: the steps are torch's."""
    kinds = [(0, torch.optim.Adam, {"lr": 0.01}), (2, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})]

    def trained(module, optimizers, data):
        for x, y in data:
            module.zero_grad()
            (module(x) - y).square().mean().backward()
            for each in optimizers:
                each.step()
        return values(module)

    def work(strategy, worker):
        module = mlp()
        ours = [pst.Optimizer(module, kind, module[n].parameters(), strategy=strategy, **o) for n, kind, o in kinds]
        assert [[*each.variables] for each in ours] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
        return trained(module, ours, pst.Loader(loader(), ours))

    alone = mlp()
    expected = trained(alone, [kind(alone[n].parameters(), **options) for n, kind, options in kinds], loader())
    assert all(apart(own, expected) < 1e-6 for workers in (1, 3) for own in job(work, workers))


def test_the_features_of_the_next_batch_come_with_the_round(strategy):
    """A function gives what a collection will be given."""

    def features(batch):
        return pst.KeyedJaggedTensor(["user"], batch, torch.ones(1, len(batch), dtype=torch.int64))

    with strategy.scope():
        bags = pst.EmbeddingBagCollection([pst.EmbeddingBagConfig("users", 4, ["user"])])
    optimizer = pst.Optimizer(bags, torch.optim.SGD, lr=0.1, strategy=strategy)
    asks, asked = lambda: strategy.backend.exchange.measures.reading.buckets()[-1][1], []
    for batch in pst.Loader([torch.arange(8), torch.arange(4, 12), torch.arange(8)], optimizer, {bags: features}):
        asked.append(asks())
        optimizer.zero_grad()
        bags(features(batch)).values().sum().backward()
        optimizer.step()
    assert asks() == asked[1]


# ---- Loss scales ----


SCALES = {"init_scale": 1024.0, "growth_interval": 3}


def scaled(optimizer, scaler, losses, overflows=(), unscales=False):
    """A step for each loss, a function's; those of the numbers given overflow. Returns the scales after them."""
    scales = []
    for number, loss in enumerate(losses):
        optimizer.zero_grad()
        scaler.scale(loss() * (float("inf") if number in overflows else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def losses_of(module, data):
    return [lambda x=x, y=y: (module(x) - y).square().mean() for x, y in data]


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(("servers", "options"), [(1, {}), (2, {"global_clipnorm": 1e6})])
def test_an_overflow_of_one_is_one_of_all(unscales, servers, options):
    """The step changes nothing anywhere, each worker halves its scale, and all go on as one process would."""

    def work(strategy, worker):
        module, scaler = mlp(), pst.GradScaler("cpu", **SCALES)
        optimizer = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy, **options)
        overflows = (2,) if worker else (5,)
        scales = scaled(optimizer, scaler, losses_of(module, share(batches(12), worker, 2)), overflows, unscales)
        return scales, values(module), [int(own["step"]) for own in optimizer.state_dict()["state"].values()]

    alone, theirs = mlp(), torch.amp.GradScaler("cpu", **SCALES)
    adam = torch.optim.Adam(alone.parameters(), lr=0.01)
    expected = scaled(adam, theirs, losses_of(alone, batches(12)), (2, 5))
    for scales, found, counts in job(work, 2, servers):
        assert scales == expected
        assert apart(found, alone) < 1e-6
        assert set(counts) == {10}


def test_a_scaler_that_is_off_does_nothing(strategy):
    module, alone = mlp(), mlp()
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    scaled(optimizer, pst.GradScaler("cpu", enabled=False), losses_of(module, batches(3)))
    steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches(3))
    assert apart(module, alone) < 1e-12


def test_a_scaler_in_half_precision():
    """float16 gradients that overflow at 65,504 halve the scale until they do not."""

    def work(strategy, worker):
        module = torch.nn.Linear(4, 1, bias=False).half()
        with torch.no_grad():
            module.weight.fill_(1.0)
        scaler = pst.GradScaler("cpu", init_scale=2.0**18, growth_interval=100)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.5, strategy=strategy)
        scales = scaled(optimizer, scaler, [lambda: module(torch.ones(1, 4).half()).float().sum()] * 4)
        return scales[-1], module.weight.tolist()

    assert job(work, 2) == [(2.0**15, [[0.5] * 4])] * 2


@pytest.mark.parametrize("unscales", [False, True])
def test_rows_are_unscaled_as_parameters_are(unscales):
    """A row moves by its gradient, whatever the scale; an overflow of rows on one worker halves the scale of all."""

    def work(strategy, worker):
        found = []
        for count, overflows in ((3, ()), (4, (0, 2) if worker else ())):
            with strategy.scope():
                module = pst.Embedding(ps.Variable(np.zeros((2, 3), "f4"), name="rows"))
            optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1.0, strategy=strategy)
            losses = [lambda module=module: module(torch.tensor([0, 1])).sum()] * count
            scales = scaled(optimizer, pst.GradScaler("cpu", **SCALES), losses, overflows, unscales)
            found.append((module.table.numpy().tolist(), scales))
        return found

    one, other = job(work, 2)
    assert one == other
    assert one[0][0] == [[-3.0] * 3] * 2
    assert one[1] == ([[-2.0] * 3] * 2, [512.0, 512.0, 256.0, 256.0])
