"""Compression as a script has it: which contributions are compressed, what is left over where, and how it trains."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from pstesting import InProcessCluster
from tests.kit.references import CODECS, Worker
from tests.kit.workers import in_threads

RATE, ROUNDS = 0.1, 90
ON_READ = ps.VariableSynchronization.ON_READ
HALVES = ps.experimental.partitioners.FixedShardsPartitioner(2)


@contextmanager
def opened(servers=1, devices=None, **options):
    with (
        InProcessCluster(servers=servers) as cluster,
        ps.ParameterServerStrategy(devices=devices, cluster_resolver=cluster.resolver(), **options) as strategy,
        strategy.scope(),
    ):
        yield strategy


def gradients(shape, count=4, dtype="float32"):
    rng = np.random.default_rng(11)
    return [rng.normal(size=shape).astype(dtype) for _ in range(count)]


def step(strategy, optimizer, *pairs):
    strategy.run(lambda: optimizer.apply_gradients(list(pairs)))


INT8 = ps.compression.Int8()
CASES = {
    "in rounds of all": {},
    "asynchronous": {"consistency": ps.Async()},
    "with bounded staleness": {"consistency": ps.BoundedStaleness(2)},
    "from a buffer, which is written again": {},
    "half precision, which is compressed in single": {},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_what_was_sent(case):
    """Bit for bit that of a plain reference, in the step that is recorded and in those that repeat it."""
    half = case.startswith("half")
    dtype = np.dtype(ml_dtypes.bfloat16 if half else "float32")
    with opened(**CASES[case]) as strategy:
        optimizer, every = ps.optimizers.SGD(0.5), []
        for name, how in ({"int8": INT8} if half else CODECS).items():
            value = np.zeros((60, 7), dtype)
            every.append([ps.Variable(value, name=name, compression=how), Worker(how, (60, 7), dtype), value])
        for gradient in gradients((60, 7), dtype=dtype):
            given = [gradient for _ in every]
            if "buffer" in case:
                given = [strategy.backend.buffer(w, 0) for w, *_ in every]
                for buffer in given:
                    buffer[:] = gradient
            step(strategy, optimizer, *((each, w) for each, (w, *_) in zip(given, every, strict=True)))
            for each in every:
                w, worker, value = each
                each[2] = value = value - dtype.type(0.5) * worker.send(gradient)
                assert w.numpy().tobytes() == value.tobytes()
                assert w.feedback.residual.dtype == np.float32
                assert w.feedback.residual.tobytes() == worker.residual.tobytes()


class Halves:
    """A variable of rows in two shards, with what a reference has of it."""

    def __init__(self, name, size):
        how = CODECS[name]
        self.half, self.value = size // 2, np.zeros((size, 3), "float32")
        self.workers = [Worker(how, (self.half, 3)) for _ in range(2)]
        self.w = ps.Variable(self.value, name=name, compression=how)

    def pair(self, rows, ids):
        """A gradient for the variable, which the reference sends as well."""
        for first, worker in zip((0, self.half), self.workers, strict=True):
            here = (ids >= first) & (ids < first + self.half)
            kept, sent = worker.send_rows(ids[here] - first, rows[here])
            self.value[[first + place for place in kept]] -= sent
        return ps.IndexedSlices(rows, ids, self.value.shape), self.w

    def check(self, rtol):
        np.testing.assert_allclose(self.w.numpy(), self.value, rtol=rtol)
        for shard, worker in zip(self.w.variables, self.workers, strict=True):
            assert shard.feedback.residual.tobytes() == worker.residual.tobytes()


@pytest.mark.parametrize("clip", [None, 1e6], ids=["plain", "measured first"])
def test_rows_are_sent_with_their_residuals(clip):
    """Of a variable in shards, too: each shard compresses its own rows; a row that is not named waits.

    A clipped step sends rows twice: the residual is that of what is applied.
    """
    rng = np.random.default_rng(2)
    with opened(servers=2, variable_partitioner=HALVES) as strategy:
        every, optimizer = [Halves(name, 20) for name in CODECS], ps.optimizers.SGD(1.0, global_clipnorm=clip)
        for _ in range(4):
            ids = np.sort(rng.choice(20, 8, replace=False))
            rows = rng.normal(size=(8, 3)).astype("float32")
            step(strategy, optimizer, *(each.pair(rows, ids) for each in every))
            for each in every:
                each.check(rtol=1e-6 if clip else 0)


def test_nothing_is_compressed_unless_it_is_asked_for():
    """No variable, no byte and no plan is another; without a request there is nothing of it."""
    with opened() as strategy:
        w = ps.Variable(np.zeros((60, 7), "float32"))
        before = strategy.bytes_transferred[0]
        step(strategy, ps.optimizers.SGD(1.0), (np.ones((60, 7), "float32"), w))
        assert strategy.bytes_transferred[0] - before >= 60 * 7 * 4
        assert w.feedback is None
        assert strategy.backend.group.session.log_server.status().variables == 2  # and a count of steps


@pytest.mark.parametrize("name", CODECS)
def test_a_round_sends_less(name):
    """As many bytes as the codec says, operands aside."""
    how, spec = CODECS[name], np.zeros((100, 100), "float32")
    with opened(compression=how) as strategy:
        w, optimizer = ps.Variable(spec), ps.optimizers.SGD(1.0)
        sent = []
        for gradient in gradients((100, 100)):
            before = strategy.bytes_transferred[0]
            step(strategy, optimizer, (gradient, w))
            sent.append(strategy.bytes_transferred[0] - before)
        assert how._codec.nbytes(w.spec) <= sent[-1] < how._codec.nbytes(w.spec) + 200
        assert how._codec.nbytes(w.spec) <= w.spec.nbytes / 2


def test_what_the_strategy_says_is_for_what_is_trained():
    """Not for counts, integers, statistics, slots, or what says that it is not; a variable's own word goes first."""
    with opened(compression=ps.compression.Int8()) as strategy:
        w = ps.Variable(np.zeros(9, "float32"), name="w")
        own = ps.Variable(np.zeros(9, "float32"), compression=ps.compression.TopK(0.5))
        others = [
            ps.Variable(np.zeros(9, "float32"), compression=False),
            ps.Variable(np.zeros(9, "float32"), trainable=False),
            ps.Variable(np.zeros(9, "int32")),
            ps.Variable(0.0, synchronization=ON_READ, aggregation=ps.VariableAggregation.SUM),
        ]
        optimizer = ps.optimizers.Adam(0.1)
        step(strategy, optimizer, (np.ones(9, "float32"), w))
        assert str(w.feedback.codec) == "int8"
        assert str(own.feedback.codec) == "topk(0.5)"
        assert {v.feedback for v in (*others, *optimizer.variables)} == {None}
        beside = deepcopy(own)
        assert beside.feedback.codec == own.feedback.codec
        assert w._residual.name == "w/residual"
        assert not w._residual.trainable


