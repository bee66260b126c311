"""Compression as a script has it: which contributions are compressed, and what is left over where."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy

import ml_dtypes
import numpy as np
import pytest

import psclient as ps
from pstesting import InProcessCluster
from tests.kit.references import CODECS, Worker

ON_READ = ps.VariableSynchronization.ON_READ
HALVES = ps.experimental.partitioners.FixedShardsPartitioner(2)


@contextmanager
def opened(servers=1, devices=None, **options):
    """A strategy with servers in this process; its scope is entered."""
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


def test_a_step_is_that_of_what_was_sent():
    """Bit for bit that of a plain reference, in the step that is recorded and in those that repeat it."""
    with opened() as strategy:
        optimizer, every = ps.optimizers.SGD(0.5), []
        for name, how in CODECS.items():
            value = np.zeros((60, 7), "float32")
            every.append([ps.Variable(value, name=name, compression=how), Worker(how, (60, 7)), value])
        for gradient in gradients((60, 7)):
            step(strategy, optimizer, *((gradient, w) for w, *_ in every))
            for each in every:
                w, worker, value = each
                each[2] = value = value - np.float32(0.5) * worker.send(gradient)
                assert w.numpy().tobytes() == value.tobytes()
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

    def check(self, **tolerance):
        np.testing.assert_allclose(self.w.numpy(), self.value, **{"rtol": 0} | tolerance)
        for shard, worker in zip(self.w.variables, self.workers, strict=True):
            assert shard.feedback.residual.tobytes() == worker.residual.tobytes()


def test_rows_are_sent_with_their_residuals():
    """Of a variable in shards, too: each shard compresses its own rows; a row that is not named waits."""
    rng = np.random.default_rng(2)
    with opened(servers=2, variable_partitioner=HALVES) as strategy:
        every, optimizer = [Halves(name, 20) for name in CODECS], ps.optimizers.SGD(1.0)
        for _ in range(4):
            ids = np.sort(rng.choice(20, 8, replace=False))
            rows = rng.normal(size=(8, 3)).astype("float32")
            step(strategy, optimizer, *(each.pair(rows, ids) for each in every))
            for each in every:
                each.check()


def test_nothing_is_compressed_unless_it_is_asked_for():
    """No variable, no byte and no plan is another; without a request there is nothing of it."""
    with opened() as strategy:
        w = ps.Variable(np.zeros((60, 7), "float32"))
        before = strategy.traffic[0]
        step(strategy, ps.optimizers.SGD(1.0), (np.ones((60, 7), "float32"), w))
        assert strategy.traffic[0] - before >= 60 * 7 * 4
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
            before = strategy.traffic[0]
            step(strategy, optimizer, (gradient, w))
            sent.append(strategy.traffic[0] - before)
        assert how.codec.nbytes(w.spec) <= sent[-1] < how.codec.nbytes(w.spec) + 200
        assert how.codec.nbytes(w.spec) <= w.spec.nbytes / 2


def test_what_the_strategy_says_is_for_what_is_trained():
    """Not for counts, integers, statistics, slots, or what says that it is not; a variable's own word goes first."""
    with opened(compression=ps.compression.Int8()) as strategy:
        w = ps.Variable(np.zeros(9, "float32"), name="w")
        own = ps.Variable(np.zeros(9, "float32"), compression=ps.compression.TopK(0.5))
        others = [
            ps.Variable(np.zeros(9, "float32"), compression=False),
            ps.Variable(np.zeros(9, "float32"), trainable=False),
            ps.Variable(np.zeros(9, "int32")),
            ps.Variable(
                0.0, synchronization=ps.VariableSynchronization.ON_READ, aggregation=ps.VariableAggregation.SUM
            ),
        ]
        optimizer = ps.optimizers.Adam(0.1)
        step(strategy, optimizer, (np.ones(9, "float32"), w))
        assert str(w.feedback.codec) == "int8"
        assert str(own.feedback.codec) == "topk(0.5)"
        assert [v.feedback for v in (*others, *optimizer.variables)] == [None] * (
            len(others) + len(optimizer.variables)
        )
        beside = deepcopy(own)
        assert beside.feedback.codec == own.feedback.codec
        assert w.residual.name == "w/residual"
        assert not w.residual.trainable


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
        assert (np.asarray(first).tobytes(), np.asarray(second).tobytes()) == (
            worker.send(one).tobytes(),
            two.tobytes(),
        )


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_what_is_not_finite_is_seen_and_leaves_the_residual(name, choice):
    """The round is skipped, or an error, as without compression; training goes on with what was left over before."""
    how, worker = CODECS[name], Worker(CODECS[name], (300,))
    bad, value = np.full(300, np.float32(1)), np.zeros(300, "float32")
    bad[7] = np.nan
    given = gradients(300, 3)
    with opened(compression=how, consistency=ps.Sync(nonfinite=choice)) as strategy:
        w, optimizer = ps.Variable(value), ps.optimizers.SGD(1.0)
        for gradient in (given[0], bad, *given[1:]):
            try:
                step(strategy, optimizer, (gradient, w))
            except ps.errors.NonfiniteError:
                assert (choice, gradient is bad) == ("raise", True)
            if gradient is not bad:
                value = value - worker.send(gradient)
        assert w.numpy().tobytes() == value.tobytes()


