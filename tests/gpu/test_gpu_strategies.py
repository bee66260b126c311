"""Strategies whose replicas compute on GPUs."""

from __future__ import annotations

import numpy as np
import pytest

import psclient as ps
from psclient._src import devices

GPU = devices.Device("gpu", 0)
ON_READ = {
    "synchronization": ps.VariableSynchronization.ON_READ,
    "aggregation": ps.VariableAggregation.SUM,
}


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
    """Whatever the replicas' values lie on."""
    cupy = devices.namespace(GPU)
    rows = strategy.run(lambda: cupy.arange(6.0).reshape(3, 2))
    total = strategy.reduce("sum", rows, axis=0)
    assert isinstance(total.numpy(), np.ndarray)
    assert total.tolist() == [6.0, 9.0]
    assert devices.device_of(strategy.extended.reduce_to("sum", rows, "gpu:0")) == GPU