def test_what_would_not_become_smaller_travels_as_it_is():
    """A number with a scale, half precision in half precision, all elements with their places."""
    with opened() as strategy:
        made = [
            ps.Variable(np.float32(0), compression=ps.compression.Int8()),
            ps.Variable(np.zeros(9, "float16"), compression=ps.compression.Float16()),
            ps.Variable(np.zeros(9, "float32"), compression=ps.compression.TopK(0.6)),
            ps.Variable(np.zeros(9, "float32"), compression=ps.compression.TopK(0.4)),
        ]
        rng = np.random.default_rng(0)
        given = [rng.normal(size=v.shape).astype(v.dtype) for v in made]
        step(strategy, ps.optimizers.SGD(1.0), *zip(given, made, strict=True))
        assert [bool(v.feedback.residual.any()) for v in made] == [False, False, False, True]
        for v, gradient in list(zip(made, given, strict=True))[:3]:
            assert v.numpy().tobytes() == (-gradient).tobytes()


def test_local_replicas_are_summed_before_they_are_compressed():
    """Once for each process, and a mean counts them all."""
    how, worker = ps.compression.Float16(), Worker(ps.compression.Float16(), (5,))
    given = gradients(5, 2)
    with opened(devices=["cpu:0", "cpu:1"]) as strategy:
        w = ps.Variable(np.zeros(5, "float32"), compression=how)

        def body():
            return given[ps.get_replica_context().replica_id_in_sync_group]

        values = strategy.run(body)
        total = strategy.extended.reduce_to("mean", values, w)
        strategy.extended.update(w, lambda v, x: v.assign(x), (total,))
        assert w.numpy().tobytes() == (worker.send(given[0] + given[1]) / np.float32(2)).tobytes()


def test_a_value_that_is_assigned_is_no_contribution():
    """It arrives as it is, without a residual of others; nor is one of another shape compressed, or an integer."""
    with opened(compression=ps.compression.Int8()) as strategy:
        w = ps.Variable(np.zeros(5, "float32"), aggregation=ps.VariableAggregation.SUM)
        step(strategy, ps.optimizers.SGD(1.0), (gradients(5)[0], w))
        left = w.feedback.residual.copy()
        assert left.any()
        value = gradients(5)[1]
        strategy.run(lambda: w.assign(value))
        assert w.numpy().tobytes() == value.tobytes()
        whole = [np.arange(5), np.ones((2, 5), "float32") / 3, np.ones(5, "complex64") / 3]
        for each in whole:
            assert np.asarray(strategy.extended.reduce_to("sum", each, w)).tolist() == each.tolist()
        assert w.feedback.residual.tobytes() == left.tobytes()


