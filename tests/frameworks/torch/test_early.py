"""Gradients that leave while backward goes on."""

from __future__ import annotations

import copy

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from pstesting.in_process import InProcessCluster
from tests.kit.internals import PART_BYTES
from tests.kit.modules import apart, job, seeded, twin, values
from tests.kit.rig import eventually

SIDE = 1024
"""A layer has 4 MiB: each is a part of its own."""


class Wide(torch.nn.Module):
    """Layers of `SIDE` numbers, with what is called in backward when only the first one's gradient is missing."""

    def __init__(self, layers=4, last=lambda: None):
        super().__init__()
        made = seeded(0, lambda: [torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)])
        self.layers = torch.nn.ModuleList(made)
        self.last = last

    def forward(self, x):
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.last())
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x


def trained(module, optimizer, count, worker=0):
    """Some steps, each with examples of its own."""
    source = torch.Generator().manual_seed(worker)
    for _ in range(count):
        optimizer.zero_grad()
        module(torch.randn(2, SIDE, generator=source)).square().sum().backward()
        optimizer.step()


def sgd(strategy, module, lr=1e-4, overlap=True):
    return pst.Optimizer(module, torch.optim.SGD, lr=lr, strategy=strategy, overlap=overlap)


def assert_ends(work, match):
    """The job cannot end as if the step had been done, where gradients have left."""
    with pytest.raises(ps.errors.PSError, match=match):
        job(work)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_server_updates_a_layer_before_backward_ends(transport):
    """From the second step on: the last layer's variable has another value when the first one's gradient is made."""
    with (
        InProcessCluster() as cluster,
        ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), transport=transport) as strategy,
    ):
        module = Wide()
        optimizer = sgd(strategy, module)
        handle = optimizer.variables["layers.3.weight"].handle
        stored = cluster.cores[0].machine.job.store
        trained(module, optimizer, 1)
        before, seen = stored.find(handle.id).array.copy(), []

        def last():
            eventually(lambda: not (stored.find(handle.id).array == before).all())
            seen.append(module.layers[3].weight.detach().numpy().copy())

        module.last = last
        trained(module, optimizer, 1)
        assert (seen[0] == before).all(), "the parameter changes in step() alone"
        assert not (module.layers[3].weight.detach().numpy() == before).all()


@pytest.mark.parametrize("servers", [1, 2])
def test_early_gradients_change_no_bit(servers):
    """Two workers compute the same by default, and wait once a step either way."""

    def work(strategy, worker):
        found = []
        for early in (True, False):
            module = Wide(3)
            optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=1e-4, overlap=early, strategy=strategy)
            before = strategy.blocking_waits
            trained(module, optimizer, 3, worker)
            found.append((values(module), strategy.blocking_waits - before))
        return found

    for (one, waits), (other, more) in job(work, 2, servers):
        assert all(map(torch.equal, one, other))
        assert (waits, more) == (3, 3)


def test_compressed_gradients_that_leave_early_have_the_same_bits():
    """Each is compressed when it is made, with what is left over of it; what is kept of that is the same, too."""
    found = []
    for early in (True, False):
        with (
            InProcessCluster() as cluster,
            ps.ParameterServerStrategy(
                cluster_resolver=cluster.resolver(), compression=ps.compression.Float16()
            ) as strategy,
        ):
            module = Wide(3)
            optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=1e-4, overlap=early, strategy=strategy)
            trained(module, optimizer, 1)
            before = strategy.bytes_transferred[0]
            trained(module, optimizer, 3)
            sent = strategy.bytes_transferred[0] - before
            left = [optimizer.variables[f"layers.{n}.weight"].feedback.residual.copy() for n in range(3)]
            found.append((values(module), left))
            assert 3 * 3 * SIDE * SIDE * 2 <= sent < 3 * 3 * SIDE * SIDE * 3
    (one, kept), (other, same) = found
    assert all(map(torch.equal, one, other))
    assert all(each.any() and each.tobytes() == more.tobytes() for each, more in zip(kept, same, strict=True))


def trained_beside(strategy, kind, lr, step, count, hook=None):
    """A module and its optimizer, and how far it is from a twin with torch's own after some steps of both."""
    module = Wide(3)
    alone = twin(module)
    ours, theirs = pst.Optimizer(module, kind, lr=lr, strategy=strategy, overlap=True), kind(alone.parameters(), lr=lr)
    for of, optimizer in ((module, ours), (alone, theirs)):
        if hook:
            of.layers[1].weight.register_hook(hook)
        for number in range(count):
            optimizer.zero_grad()
            step(of, optimizer, number, torch.Generator().manual_seed(number))
            optimizer.step()
    return ours, apart(module, alone)


def test_a_layer_that_is_not_used_is_seen_before(strategy):
    """Nothing leaves early in such a step: what is not used has no gradient, and stays as it is."""

    def step(of, optimizer, number, source):
        x = torch.randn(2, SIDE, generator=source)
        for layer in of.layers[: 2 if number in (2, 3) else 3]:
            x = torch.tanh(layer(x))
        x.square().sum().backward()

    ours, difference = trained_beside(strategy, torch.optim.AdamW, 1e-4, step, 6)
    assert difference < 1e-5
    assert [int(own["step"]) for own in ours.state_dict()["state"].values()] == [6, 6, 4]


def test_a_hook_may_change_a_gradient(strategy):
    """Before it is added to `grad`: what the hook returns is what leaves."""

    def step(of, optimizer, number, source):
        of(torch.randn(2, SIDE, generator=source)).square().sum().backward()

    clamp = lambda gradient: gradient.clamp(-0.01, 0.01)  # noqa: E731
    assert trained_beside(strategy, torch.optim.SGD, 1e-3, step, 3, clamp)[1] < 1e-5


