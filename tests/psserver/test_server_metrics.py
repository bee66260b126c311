"""A server's metrics say what it did."""

from __future__ import annotations

import socket
import struct
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from psserver.config import ServerConfig
from psserver.state.sessions import STILL_SECONDS
from psserver.telemetry import ROWS, MetricsPort, Seen
from pswire.errors import ConfigError, PSError
from pswire.model.tensor import TensorSpec
from pswire.network.traffic import traffic
from pswire.security.identity import Security
from pswire.telemetry import prometheus, web_server
from pswire.telemetry.prometheus import HEALTH
from tests.kit.rig import SOON, WORKERS, Job, compiler_of, given, reduce_only, serving, sgd, sum_into, together
from tests.kit.telemetry import Page, documented, mistakes, queried

A, B = WORKERS[:2]
NUMBER = TensorSpec("int64", ())


def page(job: Job) -> Page:
    registry = CollectorRegistry()
    (core,) = job.servers.cores[:1]
    registry.register(prometheus.Metrics(lambda: [(ROWS, Seen(core, core.status(), traffic()))]))
    return Page(generate_latest(registry).decode())


def test_names_follow_the_conventions(job):
    """Every metric has a sentence and a unit, counters are totals, and Prometheus's own parser reads the page. Names,
    kinds and labels do not change without the document: dashboards and alarms are made of them, and none stays empty
    that is made of its queries."""
    found = page(job)
    assert not mistakes(found.ours)
    assert {family.name for family in found.ours} == {row.name for row in ROWS}
    said = {name: row for name, row in documented().items() if "_server_" in name}
    code = {row.name + "_total" * (row.kind == "counter"): (row.kind, row.labels) for row in ROWS}
    assert said == {name: row for name, row in code.items() if "_server_" in name}
    assert queried() <= documented().keys()
    assert len(queried()) > 10


def test_rounds_are_counted_by_how_they_ended(job):
    one, two = job.join(A, B)
    plan = job.approve(reduce_only(NUMBER), one)
    for _ in range(3):
        together(one.push(plan, [1]), two.push(plan, [2]))
        one.round = two.round = one.round + 1
    refused = job.approve(sgd(job.variable(one, np.zeros(4, "float32"))), one)
    answers = [worker.push(refused, [np.zeros(4)], operands=[rate]) for worker, rate in ((one, 0.1), (two, 0.2))]
    assert all(answer.exception(SOON) for answer in answers)
    found = page(job)
    assert (found("server_rounds_total", outcome="completed"), found("server_rounds_total", outcome="failed")) == (3, 1)
    assert found("server_round") == 3


def test_a_round_s_time_is_told_by_phase(job):
    """It waits from the first contribution to the last; what the array work takes is no waiting. Bytes of contributions
    that are here and were not used are in flight; none once the round is over."""
    one, two = job.join(A, B)
    plan = job.approve(reduce_only(TensorSpec("float32", (256,))), one)
    first = one.push(plan, [np.ones(256)])
    assert page(job)("server_in_flight_bytes") == 1024
    job.servers.clock.now += 3.0
    together(first, two.push(plan, [np.ones(256)]))
    found = page(job)
    assert found("server_in_flight_bytes") == 0
    for phase, seconds in (("waiting", 3.0), ("applying", 0.0), ("answering", 0.0)):
        assert found("server_round_phase_seconds_sum", phase=phase) == seconds
        assert found("server_round_phase_seconds_count", phase=phase) == 1
    assert found("server_round_phase_seconds_bucket", phase="waiting", le="2.5") == 0
    assert found("server_round_phase_seconds_bucket", phase="waiting", le="5.0") == 1


def test_who_is_lost_is_counted_and_what_was_done_without(job):
    """Its lease, its contribution, its session's state; the chief is still heard of."""
    one, _ = job.join(A, B)
    plan = job.approve(reduce_only(NUMBER), one)
    answer = one.push(plan, [1])
    job.servers.spend(12.0, one.session, job.opened.session)
    job.close([one.member])
    assert answer.result(SOON).excluded == (B,)
    found = page(job)
    assert found("server_session_timeouts_total") == 1
    assert found("server_excluded_pushes_total") == 1
    assert (found("server_sessions", state="open"), found("server_sessions", state="lost")) == (1, 1)
    assert found("server_chief_silent_seconds") == 0


def test_kernels_are_counted_and_timed(job):
    """How many were compiled, for how long, and for how long they ran; small programs have none, and are counted as
    well. So are variables that live here, and their memory."""
    (one,) = job.join(A)
    small = job.approve(sum_into(job.variable(one, np.zeros(4, "float32"))), one)
    one.make(small, [np.ones(4)])
    found = page(job)
    assert found("server_programs_interpreted_total") == 1
    assert found("server_kernels_compiled_total", outcome="compiled") == 0
    variable = job.variable(one, np.zeros(1 << 16, "float32"))
    plan = job.approve(sum_into(variable, returned=False), one)
    compiler = compiler_of(job.servers.cores[0])
    compiler._folder = ""  # in which another test may have kept the same
    for _ in range(4):
        one.make(plan, [np.ones(1 << 16)])
        compiler.wait()
    found = page(job)
    assert found("server_kernels_compiled_total", outcome="compiled") == 1
    assert found("server_kernel_compile_seconds_total") > 0
    assert found("server_kernel_seconds_total") > 0
    assert (found("server_variables"), found("server_variable_bytes")) == (2, 16 + (4 << 16))
    assert found("server_memory_limit_bytes") == 0
    np.testing.assert_array_equal(job.value(one, variable), np.full(1 << 16, 4.0))


