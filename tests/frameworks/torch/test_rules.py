"""torch's optimizers on servers: with any number of workers and servers they compute what `torch.optim` does alone."""

from __future__ import annotations

import time

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import Tied, apart, batches, job, mlp, sgd_of_torch, share, steps, twin, values

T = torch.optim
RULES = [
    (T.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    (T.SGD, {"lr": 1e-3, "momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    (T.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (T.Adam, {"lr": 0.01, "weight_decay": 0.05, "betas": (0.8, 0.95), "eps": 1e-4}),
    (T.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (T.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (T.Adagrad, {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01, "initial_accumulator_value": 0.2}),
    (T.RMSprop, {"lr": 0.01}),
    (T.RMSprop, {"lr": 3e-3, "alpha": 0.9, "centered": True, "momentum": 0.8, "weight_decay": 0.02, "eps": 1e-3}),
]
"""What a script gives by torch's names; the formulas themselves are tested with those of all front ends."""


def pair(strategy, kind=torch.optim.SGD, module=None, **options):
    """A module with its optimizer on servers, and its twin with torch's own."""
    module = mlp() if module is None else module
    alone = twin(module)
    ours = pst.Optimizer(module, kind, strategy=strategy, **options)
    return (module, ours), (alone, kind(alone.parameters(), **options))


def assert_alike(ours, theirs, data, limit=1e-12):
    for module, optimizer in (ours, theirs):
        steps(module, optimizer, data)
    assert apart(ours[0], theirs[0]) < limit


# ---- Each rule ----


@pytest.mark.parametrize(("kind", "options"), RULES)
def test_a_rule_is_torchs_own(strategy, kind, options):
    """Parameters are equal to 1e-6 after 30 steps, in single precision and in double."""
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        assert_alike(*pair(strategy, kind, mlp(dtype), **options), batches(30, dtype=dtype), limit)


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
    assert_alike((module, ours), (alone, theirs), data[:15])
    for each in (ours, theirs):
        each.param_groups[0]["lr"], each.param_groups[1]["weight_decay"] = 0.02, 0.03
    assert_alike((module, ours), (alone, theirs), data[15:])


def step_of_all(module, optimizers, data):
    for x, y in data:
        for each in optimizers:
            each.zero_grad()
        (module(x) - y).square().mean().backward()
        for each in optimizers:
            each.step()


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
    step_of_all(alone, both, data)
    assert apart(module, alone) == 0


def test_two_optimizers_of_one_module_are_torchs_two(strategy):
    """Of different kinds, each with parameters of its own: each makes the steps that torch's makes."""
    module = mlp()
    alone = twin(module)
    kinds = [(0, torch.optim.Adam, {"lr": 0.01}), (2, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})]
    ours = [pst.Optimizer(module, kind, module[n].parameters(), strategy=strategy, **o) for n, kind, o in kinds]
    step_of_all(module, ours, batches(20))
    step_of_all(alone, [kind(alone[n].parameters(), **options) for n, kind, options in kinds], batches(20))
    assert [[*each.variables] for each in ours] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert apart(module, alone) < 1e-12


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


def test_a_parameter_counts_its_own_steps(strategy):
    """One without a gradient in a step stays as it is, and so do its moments and its count, as torch has it."""
    both = pair(strategy, torch.optim.AdamW, lr=0.01)
    for number, (x, y) in enumerate(batches(30)):
        for of, optimizer in both:
            optimizer.zero_grad()
            hidden = of[1](of[0](x))
            loss = (of[2](hidden) - y).square().mean() if number % 3 else hidden.square().mean()
            loss.backward()
            optimizer.step()
    (module, ours), (alone, _) = both
    assert apart(module, alone) < 1e-12
    assert [int(own["step"]) for own in ours.state_dict()["state"].values()] == [30, 30, 20, 20]


@pytest.mark.parametrize("already", [True, False], ids=["before", "after"])
def test_a_frozen_parameter_stays(strategy, already):
    """Frozen before or after the optimizer is created, it is trained from the step on in which it is so no more."""
    module, data = mlp(), batches(30)
    module[0].requires_grad_(not already)
    both = pair(strategy, torch.optim.Adam, module, lr=0.01)
    for of, optimizer in both:
        of[0].requires_grad_(False)
        before = of[0].weight.clone()
        steps(of, optimizer, data[:15])
        assert torch.equal(of[0].weight, before)
        of[0].requires_grad_(True)
    assert_alike(*both, data[15:])


def test_a_shared_parameter_is_one(strategy):
    """Of a weight that two layers have there is one variable, by its first name, and its gradient is the sum."""
    module = Tied().double()
    ours, theirs = pair(strategy, module=module, lr=0.1)
    assert [*ours[1].variables] == ["a.weight", "a.bias", "b.bias"]
    assert_alike(ours, theirs, batches(30))
    assert module.a.weight is module.b.weight


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
    ("given", "options", "error", "word"),
    [
        (
            torch.optim.Adamax,
            {},
            ValueError,
            "torch.optim.adamax.Adamax is not supported.*SGD, Adam, AdamW, Adagrad, RMSprop",
        ),
        (torch.optim.LBFGS, {}, ValueError, "torch.optim.lbfgs.LBFGS is not supported"),
        (type("Mine", (torch.optim.SGD,), {}), {}, ValueError, "Mine is not supported"),
        (torch.optim.SGD([torch.zeros(1, requires_grad=True)]), {}, TypeError, "pass its class and arguments"),
        ("adam", {}, TypeError, "is not an optimizer"),
        (torch.optim.SGD, {"lr": -1.0}, ValueError, "Invalid learning rate"),
        (torch.optim.Adam, {"differentiable": True}, ValueError, "differentiable=True is not supported"),
        (ps.optimizers.SGD(0.1), {"lr": 0.1}, TypeError, "lr cannot be passed together with a SGD instance"),
    ],
)
def test_other_optimizers_and_arguments_are_refused_by_name(strategy, given, options, error, word):
    """With those that servers run; arguments are checked as torch checks them."""
    with pytest.raises(error, match=word):
        pst.Optimizer(mlp(), given, strategy=strategy, **options)


def test_what_needs_state_that_is_not_there_is_refused(strategy):
    """Momentum that is turned on later has no buffer on the servers."""
    module, data = mlp(), batches(2)
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    steps(module, optimizer, data[:1])
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(AttributeError, match="momentum needs a slot 'momentum_buffer'"):
        steps(module, optimizer, data[1:])


# ---- Workers and servers ----


def trained(workers, servers, kind, dtype=torch.float64, count=30, apart_by=0.0, deterministic=False, **options):
    """The parameters of each worker after some steps, each of which all examples take part in.

    With `apart_by` seconds gradients come in another order in each step, and on each number of servers.
    """

    def work(strategy, worker):
        module = mlp(dtype, seed=worker)  # all begin with the first worker's
        optimizer = pst.Optimizer(module, kind(), strategy=strategy, **options)
        for number, batch in enumerate(share(batches(count, dtype=dtype), worker, workers)):
            time.sleep(apart_by * ((number * servers + worker) % workers))
            steps(module, optimizer, [batch])
        return values(module)

    return job(work, workers, servers, deterministic=deterministic)


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (torch.optim.AdamW, {}, torch.float64),
        (torch.optim.Adam, {}, torch.float64),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}, torch.float32),
        (torch.optim.Adam, {"eps": 1e-2}, torch.float32),  # a smaller one makes much of how sums are rounded
    ],
)
def test_workers_compute_what_one_computes(kind, options, dtype):
    """To 1e-6 after 30 steps; and all of them have the same bits."""
    alone = mlp(dtype)
    steps(alone, kind(alone.parameters(), lr=0.01, **options), batches(30, dtype=dtype))
    for workers in (2, 3):
        found = trained(workers, 2, lambda: kind, dtype, lr=0.01, **options)
        assert apart(found[0], alone) < 1e-6
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("kind", [lambda: torch.optim.Adam, lambda: ps.optimizers.Adam(0.01, global_clipnorm=0.5)])
def test_servers_change_no_bit(kind):
    """With `deterministic=True` three workers compute the same parameters on one, two and three servers, in any run."""
    options = {"lr": 0.01} if isinstance(kind(), type) else {}
    options |= {"apart_by": 0.001, "deterministic": True}
    found = [trained(3, n, kind, torch.float32, 15, **options)[0] for n in (1, 2, 3)]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_gradients_may_be_summed():
    """With reduction="sum" two workers make steps that are twice as long as with the mean."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.05, reduction="sum", strategy=strategy)
        steps(module, optimizer, share(batches(20), worker, 2))
        return values(module)

    alone = sgd_of_torch(batches(20))
    assert apart(job(work, 2)[0], alone) < 1e-12


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


def test_a_step_waits_once():
    """In a plain loop of torch that prints the loss, evaluates, and looks at parameters and gradients."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy)
        data, before, seen = share(batches(20), worker, 2), strategy.blocking_waits, []
        for x, y in data:
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            with torch.no_grad():
                module.eval()
                seen.append(float((module(x) - y).abs().mean()))
                module.train()
            seen.append((module[0].weight.detach().abs().max() + module[0].weight.grad.abs().max()).item())
        return strategy.blocking_waits - before, len(seen)

    assert job(work, 2, 2) == [(20, 60)] * 2


