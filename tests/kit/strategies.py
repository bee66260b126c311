"""Strategies of every kind, by names that a test can be parametrized with, and what tests ask of them."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import psclient as ps
from psclient._src.processes.process import start_server
from psclient.coordinator import content
from pstesting.in_process import InProcessCluster

MIRRORED = ("mirrored-1", "mirrored-2", "mirrored-4")
EMBEDDED = ("embedded-1", "embedded-2", "embedded-4")
CLUSTERS = ("servers-2x2",)
KINDS = ("default", *MIRRORED, *EMBEDDED, *CLUSTERS)
"""`default` is outside of every scope; `embedded-2` is a parameter server of this process's own, and two replicas;
`servers-2x2` are two servers, which hold variables in turn, and two replicas."""

USUAL = ("default", "mirrored-2", "servers-2x2")
"""Those on which `make test` runs what names no kinds; the others show each half: one replica, or a server."""

_MADE = {"mirrored": ps.MirroredStrategy, "embedded": ps.ParameterServerStrategy}

_numbers = itertools.count()


def kinds(*names: str, soak: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Says on which kinds the fixture `strategy` is for a test or a module, and on which others in `make soak`."""
    others = [pytest.param(kind, marks=pytest.mark.soak) for kind in soak if kind not in names]
    return pytest.mark.kinds(*names, *others)


@contextlib.contextmanager
def opened(kind: str) -> Iterator[Any]:
    """A strategy of one of the `KINDS`, with CPU replicas; it is closed at the end.

    Also `servers-3`: one replica, and variables on three servers that are processes; `sharded-2x2`: `servers-2x2` that
    cut variables of `ROWS` rows and more into `SHARDS`; and `async-2x2`, whose workers are asynchronous.
    """
    if kind == "default":
        backend = ps.get_strategy().extended._backend  # that of the process: what a test restores ends with the test
        with mock.patch.object(backend, "first_value", backend.first_value):
            yield ps.get_strategy()
        return
    name, _, count = kind.partition("-")
    if name not in _MADE:
        servers, _, local = count.partition("x")
        options = {"sharded": {"variable_partitioner": cut}, "async": {"consistency": ps.Async()}}.get(name, {})
        with _on_servers(int(servers), int(local or 1), in_process=bool(local), **options) as strategy:
            yield strategy
        return
    with _MADE[name](devices=_devices(int(count))) as strategy:
        yield strategy


ROWS, SHARDS = 7, 3


def cut(shape: tuple[int, ...], dtype: Any) -> list[int]:
    """The partitioner of `sharded-...`."""
    return [SHARDS if shape[0] >= ROWS else 1] + [1] * (len(shape) - 1)


def patient(cluster: InProcessCluster) -> InProcessCluster:
    """Has servers compile no kernel that they do not wait for: a test of a few steps would hardly ever run it."""
    for core in cluster.cores:
        core.kernels.compiler._patience = sys.maxsize
    return cluster


def root_of(kind: str) -> Path:
    """Where checkpoints of a kind lie: below the directory of its process, or of the servers that it starts."""
    return Path("runs" if kind.startswith(("embedded", "servers")) else ".")


def _devices(replicas: int) -> list[str]:
    return [f"cpu:{index}" for index in range(replicas)]


