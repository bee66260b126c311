"""Training with compressed contributions in real processes: equal to a NumPy reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from pswire.limits import PART_BYTES
from pswire.server_options import ServerOptions
from tests.kit.compressed import CODECS, Worker

RATE, ROUNDS = 0.1, 300
LARGE = PART_BYTES * 5 // 8
"""Elements of which a round streams though each is sent in 2 bytes."""


def data(worker):
    """Each worker has examples of its own of the same linear function."""
    rng = np.random.default_rng(worker)
    x = rng.normal(size=(64, 40)).astype("float32")
    return x, (x @ np.arange(40)).astype("float32")


def gradient(w, x, y):
    return (x.T @ (x @ w - y) / np.float32(64)).astype("float32")


def learn(kind, ratio, rounds, saves, resume, stops):
    """Regression by SGD; the bits of the variable after each round."""
    how = getattr(ps.compression, kind)(*ratio)
    strategy = ps.ParameterServerStrategy(compression=how)
    if resume == "first":
        with strategy.scope():
            ps.train.Checkpoint().restore("run")
    with strategy.scope():
        w = ps.Variable(np.zeros(40, "float32"), name="w")
        optimizer = ps.optimizers.SGD(0.1)
    checkpoint = ps.train.Checkpoint(w=w, optimizer=optimizer)
    if resume == "then":
        optimizer.build([w])
        checkpoint.restore("run").assert_consumed()
    x, y = data(ME)
    strategy.run(lambda: None)
    first = strategy.round
    while strategy.round < first + rounds:
        if [ME, strategy.round - first] == stops:
            say("at", strategy.round - first)
            gate("never")
        step = gradient(w.numpy(), x, y)
        strategy.run(lambda step=step: optimizer.apply_gradients([(step, w)]))
        say("bits", w.numpy().tobytes().hex())
    if saves:
        checkpoint.save("run/ckpt")
        checkpoint.sync()
    say("left", w.feedback.residual.tobytes().hex())


class Job:
    """The same, without processes."""

    def __init__(self, how):
        self.w = np.zeros(40, "float32")
        self.workers = [Worker(how, (40,)) for _ in range(2)]
        self.data = [data(number) for number in range(2)]

    def round(self, members=(0, 1)):
        sent = [self.workers[n].send(gradient(self.w, *self.data[n])) for n in members]
        total = sent[0] if len(sent) == 1 else sent[0] + sent[1]
        self.w = self.w - np.float32(RATE) * total
        return self.w.tobytes().hex()


def args_of(how, rounds, saves=False, resume="", stops=()):
    return type(how).__name__, [how.ratio] if hasattr(how, "ratio") else [], rounds, saves, resume, list(stops)


def left(job, task):
    (found,) = job.said(task, "left")
    return np.frombuffer(bytes.fromhex(found), "float32")


HELPERS = [data, gradient]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.soak] * (n == "bfloat16")) for n in CODECS])
def test_two_workers_train_as_the_reference_does(tmp_path, name):
    """In every round, and both have the same; it comes to the solution all the same."""
    how = CODECS[name]
    expected = Job(how)
    with ProcessCluster(learn, tmp_path, args_of(how, ROUNDS), helpers=HELPERS, ps=2, workers=2) as job:
        job.finish()
        bits = [expected.round() for _ in range(ROUNDS)]
        for number, task in enumerate((W0, W1)):
            assert job.said(task, "bits") == bits
            assert left(job, task).tobytes() == expected.workers[number].residual.tobytes()
    assert np.abs(expected.w - np.arange(40)).max() < 1e-3, "of numbers up to 39"


@pytest.mark.parametrize("resume", ["first", "then"])
def test_a_job_goes_on_with_the_sum_of_its_residuals(tmp_path, resume):
    """Each worker has its share of them: what one has left over, another may send.

    Whether the variables are there when it is restored, or are created then.
    """
    how, expected = CODECS["topk"], Job(CODECS["topk"])
    keys = {"helpers": HELPERS, "workers": 2, "server": ServerOptions(checkpoint_root=str(tmp_path / "saved"))}
    for directory in ("before", "after"):
        (tmp_path / directory).mkdir()
    with ProcessCluster(learn, tmp_path / "before", args_of(how, 7, saves=True), ps=1, **keys) as job:
        job.finish()
        assert job.said(W0, "bits") == [expected.round() for _ in range(7)]
    one, two = expected.workers
    assert one.residual.any()
    one.residual = two.residual = (one.residual + two.residual) / np.float32(2)
    with ProcessCluster(learn, tmp_path / "after", args_of(how, 7, resume=resume), ps=2, **keys) as job:
        job.finish()
        assert job.said(W1, "bits") == [expected.round() for _ in range(7)]
        assert left(job, W1).tobytes() == two.residual.tobytes()


def test_a_worker_that_dies_takes_its_residual_along(tmp_path):
    """The other one goes on with its own, and with nothing of that."""
    how, expected = CODECS["int8"], Job(CODECS["int8"])
    keys = {"helpers": HELPERS, "ps": 1, "workers": 2, "timeouts": QUICK, "gates": ["never"], "chief": "driver"}
    with ProcessCluster(learn, tmp_path, args_of(how, 9, stops=(1, 4)), **keys) as job:
        job.hear(W1, "at", 4)
        job.kill(W1)
        job.hear(W0, "left")
        bits = [expected.round() for _ in range(4)] + [expected.round((0,)) for _ in range(5)]
        assert job.said(W0, "bits") == bits
        assert left(job, W0).tobytes() == expected.workers[0].residual.tobytes()


def stream(size):
    """Each round is of more than one part, and its sums come back."""
    strategy = ps.ParameterServerStrategy(compression=ps.compression.Float16())
    rng = np.random.default_rng(ME)
    with strategy.scope():
        made = [ps.Variable(np.zeros(size, "float32"), name=f"v{n}") for n in range(3)]
        optimizer = ps.optimizers.SGD(1.0)
    for _ in range(3):
        given = [rng.normal(size=size).astype("float32") for _ in made]
        strategy.run(lambda given=given: optimizer.apply_gradients(list(zip(given, made, strict=True))))
        for each in given:
            each[:] = np.nan  # what was sent is not the script's array any more
    say("sums", [float(v.numpy().astype("float64").sum()) for v in made])


def test_a_compressed_round_streams(tmp_path):
    """Each variable is updated when what is sent for it is whole; the arrays may change once the call has returned."""
    values, workers = [np.zeros(LARGE, "float32") for _ in range(3)], []
    for number in range(2):
        rng = np.random.default_rng(number)
        workers.append((rng, [Worker(CODECS["float16"], (LARGE,)) for _ in range(3)]))
    for _ in range(3):
        given = [[rng.normal(size=LARGE).astype("float32") for _ in range(3)] for rng, _ in workers]
        for n in range(3):
            one, two = (own[n].send(arrays[n]) for (_, own), arrays in zip(workers, given, strict=True))
            values[n] = values[n] - (one + two)
    with ProcessCluster(stream, tmp_path, (LARGE,), ps=1, workers=2) as job:
        job.finish()
        for task in (W0, W1):
            assert job.said(task, "sums") == [[float(v.astype("float64").sum()) for v in values]]


def diverge():
    how = ps.compression.TopK(0.25) if ME else ps.compression.Int8()
    strategy = ps.ParameterServerStrategy(compression=how)
    with strategy.scope():
        w = ps.Variable(np.zeros(40, "float32"), name="w")
        optimizer = ps.optimizers.SGD(0.05)
    try:
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(40, "float32"), w)]))
        w.numpy()
    except ps.errors.Diverged as error:
        say("diverged", str(error))


def test_processes_that_compress_in_different_ways_are_told_so(tmp_path):
    """Each of them, with both ways, before anything is summed."""
    with ProcessCluster(diverge, tmp_path, ps=1, workers=2, timeouts=QUICK) as job:
        for task in (W0, W1):
            error = job.hear(task, "diverged")
            assert "for 'w' as int8" in error
            assert "for 'w' as topk(0.25)" in error
            assert "where they first differ: reduction 0 is sum float32[40] for 'w'" in error
