"""What scripts of PyTorch do besides backward and step: each works as with torch alone."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart

STEPS = 6


def conv():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(12, 1)).double()


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
def test_memory_moves_and_is_written_by_any_way(pair, way):
    """Parameters and gradients are torch's own: what a script does to them is taken over by the next step."""
    ours, theirs = pair(conv(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for module, optimizer in (ours, theirs):
        for number in range(STEPS):
            if number == 2:
                MEDDLE[way](module)
            x = torch.linspace(0, number + 1, 36, dtype=next(module.parameters()).dtype).reshape(2, 2, 3, 3)
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
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


# ---- State beside torch's own ----


CLEAR = {
    "the module": lambda module: module.zero_grad(),
    "in place": lambda module: module.zero_grad(set_to_none=False),
    "one by one": lambda module: [setattr(p, "grad", None) for p in module.parameters()],
}


@pytest.mark.parametrize("clear", CLEAR)
def test_gradients_are_cleared_in_any_way(strategy, clear):
    """Of parameters and rows. A step may be left out: gradients of before are cleared, or add up where they are not."""
    source = torch.Generator().manual_seed(0)
    first, head = (torch.randn(*shape, generator=source, dtype=torch.float64) for shape in ((5, 3), (1, 3)))
    with strategy.scope():
        ours = torch.nn.ModuleList([pst.Embedding(ps.Variable(first.numpy(), name=f"rows {clear}"))])
    theirs = torch.nn.ModuleList([torch.nn.Embedding.from_pretrained(first.clone(), freeze=False)])
    for module in (ours, theirs):
        module.head = torch.nn.Parameter(head.clone())
        if module is ours:
            optimizer = pst.Optimizer(ours, torch.optim.SGD, lr=0.1, strategy=strategy)
        else:
            optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for number in range(6):
            if number != 4:  # gradients of the fourth and the fifth batch add up
                CLEAR[clear](module)
            (module[0](torch.tensor([number % 5, (number + 2) % 5])) * module.head * (number + 1)).sum().backward()
            if number not in (1, 3):
                optimizer.step()
    rows = torch.tensor(ours[0].table.numpy())
    assert apart([rows, ours.head.detach()], [theirs[0].weight.detach(), theirs.head.detach()]) < 1e-12


def test_layers_that_come_later_are_trained(pair):
    """Their parameters as with torch alone, their buffers are in checkpoints. A group that is refused changes nothing:
    with a parameter of another module, with one of none, or with what is none."""
    (module, ours), theirs = pair(torch.nn.Sequential(torch.nn.Linear(4, 4)).double(), torch.optim.Adam, lr=0.01)
    for net, optimizer in ((module, ours), theirs):
        torch.manual_seed(2)
        for number in range(5):
            if number == 2:
                net.append(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double())
                later = [*net[1].parameters()]
                others = [torch.nn.Linear(2, 2).weight], [torch.nn.Parameter(torch.ones(2))], [3]
                for wrong in others if optimizer is ours else ():
                    with pytest.raises((ValueError, TypeError)):
                        optimizer.add_param_group({"params": [*later[:1], *wrong]})
                optimizer.add_param_group({"params": later, "lr": 0.02})
            optimizer.zero_grad()
            net(torch.linspace(0, 1, 12).double().reshape(3, 4)).square().mean().backward()
            optimizer.step()
    assert apart(module, theirs[0]) < 1e-10
    assert "1.0.running_mean" in ours._trackable_children()["buffers"]


# ---- Batches ----


def test_batches_come_as_they_are(strategy):
    """Any dtype and layout of torch and NumPy, mappings that are no dicts, and texts."""
    x = np.arange(16, dtype="float32").reshape(8, 2)
    names = [f"image {number}.png" for number in range(8)]
    read_only = x.copy()
    read_only.flags.writeable = False
    optimizer = pst.Optimizer(torch.nn.Linear(2, 1), torch.optim.SGD, lr=0.1, strategy=strategy)
    t = torch.from_numpy(x)
    tensors = [t.bfloat16(), t.clone().requires_grad_(), torch.nn.Parameter(t), t.to(torch.float8_e5m2)]
    arrays = [x[:, ::-1], x[::-1], x.astype(">f4"), x.astype(">i8"), read_only]
    for given in (*tensors, t.t().contiguous().t(), *arrays):
        batch = collections.UserDict(image=given, nested={"names": names, "flag": x[:, 0] > 2})
        (found,) = pst.Loader([batch], optimizer)
        assert isinstance(found, collections.UserDict)
        native = given if isinstance(given, torch.Tensor) else given.astype(given.dtype.newbyteorder("="))
        expected = torch.as_tensor(native.copy() if native is not given else given).detach()
        assert found["image"].dtype == expected.dtype
        assert torch.equal(found["image"].double(), expected.double())
        assert found["nested"]["names"] == names
        assert found["nested"]["flag"].tolist() == (x[:, 0] > 2).tolist()
