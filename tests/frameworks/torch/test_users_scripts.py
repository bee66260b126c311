"""What scripts of PyTorch do besides backward and step: each works as with torch alone, or says what is wrong."""

from __future__ import annotations

import collections
import copy

import numpy as np
import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, twin
from tests.kit.strategies import refused

STEPS = 6


def two(strategy, module, kind=torch.optim.SGD, **options):
    """A module with its optimizer on servers, and its twin with torch's own."""
    alone = twin(module)
    return (module, pst.Optimizer(module, kind, strategy=strategy, **options)), (
        alone,
        kind(alone.parameters(), **options),
    )


def conv():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(12, 1)).double()


def loss_of(module, number):
    """Another loss in each step."""
    x = torch.linspace(0, number + 1, 36, dtype=next(module.parameters()).dtype).reshape(2, 2, 3, 3)
    return module(x).square().mean()


def trained(module, optimizer, meddle, steps=STEPS):
    for number in range(steps):
        if number == 2:
            meddle(module)
        optimizer.zero_grad()
        loss_of(module, number).backward()
        optimizer.step()


# ---- Memory is torch's ----


def of_each(change):
    def meddle(module):
        for parameter in module.parameters():
            change(parameter)

    return meddle


def point_elsewhere(parameter):
    parameter.data = parameter.data.clone()


def write_by_numpy(parameter):
    parameter.detach().numpy()[...] *= 0.5


def write_by_another(parameter):
    torch.from_numpy(parameter.detach().numpy().reshape(-1)).mul_(0.5)


MEDDLE = {
    "share_memory": lambda module: module.share_memory(),
    "share_memory of a state_dict": lambda module: [value.share_memory_() for value in module.state_dict().values()],
    "share_memory of gradients": of_each(lambda p: p.grad.share_memory_()),
    "another layout": lambda module: module.to(memory_format=torch.channels_last),
    "another dtype, and back": lambda module: module.float().double(),
    "parameters elsewhere": of_each(point_elsewhere),
    "gradients elsewhere": of_each(lambda p: setattr(p.grad, "data", p.grad.data.clone())),
    "a write through .data": of_each(lambda p: p.data.clamp_(-0.01, 0.01)),
    "a write by NumPy": of_each(write_by_numpy),
    "a write by another tensor": of_each(write_by_another),
    "a write that torch counts": of_each(lambda p: torch.nn.init.constant_(p, 0.1)),
}


@pytest.mark.parametrize("way", MEDDLE)
def test_memory_moves_and_is_written_by_any_way(strategy, way):
    """Parameters and gradients are torch's own: what a script does to them is taken over by the next step."""
    ours, theirs = two(strategy, conv(), lr=0.05, momentum=0.9)
    for module, optimizer in (ours, theirs):
        trained(module, optimizer, MEDDLE[way])
    assert apart(ours[0], theirs[0]) < 1e-10


def test_a_write_to_a_large_parameter_is_noticed(strategy):
    """Of more than 4 MiB samples are compared in each step, which a write to all elements cannot pass."""
    module = torch.nn.Linear(1100, 1100, bias=False)
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.0, strategy=strategy)
    for number in range(3):
        optimizer.zero_grad()
        module(torch.ones(1, 1100)).sum().backward()
        optimizer.step()
        assert torch.equal(module.weight.detach(), torch.full((1100, 1100), float(number))) == (number > 0)
        module.weight.data.fill_(number + 1.0)


def test_a_restore_writes_where_parameters_are(strategy, in_tmp_path):
    """Their memory may have moved since the last step."""
    module = conv()
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    trained(module, optimizer, lambda _: None, 2)
    saved = twin(module)
    checkpoint = ps.train.Checkpoint(model=module)
    path = checkpoint.save("moved/ckpt")
    checkpoint.sync()
    trained(module, optimizer, lambda _: None, 2)
    module.share_memory()
    checkpoint.restore(path)
    trained(module, optimizer, lambda _: None, 0)
    optimizer._begin_batch()
    assert apart(module, saved) == 0