def test_a_dynamic_loss_scale_sees_what_is_not_finite():
    """It leaves the step out, and halves the scale."""
    with opened(compression=ps.compression.Float16()) as strategy:
        w = ps.Variable(np.zeros(4, "float32"))
        optimizer = ps.optimizers.SGD(1.0, loss_scale_factor=ps.optimizers.DynamicLossScale(8.0))
        step(strategy, optimizer, (np.full(4, np.inf, "float32"), w))
        step(strategy, optimizer, (np.full(4, 4.0, "float32"), w))
        assert w.numpy().tolist() == [-1.0] * 4


def test_rows_that_are_measured_first_are_compressed_once():
    """A clipped step on two servers sends rows twice: the residual is that of what is applied."""
    ids = np.array([1, 4, 5, 9])
    with opened(servers=2, variable_partitioner=HALVES) as strategy:
        every, optimizer = [Halves(name, 10) for name in CODECS], ps.optimizers.SGD(1.0, global_clipnorm=1e6)
        for rows in gradients((4, 3), 3):
            step(strategy, optimizer, *(each.pair(rows, ids) for each in every))
        for each in every:
            each.check(rtol=1e-6)


def test_a_buffer_may_be_written_again():
    """What is sent of it are other bytes."""
    worker, value = Worker(ps.compression.Int8(), (300,)), np.zeros(300, "float32")
    with opened(compression=ps.compression.Int8()) as strategy:
        w, optimizer = ps.Variable(value), ps.optimizers.SGD(1.0)
        for gradient in gradients(300, 6):
            buffer = strategy.backend.buffer(w, 0)
            buffer[:] = gradient
            step(strategy, optimizer, (buffer, w))
            value = value - worker.send(gradient)
        assert w.numpy().tobytes() == value.tobytes()


@pytest.mark.parametrize("consistency", [ps.Async(), ps.BoundedStaleness(2)], ids=repr)
def test_workers_of_their_own_pace_have_residuals_as_well(consistency):
    """Each its own, as in rounds of all."""
    worker, value = Worker(ps.compression.Int8(), (300,)), np.zeros(300, "float32")
    with opened(compression=ps.compression.Int8(), consistency=consistency) as strategy:
        w, optimizer = ps.Variable(value), ps.optimizers.SGD(1.0)
        for gradient in gradients(300):
            step(strategy, optimizer, (gradient, w))
            value = value - worker.send(gradient)
        assert w.numpy().tobytes() == value.tobytes()


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


INT8 = ps.compression.Int8()
ONES = np.ones(3, "float32")
MISTAKES = {
    "an integer dtype": (lambda: ps.Variable(np.ones(3, int), name="n", compression=INT8), ValueError, "'n' of int64"),
    "a complex dtype": (lambda: ps.Variable(np.ones(3, "complex64"), compression=INT8), ValueError, "complex64"),
    "ON_READ": (lambda: ps.Variable(ONES, synchronization=ON_READ, compression=INT8), ValueError, "ON_READ"),
    "a name": (lambda: ps.Variable(ONES, compression="int8"), TypeError, "'int8'; give an object such as ps.comp"),
    "a class": (
        lambda: ps.Variable(ONES, compression=ps.compression.Float16),
        TypeError,
        r"ps\.compression\.Float16\(\)",
    ),
    "a ratio of 0": (lambda: ps.compression.TopK(0), ValueError, "above 0 and at most 1"),
    "a ratio above 1": (lambda: ps.compression.TopK(1.01), ValueError, "above 0 and at most 1"),
    "a ratio below 0": (lambda: ps.compression.TopK(-0.1), ValueError, "above 0 and at most 1"),
    "no ratio": (lambda: ps.compression.TopK(float("nan")), ValueError, "above 0 and at most 1"),
    "a ratio in words": (lambda: ps.compression.TopK("1 %"), TypeError, "give a number"),
    "a strategy's": (lambda: ps.ParameterServerStrategy(compression="int8"), TypeError, "ParameterServerStrategy: "),
}


@pytest.mark.parametrize(("make", "kind", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_where_they_are_made(make, kind, words):
    """Before anything is created, or connected."""
    with pytest.raises(kind, match=words):
        make()


def test_half_precision_is_compressed_in_single():
    """A residual of bfloat16 would lose what it keeps."""
    how, dtype = ps.compression.Int8(), np.dtype(ml_dtypes.bfloat16)
    worker = Worker(how, (300,), dtype)
    value = np.zeros(300, dtype)
    with opened(compression=how) as strategy:
        w, optimizer = ps.Variable(value), ps.optimizers.SGD(1.0)
        for gradient in gradients(300, dtype=dtype):
            step(strategy, optimizer, (gradient, w))
            value = value - worker.send(gradient)
        assert w.feedback.residual.dtype == np.float32
        assert w.numpy().tobytes() == value.tobytes()
