"""torch's optimizers on servers compute what `torch.optim` does alone, and their state goes both ways."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import psclient as ps
import psclient.torch as pst
from psclient._src.arrays.conversions import on_host
from psclient.torch.parameters import copy_together
from tests.kit.modules import Tied, apart, batches, job, mlp, sgd_of_torch, share, steps, twin, values

T = torch.optim
RULES = [
    (T.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    (T.SGD, {"lr": 1e-3, "momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    (T.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (T.Adam, {"lr": 0.01, "weight_decay": 0.05, "betas": (0.8, 0.95), "eps": 1e-4}),
    (T.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (T.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (T.NAdam, {"lr": 0.01, "weight_decay": 0.05, "momentum_decay": 0.02}),
    (T.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    (T.RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (T.RAdam, {"lr": 1e-3, "betas": (0.8, 0.6), "weight_decay": 0.05, "maximize": True}),
    (T.Adamax, {"lr": 0.01, "weight_decay": 0.05, "eps": 1e-3}),
    (T.Adagrad, {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01, "initial_accumulator_value": 0.2}),
    (T.RMSprop, {"lr": 0.01}),
    (T.RMSprop, {"lr": 3e-3, "alpha": 0.9, "centered": True, "momentum": 0.8, "weight_decay": 0.02, "eps": 1e-3}),
    (T.Adadelta, {"rho": 0.8, "eps": 1e-4, "weight_decay": 0.02}),
]
"""What a script gives by torch's names; the formulas themselves are tested with those of all front ends.

torch keeps the product of NAdam's momenta in single precision, whatever parameters have.
"""


def assert_alike(ours, theirs, data, limit=1e-12):
    for module, optimizer in (ours, theirs):
        steps(module, optimizer, data)
    assert apart(ours[0], theirs[0]) < limit


@pytest.mark.parametrize(("kind", "options"), RULES)
def test_a_rule_is_torchs_own(pair, kind, options):
    """Parameters are equal to 1e-6 after 30 steps, in single precision and in double."""
    for dtype, limit in ((torch.float64, 1e-8 if kind is T.NAdam else 1e-12), (torch.float32, 1e-6)):
        assert_alike(*pair(mlp(dtype), kind, **options), batches(30, dtype=dtype), limit)


class _Copies(TorchDispatchMode):
    """Notes the copies that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if "copy" in str(operation):
            self.found.append(str(operation))
        return operation(*args, **(kwargs or {}))


def test_values_come_into_parameters_by_one_copy():
    """Where rounds cannot write, as on a GPU: of any dtype, shape and strides; a large one by itself."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    shapes = [(), (1,), (3, 5), (0, 2), (7,), (2, 3, 4)] * 2
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes for dtype in dtypes]
    tensors += [torch.zeros(3, 5).t(), torch.zeros(600, 700).t()]
    values = [on_host(torch.full_like(each, n).contiguous()) for n, each in enumerate(tensors)]
    with _Copies() as copies:
        copy_together(torch.device("cpu"), tensors, values)
    assert copies.found == ["aten._foreach_copy_.default"] * 2
    for n, each in enumerate(tensors):
        assert (each == n).all()


def test_parameters_whose_elements_do_not_follow_one_another(strategy):
    """Transposed ones, beside others; values come into the memory that they have."""
    modules = [mlp(), mlp()]
    for module in modules:
        module[0].weight = torch.nn.Parameter(module[0].weight.detach().t().contiguous().t())
    places = [p.data_ptr() for p in modules[0].parameters()]
    ours = pst.Optimizer(modules[0], torch.optim.Adam, lr=0.01, strategy=strategy)
    assert_alike((modules[0], ours), (modules[1], torch.optim.Adam(modules[1].parameters(), lr=0.01)), batches(20))
    assert not modules[0][0].weight.is_contiguous()
    assert [p.data_ptr() for p in modules[0].parameters()] == places


def test_groups_of_our_optimizers(strategy):
    """An optimizer of `ps.optimizers` has groups as torch's have them."""
    module, alone = mlp(), mlp()

    def groups(of):
        return [{"params": of[0].parameters()}, {"params": of[2].parameters(), "lr": 0.05, "betas": (0.5, 0.999)}]

    ours = pst.Optimizer(module, ps.optimizers.Adam(0.01, epsilon=1e-14), groups(module), strategy=strategy)
    theirs = torch.optim.Adam(groups(alone), lr=0.01, eps=1e-14)
    assert_alike((module, ours), (alone, theirs), batches(20), 1e-9)


