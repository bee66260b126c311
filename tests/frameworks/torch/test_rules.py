"""torch's optimizers on servers: one worker and one server compute what `torch.optim` computes alone."""

from __future__ import annotations

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, batches, mlp, steps, twin

RULES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd with decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "dampened": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "maximized": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.5, "weight_decay": 0.1, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam with decay": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.05, "betas": (0.8, 0.95), "eps": 1e-4}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw, amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.03}),
    "adagrad with decays": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01, "initial_accumulator_value": 0.2},
    ),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop, all": (
        torch.optim.RMSprop,
        {"lr": 0.003, "alpha": 0.9, "centered": True, "momentum": 0.8, "weight_decay": 0.02, "eps": 1e-3},
    ),
}


@pytest.fixture(scope="module")
def strategy():
    """One for all tests of this module: a server in a process of its own."""
    with ps.ParameterServerStrategy() as found:
        yield found


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_torchs_own(strategy, rule):
    """Parameters are equal to 1e-6 after 30 steps, in single precision and in double."""
    kind, options = RULES[rule]
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        module = mlp(dtype)
        alone, data = twin(module), batches(30, dtype=dtype)
        steps(module, pst.Optimizer(module, kind, strategy=strategy, **options), data)
        steps(alone, kind(alone.parameters(), **options), data)
        assert apart(module, alone) < limit


def test_groups_have_hyperparameters_of_their_own(strategy):
    """Learning rates, decay, momentum: each group's are those that `torch.optim` has for it, and they may change."""
    module = mlp()
    alone, data = twin(module), batches(30)

    def groups(of):
        first, last = of[0], of[2]
        return [{"params": first.parameters(), "lr": 0.05, "weight_decay": 0.1}, {"params": [last.weight, last.bias]}]

    options = {"lr": 0.01, "momentum": 0.9}
    ours = pst.Optimizer(module, torch.optim.SGD, groups(module), strategy=strategy, **options)
    theirs = torch.optim.SGD(groups(alone), **options)
    for each in (ours, theirs):
        assert [group["lr"] for group in each.param_groups] == [0.05, 0.01]
    steps(module, ours, data[:15])
    steps(alone, theirs, data[:15])
    for each in (ours, theirs):
        each.param_groups[0]["lr"], each.param_groups[1]["weight_decay"] = 0.02, 0.03
    steps(module, ours, data[15:])
    steps(alone, theirs, data[15:])
    assert apart(module, alone) < 1e-12


def test_groups_of_our_optimizers(strategy):
    """A group of another learning rate makes the steps that an optimizer of that rate makes."""
    module, data = mlp(), batches(20)
    alone = twin(module)
    groups = [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.05, "betas": (0.5, 0.999)}]
    steps(module, pst.Optimizer(module, ps.optimizers.Adam(0.01), groups, strategy=strategy), data)
    both = [
        pst.Optimizer(alone, ps.optimizers.Adam(0.01), alone[0].parameters(), strategy=strategy),
        pst.Optimizer(alone, ps.optimizers.Adam(0.05, beta_1=0.5), alone[2].parameters(), strategy=strategy),
    ]
    for x, y in data:
        for each in both:
            each.zero_grad()
        (alone(x) - y).square().mean().backward()
        for each in both:
            each.step()
    assert apart(module, alone) == 0


def test_two_optimizers_of_one_module_are_torchs_two(strategy):
    """Of different kinds, each with parameters of its own: each makes the steps that torch's makes."""
    module, data = mlp(), batches(20)
    alone = twin(module)

    def both(of, make):
        return [
            make(torch.optim.Adam, of[0].parameters(), lr=0.01),
            make(torch.optim.SGD, of[2].parameters(), lr=0.05, momentum=0.9),
        ]

    ours = both(module, lambda kind, some, **options: pst.Optimizer(module, kind, some, strategy=strategy, **options))
    theirs = both(alone, lambda kind, some, **options: kind(some, **options))
    for x, y in data:
        for of, optimizers in ((module, ours), (alone, theirs)):
            for each in optimizers:
                each.zero_grad()
            (of(x) - y).square().mean().backward()
            for each in optimizers:
                each.step()
    assert [[*each.variables] for each in ours] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert apart(module, alone) < 1e-12


def test_a_scheduler_of_torch_sets_the_rate(strategy):
    """Each step is made with the rate that the scheduler has set, and no rate makes a new plan."""
    module, data = mlp(), batches(20)
    alone = twin(module)
    ours = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    plans = []
    for optimizer, of in ((ours, module), (theirs, alone)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)
        for batch in data:
            steps(of, optimizer, [batch])
            scheduler.step()
            plans.append(len(strategy.backend.exchange._prepared))
    assert apart(module, alone) < 1e-12
    assert len(set(plans[1:])) == 1