# ---- State beside torch's own ----


def clear_by_module(module, optimizer):
    module.zero_grad()


def clear_in_place(module, optimizer):
    module.zero_grad(set_to_none=False)


def clear_one_by_one(module, optimizer):
    for parameter in module.parameters():
        parameter.grad = None


@pytest.mark.parametrize("clear", [clear_by_module, clear_in_place, clear_one_by_one])
@pytest.mark.parametrize("rows", [False, True], ids=["parameters", "rows"])
def test_gradients_are_cleared_in_any_way(strategy, clear, rows):
    """A step may be left out: gradients of before are cleared, or add up where they are not."""
    torch.manual_seed(0)
    first = torch.randn(5, 3, dtype=torch.float64)
    found = []
    for on_servers in (True, False):
        if on_servers and rows:
            with strategy.scope():
                table = ps.Variable(first.numpy(), name=f"rows {clear.__name__}")
            bag = pst.Embedding(table)
        else:
            bag = torch.nn.Embedding.from_pretrained(first.clone(), freeze=False)
        torch.manual_seed(1)
        module = torch.nn.Sequential(bag, torch.nn.Linear(3, 1).double())
        if on_servers:
            optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        else:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(6):
            if number != 4:  # gradients of the fourth and the fifth batch add up
                clear(module, optimizer)
            (module(torch.tensor([number % 5, (number + 2) % 5])) * (number + 1)).sum().backward()
            if number not in (1, 3):
                optimizer.step()
        weights = torch.tensor(table.numpy()) if on_servers and rows else bag.weight.detach()
        found.append((weights, module[1].weight.detach()))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