def test_the_first_contribution_of_a_section_alone_is_compressed():
    """A second one, of squares or of another loss, has nothing to do with what the first has left over."""
    one, two = gradients(5, 2)
    worker = Worker(ps.compression.Float16(), (5,))
    with opened(compression=ps.compression.Float16()) as strategy:
        w = ps.Variable(np.zeros(5, "float32"))
        first, second = strategy.extended.batch_reduce_to("sum", [(one, w), (two, w)])
        assert np.asarray(first).tobytes() == worker.send(one).tobytes()
        assert np.asarray(second).tobytes() == two.tobytes()


def test_a_dynamic_loss_scale_sees_what_is_not_finite():
    """It leaves the step out, and halves the scale."""
    with opened(compression=ps.compression.Float16()) as strategy:
        w = ps.Variable(np.zeros(4, "float32"))
        optimizer = ps.optimizers.SGD(1.0, loss_scale_factor=ps.optimizers.DynamicLossScale(8.0))
        step(strategy, optimizer, (np.full(4, np.inf, "float32"), w))
        step(strategy, optimizer, (np.full(4, 4.0, "float32"), w))
        assert w.numpy().tolist() == [-1.0] * 4


@pytest.mark.parametrize(("servers", "consistency"), [(1, ps.Async()), (2, ps.Sync())], ids=repr)
def test_a_checkpoint_gives_its_residuals_back(in_tmp_path, servers, consistency):
    """Also of a variable in shards; one without them leaves none, and who compresses no more may restore one with."""
    gradient, partitioner = gradients((20, 3))[0], HALVES if servers == 2 else None

    def train(how):
        return opened(servers, compression=how, consistency=consistency, variable_partitioner=partitioner)

    def made():
        w = ps.Variable(np.zeros((20, 3), "float32"), name="w")
        return w, ps.train.Checkpoint(w=w)

    def left(w):
        return np.concatenate([shard.feedback.residual for shard in getattr(w, "variables", [w])])

    with train(ps.compression.Int8()) as strategy:
        w, checkpoint = made()
        plain = checkpoint.save("run/before")
        step(strategy, ps.optimizers.SGD(1.0), (gradient, w))
        path, kept = checkpoint.save("run/ckpt"), left(w).copy()
        step(strategy, ps.optimizers.SGD(1.0), (gradient, w))
        assert kept.any()
        assert left(w).tobytes() != kept.tobytes()
        checkpoint.restore(path).assert_consumed()
        assert left(w).tobytes() == kept.tobytes()
        checkpoint.restore(plain).assert_consumed()
        assert not left(w).any()
        checkpoint.restore(path).assert_consumed()
        checkpoint.sync()
    with train(None):
        w, checkpoint = made()
        checkpoint.restore(path).assert_consumed()
        assert w.numpy().any()
        path = checkpoint.save("run/without")
        checkpoint.sync()
    with train(ps.compression.Int8()) as strategy:
        w, checkpoint = made()
        step(strategy, ps.optimizers.SGD(1.0), (gradient, w))
        assert left(w).any()
        checkpoint.restore(path).assert_consumed()
        assert not left(w).any()


@pytest.mark.parametrize("kind", [ps.MirroredStrategy, ps.get_strategy])
def test_where_nothing_travels_nothing_is_compressed(kind):
    """A script that compresses runs on every strategy."""
    strategy = kind()
    with strategy.scope() if kind is ps.MirroredStrategy else InProcessCluster(0):
        w = ps.Variable(np.zeros(3, "float32"), compression=ps.compression.TopK(0.01))
        w.assign_add(np.ones(3, "float32"))
        assert (w.feedback, w.numpy().tolist()) == (None, [1.0] * 3)


ONES = np.ones(3, "float32")
MISTAKES = {
    "an integer dtype": (lambda: ps.Variable(np.ones(3, int), name="n", compression=INT8), ValueError, "'n' of int64"),
    "a complex dtype": (lambda: ps.Variable(np.ones(3, "complex64"), compression=INT8), ValueError, "complex64"),
    "ON_READ": (lambda: ps.Variable(ONES, synchronization=ON_READ, compression=INT8), ValueError, "ON_READ"),
    "a name": (lambda: ps.Variable(ONES, compression="int8"), TypeError, "'int8'; pass an object such as ps.compr"),
    "a class": (lambda: ps.Variable(ONES, compression=type(INT8)), TypeError, r"ps\.compression\.Int8\(\)"),
    "a ratio of 0": (lambda: ps.compression.TopK(0), ValueError, "above 0 and at most 1"),
    "a ratio above 1": (lambda: ps.compression.TopK(1.01), ValueError, "above 0 and at most 1"),
    "no ratio": (lambda: ps.compression.TopK(float("nan")), ValueError, "above 0 and at most 1"),
    "a ratio in words": (lambda: ps.compression.TopK("1 %"), TypeError, "is not a number"),
    "a strategy's": (lambda: ps.ParameterServerStrategy(compression="int8"), TypeError, "ParameterServerStrategy: "),
}


