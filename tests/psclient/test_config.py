"""What the environment and a script say: timeouts, options, devices; and metrics, which say what a process did."""

from __future__ import annotations

import logging
import re
import socket
import sys
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

import psclient as ps
from psclient._src.arrays import devices
from psclient._src.arrays.devices import Device
from psclient._src.config import (
    LaunchConfig,
    child_environ,
    grpc_streams,
    local_reduction_from,
    metrics_from,
    task_config,
    timeouts_from,
    transport_from,
)
from psclient._src.options import Async, AutoShardPolicy, InputContext, InputOptions, RunOptions, Sync, ValueContext
from psclient._src.rounds import counters
from psclient._src.rounds.counters import RoundCounters
from psclient._src.telemetry.exporter import OF_CHIEFS, OF_WORKERS, Exporter, WorkerParts
from pstesting import InProcessCluster
from pstesting.script import add
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import Timeouts
from pswire.model.status import LocalProgress
from pswire.security.identity import Security
from pswire.telemetry.metrics import PROCESS, ProcessReadings
from pswire.telemetry.prometheus import Metrics
from tests.kit.strategies import refused
from tests.kit.telemetry import Page, documented, mistakes

TF_CONFIG = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "worker", "index": 0}}'


def test_what_the_environment_says(monkeypatch):
    """What a launcher hands on is what a child reads; TF_CONFIG may be set after the import; a file or a flag wins."""
    timeouts = Timeouts(session_timeout=3.25, round_timeout=9.75, heartbeat_interval=1e-3)
    assert timeouts_from(timeouts.environ()) == timeouts
    assert [local_reduction_from({"PS_LOCAL_REDUCTION": said}) for said in ("", "0", "1")] == [False, False, True]
    assert grpc_streams({})
    assert [grpc_streams({"PS_GRPC_STREAM": said}) for said in ("1", "0")] == [True, False]
    assert (transport_from({}), transport_from({"PS_TRANSPORT": "tcp"})) == ("shm", "tcp")
    monkeypatch.setenv("PS_METRICS_PORT", "9100")
    assert (LaunchConfig().metrics_port, LaunchConfig(metrics_port=0).metrics_port) == (9100, 0)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert task_config() is None
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    config = task_config()
    assert config.task == Task("worker", 0)
    services = {"PS_SERVICE_HOST": "10.0.0.1", "PS_0_PORT": "tcp://10.0.0.1:2222", "PS_PORTS": "tcp://10.0.0.1:2222"}
    others = {**services, "PS_FORMAT": "pid", "PS1": "$", "LS_TRANSPORT": "x"}
    assert timeouts_from(others) == timeouts_from({}) == Timeouts(), "of ps, and of a service that is called ps"


WRONG = [
    (timeouts_from, {"PS_SESION_TIMEOUT": "1"}, "PS_SESION_TIMEOUT is unknown; did you mean PS_SESSION_TIMEOUT?"),
    (timeouts_from, {"PS_REPLICATION_FACTR": "1"}, "is unknown; did you mean PS_REPLICATION_FACTOR?"),
    (timeouts_from, {"PS_TLS_CERTS": "1"}, "is unknown; did you mean PS_TLS_CERT?"),
    (timeouts_from, {"PS_SESSION_TIMEOUT": "soon"}, "'soon' must be a positive number"),
    *((timeouts_from, {"PS_SESSION_TIMEOUT": said}, "positive") for said in ("-1", "nan", "inf")),
    (timeouts_from, {"PS_SESSION_TIMEOUT": "5", "PS_ROUND_TIMEOUT": "14.9"}, "PS_ROUND_TIMEOUT=14.9 is below 3 times"),
    (local_reduction_from, {"PS_LOCAL_REDUCTION": "host"}, "PS_LOCAL_REDUCTION must be 1 or 0, not 'host'"),
    (grpc_streams, {"PS_GRPC_STREAM": "no"}, "PS_GRPC_STREAM must be 1 or 0, not 'no'"),
    (transport_from, {"PS_TRANSPORT": "tpc"}, r"tpc.*tcp"),
    *((metrics_from, {"PS_METRICS_PORT": said}, "PS_METRICS_PORT") for said in ("x", "-1", "65536", "1.5")),
    (lambda given: LaunchConfig(**given), {"metrics_port": 70_000}, "metrics_port"),
]


