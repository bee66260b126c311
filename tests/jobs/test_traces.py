"""A step is one trace over all processes of a job, as a collector of OpenTelemetry's protocol sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import psclient as ps
from pstesting import forks
from pstesting.processes import CHIEF, PS0, PS1, SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, add, say
from tests.jobs.test_observed import observed
from tests.kit.telemetry import Collector, Told, metrics_url

ROUNDS = 4


@pytest.fixture
def collector(environ: MutableMapping[str, str]) -> Iterator[Collector]:
    """A collector to which processes export that are started with traces on."""
    with Collector() as found:
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = found.http
        for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_SDK_DISABLED"):
            environ.pop(name, None)
        yield found


def trains(rounds: int, *lanes: str) -> None:
    """Makes some rounds, each worker by its lane, and then one of a value that no kernel sums."""
    strategy = ps.ParameterServerStrategy(lane=lanes[ME] if lanes else None)
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name="v")
        w = ps.Variable(np.zeros(1 << 12, "float32"), name="w")

    def step() -> None:
        add(v, np.ones(1 << 12, "float32"))
        add(w, np.ones(1 << 12, "float32"))

    for _ in range(rounds):
        strategy.run(step)
        v.numpy()
        w.numpy()
    say("total", float(strategy.reduce("sum", np.float32(1), axis=None)))
    strategy.close()


def reduces() -> None:
    """Makes rounds for all servers' variables, over gRPC."""
    strategy = ps.ParameterServerStrategy(lane="grpc")
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name="v")
        w = ps.Variable(np.zeros(1 << 12, "float32"), name="w")
    for _ in range(3):
        strategy.run(both, args=(v, w, np.ones(1 << 12, "float32")))
        v.numpy()
    strategy.close()


def both(v: ps.Variable, w: ps.Variable, value: object) -> None:
    """One section that changes two variables."""

    def merge(strategy, value):
        for each in (v, w):
            total = strategy.extended.reduce_to("sum", value, each)
            strategy.extended.update(each, lambda x, total: x.assign_add(total), (total,))

    ps.get_replica_context().merge_call(merge, (value,))


def one(spans: list[Told], name: str, process: object) -> Told:
    """The one span of a name and a process."""
    (found,) = [span for span in spans if (span.name, span.process) == (name, str(process))]
    return found


def within(spans: list[Told], name: str, above: Told) -> list[Told]:
    """The spans of a name whose parent is this one."""
    return [span for span in spans if (span.name, span.parent) == (name, above.id)]


