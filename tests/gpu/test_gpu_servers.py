"""Servers whose variables are on a GPU, beside servers on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psclient as ps
from pstesting.in_process import InProcessCluster
from tests.kit.internals import DTYPES

ROUNDS = 6
DENSE = ((3,), (20_000,), (130, 160))
"""Shapes of variables: one is interpreted, and two have kernels."""

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: ps.optimizers.SGD(0.1),
    "momentum": lambda: ps.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: ps.optimizers.Adam(0.01),
    "amsgrad": lambda: ps.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: ps.optimizers.AdamW(0.01),
    "adamax": lambda: ps.optimizers.Adamax(0.01),
    "nadam": lambda: ps.optimizers.Nadam(0.01),
    "adagrad": lambda: ps.optimizers.Adagrad(0.1),
    "adadelta": lambda: ps.optimizers.Adadelta(0.1),
    "rmsprop": lambda: ps.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "ftrl": lambda: ps.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "lamb": lambda: ps.optimizers.Lamb(0.01),
    "lion": lambda: ps.optimizers.Lion(0.01),
    "clipped": lambda: ps.optimizers.SGD(0.1, global_clipnorm=1.0),
    "averaged": lambda: ps.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "scheduled": lambda: ps.optimizers.Adam(ps.optimizers.schedules.CosineDecay(0.01, 10)),
}

ROWS: dict[str, Callable[[], Any]] = {
    "sgd": OPTIMIZERS["sgd"],
    "adam": OPTIMIZERS["adam"],
    "closed": lambda: ps.optimizers.Adam(0.01, settle="closed"),
    "lazy": lambda: ps.optimizers.LazyAdam(0.01),
    "adagrad": OPTIMIZERS["adagrad"],
    "rowwise": lambda: ps.optimizers.RowwiseAdagrad(0.1),
    "clipped": OPTIMIZERS["clipped"],
}


def both(work: Callable[[InProcessCluster, Any], Any], root: Path, servers: int = 1, **options: Any) -> list[Any]:
    """What a worker finds with servers on the CPU, and with servers on the GPU."""
    found = []
    for device in ("cpu", "gpu:0"):
        with (
            InProcessCluster(servers, checkpoint_root=root / device.partition(":")[0], device=device) as cluster,
            ps.ParameterServerStrategy(cluster_resolver=cluster.resolver(), devices=["cpu:0"], **options) as strategy,
            strategy.scope(),
        ):
            found.append(work(cluster, strategy))
    return found


def settle(cluster: InProcessCluster) -> None:
    """Waits for the kernels that the servers compile: what follows has them."""
    for core in cluster.cores:
        core.kernels.compiler.wait()
        core.kernels.on_host.compiler.wait()


def alike(found: list[Any], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Raises AssertionError unless what both have found is equal, but for the last digits."""
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(other, "float64"), np.asarray(one, "float64"), rtol=rtol, atol=atol)