@contextlib.contextmanager
def _on_servers(servers: int, replicas: int, in_process: bool, **options: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        if in_process:
            resolver = patient(stack.enter_context(InProcessCluster(servers))).resolver()
        else:
            addresses = [stack.enter_context(_server(task)) for task in range(servers)]
            spec = ps.ClusterSpec({"ps": addresses, "worker": ["127.0.0.1:0"]})
            resolver = ps.SimpleClusterResolver(spec, task_type="worker", task_id=0)
        devices = _devices(replicas)
        yield stack.enter_context(ps.ParameterServerStrategy(devices=devices, cluster_resolver=resolver, **options))


@contextlib.contextmanager
def _server(task: int) -> Iterator[str]:
    process, address = start_server(task)
    with process:
        try:
            yield address
        finally:
            if process.stdin:
                process.stdin.close()  # its lifeline


def kind_of(strategy: Any) -> str:
    """The first word of its name among the `KINDS`."""
    made = {kind: name for name, kind in _MADE.items()}
    return made.get(type(strategy), "default")


def replicas(strategy: Any) -> int:
    """How many local replicas it has; here these are all."""
    return len(strategy.extended.worker_devices)


def variable(strategy: Any, value: Any = (0.0, 0.0, 0.0), beside: Any = None, **options: Any) -> Any:
    """A variable of the strategy, float32 unless the value says otherwise, whose name no other has; beside another."""
    initial = value if callable(value) or hasattr(value, "dtype") else np.asarray(value, "float32")
    place = contextlib.nullcontext() if beside is None else strategy.extended.colocate_vars_with(beside)
    with strategy.scope(), place:
        return ps.Variable(initial, **{"name": f"v{next(_numbers)}", **options})


def copies(strategy: Any, variable: Any) -> int:
    """How many copies of a variable its updates have to make equal."""
    return len(strategy.experimental_local_results(variable))


def in_replicas(strategy: Any, fn: Callable[[int], Any], *args: Any) -> tuple[Any, ...]:
    """Calls a function with each replica's number, and the arguments unwrapped; returns what each replica returned."""
    kept: dict[int, Any] = {}

    def body(*own: Any) -> None:
        replica = ps.get_replica_context().replica_id_in_sync_group
        kept[replica] = fn(replica, *own)

    strategy.run(body, args)
    return tuple(kept[replica] for replica in sorted(kept))


def by_replica(strategy: Any, fn: Callable[[int], Any]) -> Any:
    """What a function returns for each replica's number, merged as `run` merges it."""
    return strategy.run(lambda: fn(ps.get_replica_context().replica_id_in_sync_group))


def of_each(strategy: Any, values: Sequence[Any]) -> Any:
    """A per-replica value of the first of some values; with one replica the first itself."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def merged(strategy: Any, merge_fn: Callable[..., Any], *args: Any) -> Any:
    """What `merge_fn(strategy, *args)` returns where the replicas meet for it."""
    return strategy.run(lambda *own: ps.get_replica_context().merge_call(merge_fn, own), args)


def refused(error: Any, says: str, *calls: Callable[[], Any]) -> None:
    """Expects of each call that it raises an error, with these words if there are any."""
    for call in calls:
        with pytest.raises(error, match=says or None):
            call()


# ---- ways by which a user's array comes in ----


def entries(strategy: Any) -> dict[str, Callable[[Any], Any]]:
    """Calls by their names. Each takes an array of ones, and returns what came of it as an array of NumPy.

    Those in `WITH_A_PATH` have the array as the field `x` of a dict, and name that in their errors.
    """
    with strategy.scope():
        name = f"entries{next(_numbers)}"
        v = ps.Variable(np.zeros(3, "float32"), name=name)
        mean = ps.metrics.Mean(name=f"{name}/mean")
        optimizer = ps.optimizers.SGD(1.0, name=f"{name}/sgd")

    def created(value: Any) -> Any:
        with strategy.scope():
            return ps.Variable(value, name=f"{name}/{next(_numbers)}").numpy()

    def assigned(value: Any) -> Any:
        v.assign(value)
        return v.numpy()

    def stepped(value: Any) -> Any:
        v.assign(np.zeros(3, "float32"))
        strategy.run(lambda: optimizer.apply_gradients([(value, v)]))
        return -v.numpy()

    def averaged(value: Any) -> Any:
        strategy.run(lambda: mean.update_state(value))
        return np.full(3, mean.result())

    def from_batch(value: Any) -> Any:
        batches = strategy.experimental_distribute_dataset([{"x": value}])
        return next(iter(batches))["x"]

    def sent(value: Any) -> Any:
        return content.decode(content.encode({"x": value}, "arguments"))["x"]

    return {
        "create": created,
        "assign": assigned,
        "step": stepped,
        "metric": averaged,
        "slices": lambda value: ps.IndexedSlices(value, [0, 1, 2], (3,)).numpy(),
        "reduce": lambda value: np.asarray(strategy.reduce("SUM", {"x": value}, axis=None)["x"]),
        "gather": lambda value: np.asarray(strategy.gather({"x": value}, axis=0)["x"]),
        "dataset": lambda value: ps.ArrayDataset({"x": value}).arrays["x"],
        "batch": from_batch,
        "send": sent,
    }


WITH_A_PATH = ("reduce", "gather", "dataset", "batch", "send")
