"""Strategies whose replicas compute on a GPU: variables, reductions, rounds without a wait, and buffers."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient._src.arrays import devices
from tests.kit.internals import WINDOW

GPU = devices.Device("gpu", 0)
ON_READ = {"synchronization": ps.VariableSynchronization.ON_READ, "aggregation": ps.VariableAggregation.SUM}


@pytest.fixture(scope="module", params=["mirrored", "servers"])
def strategy(request):
    kind = ps.MirroredStrategy if request.param == "mirrored" else ps.ParameterServerStrategy
    with kind(devices=["gpu:0"]) as strategy:
        yield strategy


def test_a_mirrored_variable_lives_on_its_device():
    """Its copy is a CuPy array, which update functions get and replace."""
    with ps.MirroredStrategy(["gpu:0"]) as strategy:
        with strategy.scope():
            w = ps.Variable(np.ones(3, "float32"))
        assert w.devices == ("/job:localhost/task:0/device:GPU:0",)
        seen = []

        def add(v, x):
            seen.append(devices.device_of(v.read_value()))
            return v.assign_add(x)

        assert strategy.extended.update(w, add, (np.full(3, 2.0, "float32"),)) is w
        assert seen == [GPU]
        assert w.numpy().tolist() == [3.0] * 3


def test_replicas_assign_what_they_compute_on_the_device(strategy):
    """Aggregated, or to a copy of their own."""
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(3, "float32"), aggregation=ps.VariableAggregation.SUM)
        count = ps.Variable(np.float32(1), **ON_READ)

    def step():
        w.assign_add(cupy.ones(3, "float32") * 2)
        count.assign_add(cupy.ones(4, "float32").sum())
        return count.read_value()

    assert devices.device_of(strategy.run(step)) == GPU
    assert w.numpy().tolist() == [2.0] * 3
    assert float(count) == 5.0


def test_optimizers_and_metrics_take_cupy_arrays(strategy):
    """Gradients, losses, labels and scores come from the device."""
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(3, "float32"))
        optimizer = ps.optimizers.SGD(0.5)
        mean, auc = ps.metrics.Mean(), ps.metrics.AUC()

    def step():
        optimizer.apply_gradients([(cupy.ones(3, "float32"), w)])
        mean.update_state(cupy.arange(4.0))
        auc.update_state(cupy.asarray([0, 0, 1, 1]), cupy.asarray([0.1, 0.4, 0.35, 0.8]))

    strategy.run(step)
    assert w.numpy().tolist() == [-0.5] * 3
    assert mean.result() == 1.5
    assert auc.result() == pytest.approx(0.75, abs=0.01)


def test_losses_and_their_metrics_stay_on_the_device(strategy):
    """Predictions come from the device, labels and weights from anywhere; losses are there, and as on the host."""
    cupy, losses = devices.namespace(GPU), ps.losses
    random = np.random.default_rng(0)
    logits, classes = random.normal(size=(6, 3)), random.integers(0, 3, 6)
    shares, labels = random.uniform(size=(6, 3)), random.integers(0, 2, (6, 3))
    weights = random.uniform(size=6)
    calls = [
        lambda put: losses.mean_squared_error(put(labels), put(logits)),
        lambda put: losses.binary_crossentropy(labels, put(shares), label_smoothing=0.1),
        lambda put: losses.binary_crossentropy(put(labels), put(logits), from_logits=True),
        lambda put: losses.categorical_crossentropy(put(labels), put(shares)),
        lambda put: losses.categorical_crossentropy(labels, put(logits), from_logits=True),
        lambda put: losses.sparse_categorical_crossentropy(classes, put(shares)),
        lambda put: losses.sparse_categorical_crossentropy(put(classes), put(logits), from_logits=True),
        lambda put: losses.compute_average_loss(put(logits), sample_weight=weights),
        lambda put: losses.compute_average_loss(put(logits[:0])),
        lambda put: losses.scale_regularization_loss(put(logits)),
    ]
    for call in calls:
        found = strategy.run(lambda call=call: call(cupy.asarray))
        assert devices.device_of(found) == GPU
        np.testing.assert_allclose(devices.to_numpy(found), call(np.asarray), rtol=1e-12, atol=1e-15)
    metrics = ps.metrics
    kinds = [
        (lambda: metrics.SparseCategoricalAccuracy(), classes, logits),
        (lambda: metrics.BinaryAccuracy(threshold=0.3), labels, shares),
        (lambda: metrics.Precision([0.2, 0.5]), labels, shares),
        (lambda: metrics.Recall(), labels, shares),
        (lambda: metrics.RootMeanSquaredError(), labels, logits),
    ]
    for make, truth, predictions in kinds:
        with strategy.scope():
            metric = make()
        expected = make()
        strategy.run(lambda m=metric, t=truth, p=predictions: m.update_state(t, cupy.asarray(p), cupy.asarray(weights)))
        expected.update_state(truth, predictions, weights)
        np.testing.assert_allclose(metric.result(), expected.result(), rtol=1e-12)


def test_reductions_give_host_arrays(strategy):
    cupy = devices.namespace(GPU)
    rows = strategy.run(lambda: cupy.arange(6.0).reshape(3, 2))
    total = strategy.reduce("sum", rows, axis=0)
    assert isinstance(total.numpy(), np.ndarray)
    assert total.tolist() == [6.0, 9.0]
    assert devices.device_of(strategy.extended.reduce_to("sum", rows, "gpu:0")) == GPU


@pytest.fixture(scope="module")
def on_servers():
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as on_servers:
        yield on_servers


def test_a_variable_is_copied_to_the_device_once_for_each_value(on_servers):
    """Reads between two rounds share the copy; a round makes a new one."""
    with on_servers.scope():
        w = ps.Variable(np.ones(3, "float32"))
    first, second = on_servers.run(lambda: (w.read_value(), w.read_value()))
    assert devices.device_of(first) == GPU
    assert first is second
    assert on_servers.run(w.read_value) is first
    w.assign_add(1.0)
    assert devices.to_numpy(on_servers.run(w.read_value)).tolist() == [2.0] * 3


def test_cupy_functions_and_operators_take_variables_and_reduced_values(on_servers):
    """On either side, and the result is on the device. Reductions and updates take CuPy arrays."""
    cupy = devices.namespace(GPU)
    with on_servers.scope():
        w = ps.Variable(np.ones(3, "float32"))
    reduced = on_servers.extended.reduce_to("sum", np.ones(3, "float32"), w)

    def step():
        x = cupy.ones(3, "float32")
        return [x + w, w + x, cupy.add(x, w), cupy.exp(w), x + reduced, reduced * x, cupy.add(reduced, x)]

    for found in on_servers.run(step):
        assert devices.device_of(found) == GPU
    rows = on_servers.run(lambda: cupy.ones((4, 3), "float16"))
    assert on_servers.reduce("mean", rows, axis=0).tolist() == [1.0] * 3
    on_servers.extended.update(w, lambda v, x: v.assign(x), (cupy.full(3, 2.0, "float32"),))
    assert w.numpy().tolist() == [2.0] * 3


def test_an_array_on_the_device_may_change_once_the_call_has_returned(on_servers):
    """What was reduced is what it was, of a whole window of rounds."""
    x = devices.namespace(GPU).zeros(1 << 16, "float32")
    float(on_servers.reduce("sum", x, axis=None)[0])
    values = []
    for number in range(WINDOW):
        x.fill(number)
        values.append(on_servers.reduce("sum", x, axis=None))
    x.fill(-1.0)
    assert [float(value[-1]) for value in values] == [float(number) for number in range(WINDOW)]


def test_a_step_waits_once(on_servers):
    """For the variables that the next one reads, on the device; the loss comes with them."""
    cupy = devices.namespace(GPU)
    with on_servers.scope():
        w = ps.Variable(np.zeros(1000, "float32"))
        optimizer = ps.optimizers.SGD(0.5)

    def step(x):
        loss = ((w - x) ** 2).sum()
        optimizer.apply_gradients([(w - x, w)])
        return loss

    waits, losses = [], []
    for _ in range(6):
        waits.append(on_servers.blocking_waits)
        losses.append(on_servers.reduce("mean", on_servers.run(step, args=(cupy.ones(1000, "float32"),)), axis=None))
    assert np.diff(waits)[2:].tolist() == [1] * 3
    assert [float(loss) for loss in losses] == [1000.0 * 0.25**number for number in range(6)]


@pytest.fixture(params=[1 << 10, 3 << 20], ids=["small", "large"])
def trained(request):
    """A strategy, a variable of one part or of several, and its optimizer."""
    with ps.ParameterServerStrategy(devices=["gpu:0"]) as strategy:
        with strategy.scope():
            v = ps.Variable(np.zeros(request.param, np.float32), name="v")
        yield strategy, v, ps.optimizers.SGD(1.0)


def test_gradients_leave_from_pinned_memory(trained):
    """What is copied there from the device is what the servers add; two arrays alternate."""
    strategy, v, optimizer = trained
    cupy = devices.namespace(GPU)
    places = set()

    def step(n):
        buffer = strategy.buffer(v)
        assert isinstance(buffer, np.ndarray)
        found = cupy.cuda.runtime.pointerGetAttributes(buffer.ctypes.data)
        assert found.type == cupy.cuda.runtime.memoryTypeHost
        places.add(buffer.ctypes.data)
        cupy.full(v.shape, -float(n), np.float32).get(out=buffer)
        optimizer.apply_gradients([(buffer, v)])
        with pytest.raises(ValueError, match="read-only"):
            buffer[0] = 0.0

    for n in range(8):
        strategy.run(step, (n,))
    assert len(places) == 2
    assert v.numpy().min() == v.numpy().max() == sum(range(8))


def test_arrays_of_the_device_go_on_beside_buffers(trained):
    """In one step, and one round: some of its gradients are on the device."""
    strategy, v, optimizer = trained
    cupy = devices.namespace(GPU)
    with strategy.scope():
        w = ps.Variable(np.zeros(5, np.float32), name="w")

    def step():
        buffer = strategy.buffer(v)
        buffer.fill(-1.0)
        optimizer.apply_gradients([(cupy.full(5, -2.0, np.float32), w), (buffer, v)])

    for _ in range(4):
        strategy.run(step)
    assert w.numpy().tolist() == [8.0] * 5
    assert v.numpy().min() == v.numpy().max() == 4.0
