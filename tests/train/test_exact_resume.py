"""A job that was killed and goes on from its checkpoint, on another number of servers, computes the same bits."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import W0, W1, W2, ProcessCluster
from pstesting.script import gate, say
from tests.kit.internals import ServerOptions, Task

ROUNDS, SAVED = 200, 100
WORKERS = (W0, W1, W2)
"""Of fewer the order of their contributions would not matter."""

MOVES = ((3, 2), (1, 5), (2, 1), (2, 3))
"""From how many servers to how many."""


class Noise:
    """Draws from a generator whose state is in the checkpoint; all workers draw the same."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def state_dict(self):
        return self.rng.bit_generator.state

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state


def learn(resume, rounds, saved):
    """Trains to a number of rounds; after `saved` of them it saves, and waits to be killed."""
    strategy = ps.ParameterServerStrategy(deterministic=True)
    rng, noise = np.random.default_rng(8), Noise()
    x, y = rng.normal(size=(50, 6)), rng.normal(size=(50, 2))
    with strategy.scope():
        w = ps.Variable(rng.normal(size=(6, 4)), name="w")
        u = ps.Variable(rng.normal(size=(4, 2)), name="u")
        optimizer = ps.optimizers.Adam(ps.optimizers.schedules.CosineDecay(0.05, 300), global_clipnorm=5.0)
        mean = ps.metrics.Mean("loss")
    checkpoint = ps.train.Checkpoint(model=[w, u], optimizer=optimizer, metrics=mean, noise=noise)
    if resume:
        optimizer.build([w, u])
        checkpoint.restore(resume).assert_consumed()
        say("restored", int(optimizer.iterations))

    def step(x, y):
        h = np.tanh(x @ w.read_value())
        error = (h @ u.read_value() - y) / 12 + noise.rng.normal()
        mean.update_state(error)
        optimizer.apply_gradients([(x.T @ ((error @ u.read_value().T) * (1 - h * h)), w), (h.T @ error, u)])

    batches = strategy.experimental_distribute_dataset(ps.ArrayDataset((x, y)).shuffle(2).batch(12))
    done = int(optimizer.iterations) if resume else 0
    for _ in batches.epochs(100):
        for batch in batches:
            strategy.run(step, args=batch)
            done += 1
            if done == saved:
                path = checkpoint.save("run/ckpt")
                checkpoint.sync()
                say("saved", path)
                gate("never")
            if done == rounds:
                break
        if done == rounds:
            break
    with strategy.scope():
        say("bits", [[v.name, v.numpy().tobytes().hex()] for v in (w, u, *optimizer.variables)])
    say("loss", mean.result())


def run(directory, servers, args, root=None):
    directory.mkdir(exist_ok=True)
    server = ServerOptions(checkpoint_root=str(root or directory / "checkpoints"))
    return ProcessCluster(
        learn, directory, args, helpers=[Noise], ps=servers, workers=3, server=server, gates=["never"]
    )


def bits(job):
    """What the workers have at the end, by name; of what stands on several servers one copy."""
    found = [(job.said(task, "bits"), job.said(task, "loss")) for task in WORKERS]
    assert found[0] == found[1] == found[2]
    ((values,), (loss,)) = found[0]
    return {name: value for name, value in values if not name.endswith((".copy", "gradient_staged"))}, loss


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What 200 rounds come to without an interruption."""
    with run(tmp_path_factory.mktemp("whole") / "job", 1, ("", ROUNDS, 0)) as job:
        job.finish()
        return bits(job)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Gives the checkpoints of a job on so many servers that was killed after 100 rounds."""

    @functools.cache
    def checkpoints(servers):
        directory = tmp_path_factory.mktemp("half") / "job"
        with run(directory, servers, ("", ROUNDS, SAVED)) as job:
            assert {job.hear(task, "saved") for task in WORKERS} == {"run/ckpt-1"}
            for task in (*(Task("ps", index) for index in range(servers)), *WORKERS):
                job.kill(task)
        return directory / "checkpoints"

    return checkpoints


@pytest.mark.soak
def test_checkpoints_are_alike_on_any_number_of_servers(killed):
    """The same tensors, bit by bit, and the same place in the data; only the files differ."""
    manifests = [json.loads((killed(count) / "run/ckpt-1/manifest.json").read_text()) for count in (1, 2, 3)]
    assert [len(manifest["files"]) for manifest in manifests] == [1, 2, 3]
    alike = [
        ({name: x["checksum"] for name, x in m["tensors"].items()}, m["positions"], m["objects"], m["state"])
        for m in manifests
    ]
    assert alike[0] == alike[1] == alike[2]
    assert alike[0][1] == [{"dataset": 0, "epoch": SAVED // 5, "index": 0}]


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_it_computes_the_same_bits(tmp_path, uninterrupted, killed, before, after):
    """Weights, slots, counts, the schedule's place, the order of the data, the state of the generator.

    A metric's sum, which is divided among the replicas, comes as near as that division allows.
    """
    with run(tmp_path / "job", after, ("run", ROUNDS, 0), killed(before)) as job:
        job.finish()
    assert [job.said(task, "restored") for task in WORKERS] == [[SAVED]] * 3
    (values, loss), (expected, whole) = bits(job), uninterrupted
    assert values == expected
    assert loss == pytest.approx(whole, rel=1e-12)