def test_a_scheduler_cycles_the_momentum_of_our_optimizers(strategy):
    """By `betas`, as torch's schedulers do by default: numbers of the round as rates are, which make no new plan."""
    module, data = mlp(), batches(30)
    alone = twin(module)
    ours = pst.Optimizer(module, ps.optimizers.Adam(0.01, epsilon=1e-14), strategy=strategy)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.01, eps=1e-14)
    plans = []
    for optimizer, of in ((ours, module), (theirs, alone)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=31)
        for batch in data:
            steps(of, optimizer, [batch])
            scheduler.step()
            plans.append(len(strategy.backend.exchange._prepared))
    assert apart(module, alone) < 1e-9
    assert ours.param_groups[0]["betas"] == theirs.param_groups[0]["betas"]
    assert len(set(plans[1:])) == 1


def test_a_parameter_counts_its_own_steps(strategy):
    """One without a gradient in a step stays as it is, and so do its moments and its count, as torch has it."""
    module, data = mlp(), batches(30)
    alone = twin(module)
    ours = pst.Optimizer(module, torch.optim.AdamW, lr=0.01, strategy=strategy)
    theirs = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for number, (x, y) in enumerate(data):
        for of, optimizer in ((module, ours), (alone, theirs)):
            optimizer.zero_grad()
            hidden = of[1](of[0](x))
            loss = (of[2](hidden) - y).square().mean() if number % 3 else hidden.square().mean()
            loss.backward()
            optimizer.step()
    assert apart(module, alone) < 1e-12
    assert [int(own["step"]) for own in ours.state_dict()["state"].values()] == [30, 30, 20, 20]


@pytest.mark.parametrize("already", [True, False], ids=["before", "after"])
def test_a_frozen_parameter_stays(strategy, already):
    """Frozen before or after the optimizer is created, it is trained from the step on in which it is so no more."""
    module, data = mlp(), batches(30)
    module[0].requires_grad_(not already)
    alone = twin(module)
    ours = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.01)
    for of, optimizer in ((module, ours), (alone, theirs)):
        of[0].requires_grad_(False)
        before = of[0].weight.clone()
        steps(of, optimizer, data[:15])
        assert torch.equal(of[0].weight, before)
        of[0].requires_grad_(True)
        steps(of, optimizer, data[15:])
    assert apart(module, alone) < 1e-12


def test_a_shared_parameter_is_one(strategy):
    """Of a weight that two layers have there is one variable, by its first name, and its gradient is the sum."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 5).double()
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))[:, :3]

    module, data = Tied(), batches(30)
    alone = twin(module)
    ours = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    assert [*ours.variables] == ["a.weight", "a.bias", "b.bias"]
    steps(module, ours, data)
    steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), data)
    assert module.a.weight is module.b.weight
    assert apart(module, alone) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_in_a_step(strategy, dtype):
    """Slots are float32: a step is that of the parameter in single precision, and then rounded."""
    module = torch.nn.Linear(3, 1, bias=False).to(dtype)
    exact = module.weight.detach().float()
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, momentum=0.9, strategy=strategy)
    momentum = torch.zeros(1, 3)
    for x in torch.arange(1.0, 5.0):
        optimizer.zero_grad()
        module((x * torch.ones(1, 3)).to(dtype)).sum().backward()
        optimizer.step()
        momentum = 0.9 * momentum + x
        exact = (exact.float() - 0.1 * momentum).to(dtype)
        assert torch.equal(module.weight, exact)
    assert module.weight.dtype is dtype


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (lambda: torch.optim.Adamax, "do not run torch.optim.adamax.Adamax.*SGD, Adam, AdamW, Adagrad, RMSprop"),
        (lambda: torch.optim.LBFGS, "do not run torch.optim.lbfgs.LBFGS"),
        (lambda: type("Mine", (torch.optim.SGD,), {}), "do not run .*Mine"),
        (lambda: torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), "give its class and its arguments"),
        (lambda: "adam", "is no optimizer"),
    ],
)
def test_other_optimizers_are_refused_by_name(strategy, given, word):
    """With those that servers run."""
    with pytest.raises((ValueError, TypeError), match=word):
        pst.Optimizer(mlp(), given(), strategy=strategy)


def test_arguments_are_checked_as_torch_checks_them(strategy):
    """A rate below 0 is no rate; arguments beside one of `ps.optimizers` are nobody's."""
    with pytest.raises(ValueError, match="Invalid learning rate"):
        pst.Optimizer(mlp(), torch.optim.SGD, lr=-1.0, strategy=strategy)
    with pytest.raises(ValueError, match="differentiable=True needs the step in this process"):
        pst.Optimizer(mlp(), torch.optim.Adam, differentiable=True, strategy=strategy)
    with pytest.raises(TypeError, match="lr given beside a SGD, which has its arguments"):
        pst.Optimizer(mlp(), ps.optimizers.SGD(0.1), lr=0.1, strategy=strategy)


def test_what_needs_state_that_is_not_there_is_refused(strategy):
    """Momentum that is turned on later has no buffer on the servers."""
    module, data = mlp(), batches(2)
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    steps(module, optimizer, data[:1])
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(AttributeError, match="momentum needs a slot 'momentum_buffer'"):
        steps(module, optimizer, data[1:])
