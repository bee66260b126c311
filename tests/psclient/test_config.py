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
    local_reduction_from,
    metrics_from,
    task_config,
    timeouts_from,
)
from psclient._src.options import Async, AutoShardPolicy, InputContext, InputOptions, RunOptions, Sync, ValueContext
from psclient._src.rounds import counters
from psclient._src.rounds.counters import RoundCounters
from psclient._src.telemetry.exporter import OF_CHIEFS, OF_WORKERS, Exporter
from pstesting.script import add
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.limits import Timeouts
from pswire.security.identity import Security
from pswire.telemetry.metrics import PROCESS, ProcessReadings
from pswire.telemetry.prometheus import Metrics
from tests.kit.strategies import refused
from tests.kit.telemetry import Page, documented, mistakes

TF_CONFIG = '{"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "worker", "index": 0}}'


def test_tf_config_is_read_at_each_call(monkeypatch):
    """A process that sets TF_CONFIG after the import is in that cluster."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert task_config() is None
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    config = task_config()
    assert config is not None
    assert config.task == Task("worker", 0)


def test_timeouts_and_aggregation_travel():
    """What a launcher hands on is what a child reads; a name that is close is said."""
    timeouts = Timeouts(session_timeout=3.25, round_timeout=9.75, heartbeat_interval=1e-3)
    assert timeouts_from(timeouts.environ()) == timeouts
    assert timeouts_from({}) == Timeouts()
    found = [local_reduction_from({"PS_LOCAL_REDUCTION": said}) for said in ("", "0", "1")]
    assert found == [False, False, True]
    with pytest.raises(ConfigError, match="PS_LOCAL_REDUCTION must be 1 or 0, not 'host'"):
        local_reduction_from({"PS_LOCAL_REDUCTION": "host"})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PS_SESION_TIMEOUT": "1"}, "PS_SESSION_TIMEOUT"),
        ({"PS_SESSION_TIMEOUT": "soon"}, "'soon' must be a positive number"),
        (
            {"PS_SESSION_TIMEOUT": "5", "PS_ROUND_TIMEOUT": "14.9"},
            "PS_ROUND_TIMEOUT=14.9 is below 3 times PS_SESSION_TIMEOUT",
        ),
        ({"PS_SESSION_TIMEOUT": "-1"}, "positive"),
        ({"PS_SESSION_TIMEOUT": "nan"}, "positive"),
        ({"PS_SESSION_TIMEOUT": "inf"}, "positive"),
    ],
)
def test_bad_timeouts_are_named(environ, said):
    """An error names the variable, and for an unknown one the nearest known."""
    refused(ConfigError, said, lambda: timeouts_from(environ))


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


def test_consistencies_that_cannot_be():
    """Backup workers fewer than none; a bound may be NumPy's, and is kept as Python's."""
    refused(
        ValueError, "backup_workers=-1 is negative; use 0 to wait for every worker", lambda: Sync(backup_workers=-1)
    )
    assert (Sync().backup_workers, Sync(backup_workers=2).mode, Async().backup_workers) == (0, "sync", 0)
    assert type(ps.BoundedStaleness(cast(Any, np.int64(3))).k) is int
    assert ps.BoundedStaleness(0) == ps.BoundedStaleness(k=0, nonfinite="apply")
    refused(ValueError, "unknown nonfinite 'never'", lambda: ps.BoundedStaleness(1, nonfinite=cast(Any, "never")))


WORKERS = "backup_workers={} is not a number of workers; use an integer"
BOUND = "BoundedStaleness has k={}; use "


@pytest.mark.parametrize(
    ("make", "given", "error", "said"),
    [
        *((lambda given: Sync(backup_workers=given), wrong, TypeError, WORKERS) for wrong in (True, 1.0, "1", None)),
        *((ps.BoundedStaleness, k, ValueError, BOUND) for k in (-1, 2**31)),
        *((ps.BoundedStaleness, k, TypeError, BOUND) for k in (True, np.True_, 3.0, "3")),
    ],
)
def test_numbers_of_a_consistency_are_whole(make, given, error, said):
    """Anything else is refused where it is said, and the message has it, with the name of the argument."""
    refused(error, re.escape(said.format(repr(given))), lambda: make(given))


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


@pytest.mark.parametrize("text", ["", "tpu:0", "gpu:-1", "gpu:", "gpu:1x", "cpu:0 ", "/job:worker/task:0"])
def test_what_is_no_device_is_refused(text):
    refused(ConfigError, "use cpu:0 or gpu:0", lambda: Device.parse(text))


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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "the list of devices is empty"),
        (["cpu:0", "cpu"], "listed twice"),
        (["cpu:0", "abacus"], "'abacus' is not a device"),
        ([f"gpu:{devices.available_gpus()}"], "use cpu:0"),
    ],
)
def test_devices_that_cannot_be_are_refused(names, message):
    refused(ConfigError, message, lambda: devices.local_devices(names))


class Foreign:
    """An array of another library, in host memory."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.arange(3)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize("make", [lambda: np.arange(3), lambda: [0, 1, 2], Foreign])