def test_a_step_is_one_trace_across_four_processes(collector, tmp_path):
    """Two workers on two lanes, a server and the chief: one trace, each span below the one that caused it."""
    keys = {"ps": 1, "workers": 2, "chief": "driver", "traces": "otlp"}
    with ProcessCluster(trains, tmp_path, (ROUNDS, "shm", "tcp"), **keys) as job:
        job.finish()
    traces = collector.traces()
    steps = {trace: spans for trace, spans in traces.items() if any(span.name == "step" for span in spans)}
    assert len(steps) == ROUNDS
    rounds = {
        span.said["paramserver.round"]: spans for spans in steps.values() for span in spans if span.name == "step"
    }
    assert sorted(rounds) == [0, 2, 4, 6]  # a step makes two rounds, and they are of one trace

    first = rounds[0]
    assert {span.process for span in first} == {str(task) for task in (W0, W1, PS0, CHIEF)}
    assert {span.service for span in first} == {f"paramserver-{kind}" for kind in ("worker", "server", "chief")}
    for spans in rounds.values():
        pushes: dict[int, dict[str, Told]] = {}
        for task in (W0, W1):
            step = one(spans, "step", task)
            assert step.parent == ""
            flushes = within(spans, "flush", step)
            assert len(flushes) == 2
            assert all(flush.process == step.process for flush in flushes)
            for flush in flushes:
                assert step.began <= flush.began <= flush.ended <= step.ended
                (push,) = within(spans, "push", flush)
                assert len(within(spans, "wait", flush)) == 1
                assert push.said["paramserver.bytes"] == 1 << 14
                pushes.setdefault(flush.said["paramserver.round"], {})[push.process] = push
        made = [span for span in spans if span.name == "round"]
        assert {span.process for span in made} == {str(PS0)}
        assert len(made) == len(pushes) == 2
        for round in made:
            mine = pushes[round.said["paramserver.round"]]
            assert round.parent == mine[str(W0)].id
            assert round.links == ((round.trace, mine[str(W1)].id),)
            assert round.said["paramserver.contributions"] == 2
            for name in ("gather", "program", "answer"):
                (part,) = within(spans, name, round)
                assert round.began <= part.began <= part.ended <= round.ended
    approvals = [span for span in first if span.name == "approve"]
    assert {span.process for span in approvals} == {str(CHIEF)}
    assert {span.parent for span in approvals} <= {span.id for span in first if span.name == "flush"}
    assert len(approvals) == 2
    assert all(span.name != "approve" for number, spans in rounds.items() if number for span in spans)
    # What no kernel sums, outside of a step: it has a trace of its own, of all processes as well.
    (last,) = [spans for trace, spans in traces.items() if trace not in steps]
    assert {span.process for span in last} == {str(task) for task in (W0, W1, PS0, CHIEF)}
    assert [span.parent for span in last if span.name == "flush"] == ["", ""]
    (program,) = [span for span in last if span.name == "program"]
    (sum,) = within(last, "sum", program)
    assert sum.said == {"paramserver.sums": 1}


def test_servers_that_vote_are_of_one_trace(collector, environ, tmp_path):
    """One worker, two servers and the chief, over gRPC to the collector too: each server's round and vote are there."""
    environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    keys = {"ps": 2, "workers": 1, "chief": "driver", "traces": "otlp"}
    with ProcessCluster(reduces, tmp_path, (), helpers=[both], **keys) as job:
        job.finish()
    traces = collector.traces()
    assert len(traces) == 3
    processes = [{span.process for span in spans} for spans in traces.values()]
    assert all(found >= {str(task) for task in (W0, PS0, PS1)} for found in processes)
    assert sum(str(CHIEF) in found for found in processes) == 1
    for spans in traces.values():
        for task in (PS0, PS1):
            round = one(spans, "round", task)
            (vote,) = within(spans, "vote", round)
            assert round.began <= vote.began <= vote.ended <= round.ended
            (push,) = [span for span in spans if span.id == round.parent]
            assert (push.name, push.process, push.said["paramserver.server"]) == ("push", str(W0), str(task))
            assert round.links == ()