@pytest.mark.parametrize(("read", "given", "said"), WRONG, ids=[str(given) for _, given, _ in WRONG])
def test_wrong_settings_are_named(read, given, said):
    """A word that means nothing would count as absent: the nearest one is told."""
    refused(ConfigError, said, lambda: read(given))


def test_children_keep_what_the_user_set(monkeypatch):
    """The launcher gives defaults for threads and the allocator, never instead of the user's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    environ = child_environ(tasks=1000, timeouts=None)
    assert environ["OMP_NUM_THREADS"] == "7"
    assert environ["GLIBC_TUNABLES"] == "glibc.malloc.check=0"
    assert environ["OPENBLAS_NUM_THREADS"] == "1"
    assert "TF_CONFIG" not in environ


def test_contexts_say_what_they_are():
    """As text, with TensorFlow's defaults; a batch is shared out equally, or not at all."""
    assert InputContext(2, 1, 4).get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match="cannot be split equally among 4 replicas"):
        InputContext(2, 1, 4).get_per_replica_batch_size(6)
    assert str(InputContext()) == "ps.InputContext(input pipeline id 0, total: 1)"
    assert str(InputContext(3, 1, 6)) == "ps.InputContext(input pipeline id 1, total: 3)"
    assert InputContext() == InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
    assert str(ValueContext(2, 4)) == "ps.ValueContext(replica id 2, total replicas in sync: 4)"
    assert ValueContext() == ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)


def test_options_have_the_names_and_defaults_of_tensorflow():
    """A policy may be its number, too; another one is refused. DYNAMIC is none of TensorFlow's."""
    assert InputOptions() == InputOptions(True, AutoShardPolicy.AUTO)
    assert InputOptions(auto_shard_policy=-1).auto_shard_policy is AutoShardPolicy.OFF
    assert [policy.value for policy in AutoShardPolicy] == [-1, 0, 1, 2, 3, 4]
    assert [policy.name for policy in AutoShardPolicy] == ["OFF", "AUTO", "FILE", "DATA", "HINT", "DYNAMIC"]
    refused(ValueError, "AutoShardPolicy", lambda: InputOptions(auto_shard_policy=7))
    assert RunOptions() == RunOptions(
        experimental_enable_dynamic_batch_size=True, experimental_bucketizing_dynamic_shape=False
    )


def test_numbers_of_a_consistency_are_whole():
    """Anything else is refused where it is said, with the name of the argument; NumPy's are kept as Python's."""
    assert (Sync().backup_workers, Sync(backup_workers=2).mode, Async().backup_workers) == (0, "sync", 0)
    assert type(ps.BoundedStaleness(cast(Any, np.int64(3))).k) is int
    assert ps.BoundedStaleness(0) == ps.BoundedStaleness(k=0, nonfinite="apply")
    refused(ValueError, "unknown nonfinite 'never'", lambda: ps.BoundedStaleness(1, nonfinite=cast(Any, "never")))
    refused(ValueError, "backup_workers=-1 is negative; use 0 to wait for every", lambda: Sync(backup_workers=-1))
    for wrong in (True, 1.0, "1", None):
        said = re.escape(f"backup_workers={wrong!r} is not a number of workers; use an integer")
        refused(TypeError, said, lambda wrong=wrong: Sync(backup_workers=wrong))
    for error, bounds in ((ValueError, (-1, 2**31)), (TypeError, (True, np.True_, 3.0, "3"))):
        for k in bounds:
            refused(error, re.escape(f"BoundedStaleness has k={k!r}; use "), lambda k=k: ps.BoundedStaleness(k))


