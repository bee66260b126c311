"""Checkpoints and buffers of modules: what servers save is what torch loads, and a job goes on from it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import Tied, batches, job, mlp, seeded, share, steps, values


def normed(seed=0, dtype=torch.float64):
    """A network with BatchNorm, and a buffer that is no part of its state."""
    layers = lambda: [torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)]  # noqa: E731
    module = torch.nn.Sequential(*seeded(seed, layers)).to(dtype)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    return module


def shards(root, path):
    found = {}
    for file in sorted((root / path).glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("make", "dtype", "prefix", "missing"),
    [(normed, torch.float64, "", []), (normed, torch.bfloat16, "", []), (Tied, torch.float32, "net/", ["b.weight"])],
    ids=["parameters and buffers", "in half precision", "a shared weight, once, by its first name"],
)
def test_torch_loads_what_the_servers_saved(tmp_path, make, dtype, prefix, missing):
    """By the names of the module's own state: into the plain module, and all its layers."""

    def work(strategy, worker):
        module = make(worker).to(dtype)
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.01, strategy=strategy, prefix=prefix)
        steps(module, optimizer, share(batches(3, dtype=dtype), worker, 2))
        checkpoint = ps.train.Checkpoint(optimizer=optimizer)
        path = checkpoint.save("run/ckpt")
        checkpoint.sync()
        return path, module.state_dict()

    path, expected = job(work, 2, 2, tmp_path)[0]
    saved, plain = shards(tmp_path, path), make(5).to(dtype)
    own = {name: saved[prefix + name] for name in plain.state_dict() if prefix + name in saved}
    found = plain.load_state_dict(own, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (missing, [])
    for name, tensor in plain.state_dict().items():
        assert tensor.dtype is expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    if make is Tied:
        assert plain.b.weight is plain.a.weight
    else:
        assert saved["adamw/0.weight/exp_avg"].shape == (4, 5)
        assert int(saved["adamw/iterations"]) == 3


def test_weights_of_torch_start_a_job(tmp_path):
    """Those that `torch.save`, or safetensors, have written: loaded before the optimizer is created, or after."""
    plain = normed(7)
    torch.save(plain.state_dict(), tmp_path / "weights.pt")
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")

    def work(strategy, worker):
        found = []
        for before in (True, False):
            module = normed(worker)
            state = torch.load(tmp_path / "weights.pt") if before else load_file(tmp_path / "weights.safetensors")
            if before:
                module.load_state_dict(state)
            optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.0, strategy=strategy)
            if not before:
                module.load_state_dict(state)
            steps(module, optimizer, share(batches(1), worker, 2))
            found.append({name: torch.tensor(v.numpy()) for name, v in optimizer.variables.items()})
        return found

    for found in job(work, 2, 1):
        for stored in found:
            assert all(torch.equal(own, plain.get_parameter(name)) for name, own in stored.items())


def test_a_restore_is_in_the_parameters_at_once(tmp_path):
    """In their own memory, which may have moved; the next step goes on with the moments and the rates of then."""

    def work(strategy, worker):
        module, data = mlp(seed=worker), share(batches(12), worker, 2)
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.1, strategy=strategy)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        checkpoint = ps.train.Checkpoint(model=module, optimizer=optimizer, scheduler=scheduler)

        def go(some):
            for batch in some:
                steps(module, optimizer, [batch])
                scheduler.step()
            return values(module)

        saved = go(data[:5])
        path = checkpoint.save("run/ckpt")
        expected = go(data[5:])
        module.share_memory()
        places = [p.data_ptr() for p in module.parameters()]
        checkpoint.restore(path).assert_consumed()
        optimizer._begin_batch()
        assert all(map(torch.equal, values(module), saved))
        assert [p.data_ptr() for p in module.parameters()] == places
        assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.05, 5)
        return all(map(torch.equal, go(data[5:]), expected))

    assert job(work, 2, 2, tmp_path) == [True, True]


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.NAdam], ids=lambda kind: kind.__name__)
def test_a_table_is_saved_with_its_module(strategy, kind):
    """Its rows are restored by keys, with what the optimizer keeps of each, and of the table."""
    with strategy.scope():
        table = ps.dynamic_embedding.get_variable(f"users of {kind.__name__}", 2, initializer=0.0)
    module = pst.Embedding(table)
    optimizer = pst.Optimizer(module, kind, lr=0.5, strategy=strategy)
    checkpoint = ps.train.Checkpoint(optimizer=optimizer)

    def go():
        optimizer.zero_grad()
        module(torch.tensor([2**50, 7])).sum().backward()
        optimizer.step()
        with torch.no_grad():
            return module(torch.tensor([2**50, 7, 8])).tolist()

    go()
    path = checkpoint.save("run/ckpt")
    expected = go()
    checkpoint.restore(path)
    assert go() == expected


