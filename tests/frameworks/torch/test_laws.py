"""The same script with one, two and three workers, on one, two and three servers."""

from __future__ import annotations

import time

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, batches, job, mlp, share, steps, twin, values


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


def sgd_of_torch(count):
    """A module after some steps of torch alone."""
    module = mlp()
    steps(module, torch.optim.SGD(module.parameters(), lr=0.1), batches(count))
    return module


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

    alone = sgd_of_torch(20)
    assert apart(job(work, 2)[0], alone) < 1e-12


@pytest.mark.parametrize(("clipped", "servers", "limit"), [({}, 2, 1e-6), ({"global_clipnorm": 1.0}, 3, 1e-5)])
def test_a_gradient_that_only_one_worker_has(clipped, servers, limit):
    """It counts as zeros of the others; a parameter of which nobody has one is not updated, as if it had no decay.

    Also where servers clip by the norm of all gradients, and a step takes two rounds.
    """

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
        data, before, seen = share(batches(20), worker, 2), strategy.waits, []
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
        return strategy.waits - before, len(seen)

    assert job(work, 2, 2) == [(20, 60)] * 2


def test_parameters_keep_their_memory():
    """Values land where they are: storages keep their addresses, and views of parameters see each step."""

    def work(strategy, worker):
        module = mlp()
        views = [p.detach().view(-1) for p in module.parameters()]
        places = [p.data_ptr() for p in module.parameters()]
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        for batch in batches(3):
            before = [view.clone() for view in views]
            steps(module, optimizer, [batch])
            assert [p.data_ptr() for p in module.parameters()] == places
            assert not any(map(torch.equal, before, views))
        return True

    assert job(work, 1, 2) == [True]


def test_a_compiled_module_is_trained():
    """It is compiled once, since parameters stay where they are, and its variables have the plain module's names."""

    def work(strategy, worker):
        module, alone, data = mlp(), mlp(), batches(10)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        torch._dynamo.utils.counters.clear()
        optimizer = pst.Optimizer(compiled, torch.optim.Adam, lr=0.01, strategy=strategy)
        steps(compiled, optimizer, data)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        steps(alone, torch.optim.Adam(alone.parameters(), lr=0.01), data)
        return [*optimizer.variables], graphs, apart(module, alone)

    ((names, graphs, difference),) = job(work)
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert graphs == 1
    assert difference < 1e-12


def test_gradients_are_two_buffers():
    """`grad` is one of two arrays that alternate; zero_grad drops the reference only, or fills it with zeros."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        places = [set() for _ in module.parameters()]
        for number, batch in enumerate(batches(8)):
            steps(module, optimizer, [batch], set_to_none=number % 4 < 2)
            for found, p in zip(places, module.parameters(), strict=True):
                found.add(p.grad.data_ptr())
        optimizer.zero_grad()
        assert all(p.grad is None for p in module.parameters())
        return [len(found) for found in places], values(module)

    alone = sgd_of_torch(8)
    ((counts, found),) = job(work)
    assert counts == [2, 2, 2, 2]
    assert apart(found, alone) < 1e-12


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
                with optimizer.accumulate():
                    for own, target in parts[: None if all_within else -1]:
                        ((module(own) - target).square().mean() / len(parts)).backward()
                if not all_within:
                    own, target = parts[-1]
                    ((module(own) - target).square().mean() / len(parts)).backward()
                optimizer.step()
            found.append(values(module))
        return found

    alone = sgd_of_torch(5)
    for found in job(work, 2)[0]:
        assert apart(found, alone) < 1e-12


def test_a_closure_is_called_once():
    """It computes the gradients, and its loss is what `step` returns."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        calls = []
        for x, y in batches(5):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = (module(x) - y).square().mean()
                loss.backward()
                calls.append(float(loss))
                return loss

            assert float(optimizer.step(closure)) == calls[-1]
        return len(calls), values(module)

    alone = sgd_of_torch(5)
    ((count, found),) = job(work)
    assert count == 5
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