def test_a_quorum_has_a_size_and_a_time_of_grace():
    """Of at least one worker, and of a finite number of seconds; NumPy's numbers are kept as Python's."""
    given = ps.Quorum(cast(Any, np.int64(3)), grace=cast(Any, np.float32(2)))
    assert (type(given.size), type(given.grace), given) == (int, float, ps.Quorum(3, 2.0, nonfinite="apply"))
    assert (ps.Quorum(1).grace, given.mode, given.backup_workers) == (0.0, "sync", 0)
    refused(ValueError, "unknown nonfinite 'never'", lambda: ps.Quorum(1, nonfinite=cast(Any, "never")))
    for error, sizes in ((ValueError, (0, -1, 2**31)), (TypeError, (True, 3.0, "3", None))):
        for size in sizes:
            refused(error, re.escape(f"Quorum has size={size!r}; use "), lambda size=size: ps.Quorum(size))
    for error, times in ((ValueError, (-1, -0.5, float("nan"), float("inf"))), (TypeError, (True, "1", None))):
        for grace in times:
            refused(error, re.escape(f"Quorum has grace={grace!r}; use "), lambda grace=grace: ps.Quorum(2, grace))


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu:0", Device("cpu", 0)),
        ("cpu", Device("cpu", 0)),
        ("GPU:1", Device("gpu", 1)),
        ("/gpu:12", Device("gpu", 12)),
        ("/device:CPU:0", Device("cpu", 0)),
        ("/job:worker/task:0/device:GPU:0", Device("gpu", 0)),
        ("/job:worker/replica:0/task:1/device:GPU:3", Device("gpu", 3)),
    ],
)
def test_devices_are_read(text, device):
    assert Device.parse(text) == device


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(([text], "use cpu:0 or gpu:0") for text in ("", "tpu:0", "gpu:-1", "gpu:", "gpu:1x", "cpu:0 ")),
        (["/job:worker/task:0"], "use cpu:0 or gpu:0"),
        ([], "the list of devices is empty"),
        (["cpu:0", "cpu"], "listed twice"),
        (["cpu:0", "abacus"], "'abacus' is not a device"),
        ([f"gpu:{devices.available_gpus()}"], "use cpu:0"),
    ],
    ids=str,
)
def test_devices_that_cannot_be_are_refused(names, message):
    refused(ConfigError, message, lambda: devices.local_devices(names))


def test_the_default_is_all_gpus_or_one_cpu():
    """Whatever this machine has; numbers tell CPU replicas apart; a device is read as it is written."""
    found = devices.available_gpus()
    kinds = [device.kind for device in devices.default_devices()]
    assert kinds == (["gpu"] * found or ["cpu"])
    assert devices.local_devices(None) == devices.default_devices()
    assert devices.local_devices(["cpu:0", "cpu:1"]) == (Device("cpu", 0), Device("cpu", 1))
    device = Device("gpu", 2)
    assert device.full_name(Task("worker", 1)) == "/job:worker/task:1/device:GPU:2"
    assert Device.parse(device.full_name(Task("worker", 1))) == Device.parse(str(device)) == device


class Foreign:
    """An array of another library, in host memory."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.arange(3)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_arrays_are_added_on_the_host(monkeypatch):
    """NumPy's are not copied, what NumPy can read is read; a GPU needs CuPy, and the error says what to install."""
    array = np.arange(3)
    assert devices.to_device(array, Device("cpu", 1)) is array
    for given in ([0, 1, 2], Foreign()):
        assert devices.to_device(given, Device("cpu", 1)).tolist() == [0, 1, 2]
    total = devices.add(np.array([1, 2], "float32"), np.array([3, 4], "float32"))
    assert (total.dtype, total.tolist(), devices.device_of(total)) == (np.float32, [4, 6], devices.CPU)
    assert devices.namespace(devices.CPU) is np
    with devices.device_scope(devices.CPU):
        assert devices.device_of(1.0) == devices.CPU
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert devices.default_devices() == (devices.CPU,)
    refused(ConfigError, r"pip install -e .\.\[gpu\]", lambda: devices.to_device(np.zeros(1), Device("gpu", 0)))


