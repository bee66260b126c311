"""Checkpoints of modules: what the servers save is what torch loads, and a job goes on from it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import psclient as ps
import psclient.torch as pst
from tests.kit.modules import batches, job, mlp, seeded, share, steps, values


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
    """All tensors of a checkpoint's files, as anybody reads them."""
    found = {}
    for file in sorted((root / path).glob("*.safetensors")):
        found |= load_file(file)
    return found


def saved_by_servers(root, make, train, kind, **options):
    """The tensors that two servers have saved of a module which two workers train, and its state in one of these."""

    def work(strategy, worker):
        module = make(worker)
        optimizer = pst.Optimizer(module, kind, lr=0.01, strategy=strategy, **options)
        train(module, optimizer, share(batches(3, dtype=torch.float32), worker, 2))
        checkpoint = ps.train.Checkpoint(optimizer=optimizer)
        path = checkpoint.save("run/ckpt")
        checkpoint.sync()
        return path, module.state_dict()

    path, state = job(work, 2, 2, root)[0]
    return shards(root, path), state


def test_torch_loads_what_the_servers_saved(tmp_path):
    """By the names of the module's own state, parameters and buffers: into the plain module, and nothing is missing."""
    saved, expected = saved_by_servers(tmp_path, net, train, torch.optim.AdamW)
    plain = net(5)
    plain.load_state_dict({name: saved[name] for name in plain.state_dict()})
    for name, own in plain.state_dict().items():
        assert own.dtype is expected[name].dtype
        assert torch.equal(own, expected[name]), name
    assert saved["adamw/0.weight/exp_avg"].shape == (2, 1, 3)
    assert int(saved["adamw/iterations"]) == 3


class Tied(torch.nn.Module):
    """Two layers that have one weight."""

    def __init__(self, seed=0):
        super().__init__()
        self.a, self.b = seeded(seed, lambda: [torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)])
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))[:, :3]


def test_torch_loads_a_tied_module(tmp_path):
    """A shared weight is saved once, by its first name; the plain module takes what is there, and all its layers."""
    saved, expected = saved_by_servers(tmp_path, Tied, steps, torch.optim.Adam, prefix="net/")
    plain = Tied(5)
    own = {name: saved[f"net/{name}"] for name in plain.state_dict() if f"net/{name}" in saved}
    found = plain.load_state_dict(own, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["b.weight"], [])
    assert plain.b.weight is plain.a.weight
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


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
    data = torch.utils.data.TensorDataset(
        *[part.reshape(-1, part.shape[-1]) for part in map(torch.stack, zip(*batches(5), strict=True))]
    )

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
        if workers == 2:
            assert all(map(torch.equal, found, expected))
        else:
            assert all(
                torch.allclose(one, other, rtol=1e-6, atol=1e-9) for one, other in zip(found, expected, strict=True)
            )


def test_a_table_is_saved_with_its_module(tmp_path):
    """Its rows are restored by keys, with what the optimizer keeps of each."""

    def work(strategy, worker):
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
        return go() == expected

    assert job(work, 1, 2, tmp_path) == [True]