@pytest.mark.parametrize(("make", "kind", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_where_they_are_made(make, kind, words):
    """Before anything is created, or connected."""
    with pytest.raises(kind, match=words):
        make()


# ---- Two workers ----


def data(worker):
    """Each worker has examples of its own of the same linear function."""
    rng = np.random.default_rng(worker)
    x = rng.normal(size=(256, 40)).astype("float32")
    return x, (x @ np.arange(40)).astype("float32")


def slope(w, x, y):
    return (x.T @ (x @ w - y) / np.float32(256)).astype("float32")


class Job:
    """The same, without processes."""

    def __init__(self, how):
        self.w = np.zeros(40, "float32")
        self.workers = [Worker(how, (40,)) for _ in range(2)]
        self.data = [data(number) for number in range(2)]

    def round(self, members=(0, 1)):
        sent = [self.workers[n].send(slope(self.w, *self.data[n])) for n in members]
        total = sent[0] if len(sent) == 1 else sent[0] + sent[1]
        self.w = self.w - np.float32(RATE) * total
        return self.w.tobytes()


def test_workers_train_as_the_reference_does():
    """With each codec, in every round, and both have the same; it comes to the solution all the same.

    One ends before, and takes its residual along: the other one goes on with its own, and with nothing of that.
    """
    expected, rounds = [Job(how) for how in CODECS.values()], (ROUNDS + 10, ROUNDS)

    def learn(strategy, worker):
        with strategy.scope():
            made = [ps.Variable(np.zeros(40, "float32"), name=n, compression=how) for n, how in CODECS.items()]
            optimizer = ps.optimizers.SGD(RATE)
        bits, own = [], data(worker)
        for _ in range(rounds[worker]):
            pairs = [(slope(w.numpy(), *own), w) for w in made]
            strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
            bits.append([w.numpy().tobytes() for w in made])
        return bits, [w.feedback.residual.tobytes() for w in made]

    found = in_threads(learn)
    bits = [[job.round((0, 1)[: 1 + (n < ROUNDS)]) for job in expected] for n in range(ROUNDS + 10)]
    residuals = [[job.workers[worker].residual.tobytes() for job in expected] for worker in range(2)]
    assert found == [(bits, residuals[0]), (bits[:ROUNDS], residuals[1])]
    for job in expected:
        assert np.abs(job.w - np.arange(40)).max() < 1e-3, "of numbers up to 39"


def test_a_job_goes_on_with_the_sum_of_its_residuals(tmp_path):
    """Each worker has its share of them: what one has left over, another may send."""
    how, expected = CODECS["topk"], Job(CODECS["topk"])

    def learn(strategy, worker, resume):
        with strategy.scope():
            w = ps.Variable(np.zeros(40, "float32"), name="w")
            optimizer = ps.optimizers.SGD(RATE)
        checkpoint = ps.train.Checkpoint(w=w, optimizer=optimizer)
        if resume:
            optimizer.build([w])
            checkpoint.restore("run").assert_consumed()
        bits, own = [], data(worker)
        for _ in range(7):
            strategy.run(lambda: optimizer.apply_gradients([(slope(w.numpy(), *own), w)]))
            bits.append(w.numpy().tobytes())
        if not resume:
            checkpoint.save("run/ckpt")
            checkpoint.sync()
        return bits, w.feedback.residual.tobytes()

    keys = {"root": tmp_path, "compression": how}
    (bits, _), _ = in_threads(lambda *one: learn(*one, False), servers=1, **keys)
    assert bits == [expected.round() for _ in range(7)]
    one, two = expected.workers
    assert one.residual.any()
    one.residual = two.residual = (one.residual + two.residual) / np.float32(2)
    _, (bits, left) = in_threads(lambda *one: learn(*one, True), servers=2, **keys)
    assert bits == [expected.round() for _ in range(7)]
    assert left == two.residual.tobytes()


def test_processes_that_compress_in_different_ways_are_told_so():
    """Each of them, with both ways, before anything is summed."""

    def diverge(strategy, worker):
        with strategy.scope():
            w = ps.Variable(np.zeros(40, "float32"), name="w")

        def update():
            step(strategy, ps.optimizers.SGD(0.05), (np.ones(40, "float32"), w))
            w.numpy()

        with pytest.raises(ps.errors.Diverged) as told:
            update()
        for words in ("'w' as int8", "'w' as topk(0.25)", "first difference: reduction 0 is sum float32[40] for 'w'"):
            assert words in str(told.value)

    hows = [ps.compression.Int8(), ps.compression.TopK(0.25)]
    in_threads(diverge, servers=1, each=[{"compression": how} for how in hows])