def test_arrays_come_to_the_host(make):
    """NumPy arrays are not copied; what NumPy can read is read."""
    given = make()
    got = devices.to_device(given, Device("cpu", 1))
    assert got.tolist() == [0, 1, 2]
    assert got is given or not isinstance(given, np.ndarray)


def test_host_arrays_are_added_on_the_host():
    total = devices.add(np.array([1, 2], "float32"), np.array([3, 4], "float32"))
    assert total.dtype == np.float32
    assert total.tolist() == [4, 6]
    assert devices.device_of(total) == devices.CPU
    assert devices.namespace(devices.CPU) is np
    with devices.device_scope(devices.CPU):
        assert devices.device_of(1.0) == devices.CPU


def test_without_cupy_there_are_no_gpus(monkeypatch):
    """That is no error; asking for one is, and says what to install."""
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
    """None of it is two of these; before the first round nothing is computed for one."""
    one = RoundCounters()
    clock[0] += 5.0
    with one:
        clock[0] += 1.0
    clock[0] += 3.0
    one.read(2.0)
    with one:
        clock[0] += 4.0
    assert (one.computing.total, one.waiting.total, one.reading.total) == (1.0, 5.0, 2.0)
    assert one.waits == 2


def test_reads_of_several_threads_are_not_more_than_the_time(clock):
    """Replicas read at the same time."""
    one = RoundCounters()
    with one:
        pass
    clock[0] += 1.0
    one.read(1.0)
    one.read(1.0)
    with one:
        pass
    assert one.computing.total == 0.0


def test_a_wait_that_is_interrupted_is_one(clock):
    one = RoundCounters()
    with pytest.raises(KeyboardInterrupt), one:
        raise KeyboardInterrupt
    assert one.waits == 1


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


@pytest.mark.parametrize("text", ["x", "-1", "65536", "1.5"])
def test_what_is_no_port_is_said(text):
    refused(ConfigError, "PS_METRICS_PORT", lambda: metrics_from({"PS_METRICS_PORT": text}))


def test_a_cluster_takes_its_port_from_the_environment(monkeypatch):
    """Where neither a flag nor its file say another."""
    monkeypatch.setenv("PS_METRICS_PORT", "9100")
    assert (LaunchConfig().metrics_port, LaunchConfig(metrics_port=0).metrics_port) == (9100, 0)
    refused(ConfigError, "metrics_port", lambda: LaunchConfig(metrics_port=70_000))


@pytest.mark.parametrize("expiry", [0.0, 2e9])
def test_a_page_without_sources_has_the_process_alone(expiry):
    """Before it has a session there is nothing else to tell; only certificates have an end."""
    registry = CollectorRegistry()
    registry.register(Metrics(lambda: [(PROCESS, ProcessReadings(WORKER, lambda: expiry))]))
    build, end = Page(generate_latest(registry).decode()).ours
    assert build.samples[0].labels["task"] == "/job:worker/task:0"
    assert [sample.value for sample in end.samples] == ([expiry] if expiry else [])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PS_REPLICATION_FACTR", "PS_REPLICATION_FACTOR"),
        ("PS_TLS_CERTS", "PS_TLS_CERT"),
        ("PS_METRICS_PROT", "PS_METRICS_PORT"),
    ],
)
def test_a_variable_that_is_misspelt_is_told(name, meant):
    """It would count as absent."""
    with pytest.raises(ConfigError, match=f"environment variable {name} is unknown; did you mean {meant}?"):
        timeouts_from({name: "1"})


def test_variables_of_others_are_none_of_ours():
    """Those of the command ps, and of a service of Kubernetes that is called ps."""
    services = {"PS_SERVICE_HOST": "10.0.0.1", "PS_0_PORT": "tcp://10.0.0.1:2222", "PS_PORTS": "tcp://10.0.0.1:2222"}
    assert timeouts_from({**services, "PS_FORMAT": "pid", "PS1": "$", "LS_TRANSPORT": "x"}) == timeouts_from({})
