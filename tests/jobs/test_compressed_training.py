"""Training with compressed contributions: equal to a NumPy reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from pstesting.processes import QUICK, W0, W1, ProcessCluster
from pstesting.script import ME, gate, say
from tests.kit.internals import PART_BYTES
from tests.kit.references import CODECS, Worker
from tests.kit.workers import in_threads

RATE, ROUNDS = 0.1, 90
LARGE = PART_BYTES * 5 // 8
"""Elements of which a round streams though each is sent in 2 bytes."""


def data(worker):
    """Each worker has examples of its own of the same linear function."""
    rng = np.random.default_rng(worker)
    x = rng.normal(size=(256, 40)).astype("float32")
    return x, (x @ np.arange(40)).astype("float32")


def gradient(w, x, y):
    return (x.T @ (x @ w - y) / np.float32(256)).astype("float32")


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
        return self.w.tobytes()


def test_two_workers_train_as_the_reference_does():
    """With each codec, in every round, and both have the same; it comes to the solution all the same."""
    expected = [Job(how) for how in CODECS.values()]

    def learn(strategy, worker):
        with strategy.scope():
            made = [ps.Variable(np.zeros(40, "float32"), name=n, compression=how) for n, how in CODECS.items()]
            optimizer = ps.optimizers.SGD(RATE)
        bits, own = [], data(worker)
        for _ in range(ROUNDS):
            pairs = [(gradient(w.numpy(), *own), w) for w in made]
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
            bits.append([w.numpy().tobytes() for w in made])
        return bits, [w.feedback.residual.tobytes() for w in made]

    found = in_threads(learn)
    bits = [[job.round() for job in expected] for _ in range(ROUNDS)]
    assert found == [(bits, [job.workers[worker].residual.tobytes() for job in expected]) for worker in range(2)]
    for job in expected:
        assert np.abs(job.w - np.arange(40)).max() < 1e-3, "of numbers up to 39"


@pytest.mark.parametrize("resume", ["first", "then"])
def test_a_job_goes_on_with_the_sum_of_its_residuals(tmp_path, resume):
    """Each worker has its share of them: what one has left over, another may send.

    Whether the variables are there when it is restored, or are created then.
    """
    how, expected = CODECS["topk"], Job(CODECS["topk"])

    def learn(strategy, worker, resume):
        if resume == "first":
            with strategy.scope():
                ps.train.Checkpoint().restore("run")
        with strategy.scope():
            w = ps.Variable(np.zeros(40, "float32"), name="w")
            optimizer = ps.optimizers.SGD(RATE)
        checkpoint = ps.train.Checkpoint(w=w, optimizer=optimizer)
        if resume == "then":
            optimizer.build([w])
            checkpoint.restore("run").assert_consumed()
        bits, own = [], data(worker)
        for _ in range(7):
            step = gradient(w.numpy(), *own)
            strategy.run(lambda step=step: optimizer.apply_gradients([(step, w)]))
            bits.append(w.numpy().tobytes())
        if not resume:
            checkpoint.save("run/ckpt")
            checkpoint.sync()
        return bits, w.feedback.residual.tobytes()

    keys = {"root": tmp_path, "compression": how}
    (bits, _), _ = in_threads(lambda *one: learn(*one, ""), servers=1, **keys)
    assert bits == [expected.round() for _ in range(7)]
    one, two = expected.workers
    assert one.residual.any()
    one.residual = two.residual = (one.residual + two.residual) / np.float32(2)
    _, (bits, left) = in_threads(lambda *one: learn(*one, resume), servers=2, **keys)
    assert bits == [expected.round() for _ in range(7)]
    assert left == two.residual.tobytes()


def learn_until(rounds, stops):
    """Regression by SGD; the bits of the variable after each round."""
    strategy = ps.ParameterServerStrategy(compression=ps.compression.Int8())
    with strategy.scope():
        w = ps.Variable(np.zeros(40, "float32"), name="w")
        optimizer = ps.optimizers.SGD(0.1)
    x, y = data(ME)
    while strategy.round < rounds:
        if [ME, strategy.round] == stops:
            say("at", strategy.round)
            gate("never")
        step = gradient(w.numpy(), x, y)
        strategy.run(lambda step=step: optimizer.apply_gradients([(step, w)]))
        say("bits", w.numpy().tobytes().hex())
    say("left", w.feedback.residual.tobytes().hex())


def test_a_worker_that_dies_takes_its_residual_along(tmp_path):
    """The other one goes on with its own, and with nothing of that."""
    expected = Job(CODECS["int8"])
    keys = {"helpers": [data, gradient], "ps": 1, "workers": 2, "timeouts": QUICK, "gates": ["never"]}
    with ProcessCluster(learn_until, tmp_path, (9, [1, 4]), chief="driver", **keys) as job:
        job.hear(W1, "at", 4)
        job.kill(W1)
        left = job.hear(W0, "left")
        bits = [expected.round() for _ in range(4)] + [expected.round((0,)) for _ in range(5)]
        assert [bytes.fromhex(said) for said in job.said(W0, "bits")] == bits
        assert bytes.fromhex(left) == expected.workers[0].residual.tobytes()


def test_a_compressed_round_streams():
    """Each variable is updated when what is sent for it is whole; the arrays may change once the call has returned."""

    def gradients(worker):
        rng = np.random.default_rng(worker)
        return [[rng.normal(size=LARGE).astype("float32") for _ in range(2)] for _ in range(2)]

    def stream(strategy, worker):
        with strategy.scope():
            made = [ps.Variable(np.zeros(LARGE, "float32"), name=f"v{n}") for n in range(2)]
            optimizer = ps.optimizers.SGD(1.0)
        for given in gradients(worker):
            strategy.run(lambda given=given: optimizer.apply_gradients(list(zip(given, made, strict=True))))
            for each in given:
                each[:] = np.nan  # what was sent is not the script's array any more
        return [v.numpy() for v in made]

    values, workers = [np.zeros(LARGE, "float32") for _ in range(2)], [gradients(0), gradients(1)]
    sent = [[Worker(CODECS["float16"], (LARGE,)) for _ in range(2)] for _ in range(2)]
    for step, n in np.ndindex(2, 2):
        one, two = (sent[worker][n].send(workers[worker][step][n]) for worker in range(2))
        values[n] = values[n] - (one + two)
    for found in in_threads(stream, servers=1, compression=ps.compression.Float16()):
        assert [v.tobytes() for v in found] == [v.tobytes() for v in values]


def test_processes_that_compress_in_different_ways_are_told_so():
    """Each of them, with both ways, before anything is summed."""

    def diverge(strategy, worker):
        with strategy.scope():
            w = ps.Variable(np.zeros(40, "float32"), name="w")
            optimizer = ps.optimizers.SGD(0.05)

        def step():
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(40, "float32"), w)]))
            w.numpy()

        with pytest.raises(ps.errors.Diverged) as told:
            step()
        assert "for 'w' as int8" in str(told.value)
        assert "for 'w' as topk(0.25)" in str(told.value)
        assert "where they first differ: reduction 0 is sum float32[40] for 'w'" in str(told.value)

    hows = [ps.compression.Int8(), ps.compression.TopK(0.25)]
    in_threads(diverge, servers=1, each=[{"compression": how} for how in hows])
