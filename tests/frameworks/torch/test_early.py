"""Gradients that leave while backward goes on."""

from __future__ import annotations

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from pstesting.in_process import InProcessCluster
from tests.kit.internals import PART_BYTES
from tests.kit.modules import apart, job, seeded, values
from tests.kit.rig import eventually
from tests.kit.strategies import refused

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


@pytest.mark.parametrize(("compression", "servers"), [(None, 1), (None, 2), (ps.compression.Float16(), 1)])
def test_early_gradients_change_no_bit(compression, servers):
    """Two workers compute the same by default, and wait once a step either way. Compressed gradients are so when they
    are made, and what is left over of each, and kept for the next step, is the same, too."""

    def work(strategy, worker):
        found = []
        for early in (True, False):
            module = Wide(3)
            optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=1e-4, overlap=early, strategy=strategy)
            before = strategy.blocking_waits
            trained(module, optimizer, 3, worker)
            assert strategy.blocking_waits == before + 3
            found.append((values(module), [v.feedback for v in optimizer.variables.values()]))
        return found

    for (one, kept), (other, same) in job(work, 2, servers, compression=compression):
        assert all(map(torch.equal, one, other))
        if compression is not None:
            left = [(own.residual, its.residual) for own, its in zip(kept, same, strict=True)]
            assert all(own.any() and own.tobytes() == its.tobytes() for own, its in left)


@pytest.fixture
def beside(pair, strategy):
    """A function that trains a module and its twin with torch's own optimizer, by a function that makes a step's
    gradients; returns our optimizer, and how far they are apart."""

    def trained_beside(kind, lr, backward, hook=None, overlap=True):
        both = pair(Wide(3), kind, ours={"overlap": overlap}, lr=lr)
        for module, optimizer in both:
            if hook:
                module.layers[1].weight.register_hook(hook)
            for number in range(6):
                optimizer.zero_grad()
                backward(module, optimizer, number, torch.Generator().manual_seed(number))
                optimizer.step()
        (module, ours), (alone, _) = both
        return ours, apart(module, alone)

    return trained_beside


@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_that_is_not_used_is_seen_before(beside, overlap):
    """Nothing leaves early in such a step: what is not used has no gradient, and stays as it is, as do its moments."""

    def backward(module, optimizer, number, source):
        x = torch.randn(2, SIDE, generator=source)
        for layer in module.layers[: 2 if number in (2, 3) else 3]:
            x = torch.tanh(layer(x))
        x.square().sum().backward()

    ours, difference = beside(torch.optim.AdamW, 1e-4, backward, overlap=overlap)
    assert difference < 1e-5
    assert [int(own["step"]) for own in ours.state_dict()["state"].values()] == [6, 6, 4]


def test_a_hook_may_change_a_gradient(beside):
    """Before it is added to `grad`: what the hook returns is what leaves."""

    def backward(module, optimizer, number, source):
        module(torch.randn(2, SIDE, generator=source)).square().sum().backward()

    clamp = lambda gradient: gradient.clamp(-0.01, 0.01)  # noqa: E731
    assert beside(torch.optim.SGD, 1e-3, backward, clamp)[1] < 1e-5


@pytest.mark.parametrize(("overlap", "within"), [(True, 2), (False, 2), (False, 3)])
def test_accumulated_gradients_are_one_step(beside, strategy, overlap, within):
    """Those within `no_sync` stay here, and are in what the last backward sends, or the step after it."""

    def backward(module, optimizer, number, source):
        x = torch.randn(3, 2, SIDE, generator=source)
        if isinstance(optimizer, torch.optim.SGD):
            module(x.view(6, SIDE)).square().sum().backward()
            return
        sent = strategy.bytes_transferred[0]
        with optimizer.no_sync():
            for own in x[:within]:
                module(own).square().sum().backward()
        assert strategy.bytes_transferred[0] == sent
        for own in x[within:]:
            module(own).square().sum().backward()
        if overlap and number:  # the first step makes known what will come
            eventually(lambda: strategy.bytes_transferred[0] > sent)

    assert beside(torch.optim.SGD, 1e-3, backward, overlap=overlap)[1] < 1e-5