def spans_of_ones_own() -> None:
    """A step within a span of the script's, made by a provider of the script's."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider().get_tracer("mine")
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(4, "float32"), name="v")

    def step() -> None:
        inner = trace.get_current_span().get_span_context()
        with tracer.start_as_current_span("backward") as backward:
            say("inner", [f"{inner.span_id:016x}", f"{backward.get_span_context().span_id:016x}"])
            add(v, np.ones(4, "float32"))

    with tracer.start_as_current_span("epoch") as epoch:
        found = epoch.get_span_context()
        say("epoch", [f"{found.trace_id:032x}", f"{found.span_id:016x}"])
        strategy.run(step)
    strategy.close()


def test_a_span_of_the_users_is_the_parent(collector, tmp_path):
    """Steps are below the span that is current, in its trace; what is current within a step is below the step."""
    with ProcessCluster(spans_of_ones_own, tmp_path, (), ps=1, workers=2, traces="otlp") as job:
        (trace, epoch), (other, _) = (job.hear(task, "epoch") for task in (W0, W1))
        step, backward = job.hear(W0, "inner")
        job.finish()
    assert trace != other
    mine = collector.traces()[trace]
    assert one(mine, "step", W0).parent == epoch
    assert one(mine, "step", W0).id == step
    flush = one(mine, "flush", W0)
    assert flush.parent == backward
    # The round is in the first member's trace, and leads to the other's.
    round = one(mine, "round", PS0)
    assert round.parent == one(mine, "push", W0).id
    assert round.links == ((other, one(collector.traces()[other], "push", W1).id),)


def test_every_nth_step_is_traced_whole(collector, environ, tmp_path):
    """A ratio of the standard sampler picks the same steps in every process: no trace lacks a part."""
    environ |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    with ProcessCluster(trains, tmp_path, (20,), ps=1, workers=2, traces="otlp") as job:
        job.finish()
    traces = [spans for spans in collector.traces().values() if any(span.name == "step" for span in spans)]
    assert 0 < len(traces) < 20
    for spans in traces:
        assert {span.process for span in spans if span.name == "step"} == {str(W0), str(W1)}
        assert [span.process for span in spans if span.name == "round"] == [str(PS0)] * 2


def test_a_collector_that_is_gone_harms_nobody(environ, tmp_path):
    """The job ends as ever; the log says that spans were lost."""
    environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with ProcessCluster(trains, tmp_path, (2,), ps=1, workers=1, traces="otlp") as job:
        assert job.hear(W0, "total") == 1
        job.finish()


def psworker(script: Path, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a script on a local cluster where OpenTelemetry cannot be imported."""
    (folder / "opentelemetry").mkdir()
    text = "raise ImportError('no module named opentelemetry', name='opentelemetry')\n"
    (folder / "opentelemetry" / "__init__.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "psclient", "--standalone", "--workers", "1", str(script)]
    kept = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "PS_TRACES")}
    given = {**kept, "PYTHONPATH": str(folder), **environ}
    return forks.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=folder, env=given)


SCRIPT = """
import numpy as np, psclient as ps, sys
strategy = ps.ParameterServerStrategy()
with strategy.scope():
    v = ps.Variable(np.zeros(4, "float32"), name="v")
strategy.run(lambda: ps.optimizers.SGD(1.0).apply_gradients([(np.ones(4, "float32"), v)]))
print(v.numpy().sum(), "opentelemetry" in sys.modules)
"""


def test_nobody_imports_opentelemetry_where_traces_are_off(tmp_path):
    """Servers, workers and the chief end as ever where it cannot be imported."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = psworker(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "-4.0 False" in done.stdout


def test_who_has_not_installed_it_is_told_what_to_install(tmp_path):
    """Before anything is trained, with the command."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = psworker(script, tmp_path, PS_TRACES="otlp")
    assert done.returncode == 2
    assert "pip install 'paramserver[otel]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_metrics_lead_to_traces(collector, tmp_path):
    """Exemplars of a server and of a worker name traces that the collector has, to those who ask for OpenMetrics."""
    keys = {"ps": 1, "workers": 1, "traces": "otlp", "metrics_port": 0, "log_format": "json"}
    with ProcessCluster(observed, tmp_path, (ROUNDS,), gates=["on"], **keys) as job:
        assert job.hear(W0, "rounds") == ROUNDS
        found = {task: exemplars(metrics_url(job, task)) for task in (PS0, W0)}
        job.open("on")
        job.finish()
    names = {(span.trace, span.id): span.name for span in collector.spans}
    assert {name: names[lead] for name, lead in found[PS0].items()} == dict.fromkeys(
        ("waiting", "applying", "answering"), "push"
    )
    assert {name: names[lead] for name, lead in found[W0].items()} == dict.fromkeys(("computing", "waiting"), "flush")


def exemplars(url: str) -> dict[str, tuple[str, str]]:
    """The trace and span of an exemplar of each phase."""
    request = Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urlopen(request, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families if family.name.endswith("phase_seconds") for sample in family.samples]
    found = [(sample.labels["phase"], sample.exemplar.labels) for sample in samples if sample.exemplar]
    return {phase: (labels["trace_id"], labels["span_id"]) for phase, labels in found}