def test_large_parameters_may_be_in_shards():
    """A partitioner of the strategy cuts them, and no bit is another."""
    partitioner = ps.experimental.partitioners.FixedShardsPartitioner(2)

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.01, strategy=strategy)
        cut = isinstance(optimizer.variables["0.weight"], ps.ShardedVariable)
        steps(module, optimizer, batches(10))
        return cut, values(module)

    ((cut, found),) = job(work, 1, 2, variable_partitioner=partitioner)
    ((whole, expected),) = job(work, 1, 2)
    assert (cut, whole) == (True, False)
    assert all(map(torch.equal, found, expected))


def test_the_state_goes_both_ways():
    """Slots are fetched and assigned; torch's own optimizer goes on from them, and from torch's the servers do."""

    def work(strategy, worker):
        module, data = mlp(), batches(15)
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.01, amsgrad=True, strategy=strategy)
        steps(module, optimizer, data[:5])
        alone = twin(module)
        theirs = torch.optim.AdamW(alone.parameters(), lr=0.3)
        theirs.load_state_dict(optimizer.state_dict())
        assert theirs.param_groups[0]["lr"] == 0.01
        steps(module, optimizer, data[5:10])
        steps(alone, theirs, data[5:10])
        assert apart(module, alone) < 1e-12

        other = twin(alone)
        again = pst.Optimizer(other, torch.optim.AdamW, lr=0.3, amsgrad=True, strategy=strategy)
        again.load_state_dict(theirs.state_dict())
        steps(other, again, data[10:])
        steps(alone, theirs, data[10:])
        assert apart(other, alone) < 1e-12
        return True

    assert job(work, 1, 2) == [True]


@pytest.mark.parametrize("way", [{"foreach": True}, {"fused": True}])
def test_the_state_is_for_each_way_of_torch(way):
    """Counts are float32 as torch's are, so that its optimizers of many tensors at once go on from them as well."""

    def work(strategy, worker):
        module, data = mlp(), batches(10)
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.01, strategy=strategy)
        steps(module, optimizer, data[:5])
        saved = optimizer.state_dict()
        assert {own["step"].dtype for own in saved["state"].values()} == {torch.float32}
        alone = twin(module)
        theirs = torch.optim.AdamW(alone.parameters(), lr=0.3, **way)
        theirs.load_state_dict(saved)
        theirs.param_groups[0].update(way)
        steps(module, optimizer, data[5:])
        steps(alone, theirs, data[5:])
        return apart(module, alone)

    assert job(work)[0] < 1e-12


def test_our_state_goes_on_as_well():
    """An optimizer of `ps.optimizers` has its slots and its count in the state, by its own names."""

    def work(strategy, worker):
        module, data = mlp(), batches(20)
        optimizer = pst.Optimizer(module, ps.optimizers.Adam(0.01), strategy=strategy)
        steps(module, optimizer, data[:10])
        saved, other = optimizer.state_dict(), twin(module)
        assert (saved["iterations"], [*saved["state"][0]]) == (10, ["m", "v"])
        again = pst.Optimizer(other, ps.optimizers.Adam(0.5), strategy=strategy)
        again.load_state_dict(saved)
        assert again.rule.learning_rate == 0.5, "until the next step"
        steps(module, optimizer, data[10:])
        steps(other, again, data[10:])
        assert int(again.rule.iterations) == 20
        return values(module), values(other)

    ((one, other),) = job(work)
    assert all(map(torch.equal, one, other))


def test_an_asynchronous_worker_waits_for_nobody():
    """Each step is a round of its own, with this worker's gradient whole."""

    def work(strategy, worker):
        module = mlp()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        if worker == 0:
            steps(module, optimizer, batches(20))
        return values(module)

    alone = sgd_of_torch(20)
    assert apart(job(work, 2, consistency=ps.Async())[0], alone) < 1e-12
