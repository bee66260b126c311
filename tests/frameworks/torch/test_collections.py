"""Collections of tables with TorchRec's names, and modules with the constructors of `torch.nn`, beside torch's own."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import psclient as ps
import psclient.torch as pst
from pstesting.in_process import InProcessCluster
from tests.kit.modules import apart, job, seeded

SIZE, DIM, BATCH = 12, 3, 5
NAMES = ["a", "b", "c", "d"]
POOLING = {"t0": "SUM", "t1": "MEAN", "t2": "SUM"}
FEATURES = {"t0": ["a"], "t1": ["b", "c"], "t2": ["d", "a"]}
FIRST = {name: torch.randn(SIZE, DIM, generator=torch.Generator().manual_seed(n)) for n, name in enumerate(FEATURES)}
OPTIMIZERS = {"sgd": (torch.optim.SGD, {"lr": 0.5}), "adagrad": (torch.optim.Adagrad, {"lr": 0.5})}


def jagged(seed, weighted=False, kind=pst.KeyedJaggedTensor):
    """Bags of the four features, of 0 to 3 ids."""
    source = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(NAMES) * BATCH,), generator=source)
    ids = torch.randint(0, SIZE, (int(lengths.sum()),), generator=source)
    weights = torch.rand(len(ids), generator=source) if weighted else None
    return kind.from_lengths_sync(NAMES, ids, lengths, weights)


def by_feature(features):
    """Ids, lengths and weights of each feature."""
    lengths = features.lengths().reshape(len(NAMES), -1)
    sizes = lengths.sum(1).tolist()
    weights = features.weights_or_none()
    own = [None] * len(NAMES) if weights is None else weights.split(sizes)
    return dict(zip(NAMES, zip(features.values().split(sizes), lengths, own, strict=True), strict=True))


def configs(kind, made=pst.EmbeddingBagConfig):
    found = []
    for name, own in FEATURES.items():
        options = {"pooling": POOLING[name]} if made is pst.EmbeddingBagConfig else {}
        if kind == "static":
            options |= {"num_embeddings": SIZE, "init_fn": lambda t, name=name: FIRST[name].clone()}
        found.append(made(name, DIM, own, **options))
    return found


def collection(strategy, kind, cls=pst.EmbeddingBagCollection, **options):
    """A collection whose tables have the first values; of the dynamic ones only the ids differ."""
    made = pst.EmbeddingBagConfig if cls is pst.EmbeddingBagCollection else pst.EmbeddingConfig
    with strategy.scope():
        module = cls(configs(kind, made), **options)
    if kind == "dynamic":
        for name, table in module.tables.items():
            table.scatter_update(ps.IndexedSlices(FIRST[name].numpy(), np.arange(SIZE)))
    return module


class OfTorch(torch.nn.Module):
    """Tables of torch's own, whose features are looked up one after the other."""

    def __init__(self):
        super().__init__()
        self.tables = torch.nn.ParameterDict({name: first.clone() for name, first in FIRST.items()})

    def forward(self, features):
        found, of = [], by_feature(features)
        for table, names in FEATURES.items():
            for name in names:
                ids, lengths, weights = of[name]
                offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
                how = {"mode": "sum", "per_sample_weights": weights, "include_last_offset": True}
                bags = torch.nn.functional.embedding_bag(ids, self.tables[table], offsets, **how)
                found.append(bags / lengths.clamp(min=1)[:, None] if POOLING[table] == "MEAN" else bags)
        return torch.cat(found, 1)