# ---- Buffers ----


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def trained(mode, workers=2, **options):
    def work(strategy, worker):
        module = normed()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.0, strategy=strategy, buffers=mode)
        steps(module, optimizer, share(batches(4), worker, workers))
        return buffers(module)

    return job(work, workers, 2, **options)


def test_buffers_are_those_of_the_first_means_or_each_workers_own():
    """Those of the first as with DDP: what it alone makes of its part. Means have the same bits, those of the whole
    batch. Asynchronous workers keep their own in any case."""
    own = trained("own")
    for found in (own, trained("first", consistency=ps.Async())):
        assert not torch.equal(*(each["1.running_mean"] for each in found))
        assert {int(each["1.num_batches_tracked"]) for each in found} == {4}
    for found in trained("first"):
        assert all(torch.equal(found[name], mine) for name, mine in own[0].items())
    one, other = trained("mean")
    assert all(torch.equal(one[name], other[name]) for name in one)
    (alone,) = trained("mean", 1)
    assert (one["1.running_mean"] - alone["1.running_mean"]).abs().max() < 1e-6
    assert int(one["1.num_batches_tracked"]) == 4


class Kinds(torch.nn.Module):
    """Buffers of all kinds, each of which a forward changes; and one that has no element."""

    KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)

    def __init__(self, value):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3, dtype=torch.float64)
        self.value = value
        for number, dtype in enumerate(self.KINDS):
            self.register_buffer(f"of_{number}", torch.zeros(2, 2, dtype=dtype))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, x):
        for number in range(len(self.KINDS)):
            getattr(self, f"of_{number}").fill_(self.value)
        return self.layer(x)


def test_buffers_of_all_dtypes_are_the_first_workers():
    """By default: from the beginning, and after each step. Numbers of any width, truth values, infinity, and nothing at
    all, to the last bit; what is no part of the module's state is nobody else's concern."""

    def work(strategy, worker):
        module = Kinds(1 - worker)
        module.register_buffer("own", torch.full((1,), worker), persistent=False)
        module.register_buffer("first", torch.full((1,), worker + 3.0))
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        assert (module.own.item(), module.first.item()) == (worker, 3)
        steps(module, optimizer, share(batches(2), worker, 2))
        return buffers(module)

    for worker, found in enumerate(job(work, 2)):
        assert all(found[f"of_{number}"].eq(1).all() for number in range(len(Kinds.KINDS)))
        assert found["mask"].tolist() == [-torch.inf] * 3
        assert found["own"].item() == worker


def test_a_graph_from_before_a_step_can_be_gone_back():
    """Buffers get their values as BatchNorm gives them: autograd does not take them for changed."""

    def work(strategy, worker):
        norm, head = torch.nn.BatchNorm1d(5, affine=False).double(), torch.nn.Linear(5, 1).double()
        module = torch.nn.Sequential(norm, head)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy)
        x = batches(1)[0][0].requires_grad_()
        normalized = norm(x)
        head(normalized.detach()).sum().backward()
        optimizer.step()
        (normalized[0].sum()).backward()
        return x.grad.isfinite().all()

    assert all(job(work, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_checkpoints_have_those_of_the_first_worker(tmp_path, dtype):
    """And give them to all: to the module's own memory, where they are restored."""

    def work(strategy, worker, restores):
        module = normed(dtype=dtype)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
        checkpoint, places = ps.train.Checkpoint(optimizer=optimizer), [each.data_ptr() for each in module.buffers()]
        steps(module, optimizer, share(batches(1 if restores else 3, dtype=dtype), worker, 3))
        if restores:
            checkpoint.restore("saved").assert_existing_objects_matched()
        else:
            checkpoint.write("saved")
        assert [each.data_ptr() for each in module.buffers()] == places
        return buffers(module)

    saved, *_ = job(partial(work, restores=False), 3, 2, tmp_path)
    for found in job(partial(work, restores=True), 3, 1, tmp_path):
        assert all(torch.equal(saved[name], found[name]) for name in saved)
