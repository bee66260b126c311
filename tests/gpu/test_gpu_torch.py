"""Modules of PyTorch on a GPU, trained on servers. Skipped, visibly, without a device, CuPy or PyTorch."""

from __future__ import annotations

import pytest

from psclient._src.arrays import devices

if devices.available_gpus() == 0:  # before PyTorch is imported
    pytest.skip("no CUDA device, or CuPy is not installed (extra `gpu`)", allow_module_level=True)
torch = pytest.importorskip("torch", reason="PyTorch is not installed; it comes with paramserver[torch]")

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import apart, batches, job, mlp, sgd_of_torch, share, steps, values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")

CUDA = "cuda:0"


def there(data):
    return [tuple(part.to(CUDA) for part in batch) for batch in data]


def host(tensors):
    return [each.cpu() for each in tensors]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01}), (torch.optim.Adam, {})],
)
def test_a_rule_is_torchs_own(kind, options):
    """Parameters stay on the device, where they were, and are those of `torch.optim` on the host after 20 steps."""

    def work(strategy, worker):
        module = mlp().to(CUDA)
        places = [p.data_ptr() for p in module.parameters()]
        optimizer = pst.Optimizer(module, kind, strategy=strategy, **options)
        steps(module, optimizer, there(batches(20)))
        assert [p.data_ptr() for p in module.parameters()] == places
        assert optimizer.device == torch.device(CUDA)
        return host(values(module))

    alone = mlp()
    steps(alone, kind(alone.parameters(), **options), batches(20))
    assert apart(job(work)[0], alone) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_each_dtype_goes_there_and_back(dtype):
    """A step of rate 1 takes the gradient off the parameter: numbers that each dtype has."""

    def work(strategy, worker):
        module = torch.nn.Linear(3, 1, bias=False).to(CUDA, dtype)
        with torch.no_grad():
            module.weight.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1.0, strategy=strategy)
        module(torch.tensor([[0.5, 0.25, 2.0]], device=CUDA, dtype=dtype)).sum().backward()
        optimizer.step()
        assert (module.weight.dtype, module.weight.device) == (dtype, torch.device(CUDA))
        return module.weight.tolist()

    assert job(work) == [[[0.5, 1.75, 1.0]]]


def test_parameters_of_any_strides_and_dtypes_are_trained_together():
    """Ten small ones and one that is copied by itself, some of them transposed or empty, in a stream of torch's own."""

    def work(strategy, worker):
        dtypes = [torch.float32, torch.float64, torch.float16]
        shapes = [(n, 3) for n in range(10)] + [(1000, 1000)]
        module = torch.nn.ParameterList(
            torch.zeros(shape, dtype=dtypes[n % 3], device=CUDA).t() for n, shape in enumerate(shapes)
        )
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=1.0, strategy=strategy)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                optimizer.zero_grad()
                sum((p * float(n)).sum() for n, p in enumerate(module)).backward()
                optimizer.step()
            return [p.float().cpu().unique().tolist() for p in module]

    assert job(work) == [[[], *([-4.0 * n] for n in range(1, 11))]]


def test_two_workers_have_the_same_bits():
    """One on the device and one on the host: gradients are summed on the servers."""

    def work(strategy, worker):
        module, data = mlp(seed=worker), share(batches(10), worker, 2)
        if worker == 0:
            module, data = module.to(CUDA), there(data)
        steps(module, pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy), data)
        return host(values(module))

    alone = sgd_of_torch(batches(10))
    one, other = job(work, 2, 2)
    assert all(map(torch.equal, one, other))
    assert apart(one, alone) < 1e-9


def test_what_the_script_changes_is_assigned():
    """Weights that are loaded on the device are the servers' from the next step on."""

    def work(strategy, worker):
        module = mlp().to(CUDA)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        module.load_state_dict(mlp(seed=5).state_dict())
        steps(module, optimizer, there(batches(3)))
        return host(values(module))

    alone = sgd_of_torch(batches(3), seed=5)
    assert apart(job(work)[0], alone) < 1e-9


def test_a_loader_gives_batches_on_the_device():
    """Where the parameters are; all steps wait once, and give what one process computes."""

    def work(strategy, worker):
        module = mlp().to(CUDA)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        for batch in pst.Loader(batches(6), optimizer):
            assert {part.device for part in batch} == {torch.device(CUDA)}
            steps(module, optimizer, [batch])
        return host(values(module))

    alone = sgd_of_torch(batches(6))
    for found in job(work, 2):
        assert apart(found, alone) < 1e-6


def test_an_overflow_of_one_is_one_of_all():
    """The scaler's verdict is on the device, and all workers halve their scales."""

    def work(strategy, worker):
        module, data = mlp().to(CUDA), there(share(batches(4), worker, 2))
        scaler = pst.GradScaler("cuda", init_scale=1024.0)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            scaler.scale(loss * (float("inf") if (number, worker) == (2, 1) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), host(values(module))

    data = batches(4)
    alone = sgd_of_torch([*data[:2], data[3]])
    for scale, found in job(work, 2):
        assert scale == 512.0
        assert apart(found, alone) < 1e-6


@pytest.mark.parametrize("kind", ["table", "sparse"])
def test_rows_come_to_the_device(kind):
    """Of a table on servers, and of `nn.Embedding(sparse=True)`: only rows that were named change."""

    def work(strategy, worker):
        if kind == "table":
            with strategy.scope():
                module = pst.Embedding(ps.dynamic_embedding.get_variable("users", 2, initializer=1.0))
        else:
            module = torch.nn.Embedding(9, 2, sparse=True).to(CUDA)
            torch.nn.init.ones_(module.weight)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.5, strategy=strategy)
        module(torch.tensor([3, 7, 3], device=CUDA)).sum().backward()
        optimizer.step()
        found = module(torch.tensor([3, 7, 8], device=CUDA))
        assert found.device == torch.device(CUDA)
        return found.tolist()

    assert job(work) == [[[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]]