def train(module, optimizer, data, forward):
    for features in data:
        optimizer.zero_grad()
        (forward(module, features) - 1).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "rule", "weighted"), [("static", "sgd", False), ("dynamic", "adagrad", True), ("static", "adagrad", True)]
)
def test_a_collection_trains_as_torchs_own_bags(kind, rule, weighted):
    """Of several features a table and several tables a feature, on two servers. Tables that are alike are one."""
    data = [jagged(n, weighted) for n in range(6)]
    alone = OfTorch()
    how, options = OPTIMIZERS[rule]
    train(alone, how(alone.parameters(), **options), data, lambda module, x: module(x))

    def work(strategy, worker):
        module = collection(strategy, kind, is_weighted=weighted)
        assert len(module.rows) == 1
        optimizer = pst.Optimizer(module, how, strategy=strategy, **options)
        train(module, optimizer, data, lambda module, x: module(x).values())
        bags = module(data[0])
        assert bags.keys() == ["a@t0", "b", "c", "d", "a@t2"]
        assert torch.allclose(bags.values(), alone(data[0]), atol=1e-5)
        return {name: table.gather(np.arange(SIZE)) for name, table in module.tables.items()}

    (found,) = job(work, servers=2)
    for name, value in found.items():
        assert apart([torch.tensor(value)], [alone.tables[name]]) < 1e-5


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_rows_of_a_collection_are_torchs_own(kind):
    """Unpooled, with the ids as weights where they are asked for; two workers that have different features."""
    data = [jagged(n) for n in range(4)]

    def loss(rows):
        return torch.stack([(rows[name] - 1).square().sum() for name in sorted(rows)]).sum()

    alone = OfTorch()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for features in (first, second):
            of = by_feature(features)
            rows = {f"{n}@{t}": alone.tables[t][of[n][0]] for t, names in FEATURES.items() for n in names}
            (loss(rows) / 2).backward()
        optimizer.step()

    def work(strategy, worker):
        module = collection(strategy, kind, pst.EmbeddingCollection, need_indices=True)
        assert (module.embedding_dim(), module.need_indices(), len(module.rows)) == (DIM, True, 1)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        for features in data[worker::2]:
            optimizer.zero_grad()
            found = module(features)
            of = by_feature(features)
            for shown, own in found.items():
                ids, lengths, _ = of[shown[0]]
                assert torch.equal(own.weights(), ids)
                assert torch.equal(own.lengths(), lengths)
                assert own.values().shape == (len(ids), DIM)
            loss({name: own.values() for name, own in found.items()}).backward()
            optimizer.step()
        return {name: table.gather(np.arange(SIZE)) for name, table in module.tables.items()}

    for found in job(work, workers=2, servers=2):
        for name, value in found.items():
            assert apart([torch.tensor(value)], [alone.tables[name]]) < 1e-5


def test_a_jagged_tensor_has_torchrecs_methods():
    """Its examples one by one, and padded or shortened to one length."""
    made = pst.JaggedTensor(torch.arange(6.0).reshape(3, 2), torch.tensor([2, 0, 1]))
    assert made.offsets().tolist() == [0, 2, 2, 3]
    assert [own.tolist() for own in made.to_dense()] == [[[0, 1], [2, 3]], [], [[4, 5]]]
    assert made.to_padded_dense(padding_value=9.0)[:, 1].tolist() == [[2, 3], [9, 9], [9, 9]]
    assert made.to_padded_dense(1).tolist() == [[[0, 1]], [[0, 0]], [[4, 5]]]
    assert made.weights_or_none() is None
    with pytest.raises(ValueError, match="has no weights"):
        made.weights()


def test_a_keyed_tensor_has_torchrecs_methods():
    """Its bags lie side by side in the tensor that it was made of, and have gradients by their names."""
    values = torch.arange(6.0).reshape(2, 3).requires_grad_()
    made = pst.KeyedTensor(["a", "b"], [1, 2], values)
    assert made.values() is values
    assert made.length_per_key() == [1, 2]
    assert {name: own.tolist() for name, own in made.to_dict().items()} == {"a": [[0], [3]], "b": [[1, 2], [4, 5]]}
    (made["a"].sum() + 2 * made["b"].sum()).backward()
    assert values.grad.tolist() == [[1, 2, 2]] * 2


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_step_of_a_collection_asks_each_server_once(kind):
    """For the rows of all its tables; none at all where the features were named before the last step."""
    calls = Counter()
    with InProcessCluster(2) as cluster:
        for number, core in enumerate(cluster.cores):
            core.stimuli.record = lambda stimulus, number=number: calls.update([(number, stimulus.name)])
        with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as strategy:
            module = collection(strategy, kind)
            optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.5, strategy=strategy)
            for number in range(4):
                before = calls[0, "pull"], calls[1, "pull"]
                train(module, optimizer, [jagged(number)], lambda module, x: module(x).values())
                pulls = [calls[server, "pull"] - before[server] for server in (0, 1)]
                if number:
                    assert pulls == ([1, 1] if number == 1 else [0, 0])
                if number:
                    module.prefetch(jagged(number + 1))
                    optimizer.zero_grad()
                    module(jagged(number)).values().sum().backward()
                    optimizer.step()


