"""Batches that workers share, and whose ids ride in the round before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, job, mlp, values

EXAMPLES = 45


def data():
    """Examples of 5 numbers, each with a target of 3."""
    source = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 5, generator=source, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x[:, :3] * x[:, 1:4])


def loader(size=16, **options):
    """Batches of 16, 16 and 13 examples, in another order in each epoch."""
    generator = torch.Generator().manual_seed(5)
    return torch.utils.data.DataLoader(data(), batch_size=size, shuffle=True, generator=generator, **options)


def epochs(module, optimizer, batches, count=3):
    """Trains for some epochs; returns the number of examples of each batch."""
    seen = []
    for _ in batches.epochs(count):
        for x, y in batches:
            assert x.dtype is torch.float64
            seen.append(len(x))
            optimizer.zero_grad()
            (module(x) - y).square().mean().backward()
            optimizer.step()
    return seen


def asks(strategy):
    """How often this process has asked servers for values."""
    return strategy.backend.exchange.measures.reading.buckets()[-1][1]


def trained(workers, servers=2, size=16, **options):
    """What each worker has seen, and its parameters."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy)
        return epochs(module, optimizer, pst.Loader(loader(size), optimizer)), values(module)

    return job(work, workers, servers, **options)


def test_parts_of_batches_count_by_their_examples():
    """One worker, two and three compute the same, though their parts of a batch are of different sizes."""
    ((sizes, expected),) = trained(1)
    assert sizes == [16, 16, 13] * 3
    for workers in (2, 3):
        found = trained(workers)
        assert sum(sum(sizes) for sizes, _ in found) == 3 * EXAMPLES
        assert all(apart(own, expected) < 1e-6 for _, own in found)


def test_a_worker_without_examples_computes_one_batch_again():
    """Of a last batch of one example: what the others compute then counts nothing, and they make the same steps."""
    ((sizes, expected),) = trained(1, size=22)
    assert sizes == [22, 22, 1] * 3
    found = trained(3, size=22)
    assert [own for own, _ in found] == [[8, 8, 1] * 3, [8, 8, 8] * 3, [6, 6, 6] * 3]
    assert all(apart(own, expected) < 1e-6 for _, own in found)


def test_sums_are_not_weighed():
    """Where losses are sums, and gradients are summed, a part counts as it is."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1e-3, reduction="sum", strategy=strategy)
        for x, y in pst.Loader(loader(), optimizer):
            optimizer.zero_grad()
            (module(x) - y).square().sum().backward()
            optimizer.step()
        return values(module)

    (expected,) = job(work)
    assert all(apart(own, expected) < 1e-12 for own in job(work, 3))


def test_asynchronous_workers_share_the_data():
    """Each has its part of every batch, and its gradients count whole."""
    found = trained(2, consistency=ps.Async())
    assert [sum(sizes) for sizes, _ in found] == [3 * (8 + 8 + 7), 3 * (8 + 8 + 6)]


@pytest.mark.parametrize("named", [True, False])
def test_the_rows_of_the_next_batch_come_with_the_round(named):
    """With lookups a step asks the servers for nothing; without them for the rows of each batch."""

    def work(strategy, worker):
        with strategy.scope():
            users = pst.Embedding(ps.dynamic_embedding.get_variable("users", 4))
        optimizer = pst.Optimizer(users, torch.optim.Adagrad, lr=0.1, strategy=strategy)
        batches = ps.ArrayDataset({"user": np.arange(60) % 23, "liked": np.ones(60, "float32")}).batch(12)
        lookups, asked = {users: lambda batch: batch["user"]}, []
        for batch in pst.Loader(batches, optimizer, lookups if named else None):
            asked.append(asks(strategy))
            optimizer.zero_grad()
            (users(batch["user"]).sum(1) - batch["liked"]).square().mean().backward()
            optimizer.step()
        return np.diff([*asked, asks(strategy)]).tolist()

    for found in job(work, 2, 2):
        assert found[1:] == [int(not named)] * 4


def test_features_of_a_collection_ride_as_well():
    """A function gives what the collection will be given."""

    def features(batch):
        return pst.KeyedJaggedTensor(["user"], batch, torch.ones(1, len(batch), dtype=torch.int64))

    def work(strategy, worker):
        with strategy.scope():
            bags = pst.EmbeddingBagCollection([pst.EmbeddingBagConfig("users", 4, ["user"])])
        optimizer = pst.Optimizer(bags, torch.optim.SGD, lr=0.1, strategy=strategy)
        asked = []
        for batch in pst.Loader([torch.arange(8), torch.arange(4, 12), torch.arange(8)], optimizer, {bags: features}):
            asked.append(asks(strategy))
            optimizer.zero_grad()
            bags(features(batch)).values().sum().backward()
            optimizer.step()
        return asks(strategy) - asked[1]

    assert job(work) == [0]


def test_several_optimizers_have_one_loader():
    """Each weighs its gradients by the part of the batch."""

    def work(strategy, worker):
        module = mlp()
        parts = [module[n].parameters() for n in (0, 2)]
        both = [pst.Optimizer(module, torch.optim.SGD, part, lr=0.1, strategy=strategy) for part in parts]
        for x, y in pst.Loader(loader(), both):
            for each in both:
                each.zero_grad()
            (module(x) - y).square().mean().backward()
            for each in both:
                each.step()
        return values(module)

    (expected,) = job(work)
    assert all(apart(own, expected) < 1e-6 for own in job(work, 3))


def test_what_is_wrong_is_told():
    """In a sentence: an iterator, an optimizer of torch's own, a key that looks nothing up, or what gives no ids."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        theirs = torch.optim.SGD(mlp().parameters(), lr=0.1)
        with strategy.scope():
            rows = pst.Embedding(ps.Variable([[1.0]], name="rows"))
        for make, error, word in (
            (lambda: pst.Loader(iter(loader()), optimizer), TypeError, "can be gone through only once"),
            (lambda: pst.Loader(loader(), theirs), TypeError, "a SGD makes no rounds"),
            (lambda: pst.Loader(loader(), optimizer, {module: lambda b: b}), TypeError, "lookups has a Sequential"),
            (lambda: pst.Loader(loader(), optimizer, {rows: 3}), TypeError, "lookups has 3 for a Embedding"),
        ):
            with pytest.raises(error, match=word):
                make()
        assert len(pst.Loader(loader(), optimizer)) == 3

    job(work)
