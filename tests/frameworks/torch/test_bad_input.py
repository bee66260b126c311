"""What is wrong is told in a sentence, by every worker that is concerned, and nobody waits for ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import psclient as ps
import psclient.torch as pst
from pstesting.in_process import InProcessCluster
from tests.kit.modules import apart, batches, mlp, sgd_of_torch, share, steps, values
from tests.kit.strategies import opened

HASTY = replace(
    ps.Timeouts(),
    heartbeat_interval=0.2,
    session_timeout=1.0,
    round_timeout=4.0,
    no_workers_timeout=4.0,
    start_timeout=4.0,
    chief_timeout=4.0,
)


def outcomes(fn, workers=2):
    """What each worker's function came to: its result or its error; no worker waits for long."""
    found = []
    with InProcessCluster(1, workers, timeouts=HASTY) as cluster, ThreadPoolExecutor(workers) as pool:

        def work(worker):
            with ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(worker), timeouts=HASTY) as strategy:
                return fn(strategy, worker)

        for future in [pool.submit(work, worker) for worker in range(workers)]:
            error = future.exception()
            found.append(future.result() if error is None else error)
    return found


def sgd(module, strategy, *args, **options):
    return pst.Optimizer(module, torch.optim.SGD, *args, lr=0.1, strategy=strategy, **options)


def odd(dtype):
    return torch.nn.ParameterDict({"odd": torch.nn.Parameter(torch.ones(3, dtype=dtype), dtype.is_floating_point)})


WEIGHT = "'weight' float32[7,5]"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: torch.nn.Linear(5, 8), [WEIGHT, "'weight' float32[8,5]"]),
        (lambda: torch.nn.Linear(5, 7).double(), [WEIGHT, "'weight' float64[7,5]"]),
        (lambda: torch.nn.ParameterDict({"kernel": torch.ones(7, 5)}), [WEIGHT, "'kernel' float32[7,5]"]),
    ],
)
def test_modules_differ(other, words):
    """The first parameter that is another one is named, with both shapes, or dtypes, and whose it is."""

    def work(strategy, worker):
        sgd(torch.nn.Linear(5, 7) if worker == 0 else other(), strategy)
        strategy.backend.settle()

    errors = [str(found) for found in outcomes(work) if isinstance(found, ps.errors.PSError)]
    assert errors, "one of them is told"
    for word in (*words, "/job:worker/task:0", "/job:worker/task:1", "test_bad_input.py"):
        assert word in errors[0]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: odd(torch.int64), "'odd' is torch.int64"),
        (lambda: odd(torch.complex64), "'odd' is torch.complex64.*view_as_complex"),
        (lambda: torch.nn.LazyLinear(3), "'weight' has no shape yet"),
        (lambda: torch.nn.Linear(2, 3, device="meta"), r"'weight' is on the meta device.*to_empty"),
    ],
)
def test_parameters_that_cannot_be_trained(strategy, make, word):
    """Integers, complex numbers, what has no shape yet: with what to do."""
    with pytest.raises(ValueError, match=word):
        sgd(make(), strategy)


def test_a_second_optimizer_over_a_parameter(strategy):
    """Is refused while there is the first; afterwards it begins anew, with the values of then."""
    module = mlp()
    first = sgd(module, strategy)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is already trained by another psclient"):
        sgd(module, strategy)
    steps(module, first, batches(2))
    with strategy.scope():
        rows = pst.Embedding(ps.Variable([[1.0], [2.0]], name="rows"))
    kept = sgd(rows, strategy)
    with pytest.raises(ValueError, match=r"what is looked up in 'rows.*' is already trained by another"):
        sgd(rows, strategy)
    assert kept.param_groups[0]["params"] == []
    del first
    again = sgd(module, strategy)
    steps(module, again, batches(2))
    assert apart(module, sgd_of_torch([*batches(2), *batches(2)])) < 1e-12


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(strategy):
    module, others = mlp(), mlp()
    optimizer = sgd(module, strategy, module[0].parameters())
    rest = [*module[2].parameters()]
    for wrong in ([rest[0], *others.parameters()], [*rest[:1], torch.nn.Parameter(torch.ones(2))], [rest, 3]):
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group({"params": wrong})
    steps(module, optimizer, batches(1))
    optimizer.add_param_group({"params": rest, "lr": 0.2})
    steps(module, optimizer, batches(2)[1:])
    alone = mlp()
    theirs = torch.optim.SGD(alone[0].parameters(), lr=0.1)
    steps(alone, theirs, batches(1))
    theirs.add_param_group({"params": [*alone[2].parameters()], "lr": 0.2})
    alone.zero_grad()
    steps(alone, theirs, batches(2)[1:])
    assert apart(module, alone) < 1e-12


def test_an_optimizer_that_could_not_be_created_trains_nothing(strategy):
    """Its parameters, and rows, are free for the next one, even while its error is looked at."""
    with strategy.scope():
        module = torch.nn.ModuleList([mlp(), pst.Embedding(ps.Variable([[1.0], [2.0]], name="rows"))])
    groups = [{"params": [*module[0][0].parameters(), module[1]]}, {"params": mlp().parameters()}]
    errors = []
    for given in ([*module[0].parameters(), module[1], torch.nn.Parameter(torch.ones(2))], groups):
        with pytest.raises(ValueError, match="does not belong to the module and") as raised:
            sgd(module, strategy, given)
        errors.append(raised)
    steps(module[0], sgd(module, strategy), batches(2))
    assert len(errors) == 2
    assert apart(module[0], sgd_of_torch(batches(2))) < 1e-12


