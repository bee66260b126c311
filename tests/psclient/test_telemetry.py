"""The metrics of workers and chiefs say what these did."""

from __future__ import annotations

import logging
import re
import socket

import numpy as np
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

import psclient as ps
from psclient._src.config import LaunchConfig, metrics_from
from psclient._src.rounds import counters
from psclient._src.rounds.counters import RoundCounters
from psclient._src.telemetry.exporter import OF_CHIEFS, OF_WORKERS, Exporter
from pstesting.script import add
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.security.identity import Security
from pswire.telemetry.metrics import PROCESS, ProcessReadings
from pswire.telemetry.prometheus import Metrics
from tests.kit.telemetry import Page, documented, mistakes

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
    """Whatever ended it."""
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
    assert found("worker_waits_total") == 2, "for the first, whose plan is new, and for the others at once"
    assert (found("chief_epochs_total"), found("chief_members")) == (1, 1)
    assert not mistakes(found.ours)
    port = int(url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_nobody_listens_unless_it_is_asked_for(monkeypatch):
    """Metrics are for those who want them."""
    monkeypatch.delenv("PS_METRICS_PORT", raising=False)
    assert Exporter(WORKER, Security())._page is None


def test_a_port_in_use_is_said(monkeypatch):
    """And which flag chooses another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("PS_METRICS_PORT", str(port))
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .*in use.*--metrics-port"):
            Exporter(WORKER, Security())


@pytest.mark.parametrize("text", ["x", "-1", "65536", "1.5"])
def test_what_is_no_port_is_said(text):
    """With the variable's name."""
    with pytest.raises(ConfigError, match="PS_METRICS_PORT"):
        metrics_from({"PS_METRICS_PORT": text})


def test_a_cluster_takes_its_port_from_the_environment(monkeypatch):
    """Where neither a flag nor its file say another."""
    monkeypatch.setenv("PS_METRICS_PORT", "9100")
    assert (LaunchConfig().metrics_port, LaunchConfig(metrics_port=0).metrics_port) == (9100, 0)
    with pytest.raises(ConfigError, match="metrics_port"):
        LaunchConfig(metrics_port=70_000)


@pytest.mark.parametrize("expiry", [0.0, 2e9])
def test_a_page_without_sources_has_the_process_alone(expiry):
    """Before it has a session there is nothing else to tell; only certificates have an end."""
    registry = CollectorRegistry()
    registry.register(Metrics(lambda: [(PROCESS, ProcessReadings(WORKER, lambda: expiry))]))
    build, end = Page(generate_latest(registry).decode()).ours
    assert build.samples[0].labels["task"] == "/job:worker/task:0"
    assert [sample.value for sample in end.samples] == ([expiry] if expiry else [])
