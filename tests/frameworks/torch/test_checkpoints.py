"""Checkpoints and buffers of modules: what servers save is what torch loads, and a job goes on from it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import Tied, batches, job, mlp, seeded, share, steps, values


def net(seed=0):
    """A convolution, BatchNorm, and a layer in bfloat16."""
    layers = lambda: [torch.nn.Conv1d(1, 2, 3), torch.nn.BatchNorm1d(2), torch.nn.Flatten(), torch.nn.Linear(6, 3)]  # noqa: E731
    module = torch.nn.Sequential(*seeded(seed, layers))
    module.last = torch.nn.Linear(3, 3).to(torch.bfloat16)
    return module


def forward(module, x):
    return module.last(module[3](module[2](module[1](module[0](x[:, None])))).to(torch.bfloat16)).float()


def train(module, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        (forward(module, x) - y).square().mean().backward()
        optimizer.step()


def shards(root, path):
    found = {}
    for file in sorted((root / path).glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("make", "train", "kind", "prefix", "missing"),
    [(net, train, torch.optim.AdamW, "", []), (Tied, steps, torch.optim.Adam, "net/", ["b.weight"])],
    ids=["parameters and buffers", "a shared weight, once, by its first name"],
)
def test_torch_loads_what_the_servers_saved(tmp_path, make, train, kind, prefix, missing):
    """By the names of the module's own state: into the plain module, and all its layers."""

    def work(strategy, worker):
        module = make(worker)
        optimizer = pst.Optimizer(module, kind, lr=0.01, strategy=strategy, prefix=prefix)
        train(module, optimizer, share(batches(3, dtype=torch.float32), worker, 2))
        checkpoint = ps.train.Checkpoint(optimizer=optimizer)
        path = checkpoint.save("run/ckpt")
        checkpoint.sync()
        return path, module.state_dict()

    path, expected = job(work, 2, 2, tmp_path)[0]
    saved, plain = shards(tmp_path, path), make(5)
    own = {name: saved[prefix + name] for name in plain.state_dict() if prefix + name in saved}
    found = plain.load_state_dict(own, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (missing, [])
    for name, tensor in plain.state_dict().items():
        assert tensor.dtype is expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    if make is net:
        assert saved["adamw/0.weight/exp_avg"].shape == (2, 1, 3)
        assert int(saved["adamw/iterations"]) == 3
    else:
        assert plain.b.weight is plain.a.weight


def test_weights_of_torch_start_a_job(tmp_path):
    """Those that `torch.save`, or safetensors, have written: loaded before the optimizer is created, or after."""
    plain = net(7)
    torch.save(plain.state_dict(), tmp_path / "weights.pt")
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")

    def work(strategy, worker):
        found = []
        for before in (True, False):
            module = net(worker)
            weights = tmp_path / ("weights.pt" if before else "weights.safetensors")
            state = torch.load(weights) if before else load_file(weights)
            if before:
                module.load_state_dict(state)
            optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.0, strategy=strategy)
            if not before:
                module.load_state_dict(state)
            train(module, optimizer, share(batches(1, dtype=torch.float32), worker, 2))
            found.append({name: torch.tensor(v.numpy().astype("float32")) for name, v in optimizer.variables.items()})
        return found

    for found in job(work, 2, 1):
        for stored in found:
            assert all(torch.equal(own, plain.get_parameter(name).float()) for name, own in stored.items())


def test_a_restore_is_in_the_parameters_at_once(tmp_path):
    """In their own memory; and the next step goes on from there, with the moments and the rates of then."""

    def work(strategy, worker):
        module, data = mlp(seed=worker), share(batches(12), worker, 2)
        optimizer = pst.Optimizer(module, torch.optim.AdamW, lr=0.1, strategy=strategy)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        checkpoint = ps.train.Checkpoint(optimizer=optimizer, scheduler=scheduler)
        places = [p.data_ptr() for p in module.parameters()]

        def go(some):
            for batch in some:
                steps(module, optimizer, [batch])
                scheduler.step()
            return values(module)

        saved = go(data[:5])
        path = checkpoint.save("run/ckpt")
        expected = go(data[5:])
        checkpoint.restore(path).assert_consumed()
        assert all(map(torch.equal, values(module), saved))
        assert [p.data_ptr() for p in module.parameters()] == places
        assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.05, 5)
        return all(map(torch.equal, go(data[5:]), expected))

    assert job(work, 2, 2, tmp_path) == [True, True]


@pytest.mark.parametrize(("workers", "servers"), [(2, 3), (1, 1)])
def test_a_job_goes_on_where_it_stood(tmp_path, workers, servers):
    """In the middle of an epoch, on other servers to the last bit; with another number of workers to 1e-6."""
    parts = map(torch.stack, zip(*batches(5), strict=True))
    data = torch.utils.data.TensorDataset(*(part.reshape(-1, part.shape[-1]) for part in parts))

    def trained(strategy, resume, until, stop=None):
        module = mlp()
        optimizer = pst.Optimizer(module, ps.optimizers.Adam(0.01), strategy=strategy)
        generator = torch.Generator().manual_seed(1)
        loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True, generator=generator)
        checkpoint = ps.train.Checkpoint(optimizer=optimizer)
        if resume:
            checkpoint.restore("run").assert_existing_objects_matched()
        shared, count = pst.Loader(loader, optimizer), 0
        for _ in shared.epochs(until):
            for x, y in shared:
                optimizer.zero_grad()
                (module(x) - y).square().mean().backward()
                optimizer.step()
                count += 1
                if count == stop:
                    checkpoint.save("run/ckpt")
                    checkpoint.sync()
                    return values(module)
        return values(module)

    expected = job(lambda strategy, worker: trained(strategy, False, 3), 2, 2, tmp_path)[0]
    job(lambda strategy, worker: trained(strategy, False, 3, 8), 2, 2, tmp_path)
    for found in job(lambda strategy, worker: trained(strategy, True, 3), workers, servers, tmp_path):
        alike = torch.equal if workers == 2 else partial(torch.allclose, rtol=1e-6, atol=1e-9)
        assert all(map(alike, found, expected))