def test_a_collection_takes_tables_that_exist(strategy):
    """Those of a group are looked up together, also beside modules of one of them: their gradients are one."""
    with strategy.scope():
        tables = ps.dynamic_embedding.group(["given 0", "given 1"], DIM, name="given", initializer=1.0)
        own = [pst.EmbeddingBagConfig(name, DIM, [name[-1]], table=table) for name, table in tables.items()]
        parts = {"bags": pst.EmbeddingBagCollection(own), "rows": pst.Embedding(tables["given 1"])}
        module = torch.nn.ModuleDict(parts)
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1.0, strategy=strategy)
    features = pst.KeyedJaggedTensor.from_offsets_sync(["0", "1"], torch.tensor([3, 3, 4]), torch.tensor([0, 1, 3]))
    (module["bags"](features).values().sum() + 10 * module["rows"](torch.tensor([4, 5])).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    module["rows"](torch.tensor([5])).sum().backward()
    optimizer.step()
    found = {name: table.gather([3, 4, 5])[:, 0].tolist() for name, table in tables.items()}
    assert found == {"given 0": [0.0, 1.0, 1.0], "given 1": [0.0, -10.0, -10.0]}
    assert len(module["bags"].rows) == 1


def test_tables_of_a_collection_can_be_read_one_by_one(strategy):
    """As arrays where they have a size, by keys where they have not; and copies of the module have the same tables."""
    with strategy.scope():
        module = pst.EmbeddingBagCollection(
            [pst.EmbeddingBagConfig(f"read {n}", 2, [n], 3 + n, init_fn=lambda t, n=n: t * 0 + n) for n in range(3)]
        )
    assert [table.numpy().tolist() for table in module.tables.values()] == [[[n] * 2] * (3 + n) for n in range(3)]
    assert np.asarray(module.tables["read 2"].lookup([4, 0])).tolist() == [[2, 2], [2, 2]]
    with pytest.raises(ValueError, match=r"table 'read 1'.*id 4 at index 1 is not a row of 4"):
        module.tables["read 1"].gather([3, 4])
    made = copy.deepcopy(module)
    assert made.tables["read 1"] is module.tables["read 1"]
    assert [*made.parameters()] == [*module.parameters()]
    rows = pst.Embedding(module.tables["read 1"])
    optimizer = pst.Optimizer(torch.nn.ModuleList([module, rows]), torch.optim.SGD, lr=1.0, strategy=strategy)
    rows(torch.tensor([2])).sum().backward()
    optimizer.step()
    assert [table.numpy()[:, 0].tolist() for table in module.tables.values()] == [[0] * 3, [1, 1, 0, 1], [2] * 5]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_collection_is_saved_and_restored(kind, tmp_path):
    """On another number of servers."""

    def save(strategy, worker):
        module = collection(strategy, kind)
        optimizer = pst.Optimizer(module, torch.optim.Adagrad, lr=0.5, strategy=strategy)
        train(module, optimizer, [jagged(1)], lambda module, x: module(x).values())
        checkpoint = ps.train.Checkpoint(optimizer=optimizer)
        checkpoint.save("kept/ckpt")
        checkpoint.sync()
        train(module, optimizer, [jagged(2)], lambda module, x: module(x).values())
        return {name: table.gather(np.arange(SIZE)) for name, table in module.tables.items()}

    def restore(strategy, worker):
        with strategy.scope():
            module = pst.EmbeddingBagCollection(configs(kind))
        optimizer = pst.Optimizer(module, torch.optim.Adagrad, lr=0.5, strategy=strategy)
        ps.train.Checkpoint(optimizer=optimizer).restore("kept")
        train(module, optimizer, [jagged(2)], lambda module, x: module(x).values())
        return {name: table.gather(np.arange(SIZE)) for name, table in module.tables.items()}

    (before,) = job(save, servers=2, root=tmp_path)
    (after,) = job(restore, servers=1, root=tmp_path)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


def test_bad_input_of_a_collection_loses_nothing():
    """An id that is no row, and a gradient that is not finite: the step raises, no row changes, and the next one is
    made."""

    def work(strategy, worker):
        module = collection(strategy, "static")
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.5, strategy=strategy)
        values = lambda: np.stack([table.numpy() for table in module.tables.values()])  # noqa: E731
        before, good = values(), jagged(1)
        bad = pst.KeyedJaggedTensor(NAMES, torch.tensor([1, 1, SIZE, 1]), torch.ones(4, 1, dtype=torch.int64))
        with pytest.raises(ValueError, match=rf"table 't1'.*id {SIZE} at index 0 is not a row of {SIZE}"):
            module(bad)
        with pytest.raises(ps.errors.PSError, match=r"t0_group.*finite|finite.*t0_group"):
            train(module, optimizer, [good], lambda module, x: module(x).values() * float("nan"))
        assert np.array_equal(values(), before)
        optimizer.zero_grad()
        train(module, optimizer, [good], lambda module, x: module(x).values())
        return bool(np.isfinite(values()).all() and not np.array_equal(values(), before))

    assert job(work, consistency=ps.Sync(nonfinite="raise")) == [True]