HYPERPARAMETERS = {
    "momentum": (torch.optim.SGD, {"momentum": 0.5}, {"momentum": 0.9, "nesterov": True}),
    "dampening": (torch.optim.SGD, {}, {"momentum": 0.9, "dampening": 0.5}),
    "centered": (torch.optim.RMSprop, {}, {"centered": True, "momentum": 0.4}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, {}),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_a_group_has_state_that_others_have_not(strategy, name):
    """Also where its hyperparameters come with a state that is loaded, torch's own or one of ours."""
    kind, first, last = HYPERPARAMETERS[name]

    def groups(module):
        return [{"params": module[0].parameters(), **first}, {"params": module[2].parameters(), **last}]

    module = conv()
    alone = twin(module)
    ours, theirs = pst.Optimizer(module, kind, groups(module), lr=0.05, strategy=strategy), kind(groups(alone), lr=0.05)
    for each in ((module, ours), (alone, theirs)):
        trained(*each, lambda _: None, 3)
    assert apart(module, alone) < 1e-10
    for state in (theirs.state_dict(), ours.state_dict()):
        again = twin(alone)
        loaded = pst.Optimizer(
            again, kind, [{"params": p.parameters()} for p in (again[0], again[2])], lr=1.0, strategy=strategy
        )
        loaded.load_state_dict(state)
        expected = twin(alone)
        rest = kind([{"params": p.parameters()} for p in (expected[0], expected[2])], lr=1.0)
        rest.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for each in ((again, loaded), (expected, rest)):
            trained(*each, lambda _: None, 3)
        assert apart(again, expected) < 1e-10


def test_frozen_rows_rest(strategy):
    """By the module, or by a parameter loop over the whole; they are trained again once that is asked for."""
    with strategy.scope():
        table = ps.Variable(np.ones((4, 2), "float32"), name="frozen")
    net = torch.nn.Sequential(pst.Embedding(table), torch.nn.Linear(2, 1))
    optimizer = pst.Optimizer(net, torch.optim.SGD, lr=0.5, strategy=strategy)

    def step():
        optimizer.zero_grad()
        net(torch.arange(4)).sum().backward()
        optimizer.step()
        return bool((table.numpy() == 1).all())

    net[0].requires_grad_(False)
    assert step()
    net.requires_grad_(True)
    assert not step()
    with strategy.scope():
        table.assign(np.ones((4, 2), "float32"))
    for parameter in net[0].parameters():
        parameter.requires_grad = False
    assert step()
    assert [*net.state_dict()] == ["1.weight", "1.bias"]
    assert net.load_state_dict(net.state_dict()).missing_keys == []


def test_layers_that_come_later_are_trained(strategy):
    """Their parameters as with torch alone, their buffers are in checkpoints; a stranger's parameter is refused."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    ours, theirs = two(strategy, module, torch.optim.Adam, lr=0.01)
    for net, optimizer in (ours, theirs):
        torch.manual_seed(2)
        for number in range(5):
            if number == 2:
                later = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
                net.append(later)
                optimizer.add_param_group({"params": [*later.parameters()], "lr": 0.02})
            optimizer.zero_grad()
            net(torch.linspace(0, 1, 12).reshape(3, 4)).square().mean().backward()
            optimizer.step()
    assert apart(ours[0], theirs[0]) < 1e-6
    assert "1.0.running_mean" in ours[1]._trackable_children()["buffers"]
    stranger = torch.nn.Linear(2, 2)
    refused(
        ValueError, "add its layer to the module first", lambda: ours[1].add_param_group({"params": stranger.weight})
    )


def test_a_module_without_servers_is_not_in_a_checkpoint(strategy):
    """A parameter that nothing trains on servers is named; a module of torch's own optimizer has none."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    pst_optimizer = pst.Optimizer(net, torch.optim.SGD, net[0].parameters(), lr=0.1, strategy=strategy)
    with strategy.scope():
        refused(
            ValueError,
            r"parameter '1\.weight' of a module in a checkpoint is not trained by a psclient\.torch\.Optimizer",
            lambda: ps.train.Checkpoint(model=net),
        )
    assert pst_optimizer.variables


# ---- What is told ----


def test_lengths_and_weights_fit_the_values(strategy):
    """Too few, too many, below 0, not the same for each key; weights for each value."""
    with strategy.scope():
        config = pst.EmbeddingBagConfig(name="bags of users", embedding_dim=2, feature_names=["a", "b"])
        bags = pst.EmbeddingBagCollection([config], is_weighted=True)
    values, ones = torch.tensor([1, 2, 3]), torch.ones(3)
    for lengths, weights, words in (
        ([1, 1], ones, "lengths of 'a', 'b' add up to 2, but there are 3 values"),
        ([2, 2], ones, "add up to 4, but there are 3 values"),
        ([4, -1], ones, "at least 0"),
        ([1, 1, 1], ones, "2 keys have 3 lengths"),
        ([2, 1], torch.ones(2), "2 weights for 3 values"),
    ):
        features = pst.KeyedJaggedTensor(["a", "b"], values, torch.tensor(lengths), weights)
        refused(ValueError, words, lambda features=features: bags(features))
    assert bags(pst.KeyedJaggedTensor(["a", "b"], values, torch.tensor([2, 1]), ones)).values().shape == (1, 4)


def test_sizes_in_place_of_a_table_are_told():
    """As torch's modules are called: the message says what to give."""
    for make in (
        lambda: pst.Embedding(10, 4),
        lambda: pst.Embedding(num_embeddings=10, embedding_dim=4),
        lambda: pst.EmbeddingBag(10, 4, mode="sum"),
        lambda: pst.EmbeddingBag(num_embeddings=10, embedding_dim=4),
    ):
        refused(TypeError, r"takes a table instead of sizes.*ps\.Variable", make)


def test_a_large_parameter_with_sparse_gradients_is_told(strategy, caplog):
    """It comes back as a whole; a small one, and one with dense gradients, is not worth a word."""
    for size, sparse, told in ((70_000, True, 1), (70_000, False, 0), (100, True, 0)):
        caplog.clear()
        pst.Optimizer(torch.nn.EmbeddingBag(size, 4, sparse=sparse), torch.optim.SGD, lr=0.1, strategy=strategy)
        assert sum("the whole parameter" in each.getMessage() for each in caplog.records) == told


# ---- Conversions ----


def test_batches_come_as_they_are(strategy):
    """Any dtype and layout of torch and NumPy, mappings that are no dicts, and texts."""
    x = np.arange(16, dtype="float32").reshape(8, 2)
    names = [f"image {number}.png" for number in range(8)]
    read_only = x.copy()
    read_only.flags.writeable = False
    optimizer = pst.Optimizer(torch.nn.Linear(2, 1), torch.optim.SGD, lr=0.1, strategy=strategy)
    for given in (
        torch.from_numpy(x).bfloat16(),
        torch.from_numpy(x).requires_grad_(),
        torch.nn.Parameter(torch.from_numpy(x)),
        torch.from_numpy(x).to(torch.float8_e5m2),
        torch.from_numpy(x).t().contiguous().t(),
        x[:, ::-1],
        x[::-1],
        x.astype(">f4"),
        x.astype(">i8"),
        read_only,
    ):
        batch = collections.UserDict(image=given, nested={"names": names, "flag": x[:, 0] > 2})
        (found,) = pst.Loader([batch], optimizer)
        assert isinstance(found, collections.UserDict)
        expected = (
            given.detach()
            if isinstance(given, torch.Tensor)
            else torch.tensor(given.astype(given.dtype.newbyteorder("=")).copy())
        )
        assert found["image"].dtype == expected.dtype
        assert torch.equal(found["image"].double(), expected.double())
        assert found["nested"]["names"] == names
        assert found["nested"]["flag"].tolist() == (x[:, 0] > 2).tolist()


def test_what_is_no_array_is_told_by_its_field(strategy):
    """With the remedy, before the loop goes on."""
    optimizer = pst.Optimizer(torch.nn.Linear(2, 1), torch.optim.SGD, lr=0.1, strategy=strategy)
    sparse = torch.eye(4).to_sparse()
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    masked = np.ma.masked_array(np.ones(4), [True, False, False, False])
    for given, words in (
        (sparse, "is sparse.*to_dense"),
        (quantized, "quantized.*dequantize"),
        (masked, "masked.*filled"),
    ):
        refused(
            TypeError,
            rf"its field at \['x'\]\[1\] is not an array: .*{words}",
            lambda given=given: [*pst.Loader([{"x": (torch.ones(4), given)}], optimizer)],
        )


def test_torch_takes_what_was_reduced(strategy):
    """As a number or an array of NumPy: in tensors that are made of it, and beside tensors with gradients."""
    for value in (np.float32(2.5), np.arange(3, dtype="float64")):
        reduced = strategy.reduce("SUM", value, axis=None)
        for make in (torch.tensor, torch.as_tensor, torch.asarray):
            made = make(reduced)
            assert made.tolist() == value.tolist()
            made.fill_(7)  # is torch's own
            assert np.asarray(reduced).tolist() == value.tolist()
        weight = torch.ones(3, requires_grad=True)
        for found in (weight * reduced, reduced * weight, weight + reduced):
            assert isinstance(found, torch.Tensor)
            assert found.dtype is (torch.float32 if value.ndim == 0 else torch.float64)
        (weight * reduced).sum().backward()
        assert weight.grad.tolist() == np.broadcast_to(value, 3).tolist()


def test_values_that_need_a_gradient_are_taken(strategy):
    """Of parameters, losses and tensors in half precision, wherever an array is taken."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    for given in (parameter, parameter.bfloat16(), (parameter * 1).half(), torch.conj(parameter + 0j).real):
        with strategy.scope():
            made = ps.Variable(given)
            made.assign(given * 2)
        assert np.asarray(made.numpy(), "float32").tolist() == [2, 4]
        assert np.asarray(strategy.reduce("SUM", given.sum(), axis=None), "float32") == 3