def test_an_asynchronous_worker_waits_for_nobody():
    """Each step is a round of its own, with this worker's gradient whole."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        if worker == 0:
            steps(module, optimizer, batches(20))
        return values(module)

    alone = sgd_of_torch(batches(20))
    assert apart(job(work, 2, consistency=ps.Async())[0], alone) < 1e-12


def test_large_parameters_may_be_in_shards():
    """A partitioner of the strategy cuts them, and no bit is another."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.01, strategy=strategy)
        steps(module, optimizer, batches(10))
        return isinstance(optimizer.variables["0.weight"], ps.ShardedVariable), values(module)

    partitioner = ps.experimental.partitioners.FixedShardsPartitioner(2)
    ((cut, found),) = job(work, 1, 2, variable_partitioner=partitioner)
    ((whole, expected),) = job(work, 1, 2)
    assert (cut, whole) == (True, False)
    assert all(map(torch.equal, found, expected))


def test_accumulated_gradients_are_one_step():
    """Of several backward passes, the last one outside of `accumulate`, or all of them within; a step sends once."""

    def work(strategy, worker):
        found = []
        for all_within in (False, True):
            module = mlp()
            optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
            for x, y in share(batches(5), worker, 2):
                optimizer.zero_grad()
                parts = [*zip(x.split(2), y.split(2), strict=True)]
                with optimizer.no_sync():
                    for own, target in parts[: None if all_within else -1]:
                        ((module(own) - target).square().mean() / len(parts)).backward()
                if not all_within:
                    own, target = parts[-1]
                    ((module(own) - target).square().mean() / len(parts)).backward()
                optimizer.step()
            found.append(values(module))
        return found

    alone = sgd_of_torch(batches(5))
    for found in job(work, 2)[0]:
        assert apart(found, alone) < 1e-12