def test_staleness_is_what_others_did_since_the_read(job):
    """Three rounds of another worker lie between this one's read and its push; then none."""
    one, two = job.join(A, B, mode="async")
    variable = job.variable(one, np.zeros(4, "float32"))
    plan = job.approve(sum_into(variable), one)
    job.value(one, variable)
    for _ in range(3):
        two.make(plan, [np.ones(4)])
    for _ in range(2):
        one.make(plan, [np.ones(4)])
    found = page(job)
    assert found("server_staleness_rounds_count") == 5
    assert found("server_staleness_rounds_sum") == 3
    assert found("server_staleness_rounds_bucket", le="2") == 4


@pytest.mark.parametrize("transport", ["grpc", "tcp", "shm"])
def test_bytes_are_counted_on_their_transport(transport, tmp_path):
    """What a client has sent is what came, and what came back is what was sent, on both sides."""
    values = np.arange(1 << 16, dtype="float32")
    with serving(transport, 1, tmp_path) as servers:
        job = Job(servers)
        (one,) = job.join(A)
        plan = job.approve(reduce_only(TensorSpec("float32", values.shape)), one)
        (reply,) = together(one.push(plan, [values]))
        np.testing.assert_array_equal(given(reply, plan)[0], values)
        for name, each in servers.verbs[0].traffic.items():
            expected = (values.nbytes, values.nbytes) if name == transport else (0, 0)
            assert (each.sent, each.received) == expected


def test_checkpoints_are_counted(job):
    """Parts that were saved with their bytes, one that was not, and what was read back."""
    (one,) = job.join(A)
    variable = job.variable(one, np.arange(1000, dtype="float32"))
    (shard,) = job.save(one, "run/ckpt-1")
    (job.servers.root / "run/ckpt-2").write_text("in the way")
    with pytest.raises(PSError):
        job.save(one, "run/ckpt-2")
    job.restore(one, "run/ckpt-1")
    with pytest.raises(PSError):
        job.verbs[0].restore(one.session, "nowhere", one.turn()).result(SOON)
    found = page(job)
    shards = [found("server_checkpoint_shards_total", outcome=outcome) for outcome in ("saved", "failed")]
    assert shards == [1, 1]
    assert found("server_checkpoint_written_bytes_total") == shard.nbytes > 4000
    assert found("server_checkpoint_shard_seconds_count") == 2
    assert (found("server_held_checkpoints"), found("server_held_checkpoint_bytes")) == (0, 0)
    restores = [found("server_restores_total", outcome=outcome) for outcome in ("restored", "failed")]
    assert restores == [1, 1]
    np.testing.assert_array_equal(job.value(one, variable), np.arange(1000))


@contextmanager
def served(job: Job, port: int = 0):
    (core,) = job.servers.cores[:1]
    one = MetricsPort(core, traffic(), ServerConfig(core.task, security=Security(expiry=2e9)), port)
    try:
        yield one.url
    finally:
        one.close()


def test_metrics_are_served_over_http(job):
    """At a port that is picked; with those of the process, and which version runs here. Of a port in use it is said
    which flag chooses another."""
    with served(job) as url:
        found = Page.at(url)
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*in use.*--metrics-port"), served(job, port):
            pass
    assert found.families["process_resident_memory_bytes"].samples[0].value > 0
    (build,) = found.families["paramserver_build_info"].samples
    assert build.labels["task"] == "/job:ps/task:0"
    assert found("certificate_expiry_timestamp_seconds") == 2e9


def health(url: str) -> tuple[int, str]:
    """What a probe is told: the status, and the text."""
    try:
        with urlopen(url.removesuffix("/metrics") + HEALTH, timeout=SOON) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_probes_over_http_are_told_what_grpc_s_health_service_tells(job):
    """A server whose leases nobody checks is not ready, and is so again once somebody does; metrics are served on."""
    (core,) = job.servers.cores[:1]
    core.tick()
    with served(job) as url:
        assert health(url) == (200, "serving\n")
        job.servers.clock.now += STILL_SECONDS
        assert not core.well()
        assert health(url) == (503, "not serving\n")
        Page.at(url)
        core.tick()
        assert health(url) == (200, "serving\n")


def test_who_asks_for_nothing_is_not_waited_for(job, monkeypatch, capfd):
    """Its connection is closed, which has cost a thread; one that is broken off is nothing to tell."""
    monkeypatch.setattr(web_server, "SILENT_SECONDS", 0.05)
    with served(job) as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))
        silent = [socket.create_connection(place, SOON) for _ in range(5)]
        for each in silent:
            assert each.recv(1) == b""
            each.close()
        with socket.create_connection(place) as rude:
            rude.sendall(b"GET ")
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        Page.at(url)
    assert capfd.readouterr().err == ""
