"""Modules whose rows are on servers, beside those of `torch.nn`."""

from __future__ import annotations

import contextlib
import copy
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import psclient as ps
import psclient.torch as pst
from psclient.optimizers.rules import TORCH
from tests.kit.modules import apart, job

SIZE, DIM = 20, 4
FIRST = torch.randn(SIZE, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ids(count, shape=(6, 3), size=SIZE):
    source = torch.Generator().manual_seed(2)
    return [torch.randint(0, size, shape, generator=source) for _ in range(count)]


def static(strategy, name="table"):
    with strategy.scope():
        return ps.Variable(FIRST.numpy(), name=name)


def dynamic(strategy, name="table"):
    """A dynamic table of float64 that begins with zeros."""
    with strategy.scope():
        return ps.dynamic_embedding.get_variable(name, DIM, value_dtype="float64", initializer=0.0)


def rows_of(strategy, lr=0.05, **options):
    module = pst.Embedding(static(strategy), **options)
    return module, pst.Optimizer(module, torch.optim.SGD, lr=lr, strategy=strategy)


def call(module, batch):
    return module(batch)


def train(module, optimizer, data, forward=call):
    """A step for each batch, of a loss that squares what comes of it."""
    for batch in data:
        optimizer.zero_grad()
        (forward(module, batch) - 1.0).square().sum().backward()
        optimizer.step()


def alone(data, forward=call, kind=torch.nn.Embedding, optimizer=torch.optim.SGD, lr=0.05, **options):
    """The rows of torch's own module after the same steps with torch's own optimizer."""
    module = kind.from_pretrained(FIRST.clone(), freeze=False, **options)
    train(module, optimizer(module.parameters(), lr=lr), data, forward)
    return module.weight.detach()


def changed_rows(table):
    return np.flatnonzero((table.numpy() != FIRST.numpy()).any(axis=1)).tolist()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_is_torchs_own(strategy, mode):
    """With offsets, and for "sum" with weights; a bag may be empty."""
    offsets, weights = torch.tensor([0, 2, 2, 5]), torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
    given = {"per_sample_weights": weights} if mode == "sum" else {}
    forward = lambda module, batch: module(batch, offsets, **given)  # noqa: E731
    module = pst.EmbeddingBag(static(strategy), mode=mode)
    train(module, pst.Optimizer(module, torch.optim.SGD, lr=0.05, strategy=strategy), ids(10, (6,)), forward)
    expected = alone(ids(10, (6,)), forward, torch.nn.EmbeddingBag, mode=mode)
    assert apart([torch.tensor(module.table.numpy())], [expected]) < 1e-10


@pytest.mark.parametrize("make", [static, dynamic])
def test_a_module_may_be_used_twice_in_a_step(strategy, make):
    """And two modules may have one table: the gradients of all lookups are one, of each row the sum."""
    forward = lambda module, batch: torch.tanh(module(batch[:4]).sum(0) * module(batch[2:]).sum(0))  # noqa: E731
    twice = lambda both, batch: torch.tanh(both[0](batch[:4]).sum(0) * both[1](batch[2:]).sum(0))  # noqa: E731
    table = make(strategy, name=f"{make.__name__} twice")
    both = torch.nn.ModuleList([pst.Embedding(table), pst.Embedding(table)])
    optimizer = pst.Optimizer(both, torch.optim.SGD, lr=0.05, strategy=strategy)
    if make is dynamic:
        table.scatter_update(ps.IndexedSlices(FIRST.numpy(), np.arange(SIZE)))
    train(both, optimizer, ids(5), twice)
    train(both[0], optimizer, ids(5), forward)
    expected = alone([*ids(5), *ids(5)], forward)
    with torch.no_grad():
        assert apart([both[1](torch.arange(SIZE))], [expected]) < 1e-10


def test_how_often_a_key_came_is_counted(strategy):
    """Over all lookups of a step: a filter that admits a key of three lets one in that came twice, and once more."""
    with strategy.scope():
        admission = ps.dynamic_embedding.CounterFilter(3)
        module = pst.Embedding(ps.dynamic_embedding.get_variable("filtered", DIM, admission=admission))
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.05, strategy=strategy)
    forward = lambda module, batch: module(batch[:3]).sum() + module(batch[3:]).sum()  # noqa: E731
    train(module, optimizer, [torch.tensor([7, 7, 8, 7, 8])], forward)
    assert module.table.keys().tolist() == [7]


