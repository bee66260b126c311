"""`DiLoCo` and `LocalSGD`: modules of PyTorch; `tests/strategies/test_local_steps.py` has the rest."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, batches, job, mlp, share, values

DATA = batches(12)
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def inner_step(net, inner, x, y):
    inner.zero_grad()
    (net(x) - y).square().mean().backward()
    inner.step()


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def trained(strategy, worker, data=DATA, workers=2, dtype=torch.float64, made=pst.DiLoCo, tokens=False, **options):
    """A network, what exchanges it, and the inner optimizer, after a step with each batch."""
    net = mlp(dtype)
    inner = adamw(net)
    outer = made(net, inner, strategy=strategy, **options)
    for number, (x, y) in enumerate(share(data, worker, workers)):
        inner_step(net, inner, x.to(dtype), y.to(dtype))
        outer.step(*([3 + worker + number] if tokens else []))
    return net, outer, inner


class Nesterov:
    """torch's SGD with the operations of its documentation, one by one: torch itself joins some of them."""

    def __init__(self, parameters, lr=0.7, momentum=0.9):
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum
        self.kept = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        for number, p in enumerate(self.parameters):
            self.kept[number] = self.momentum * self.kept[number] + p.grad
            p.copy_(p - self.lr * (p.grad + self.momentum * self.kept[number]))


def simulated(workers, every, kind=Nesterov, dtype=torch.float64, tokens=False, data=DATA):
    """The outer module, of a loop in one process with optimizers of torch alone."""
    outer, nets = mlp(dtype), [mlp(dtype) for _ in range(workers)]
    inners, rule, counts = [adamw(net) for net in nets], kind(outer.parameters()), [0.0] * workers
    for number in range(len(data)):
        for worker, (net, inner) in enumerate(zip(nets, inners, strict=True)):
            x, y = share(data, worker, workers)[number]
            inner_step(net, inner, x.to(dtype), y.to(dtype))
            counts[worker] += 3 + worker + number if tokens else 1 / every
        if (number + 1) % every == 0:
            for p, *own in zip(outer.parameters(), *(net.parameters() for net in nets), strict=True):
                moved = [(p.detach() - each.detach()) * weight for each, weight in zip(own, counts, strict=True)]
                p.grad = sum(moved[1:], moved[0]) / sum(counts)
            rule.step()
            counts = [0.0] * workers
            for net in nets:
                net.load_state_dict(outer.state_dict())
    return outer


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 0.0), (torch.float32, 1e-6)])
def test_workers_do_what_one_process_of_torch_does(tokens, dtype, error):
    """DiLoCo: inner AdamW, outer Nesterov; with equal weights and by tokens."""

    def work(strategy, worker):
        net, _, _ = trained(
            strategy, worker, dtype=dtype, made=partial(pst.DiLoCo, outer=torch.optim.SGD, **OUTER), tokens=tokens,
            sync_every=4,
        )  # fmt: skip
        return values(net)

    expected = simulated(2, 4, dtype=dtype, tokens=tokens)
    for found in job(work, 2, 2):
        assert apart(found, values(expected)) <= error


def test_local_sgd_averages():
    def work(strategy, worker):
        net, _, _ = trained(strategy, worker, made=pst.LocalSGD, sync_every=3)
        return values(net)

    expected = simulated(2, 3, partial(Nesterov, lr=1.0, momentum=0.0))
    assert all(apart(found, values(expected)) == 0 for found in job(work, 2, 2))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_classes_of_torch_are_outer_optimizers(name):
    outer = getattr(torch.optim, name)

    def work(strategy, worker):
        net, _, _ = trained(strategy, worker, made=partial(pst.DiLoCo, outer=outer, lr=0.1), sync_every=4)
        return values(net)

    expected = simulated(2, 4, partial(outer, lr=0.1))
    assert all(apart(found, values(expected)) < 1e-12 for found in job(work, 2, 1))