# ---- What is told ----


def backward(module, optimizer):
    optimizer.zero_grad()
    module(torch.ones(1, SIDE)).sum().backward()


def fail():
    raise KeyError("the test fails here")


def fail_in_a_closure(module, optimizer):
    def closure():
        backward(module, optimizer)
        fail()

    refused(KeyError, "the test fails here", lambda: optimizer.step(closure))


def fail_in_backward(module, optimizer):
    module.last = fail
    refused(KeyError, "the test fails here", lambda: backward(module, optimizer))
    module.last = lambda: None


def fail_and_go_on(module, optimizer):
    fail_in_backward(module, optimizer)
    module(torch.ones(1, SIDE)).sum().backward()


def use_twice(module, optimizer):
    loss = module(torch.ones(1, SIDE)).sum()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()


def change_the_rate(module, optimizer):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # which changes it after the step: that is right
    trained(module, optimizer, 1)
    scheduler.step()
    backward(module, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1


def clip(module, optimizer):
    backward(module, optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def step(module, optimizer):
    optimizer.step()


ZEROED = r"sent to the servers during backward\(\), and zero_grad\(\) came before step\(\), .*without overlap=True"
FAILED = r"sent to the servers during backward\(\), which has failed, .*without overlap=True"
TWICE = r"a second backward\(\) before step\(\) computed a gradient of 'layers\.2\.weight'.*no_sync.*without overlap"
HALF = r"failed, or computed no gradient for 'layers\.0\.weight'"
CLIPPED = r"clip_grad_norm_, but step\(\) uses the gradient from backward.*use global_clipnorm.*register_hook"

TOLD = {
    "a failed closure": (fail_in_a_closure, backward, ZEROED),
    "a step that is left out": (backward, backward, ZEROED),
    "a failed backward": (fail_in_backward, backward, FAILED),
    "a failed backward, and another": (fail_and_go_on, step, FAILED),
    "a failed backward, and a step": (fail_in_backward, step, HALF),
    "a second backward": (use_twice, step, TWICE),
    "a changed rate": (change_the_rate, step, r"learning rate was changed between backward\(\) and step\(\)"),
    "clipping": (clip, step, CLIPPED),
}
"""What a script does, and what it then calls in vain."""


@pytest.mark.parametrize("name", TOLD)
def test_what_comes_too_late_is_told(name):
    """Where gradients have left, nobody can take them back: that ends the worker's part in the job, with a word."""
    do, call, words = TOLD[name]

    def work(strategy, worker):
        module = Wide(3)
        optimizer = sgd(strategy, module)
        trained(module, optimizer, 1)

        def late():
            do(module, optimizer)
            call(module, optimizer)

        refused(RuntimeError, words, late)

    refused(ps.errors.PSError, words, lambda: job(work))


@pytest.mark.parametrize("do", [fail_in_a_closure, backward, fail_in_backward])
def test_where_nothing_leaves_early_gradients_are_forgotten(pair, do):
    """And the next step is made."""
    (module, ours), theirs = pair(Wide(3), torch.optim.SGD, lr=1e-4)
    trained(module, ours, 1)
    do(module, ours)
    trained(module, ours, 1)
    for _ in range(2):
        trained(*theirs, 1)
    assert apart(module, theirs[0]) < 1e-5


@pytest.mark.parametrize("overlap", [True, False])
def test_small_gradients_leave_at_the_step(pair, strategy, overlap):
    """What fits one part is sent at once: gradients add up as with torch alone. Nobody clips them in a worker."""
    module = torch.nn.Linear(SIDE, 4)
    assert module.weight.nbytes < PART_BYTES
    ours, theirs = pair(module, torch.optim.SGD, ours={"overlap": overlap}, lr=1e-4)
    for do in (backward, use_twice):
        for each in (ours, theirs):
            do(*each)
            before = strategy.round
            step(*each)
            assert strategy.round == before + (each is ours)
    assert apart(module, theirs[0]) < 1e-5
    clip(*ours)
    refused(RuntimeError, CLIPPED, ours[1].step)