@pytest.mark.parametrize(
    ("rule", "kind", "schedule", "limit"),
    [
        (torch.optim.SGD, torch.optim.SGD, {"total_steps": 20, "max_lr": 0.1, "cycle_momentum": False}, 1e-12),
        (ps.optimizers.Adam(0.01, epsilon=1e-14), torch.optim.Adam, {"total_steps": 21, "max_lr": 0.02}, 1e-9),
    ],
    ids=["the rate of torch's", "the momentum of our optimizers, by betas"],
)
def test_a_scheduler_of_torch_makes_no_new_plan(strategy, rule, kind, schedule, limit):
    """Each step is made with the rate, and the momentum, that the scheduler has set: they are numbers of the round."""
    module = mlp()
    alone, plans = twin(module), []
    ours = pst.Optimizer(module, rule, strategy=strategy, **({"lr": 0.1} if rule is kind else {}))
    theirs = kind(alone.parameters(), **({"lr": 0.1} if rule is kind else {"lr": 0.01, "eps": 1e-14}))
    for optimizer, of in ((ours, module), (theirs, alone)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, **schedule)
        for batch in batches(20):
            steps(of, optimizer, [batch])
            scheduler.step()
            plans.append(len(strategy.backend.exchange._prepared))
    assert apart(module, alone) < limit
    assert ours.param_groups[0].get("betas") == theirs.param_groups[0].get("betas")
    assert len(set(plans[1:])) == 1


@pytest.mark.parametrize("already", [True, False], ids=["before", "after"])
def test_a_frozen_parameter_stays(pair, already):
    """Frozen before or after the optimizer is created, it is trained from the step on in which it is so no more."""
    module, data = mlp(), batches(30)
    module[0].requires_grad_(not already)
    both = pair(module, torch.optim.Adam, lr=0.01)
    for of, optimizer in both:
        of[0].requires_grad_(False)
        before = of[0].weight.clone()
        steps(of, optimizer, data[:15])
        assert torch.equal(of[0].weight, before)
        of[0].requires_grad_(True)
    assert_alike(*both, data[15:])


def test_a_shared_parameter_is_one(pair):
    """Of a weight that two layers have there is one variable, by its first name, and its gradient is the sum."""
    (module, ours), theirs = pair(Tied().double(), torch.optim.SGD, lr=0.1)
    assert [*ours.variables] == ["a.weight", "a.bias", "b.bias"]
    assert_alike((module, ours), theirs, batches(30))
    assert module.a.weight is module.b.weight


@pytest.mark.parametrize(("clipped", "servers", "limit"), [({}, 2, 1e-6), ({"global_clipnorm": 1.0}, 3, 1e-5)])
def test_a_gradient_that_only_one_worker_has(clipped, servers, limit):
    """It counts as zeros of the others; a parameter without any is not updated; also with clipping, in two rounds."""

    def work(strategy, worker):
        module = torch.nn.ParameterList([torch.ones(3), torch.ones(3), torch.ones(3)])
        options = {"lr": 0.5, "weight_decay": 0.1, **clipped}
        optimizer = pst.Optimizer(module, torch.optim.AdamW, strategy=strategy, **options)
        for _ in range(3):
            optimizer.zero_grad()
            used = module[0] * 3 if worker else module[0] * 3 + module[1]
            used.sum().backward()
            optimizer.step()
        return values(module), [int(own["step"]) for own in optimizer.state_dict()["state"].values()]

    expected = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    alone = torch.optim.AdamW(expected, lr=0.5, weight_decay=0.1)
    for _ in range(3):
        expected[0].grad, expected[1].grad = torch.full((3,), 3.0), torch.full((3,), 0.5)
        if clipped:
            torch.nn.utils.clip_grad_norm_(expected, 1.0)
        alone.step()
    for found, counts in job(work, 2, servers):
        assert counts == [3, 3, 0]
        assert torch.equal(found[2], torch.ones(3))
        assert apart(found[:2], [p.detach() for p in expected]) < limit


def test_a_compiled_module_is_trained(strategy):
    """It is compiled once, since parameters stay where they are, and its variables have the plain module's names."""
    module, alone = mlp(), mlp()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    optimizer = pst.Optimizer(compiled, torch.optim.Adam, lr=0.01, strategy=strategy)
    assert [*optimizer.variables] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    steps(compiled, optimizer, batches(10))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    steps(alone, torch.optim.Adam(alone.parameters(), lr=0.01), batches(10))
    assert apart(module, alone) < 1e-12


def test_parameters_keep_their_memory_and_gradients_are_two_buffers(strategy):
    """Views of parameters see each step; zero_grad drops the reference only, or fills with zeros."""
    module = mlp()
    views, places = [p.detach().view(-1) for p in module.parameters()], [p.data_ptr() for p in module.parameters()]
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    seen = [set() for _ in views]
    for number, batch in enumerate(batches(8)):
        before = [view.clone() for view in views]
        steps(module, optimizer, [batch], set_to_none=number % 4 < 2)
        assert [p.data_ptr() for p in module.parameters()] == places
        assert not any(map(torch.equal, before, views))
        for found, p in zip(seen, module.parameters(), strict=True):
            found.add(p.grad.data_ptr())
    optimizer.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    assert [len(found) for found in seen] == [2, 2, 2, 2]
    assert apart(module, sgd_of_torch(batches(8))) < 1e-12