WORKER = Task("worker", 0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test turns."""
    now = [100.0]
    monkeypatch.setattr(counters.time, "monotonic", lambda: now[0])
    return now


def test_time_is_computing_waiting_or_reading(clock):
    """None of it is two of these; before the first round nothing is computed for one. Reads of several threads are not
    more than the time, and a wait that is interrupted is one."""
    one = RoundCounters()
    clock[0] += 5.0
    with one:
        clock[0] += 1.0
    clock[0] += 3.0
    one.read(2.0)
    with one:
        clock[0] += 4.0
    assert (one.computing.total, one.waiting.total, one.reading.total) == (1.0, 5.0, 2.0)
    clock[0] += 1.0
    one.read(1.0)
    one.read(1.0)
    with pytest.raises(KeyboardInterrupt), one:
        raise KeyboardInterrupt
    assert (one.computing.total, one.waits) == (1.0, 3)


def test_local_steps_are_counted_since_the_last_exchange(clock):
    """Bytes count from the first local step on; before an exchange none is said to have been."""
    one = RoundCounters()
    assert one.pace().local is None
    one.local_step(100, False, 5000, 0.0)
    assert one.pace().local == LocalProgress(1, 1, -1.0, 100.0, 0)
    one.local_step(50, True, 5600, 3.5)
    clock[0] += 2.5
    assert one.pace().local == LocalProgress(2, 0, 2.5, 150.0, 600, 3.5)
    one.local_step(None, False, 5600, 3.5)
    assert one.pace().local == LocalProgress(3, 1, 2.5, 150.0, 600, 3.5)


def test_local_steps_are_told_by_heartbeats_and_metrics():
    """A server knows how far each worker is between two exchanges, and what an exchange has moved."""
    with InProcessCluster(servers=1) as cluster, ps.ParameterServerStrategy(cluster_resolver=cluster.resolver()) as one:
        with one.scope():
            v = ps.Variable(np.zeros(8, "float32"))
        measures = one.backend.exchange.measures
        measures.local_step(None, False, sum(one.bytes_transferred), 0.0)
        one.run(add, args=(v, np.ones(8, "float32")))
        v.numpy()
        for exchanged in (True, False):
            measures.local_step(None, exchanged, sum(one.bytes_transferred), 0.0)
        session = one.backend.group.session
        session.heartbeat_now(0)
        (local,) = (each.pace.local for each in session.log_server.status().sessions if each.pace.local)
        assert (local.steps, local.since, local.tokens) == (3, 1, 0.0)
        assert local.moved >= 64, "a gradient of 32 bytes, and values as many"
        assert 0 <= local.seconds < 60
        worker = WorkerParts(one.backend.exchange, ())
        values = {row.name: row.read(worker) for row in OF_WORKERS if "local_" in row.name}
        assert values["paramserver_worker_local_steps"] == {(): 3}
        assert values["paramserver_worker_local_tokens"] == {}


def test_the_document_has_the_metrics_of_the_code():
    """Names, kinds and labels do not change without it: dashboards and alarms are made of them."""
    said = {name: row for name, row in documented().items() if "_server_" not in name}
    rows = (*PROCESS, *OF_WORKERS, *OF_CHIEFS)
    assert said == {row.name + "_total" * (row.kind == "counter"): (row.kind, row.labels) for row in rows}


def test_a_process_serves_what_its_script_counts(monkeypatch, caplog):
    """Beside a worker's and a chief's own metrics, at the port that was picked, until the strategy is closed."""
    monkeypatch.setenv("PS_METRICS_PORT", "0")
    mine = Counter("mine", "What a script counts.")
    mine.inc(3)
    try:
        with caplog.at_level(logging.WARNING), ps.ParameterServerStrategy() as strategy:
            (url,) = re.findall(r"http://\S+/metrics", caplog.text)
            with strategy.scope():
                v = ps.Variable(np.zeros(8, "float32"))
            for _ in range(3):
                strategy.run(add, args=(v, np.ones(8, "float32")))
            v.numpy()
            found = Page.at(url)
    finally:
        REGISTRY.unregister(mine)
    assert found.families["mine"].samples[0].value == 3
    assert found("worker_rounds_total", outcome="completed") == found("worker_steps_total") == 3
    assert found("worker_blocking_waits_total") == 2, "for the first, whose plan is new, and for the others at once"
    assert (found("chief_generations_total"), found("chief_members")) == (1, 1)
    assert not mistakes(found.ours)
    port = int(url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_port_for_metrics(monkeypatch):
    """Nobody listens unless asked for; a port in use is said, with the flag that chooses another."""
    monkeypatch.delenv("PS_METRICS_PORT", raising=False)
    assert Exporter(WORKER, Security())._page is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("PS_METRICS_PORT", str(port))
        refused(ConfigError, rf"127.0.0.1:{port} .*in use.*--metrics-port", lambda: Exporter(WORKER, Security()))


@pytest.mark.parametrize("expiry", [0.0, 2e9])
def test_a_page_without_sources_has_the_process_alone(expiry):
    """Before it has a session there is nothing else to tell; only certificates have an end."""
    registry = CollectorRegistry()
    registry.register(Metrics(lambda: [(PROCESS, ProcessReadings(WORKER, lambda: expiry))]))
    build, end = Page(generate_latest(registry).decode()).ours
    assert build.samples[0].labels["task"] == "/job:worker/task:0"
    assert [sample.value for sample in end.samples] == ([expiry] if expiry else [])