def packages():
    """This package; and TorchRec, which needs an fbgemm-gpu-cpu built for the torch that is there."""
    try:
        import torchrec
    except ImportError:
        return [pst]
    return [pst, torchrec]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_features_and_configurations_of_torchrec_are_taken(strategy, package):
    """Of its own classes, where it is installed, and of those that have its names here."""
    words = getattr(package, "PoolingType", SimpleNamespace(SUM="SUM", MEAN="MEAN"))
    made = []
    for name, own in FEATURES.items():
        options = {"name": f"{package.__name__} {name}", "embedding_dim": DIM, "num_embeddings": SIZE}
        options |= {"pooling": getattr(words, POOLING[name]), "init_fn": lambda t, name=name: FIRST[name].clone()}
        made.append(package.EmbeddingBagConfig(feature_names=own, **options))
    features = jagged(3, weighted=True, kind=package.KeyedJaggedTensor)
    with strategy.scope():
        module = pst.EmbeddingBagCollection(made, is_weighted=True)
    assert len(module.rows) == 1
    assert torch.allclose(module(features).values(), OfTorch()(features), atol=1e-6)


# ---- Constructors of torch.nn ----

IDS = [torch.randint(0, SIZE, (4, 3), generator=torch.Generator().manual_seed(n)) for n in range(5)]
LARGE = torch.full((SIZE, DIM), 2.0) + torch.arange(SIZE * DIM).reshape(SIZE, DIM) / 10
MODULES = [
    ("Embedding", {}),
    ("Embedding", {"padding_idx": -2}),
    ("Embedding", {"scale_grad_by_freq": True}),
    ("Embedding", {"max_norm": 1.5}),
    ("Embedding", {"max_norm": 4.0, "norm_type": 1.0, "sparse": True}),
    ("EmbeddingBag", {"mode": "sum", "max_norm": 2.0, "norm_type": float("inf")}),
    ("EmbeddingBag", {"mode": "mean", "padding_idx": 3, "scale_grad_by_freq": True}),
    ("EmbeddingBag", {"mode": "max", "max_norm": 1.0, "norm_type": 3.0}),
    ("EmbeddingBag", {}),
]


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize(("kind", "options"), MODULES)
def test_a_module_made_by_sizes_is_torchs_own(strategy, kind, options, rule):
    """Its first values by torch's seed, and each step: so do rows that are longer than `max_norm`."""
    how, rate = OPTIMIZERS[rule]
    made = lambda package: seeded(5, lambda: getattr(package, kind)(SIZE, DIM, **options))  # noqa: E731
    given = lambda package: getattr(package, kind).from_pretrained(LARGE, freeze=False, **options)  # noqa: E731
    for make in (made, given):
        own = make(torch.nn)
        with strategy.scope():
            module = make(pst)
        assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (SIZE, DIM, own.padding_idx)
        optimizer = pst.Optimizer(module, how, strategy=strategy, **rate)
        if own.sparse and how is torch.optim.Adagrad:
            own.sparse = False
        theirs = how(own.parameters(), **rate)
        for ids in IDS:
            found, expected = module(ids), own(ids)
            assert torch.allclose(found, expected, atol=1e-5)
            for each, loss in ((optimizer, found), (theirs, expected)):
                each.zero_grad()
                (loss - 1).square().sum().backward()
                each.step()
        with torch.no_grad():
            every = torch.arange(SIZE)[:, None]
            assert torch.allclose(module(every), own(every), atol=1e-5)