def test_a_closure_is_called_once():
    """Its loss is what `step` returns. Its error is raised as it is: nothing was sent, and all make the next step."""

    def work(strategy, worker):
        module, calls = mlp(), []
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        data = share(batches(5), worker, 2)

        def closure(number, fails=False):
            x, y = data[number]
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            calls.append(float(loss))
            if fails:
                raise KeyError("the test fails here")
            return loss

        for number in range(5):
            if number == 1:
                with pytest.raises(KeyError, match="the test fails here"):
                    optimizer.step(lambda: closure(1, fails=True))
            assert float(optimizer.step(lambda number=number: closure(number))) == calls[-1]
        assert len(calls) == 6
        return values(module)

    assert all(apart(found, sgd_of_torch(batches(5))) < 1e-12 for found in job(work, 2))


STATES = {
    "momentum": (torch.optim.SGD, {"momentum": 0.5}, {"momentum": 0.9, "nesterov": True}, {}),
    "dampening": (torch.optim.SGD, {}, {"momentum": 0.9, "dampening": 0.5}, {"foreach": True}),
    "centered": (torch.optim.RMSprop, {}, {"centered": True, "momentum": 0.4}, {"foreach": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, {}, {"fused": True}),
    "decay": (torch.optim.AdamW, {"lr": 0.01}, {"weight_decay": 0.1}, {}),
    "product": (torch.optim.NAdam, {"lr": 0.01}, {"momentum_decay": 0.1}, {"foreach": True}),
    "largest": (torch.optim.Adamax, {"lr": 0.01}, {"betas": (0.8, 0.9)}, {}),
    "sizes": (torch.optim.Adadelta, {}, {"rho": 0.5}, {}),
}
"""A class of torch, hyperparameters of two groups, and a way in which torch's own optimizer then computes."""


@pytest.mark.parametrize("name", STATES)
def test_the_state_goes_both_ways(strategy, pair, name):
    """Groups have hyperparameters of their own, which may change, and state that others have not. torch's own goes
    on from ours, and a new one of ours from each."""
    kind, first, last, way = STATES[name]
    data, limit = batches(9), 1e-8 if kind is T.NAdam else 1e-10

    def groups(of, *numbers):
        return [{"params": part.parameters(), **own} for part, own in zip((of[0], of[2]), numbers, strict=True)]

    (module, ours), (alone, theirs) = pair(mlp(), kind, lambda of: groups(of, first, last), lr=0.05)
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups]
    assert_alike((module, ours), (alone, theirs), data[:3], limit)
    for each in (ours, theirs):
        each.param_groups[0]["lr"], each.param_groups[1]["weight_decay"] = 0.02, 0.03
    assert_alike((module, ours), (alone, theirs), data[3:6], limit)
    saved = ours.state_dict()
    if "step" in saved["state"][0]:
        assert saved["state"][0]["step"].dtype == torch.float32
    for state in (saved, theirs.state_dict()):
        again, expected = twin(alone), twin(alone)
        loaded = pst.Optimizer(again, kind, groups(again, {}, {}), lr=1.0, strategy=strategy)
        loaded.load_state_dict(state)
        rest = kind(groups(expected, {}, {}), lr=1.0, **way)
        rest.load_state_dict(copy.deepcopy(saved))
        for group in rest.param_groups:
            group.update(way)
        assert rest.param_groups[0]["lr"] == 0.02
        assert_alike((again, loaded), (expected, rest), data[6:], limit)


def test_our_state_goes_on_as_well(strategy):
    """An optimizer of `ps.optimizers` has its slots and its count in the state, by its own names."""
    module, data = mlp(), batches(20)
    optimizer = pst.Optimizer(module, ps.optimizers.Adam(0.01), strategy=strategy)
    steps(module, optimizer, data[:10])
    saved, other = optimizer.state_dict(), twin(module)
    assert (saved["iterations"], [*saved["state"][0]]) == (10, ["m", "v"])
    again = pst.Optimizer(other, ps.optimizers.Adam(0.5), strategy=strategy)
    again.load_state_dict(saved)
    assert again.rule.learning_rate == 0.01
    steps(module, optimizer, data[10:])
    steps(other, again, data[10:])
    assert int(again.rule.iterations) == 20
    assert all(map(torch.equal, values(module), values(other)))