def test_accumulated_gradients_leave_early_with_the_last(strategy):
    """Those within `accumulate` stay here, and are in what the last backward sends."""

    def step(of, optimizer, number, source):
        x = torch.randn(3, 2, SIDE, generator=source)
        if isinstance(optimizer, torch.optim.SGD):
            of(x.view(6, SIDE)).square().sum().backward()
            return
        sent = strategy.bytes_transferred[0]
        with optimizer.no_sync():
            for own in x[:2]:
                of(own).square().sum().backward()
        assert strategy.bytes_transferred[0] == sent
        of(x[2]).square().sum().backward()

    assert trained_beside(strategy, torch.optim.SGD, 1e-3, step, 3)[1] < 1e-5


def test_small_gradients_leave_at_the_step(strategy):
    """What fits one part is sent at once, in the step."""
    module = torch.nn.Linear(SIDE, 4)
    assert module.weight.nbytes < PART_BYTES
    optimizer = sgd(strategy, module)
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.ones(1, SIDE)).sum().backward()
        before = strategy.round
        optimizer.step()
        assert strategy.round == before + 1


# ---- What is told ----


@pytest.mark.parametrize(
    ("left", "word"),
    [
        ("a failed closure", r"and zero_grad\(\) came before step\(\)"),
        ("a failed backward", "which has failed"),
        ("a skipped step", r"and zero_grad\(\) came before step\(\)"),
        ("a second backward after a failed one", "which has failed"),
    ],
)
def test_a_step_that_is_excluded_is_told(left, word):
    """What has happened, and what to do. By default gradients are forgotten, and the next step is made."""

    def fail():
        raise KeyError(left)

    def leave(module, optimizer, early):
        def closure():
            backward(module, optimizer)
            fail()

        trained(module, optimizer, 1)
        module.last = fail if "backward" in left else lambda: None
        if "skipped" in left:
            backward(module, optimizer)
        else:
            with pytest.raises(KeyError, match=left):
                optimizer.step(closure)
        module.last = lambda: None
        if early and "second" in left:
            module(torch.ones(1, SIDE)).sum().backward()
        trained(module, optimizer, 1)

    def work(strategy, worker):
        module, early = Wide(3), Wide(3)
        leave(module, pst.Optimizer(module, torch.optim.SGD, lr=1e-4, strategy=strategy), early=False)
        alone = Wide(3)
        theirs = torch.optim.SGD(alone.parameters(), lr=1e-4)
        for _ in range(2):
            trained(alone, theirs, 1)
        assert apart(module, alone) < 1e-5
        optimizer = sgd(strategy, early)
        with pytest.raises(
            RuntimeError, match=rf"were already sent to the servers .*{word}.*create .* without overlap=True"
        ):
            leave(early, optimizer, early=True)

    assert_ends(work, word)


def test_a_second_backward_is_told_where_gradients_have_left():
    """Where they have not, gradients add up as with torch alone."""

    def twice(module, optimizer):
        trained(module, optimizer, 2)
        loss = module(torch.ones(1, SIDE)).sum()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    def work(strategy, worker):
        module = torch.nn.Linear(SIDE, 1)
        alone = copy.deepcopy(module)
        twice(module, sgd(strategy, module))
        twice(alone, torch.optim.SGD(alone.parameters(), lr=1e-4))
        assert apart(module, alone) < 1e-5
        module = Wide(3)
        with pytest.raises(RuntimeError, match=r"a second backward\(\) before step\(\).*no_sync.*without overlap=True"):
            twice(module, sgd(strategy, module))

    assert_ends(work, r"a second backward\(\) before step\(\) computed a gradient of 'layers\.2\.weight'")


def change_the_rate(module, optimizer):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # which changes it after the step: that is right
    for _ in range(2):
        trained(module, optimizer, 1)
        scheduler.step()
    backward(module, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1


def fail_in_backward(module, optimizer):
    def fail():
        raise ValueError("the test fails here")

    module.last = fail
    with pytest.raises(ValueError, match="the test fails here"):
        backward(module, optimizer)


def clip(module, optimizer):
    backward(module, optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def backward(module, optimizer):
    optimizer.zero_grad()
    module(torch.ones(1, SIDE)).sum().backward()


CLIPPED = r"clip_grad_norm_, but step\(\) uses the gradient from backward.*use global_clipnorm.*register_hook"


@pytest.mark.parametrize(
    ("do", "wide", "early", "word"),
    [
        (change_the_rate, True, True, r"a learning rate was changed between backward\(\) and step\(\)"),
        (fail_in_backward, True, True, r"backward failed, or computed no gradient for 'layers\.0\.weight'"),
        (clip, True, True, CLIPPED),
        (clip, True, False, CLIPPED),
        (clip, False, True, CLIPPED),
    ],
)
def test_what_comes_too_late_is_told(do, wide, early, word):
    """Where gradients have left, nobody can take them back: the step ends the worker's part in the job, with a word."""

    def work(strategy, worker):
        module = Wide(3) if wide else torch.nn.Linear(SIDE, 1)
        optimizer = sgd(strategy, module, overlap=early)
        trained(module, optimizer, 2)
        do(module, optimizer)
        with pytest.raises(RuntimeError, match=word):
            optimizer.step()

    if wide and early:
        assert_ends(work, word)
    else:
        job(work)