def test_pretrained_rows_are_frozen_until_they_are_asked_for(strategy):
    """As torch's; and their memory is not shared with the values that were given."""
    values = LARGE.clone()
    with strategy.scope():
        module = pst.EmbeddingBag.from_pretrained(values, mode="sum", name="kept")
    values.zero_()
    assert module.table.name == "kept"
    assert not module(torch.tensor([[1]])).requires_grad
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1.0, strategy=strategy)
    module.requires_grad_(True)
    module(torch.tensor([[1, 1]])).sum().backward()
    optimizer.step()
    assert np.allclose(module.table.numpy()[:2], LARGE[:2].numpy() - [[0], [2]])


def test_sqrtn_is_that_of_lookups_of_bags(strategy):
    """Values and gradients, with weights or without; zeros for an empty bag."""
    with strategy.scope():
        module = pst.EmbeddingBag(SIZE, DIM, mode="sqrtn")
    ids, offsets = torch.tensor([1, 2, 1, 5]), torch.tensor([0, 3, 3])
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1.0, strategy=strategy)
    for weights in (None, torch.tensor([0.5, 2.0, 1.0, 3.0])):
        given = None if weights is None else [weights[:3].numpy(), np.zeros(0), weights[3:].numpy()]
        bags = [ids[:3].numpy(), np.zeros(0, np.int64), ids[3:].numpy()]
        expected = ps.nn.embedding_lookup_sparse(module.table, bags, given, combiner="sqrtn")
        before, d = module.table.numpy().copy(), np.ones((3, DIM), np.float32)
        found = module(ids, offsets, weights)
        assert np.allclose(found.detach().numpy(), np.asarray(expected), atol=1e-6)
        optimizer.zero_grad()
        found.sum().backward()
        optimizer.step()
        gradient = expected.gradient(d)
        moved = before - module.table.numpy()
        assert np.allclose(moved[gradient.indices], gradient.values, atol=1e-6)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_a_dynamic_table_keeps_a_norm(rule):
    """Of two workers that look up the same long rows: each is shortened once, by the step that trains it."""
    rules = {"sgd": ps.optimizers.SGD, "adagrad": ps.optimizers.Adagrad, "adam": ps.optimizers.LazyAdam}
    limit = 2.0

    def work(strategy, worker):
        with strategy.scope():
            table = ps.dynamic_embedding.get_variable("t", DIM, initializer=3.0)
        module = pst.Embedding(table, max_norm=limit)
        optimizer = pst.Optimizer(module, rules[rule](0.5), strategy=strategy)
        rows = module(torch.tensor([7, 8 + worker]))
        assert torch.allclose(rows.norm(dim=1), torch.tensor(limit))
        (0 * rows.sum()).backward()
        optimizer.step()
        return table.gather([7, 8, 9, 10])

    for found in job(work, workers=2, servers=2):
        assert np.allclose(np.linalg.norm(found, axis=1), [limit, limit, limit, 27**0.5])