def test_fragments_are_modules_or_of_equal_size(strategy):
    """Either way one is exchanged after each H / P steps, and the other parameters stay the worker's own."""
    for fragments in (2, lambda net: [net[0], net[2]]):
        net = mlp()
        inner = adamw(net)
        cut = fragments(net) if callable(fragments) else fragments
        options = {"lr": 0.5, "sync_every": 4, "prefix": "m/" if callable(fragments) else ""}
        outer = pst.DiLoCo(net, inner, torch.optim.SGD, fragments=cut, strategy=strategy, **options)
        moved = []
        for x, y in DATA[:8]:
            inner_step(net, inner, x, y)
            before = values(net)
            merged = outer.step()
            moved.append(tuple(not torch.equal(a, b) for a, b in zip(before, values(net), strict=True)))
            assert merged == any(moved[-1])
        first = (True, callable(fragments), False, False)  # of 66 numbers the first layer's weight has 35
        second, nothing = tuple(not own for own in first), (False,) * 4
        assert moved == [nothing, second, nothing, first] * 2


def test_the_outer_learning_rate_may_change(strategy):
    """`param_groups` are those of the outer optimizer, as in torch; of all fragments."""
    net = mlp()
    inner = torch.optim.SGD(net.parameters(), lr=0.0)
    outer = pst.DiLoCo(net, inner, torch.optim.SGD, lr=1.0, sync_every=2, fragments=2, strategy=strategy)
    start = values(net)
    outer.param_groups[0]["lr"] = 0.5
    for _ in range(2):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(1.0)
        outer.step()
    expected = [start[0] + 1.0, *(p + 1.5 for p in start[1:])]  # half of two steps; half of the first, and the second
    assert apart(values(net), expected) < 1e-12


def test_a_checkpoint_and_a_workers_own_state_continue_with_the_same_bits(tmp_path):
    """The first has outer parameters and their optimizer, the second one the inner optimizer."""
    made = partial(pst.DiLoCo, outer=torch.optim.SGD, sync_every=4, **OUTER)

    def work(resumes, strategy, worker):
        net, outer, inner = trained(strategy, worker, [] if resumes else DATA[:8], made=made)
        checkpoint, file = ps.train.Checkpoint(outer=outer), tmp_path / f"own-{worker}.pt"
        if resumes:
            checkpoint.restore("ckpt")
            outer.load_state_dict(torch.load(file))
            assert outer.local_step == 8
        else:
            checkpoint.save("ckpt/one")
            checkpoint.sync()
            torch.save(outer.state_dict(), file)
        for x, y in share(DATA[8:], worker, 2):
            inner_step(net, inner, x, y)
            outer.step()
        return values(net)

    for resumes in (False, True):
        for found in job(partial(work, resumes), 2, 2, tmp_path):
            assert apart(found, values(simulated(2, 4))) == 0


def test_an_inner_optimizer_has_to_train_the_same_parameters(strategy):
    net, other = mlp(), mlp()
    part = torch.optim.AdamW(net[0].parameters(), lr=0.1)
    for inner, why in ((part, "does not train 2.weight, 2.bias"), (adamw(other), "trains 4 parameters that are not")):
        with pytest.raises(ValueError, match=why):
            pst.DiLoCo(net, inner, torch.optim.SGD, lr=0.5, strategy=strategy)
    both = [part, torch.optim.SGD(net[2].parameters(), lr=0.1)]
    assert pst.DiLoCo(net, both, torch.optim.SGD, lr=0.5, prefix="both/", strategy=strategy).local_step == 0


def test_what_cannot_be_exchanged_is_refused(strategy):
    net = mlp()
    inner = adamw(net)
    made = partial(pst.DiLoCo, net, inner, torch.optim.SGD, lr=0.5, strategy=strategy)
    for options, why in (
        ({"sync_every": 4, "fragments": 2, "dynamic": True}, "dynamic=True with 2 fragments"),
        ({"fragments": [net[0]]}, "2.weight, 2.bias are in no fragment"),
        ({"fragments": [net, net[2]]}, "in common"),
        ({"fragments": [net, torch.nn.Tanh()]}, "fragment 1 has no parameters"),
        ({"alpha": 2}, "alpha is 2"),
    ):
        with pytest.raises(ValueError, match=why):
            made(**options)
    with pytest.raises(ValueError, match="no parameters to exchange"):
        pst.DiLoCo(torch.nn.Tanh(), inner, torch.optim.SGD, lr=0.5, strategy=strategy)
    with pytest.raises(TypeError, match="inner is a str"):
        pst.DiLoCo(net, ["adam"], torch.optim.SGD, lr=0.5, strategy=strategy)