def test_a_table_is_saved_with_its_module(strategy):
    """Its rows are restored by keys, with what the optimizer keeps of each."""
    with strategy.scope():
        module = pst.Embedding(ps.dynamic_embedding.get_variable("users", 2, initializer=0.0))
    optimizer = pst.Optimizer(module, torch.optim.Adagrad, lr=0.5, strategy=strategy)
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


def normed(seed=0, dtype=torch.float64):
    """A network with BatchNorm, and a buffer that is no part of its state."""
    layers = lambda: [torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)]  # noqa: E731
    module = torch.nn.Sequential(*seeded(seed, layers)).to(dtype)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    return module


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def trained(mode=None, workers=2, count=4, **options):
    said = {} if mode is None else {"buffers": mode}

    def work(strategy, worker):
        module = normed()
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.0, strategy=strategy, **said)
        steps(module, optimizer, share(batches(count), worker, workers))
        return buffers(module)

    return job(work, workers, 2, **options)


def test_all_workers_have_the_buffers_of_the_first():
    """By default, as with DDP: after a step they are what the first worker alone makes of its part, of any dtype."""
    mine, _, _ = trained("own", 3)
    for found in (trained(workers=3), trained("first", 3)):
        assert all(torch.equal(own[name], mine[name]) for own in found for name in mine)


def test_asynchronous_workers_keep_their_buffers():
    """No worker waits for another's, whatever the mode."""
    one, other = trained(consistency=ps.Async())
    assert not torch.equal(one["1.running_mean"], other["1.running_mean"])


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
    """Numbers of any width, truth values, infinity, and nothing at all, to the last bit."""

    def work(strategy, worker):
        module = Kinds(1 - worker)
        steps(module, pst.Optimizer(module, torch.optim.SGD, lr=0.1, strategy=strategy), share(batches(2), worker, 2))
        return buffers(module)

    for found in job(work, 2):
        assert all(found[f"of_{number}"].eq(1).all() for number in range(len(Kinds.KINDS)))
        assert found["mask"].tolist() == [-torch.inf] * 3


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


def test_buffers_are_each_workers_own_or_means():
    """Own ones differ; means have the same bits after each step, those of the whole batch."""
    one, other = trained("own")
    assert not torch.equal(one["1.running_mean"], other["1.running_mean"])
    assert int(one["1.num_batches_tracked"]) == int(other["1.num_batches_tracked"]) == 4
    one, other = trained("mean")
    assert all(torch.equal(one[name], other[name]) for name in one)
    (alone,) = trained("mean", 1)
    assert (one["1.running_mean"] - alone["1.running_mean"]).abs().max() < 1e-6
    assert int(one["1.num_batches_tracked"]) == 4


def test_workers_begin_with_those_of_the_first():
    """As with parameters; what is no part of the module's state is nobody else's concern."""

    def work(strategy, worker):
        module = normed()
        with torch.no_grad():
            for buffer in module.buffers():
                buffer.fill_(worker + 3)
        pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
        return {name: buffer.flatten()[0].item() for name, buffer in module.named_buffers()}

    one, other = job(work, 2)
    assert set(one.values()) == {3}
    assert other.pop("scratch") == 4
    assert set(other.values()) == {3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_checkpoints_have_those_of_the_first_worker(tmp_path, dtype):
    """And give them to all: to the module's own memory, where they are restored."""

    def saving(strategy, worker):
        module = normed(dtype=dtype)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
        steps(module, optimizer, share(batches(3, dtype=dtype), worker, 2))
        ps.train.Checkpoint(optimizer=optimizer).write("saved")
        return buffers(module)

    def restoring(strategy, worker):
        module = normed(dtype=dtype)
        optimizer = pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
        places = [buffer.data_ptr() for buffer in module.buffers()]
        steps(module, optimizer, share(batches(1, dtype=dtype), worker, 3))
        ps.train.Checkpoint(optimizer=optimizer).restore("saved").assert_existing_objects_matched()
        assert [buffer.data_ptr() for buffer in module.buffers()] == places
        return buffers(module)

    saved, _ = job(saving, 2, 2, tmp_path)
    for found in job(restoring, 3, 1, tmp_path):
        assert all(torch.equal(saved[name], found[name]) for name in saved)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_servers_do_not_have(strategy, persistent):
    """Is named, with its dtype; one that is not persistent stays this worker's own. A mode is one of three."""
    with pytest.raises(ValueError, match="buffers is 'sum'; use 'first', 'mean' or 'own'"):
        pst.Optimizer(normed(), torch.optim.SGD, lr=0.01, buffers="sum", strategy=strategy)
    module = torch.nn.Linear(2, 2)
    module.register_buffer("scales", torch.ones(2).to(torch.float8_e4m3fn), persistent)
    word = r"buffer 'scales' is torch\.float8_e4m3fn, a dtype that servers do not"
    with pytest.raises(ValueError, match=word) if persistent else nullcontext():
        pst.Optimizer(module, torch.optim.SGD, lr=0.01, strategy=strategy)