def test_a_worker_without_ids_contributes_nothing():
    """Where no worker has any, the table stays as it is, and so does what the optimizer keeps of it."""

    def work(strategy, worker):
        parts = {"rows": pst.Embedding(static(strategy)), "dense": torch.nn.Linear(DIM, 1)}
        module = torch.nn.ModuleDict(parts).double()
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.02, weight_decay=0.1, strategy=strategy)
        seen = []
        for number in range(3):
            optimizer.zero_grad()
            looks_up = number == 1 and worker == 0
            x = module["rows"](torch.tensor([2, 5])) if looks_up else torch.ones(1, DIM, dtype=torch.float64)
            module["dense"](x).sum().backward()
            optimizer.step()
            seen.append(torch.tensor(module["rows"].table.numpy()))
        return seen

    for seen in job(work, 2, 2):
        assert torch.equal(seen[0], FIRST)
        assert not torch.equal(seen[1], FIRST)
        assert torch.equal(seen[2], seen[1])


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_of_rows_add_up(strategy, accumulates):
    """Of several backward passes, as of parameters, in `no_sync` or not; `zero_grad` forgets those of before. What was
    looked ahead stays here."""
    module, optimizer = rows_of(strategy, lr=1.0)
    module.prefetch(torch.tensor([2, 3]))
    train(module, optimizer, [torch.tensor([0])], lambda module, batch: 0 * module(batch))
    kept = module(torch.tensor([0]))
    (kept.sum() + module(torch.tensor([1])).sum()).backward(retain_graph=True)
    optimizer.zero_grad()
    before = strategy.blocking_waits
    loss = module(torch.tensor([2, 3])).sum() + kept.sum()
    assert strategy.blocking_waits == before
    with optimizer.no_sync() if accumulates else contextlib.nullcontext():
        loss.backward(retain_graph=True)
        loss.backward()
    module(torch.tensor([3])).sum().backward()
    optimizer.step()
    moved = FIRST - torch.tensor(module.table.numpy())
    assert moved[:5, 0].round(decimals=9).tolist() == [2.0, 0.0, 2.0, 3.0, 0.0]


def test_a_table_in_memory_takes_no_hints(strategy, calls_of):
    """A module says what its table says, and hands on what it is told; a copy of it has the same table."""
    module = torch.nn.Sequential(pst.Embedding(static(strategy)), torch.nn.Linear(DIM, 1).double())
    hints = calls_of("prefetch_hint", module[0].table)
    module[0].prefetch_hint(torch.tensor([2, 3]), torch.tensor([4]))
    assert [[ids.tolist() for ids in call] for call in hints] == [[[2, 3], [4]]]
    assert not module[0]._takes_hints
    made = copy.deepcopy(module)  # as a moving average of a model makes one
    assert made[0].table is module[0].table
    assert made[1].weight is not module[1].weight
    assert torch.equal(made(torch.tensor([1])), module(torch.tensor([1])))


def test_rows_that_nobody_trains_are_let_go(strategy):
    """Neither those of an evaluation are kept, with gradients or without, nor those of a module no optimizer has."""
    module = torch.nn.ModuleDict({"users": pst.Embedding(static(strategy)), "dense": torch.nn.Linear(DIM, 1)}).double()
    optimizer = pst.Optimizer(module, torch.optim.SGD, module["dense"].parameters(), lr=0.05, strategy=strategy)
    other, kept = rows_of(strategy)
    with torch.no_grad():
        assert not other(torch.arange(SIZE)).requires_grad
    seen = []
    for _ in range(3):
        rows = module["users"](torch.tensor([1]))
        module["dense"](rows).sum().backward(retain_graph=True)
        optimizer.step()
        of_both = rows, other(torch.tensor([1]))
        seen += [weakref.ref(each.grad_fn.next_functions[0][0].variable) for each in of_both]
    assert all(each() is not None for each in seen[-2:])
    del rows, of_both
    assert kept._gradient_holders == []
    assert optimizer._gradient_holders == [*module["dense"].parameters()]
    assert [each() for each in seen] == [None] * 6
    train(other, kept, [torch.tensor([2])])
    assert (changed_rows(module["users"].table), changed_rows(other.table)) == ([], [2])


def test_sparse_gradients_of_torch_are_rows(strategy):
    """`nn.Embedding(sparse=True)` sends the rows of a batch alone, and computes what `torch.optim` computes."""
    module, sent = torch.nn.Embedding.from_pretrained(FIRST.clone(), freeze=False, sparse=True), []
    optimizer = pst.Optimizer(module, torch.optim.Adagrad, lr=0.1, strategy=strategy)
    for batch in ids(10, (2,)):
        before = strategy.bytes_transferred[0]
        train(module, optimizer, [batch])
        sent.append(strategy.bytes_transferred[0] - before)
    assert apart(module, [alone(ids(10, (2,)), optimizer=torch.optim.Adagrad, lr=0.1, sparse=True)]) < 1e-10
    assert max(sent[1:]) < FIRST.nbytes / 2