def gradients(number: int, shapes: Any = DENSE) -> list[Any]:
    """Those of a round."""
    rng = np.random.default_rng(number)
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Each of them, interpreted and by kernels; no kernel fails to be compiled."""

    def work(cluster: InProcessCluster, strategy: Any) -> list[Any]:
        variables = [ps.Variable(np.ones(shape, "float32")) for shape in DENSE]
        optimizer = OPTIMIZERS[name]()
        for number in range(ROUNDS):
            strategy.run(optimizer.apply_gradients, (list(zip(gradients(number), variables, strict=True)),))
            [v.numpy() for v in variables]
            settle(cluster)
        assert [core.kernels.compiler.failed for core in cluster.cores] == [0]
        return [v.numpy() for v in variables]

    alike(both(work, tmp_path))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "int64", "complex64", "bool"])
def test_variables_of_other_dtypes_are_assigned(dtype: str, tmp_path: Path) -> None:
    """They are summed on the host, and kept on the device."""

    def work(cluster: InProcessCluster, strategy: Any) -> list[Any]:
        found = []
        for size in (3, 20_000):
            how = ps.VariableAggregation.ONLY_FIRST_REPLICA if dtype == "bool" else ps.VariableAggregation.SUM
            v = ps.Variable(np.zeros(size).astype(DTYPES[dtype]), aggregation=how)
            for number in range(4):
                strategy.run(lambda v=v, n=number: v.assign(np.full(v.shape, n % 2).astype(v.dtype)))
                if dtype != "bool":
                    strategy.run(lambda v=v: v.assign_add(np.full(v.shape, 2).astype(v.dtype)))
                settle(cluster)
            found.append(v.numpy().real)
        return found

    alike(both(work, tmp_path))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_trained_as_on_the_cpu(name: str, servers: int, tmp_path: Path) -> None:
    """Of a table with a size and of one without; also the rows that have missed updates, and of whole rounds."""

    def work(cluster: InProcessCluster, strategy: Any) -> list[Any]:
        table = ps.Variable(np.ones((50, 4), "float32"), name="table")
        keyed = ps.dynamic_embedding.get_variable("keyed", dim=4, initializer=ps.initializers.Ones())
        optimizer = ROWS[name]()
        rng = np.random.default_rng(0)
        for _ in range(ROUNDS):
            ids = rng.integers(0, 50, 12)
            steps = rng.standard_normal((12, 4)).astype("float32")

            def step(ids: Any = ids, steps: Any = steps) -> None:
                slices = [(ps.IndexedSlices(steps, ids), table)]
                if name != "clipped":
                    slices.append((ps.IndexedSlices(steps, ids), keyed))
                optimizer.apply_gradients(slices)

            strategy.run(step)
            np.asarray(table.lookup(ids).values)
            settle(cluster)
        return [table.numpy(), keyed.lookup(np.arange(50)).numpy()]

    alike(both(work, tmp_path, servers))


def test_rows_that_are_not_finite_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are applied, and the variable is named."""

    def work(cluster: InProcessCluster, strategy: Any) -> list[Any]:
        table = ps.Variable(np.ones((50, 4), "float32"), name="table")
        steps = np.ones((2, 4), "float32")
        steps[1, 2] = np.nan
        optimizer = ps.optimizers.SGD(0.5)
        strategy.run(lambda: optimizer.apply_gradients([(ps.IndexedSlices(steps, np.array([7, 9])), table)]))
        value = table.numpy()
        assert np.isnan(value[9, 2])
        assert np.isfinite(np.delete(value, 9, axis=0)).all()
        assert "variable 'table': the contribution of /job:worker/task:0 has NaN" in caplog.text
        caplog.clear()
        return [np.isnan(value)]

    alike(both(work, tmp_path))


@pytest.mark.parametrize("consistency", [ps.Async(), ps.Sync(nonfinite="skip"), ps.Sync(whole_rounds=False)])
def test_other_kinds_of_rounds(consistency: Any, tmp_path: Path) -> None:
    """Asynchronous ones, whole ones of two servers on trial, and those of which each server decides by itself."""

    def work(cluster: InProcessCluster, strategy: Any) -> list[Any]:
        variables = [ps.Variable(np.ones(shape, "float32")) for shape in (*DENSE, (1_500_000,))]
        optimizer = ps.optimizers.Adam(0.01)
        for number in range(4):
            given = gradients(number, [v.shape for v in variables])
            strategy.run(optimizer.apply_gradients, (list(zip(given, variables, strict=True)),))
            [v.numpy() for v in variables]
            settle(cluster)
        return [v.numpy() for v in variables]

    alike(both(work, tmp_path, 2, consistency=consistency))


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    """With slots, rows that have missed updates, and a table without a size: what was restored trains as before."""

    def work(cluster: InProcessCluster, strategy: Any) -> list[Any]:
        dense = ps.Variable(np.ones(20_000, "float32"), name="dense")
        table = ps.Variable(np.ones((50, 4), "float32"), name="table")
        keyed = ps.dynamic_embedding.get_variable("keyed", dim=4, initializer=ps.initializers.Ones())
        optimizer = ps.optimizers.Adam(0.01)
        checkpoint = ps.train.Checkpoint(dense=dense, table=table, keyed=keyed, optimizer=optimizer)

        def train(number: int) -> list[Any]:
            rng = np.random.default_rng(number)
            ids, steps = rng.integers(0, 50, 12), rng.standard_normal((12, 4)).astype("float32")

            def step() -> None:
                rows = ps.IndexedSlices(steps, ids)
                whole = rng.standard_normal(20_000).astype("float32")
                optimizer.apply_gradients([(rows, table), (rows, keyed), (whole, dense)])

            strategy.run(step)
            return [dense.numpy(), table.numpy(), keyed.lookup(np.arange(50)).numpy()]

        for number in range(3):
            train(number)
        path = checkpoint.save("run/ckpt")
        after = train(3)
        train(4)
        checkpoint.restore(path)
        again = train(3)
        for one, other in zip(after, again, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6)
        return again

    alike(both(work, tmp_path))