def test_a_state_of_another_optimizer_changes_nothing(strategy):
    """Whether its groups lack a number or its parameters have other slots; a group of an older one may lack a word."""
    module, other = mlp(), mlp()
    optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, momentum=0.5, strategy=strategy)
    steps(module, optimizer, batches(1))
    adam = torch.optim.Adam(other.parameters(), lr=0.5)
    steps(other, adam, batches(1))
    state = adam.state_dict()
    with pytest.raises(ValueError, match="a parameter group without dampening, momentum"):
        optimizer.load_state_dict(state)
    mixed = {**state, "param_groups": [{**optimizer.param_groups[0], **state["param_groups"][0]}]}
    with pytest.raises(
        ValueError, match=r"'0\.weight' has exp_avg, exp_avg_sq, but a SGD on servers has momentum_buffer"
    ):
        optimizer.load_state_dict(mixed)
    assert optimizer.param_groups[0]["lr"] == 0.1
    steps(module, optimizer, batches(2)[1:])
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["maximize"]
    optimizer.load_state_dict(saved)
    steps(module, optimizer, batches(3)[2:])
    alone = mlp()
    steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5), batches(3))
    assert apart(module, alone) < 1e-12


REPLACED = {
    "a layer": (
        lambda module: module.__setitem__(2, torch.nn.Linear(7, 3).double()),
        r"'2\.weight' of the module was replaced after its optimizer was created",
    ),
    "a layer's dtype": (
        lambda module: module.__setitem__(2, torch.nn.Linear(7, 3)),
        r"'2\.weight' has dtype torch\.float32",
    ),
    "the device": (
        lambda module: module.to("meta"),
        r"'0\.weight' has device meta, but had cpu when its optimizer was",
    ),
    "memory": (lambda module: module.to_empty(device="meta"), r"'0\.weight' has device meta, but had cpu"),
    "the dtype": (lambda module: module.float(), r"'0\.weight' has dtype torch\.float32, but had torch\.float64"),
    "a shape": (
        lambda module: setattr(module[2].bias, "data", torch.zeros(4).double()),
        r"'2\.bias' has shape \(4,\), but had \(3,\)",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_parameter_that_is_replaced(strategy, case, compiled):
    """By another object, shape, dtype or device: the step says which; one that is only not used is no error."""
    change, word = REPLACED[case]
    module = mlp()
    optimizer = sgd(torch.compile(module, backend="eager") if compiled else module, strategy)
    optimizer.zero_grad()
    x = batches(1)[0][0]
    module[0](x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    change(module)
    if case in ("a layer", "the device", "memory"):
        module(x.to(module[0].weight.device)).sum().backward()
    with pytest.raises(RuntimeError, match=word):
        optimizer.step()


def test_a_closure_that_fails():
    """Its error is raised as it is; nothing was sent, and the next step is made, by all workers together."""

    def work(strategy, worker):
        module = mlp()
        optimizer = sgd(module, strategy)
        data = share(batches(3), worker, 2)
        steps(module, optimizer, data[:1])
        optimizer.zero_grad()

        def fail():
            (module(data[1][0]) - data[1][1]).square().mean().backward()
            raise KeyError("the test fails here")

        with pytest.raises(KeyError, match="the test fails here"):
            optimizer.step(fail)
        steps(module, optimizer, data[1:])
        return values(module)

    assert all(apart(found, sgd_of_torch(batches(3))) < 1e-12 for found in outcomes(work))


def test_a_step_in_one_worker_only():
    """Another one does something else: both are told what, instead of waiting for each other."""

    def work(strategy, worker):
        module = mlp()
        optimizer = sgd(module, strategy)
        (module(batches(1)[0][0]).sum()).backward()
        if worker == 0:
            optimizer.step()
        else:
            float(strategy.reduce("sum", 1.0, axis=None))

    for found in outcomes(work):
        assert isinstance(found, ps.errors.PSError)
        assert "reduce sum float64[3] for '2.bias'" in str(found)
        assert "reduce sum float64[]" in str(found)


def test_a_worker_that_ends_is_not_waited_for():

    def work(strategy, worker):
        module = mlp()
        optimizer = sgd(module, strategy)
        if worker == 0:
            steps(module, optimizer, batches(3))
        return strategy.round

    assert outcomes(work)[0] == 3


def test_where_there_is_no_strategy(strategy):
    """Or no servers, several replicas, a function of `run`, another module's parameters: it says so."""
    with pytest.raises(ValueError, match=r"no strategy is active; create the optimizer in strategy\.scope\(\)"):
        pst.Optimizer(mlp(), torch.optim.SGD, lr=0.1)
    for kind, word in (
        ("mirrored-1", "trained by parameter servers, but a MirroredStrategy has none"),
        ("servers-2x2", "the strategy has 2 replicas in this process"),
    ):
        with opened(kind) as other, pytest.raises(TypeError, match=word):
            sgd(mlp(), other)
    with pytest.raises(TypeError, match="a list is not a module"):
        sgd([], strategy)
    optimizer = sgd(mlp(), strategy)
    with pytest.raises(RuntimeError, match="step needs cross-replica context but was called in replica context"):
        strategy.run(optimizer.step)
    with pytest.raises(ValueError, match=r"a parameter of shape \(7, 5\) does not belong to the module and"):
        sgd(torch.nn.Linear(1, 1), strategy, mlp().parameters())