T = torch.optim
SPARSE = {kind: kind in (T.SGD, T.Adagrad, T.SparseAdam) for kind in map(T.__dict__.get, TORCH)}
"""The classes that servers run, and whether they take sparse gradients in torch, where others get dense ones."""


@pytest.mark.parametrize("table", ["parameter", "static", "dynamic"])
@pytest.mark.parametrize("kind", SPARSE, ids=lambda kind: kind.__name__)
def test_rows_are_trained_as_torch_trains_them(strategy, kind, table):
    """Also rows that a batch does not have: as by dense gradients, but for SparseAdam, which leaves them alone."""
    if table == "parameter":
        module = torch.nn.Embedding.from_pretrained(FIRST.clone(), freeze=False, sparse=True)
    else:
        made = {"static": static, "dynamic": dynamic}[table]
        module = pst.Embedding(made(strategy, f"{table} for {kind.__name__}"))
    if table == "dynamic":
        module.table.scatter_update(ps.IndexedSlices(FIRST.numpy(), np.arange(SIZE)))
    train(module, pst.Optimizer(module, kind, lr=0.1, strategy=strategy), ids(10, (2,)))
    expected = alone(ids(10, (2,)), optimizer=kind, lr=0.1, sparse=SPARSE[kind])
    with torch.no_grad():  # torch keeps the product of NAdam's momenta in single precision
        assert apart([module(torch.arange(SIZE))], [expected]) < (1e-7 if kind is T.NAdam else 1e-10)


def test_a_collection_takes_what_looks_like_torchrecs(strategy):
    """Configurations with enumerations, and features by their methods' names, with weights. Tables are of their own
    dimension and dtype, with first values of a range, or of a function that fills a tensor or returns one."""
    options = {"embedding_dim": 2, "num_embeddings": 4, "pooling": SimpleNamespace(value="SUM")}
    near = {"weight_init_min": 1.0, "weight_init_max": 1.0 + 1e-12}
    half = SimpleNamespace(value="FP16")
    configs = [
        SimpleNamespace(name="near", feature_names=["a"], **options, **near),
        pst.EmbeddingBagConfig("filled", 2, ["b"], 4, init_fn=torch.nn.init.ones_),
        pst.EmbeddingBagConfig("made", 2, ["c"], 4, data_type=half, init_fn=lambda t: t * 0 + 3),
        pst.EmbeddingBagConfig("dynamic", 3, ["d"], data_type="BF16"),
    ]
    features = SimpleNamespace(
        keys=lambda: ["a", "b", "c", "d"],
        values=lambda: torch.tensor([1, 2, 3, 1, 2, 3]),
        lengths=lambda: torch.tensor([2, 1, 0, 1, 1, 0, 1, 0]),
        weights_or_none=lambda: torch.tensor([1.0, 2.0, 5.0, 2.0, 2.0, 1.0]),
    )
    with strategy.scope():
        weighted = pst.EmbeddingBagCollection(configs[:1], is_weighted=True)
        plain = pst.EmbeddingBagCollection(configs[1:])
    found = weighted(features).to_dict()
    del features.weights_or_none  # others do not ask for weights
    bags = plain(features)
    assert (bags.keys(), bags.length_per_key()) == (["b", "c", "d"], [2, 2, 3])
    found |= bags.to_dict()
    assert [found[name][:, 0].tolist() for name in "abc"] == [[3.0, 5.0], [0.0, 1.0], [3.0, 0.0]]
    assert [found[name].dtype for name in "bcd"] == [torch.float32, torch.float16, torch.bfloat16]


def test_a_table_that_is_not_trainable_is_not_trained(strategy):
    """The step says so, and changes no row."""
    with strategy.scope():
        table = ps.Variable(FIRST.numpy(), trainable=False)
    module = pst.Embedding(table)
    with pytest.raises(ValueError, match="not trainable"):
        train(module, pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy), ids(1))
    assert changed_rows(table) == []


def test_frozen_rows_rest(strategy):
    """By the module, or by a parameter loop over the whole; they are trained again once that is asked for."""
    module = torch.nn.Sequential(pst.Embedding(static(strategy)), torch.nn.Linear(DIM, 1).double())
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.5, strategy=strategy)

    def moved():
        before = module[0].table.numpy()
        train(module, optimizer, [torch.arange(4)])
        return not np.array_equal(module[0].table.numpy(), before)

    module[0].requires_grad_(False)
    assert not moved()
    module.requires_grad_(True)
    assert moved()
    for parameter in module[0].parameters():
        parameter.requires_grad = False
    assert not moved()
    assert [*module.state_dict()] == ["1.weight", "1.bias"]
    assert module.load_state_dict(module.state_dict()).missing_keys == []