def test_what_the_script_changes_is_assigned():
    """Weights that are loaded, or cut, after the optimizer was created are the servers' from the next step on."""

    def change(module):
        with torch.no_grad():
            module[0].weight.clamp_(-0.1, 0.1)
        module[2].bias.data = torch.full((3,), 0.5, dtype=torch.float64)

    def work(strategy, worker):
        module = mlp(seed=worker)
        optimizer = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy)
        module.load_state_dict(mlp(seed=5).state_dict())
        data = share(batches(6), worker, 2)
        steps(module, optimizer, data[:3])
        change(module)
        steps(module, optimizer, data[3:])
        return values(module), [v.numpy() for v in optimizer.variables.values()]

    alone = mlp(seed=5)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.01)
    steps(alone, theirs, batches(6)[:3])
    change(alone)
    steps(alone, theirs, batches(6)[3:])
    for found, stored in job(work, 2, 2):
        assert apart(found, alone) < 1e-12
        assert [own.tolist() for own in found] == [own.tolist() for own in stored]


# ---- One worker ----


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


def test_a_closure_is_called_once(strategy):
    """It computes the gradients, and its loss is what `step` returns."""
    module, calls = mlp(), []
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
    for x, y in batches(5):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            calls.append(float(loss))
            return loss

        assert float(optimizer.step(closure)) == calls[-1]
    assert len(calls) == 5
    assert apart(module, sgd_of_torch(batches(5))) < 1e-12


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"fused": True}])
def test_the_state_goes_both_ways(strategy, way):
    """torch's own optimizer goes on from our slots, in each of its ways, and the servers from torch's."""
    module, data = mlp(), batches(15)
    ours = module, pst.Optimizer(module, torch.optim.AdamW, lr=0.01, amsgrad=True, strategy=strategy)
    steps(*ours, data[:5])
    saved = ours[1].state_dict()
    assert {own["step"].dtype for own in saved["state"].values()} == {torch.float32}
    alone = twin(module)
    theirs = alone, torch.optim.AdamW(alone.parameters(), lr=0.3, **way)
    theirs[1].load_state_dict(saved)
    theirs[1].param_groups[0].update(way)
    assert theirs[1].param_groups[0]["lr"] == 0.01
    assert_alike(ours, theirs, data[5:10])
    other = twin(alone)
    again = pst.Optimizer(other, torch.optim.AdamW, lr=0.3, amsgrad=True, strategy=strategy)
    again.load_state_dict(theirs[1].state_dict())
    assert_alike((other, again), theirs, data[10:])


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
