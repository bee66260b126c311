"""Jobs of real processes tell what they do: metrics of every task, a log that programs can read, traces, and NaN."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from urllib.request import Request, urlopen

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import psclient as ps
from pstesting import forks
from pstesting.processes import CHIEF, PS0, PS1, SECONDS, W0, W1, ProcessCluster
from pstesting.script import ME, add, add_all, gate, say
from pswire.telemetry import logging_setup
from tests.kit.shell import shell
from tests.kit.telemetry import Collector, Page, Told, metrics_url

ROUNDS = 5
TASKS = (PS0, PS1, CHIEF, W0, W1)


def observed(rounds: int) -> None:
    """Makes some rounds, and stands still so that somebody may look."""
    import logging

    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name="v")
    for _ in range(rounds):
        strategy.run(add, args=(v, np.ones(1 << 12, "float32")))
        v.numpy()
    logging.getLogger("mine").warning("half way")
    say("rounds", strategy.round)
    gate("on")
    strategy.close()


@pytest.fixture
def collector(environ: MutableMapping[str, str]) -> Iterator[Collector]:
    """A collector to which processes export that are started with traces on."""
    with Collector() as found:
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = found.http
        for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_SDK_DISABLED"):
            environ.pop(name, None)
        yield found


def test_every_task_tells_what_it_does(collector, tmp_path):
    """Servers, workers and the chief agree on the rounds; each line of a log says whose it is.

    Exemplars of a server and of a worker name traces that the collector has, to those who ask for OpenMetrics.
    """
    keys = {"ps": 2, "workers": 2, "chief": "driver", "metrics_port": 0, "log_format": "json", "traces": "otlp"}
    with ProcessCluster(observed, tmp_path, (ROUNDS,), gates=["on"], **keys) as job:
        assert {job.hear(task, "rounds") for task in (W0, W1)} == {ROUNDS}
        urls = {task: metrics_url(job, task) for task in TASKS}
        pages = {task: Page.at(url) for task, url in urls.items()}
        leads = [exemplars(urls[task]) for task in (PS0, PS1, W0)]
        job.open("on")
        job.finish()
        said = {task: _own(job.errors(task)) for task in TASKS}
    lines = {task: [logging_setup.read(line) for line in said[task]] for task in TASKS}
    for task in (W0, W1):
        _check_worker(pages[task])
    _check_servers([pages[PS0], pages[PS1]])
    chief = pages[CHIEF]
    assert (chief("chief_generations_total"), chief("chief_members"), chief("chief_plans_approved_total")) == (1, 2, 1)
    assert not chief.families["paramserver_chief_missing"].samples
    for task, found in lines.items():
        assert all(line and line["task"] == str(task) for line in found), said[task]
    (mine,) = [line for line in lines[W1] if line["logger"] == "mine"]
    assert (mine["message"], mine["round"]) == ("half way", ROUNDS)
    assert int(mine["session"]) > 0
    names = {(span.trace, span.id): span.name for span in collector.spans}
    *servers, worker = ({phase: names[lead] for phase, lead in found.items()} for found in leads)
    assert dict.fromkeys(("waiting", "applying", "answering"), "push") in servers
    assert worker == dict.fromkeys(("computing", "waiting"), "flush")


def _own(errors: str) -> list[str]:
    """What a task itself has said; the launcher, which is the test's process, tells of who is slow to end."""
    return [line for line in errors.splitlines() if not line.startswith("psworker: waiting for ")]


def _check_worker(page: Page) -> None:
    assert page("worker_rounds_total", outcome="completed") == page("worker_round") == ROUNDS
    assert page("worker_phase_seconds_count", phase="waiting") == ROUNDS
    assert page("worker_phase_seconds_count", phase="computing") == ROUNDS - 1
    assert page("worker_excluded_pushes_total") == 0
    assert _moved(page, "worker", "sent") >= ROUNDS << 14


def _check_servers(pages: list[Page]) -> None:
    holder, other = sorted(pages, key=lambda page: -page("server_variable_bytes"))
    assert (holder("server_variable_bytes"), other("server_variable_bytes")) == (1 << 14, 0)
    assert holder("server_rounds_total", outcome="completed") == ROUNDS
    assert holder("server_round_phase_seconds_count", phase="applying") == ROUNDS
    assert _moved(holder, "server", "received") >= 2 * ROUNDS << 14
    assert _moved(other, "server", "received") == 0
    assert [page("server_sessions", state="open") for page in pages if page.has("server_sessions", state="open")] == [2]


def _moved(page: Page, side: str, direction: str) -> float:
    return sum(
        page(f"{side}_payload_bytes_total", transport=transport, direction=direction)
        for transport in ("shm", "tcp", "grpc")
    )


@pytest.mark.parametrize(
    ("body", "code"), [("1 / 0", 1), ("import psclient as ps; ps.ParameterServerStrategy(devices=['tpu:7'])", 2)]
)
def test_all_of_stderr_is_json(body, code, tmp_path):
    """What the launcher relays, tracebacks of scripts, and its own report: nothing else is there."""
    script = tmp_path / "script.py"
    script.write_text(f"print('begins')\n{body}\n", encoding="utf-8")
    done = shell(["psworker", "--standalone", "--log-format", "json", "script.py"], tmp_path)
    assert done.code == code, done.err
    assert "[worker 0] begins" in done.out
    lines = [logging_setup.read(line) for line in done.err.splitlines()]
    assert all(lines), done.err
    failed = next(line for line in lines if line["task"] == "/job:worker/task:0" and line["level"] == "error")
    assert ("exception" in failed) == ("1 / 0" in body)
    assert lines[-1]["task"] is None
    assert f"/job:worker/task:0 failed (exit code {code})" in lines[-1]["message"]
    assert ("ZeroDivisionError" if "1 / 0" in body else "tpu:7") in lines[-1]["message"]


# ---- Traces: a step is one trace over all processes, as a collector of OpenTelemetry sees it ----


def trains(rounds: int, *transports: str) -> None:
    strategy = ps.ParameterServerStrategy(transport=transports[ME] if transports else None)
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
    strategy = ps.ParameterServerStrategy(transport="grpc")
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name="v")
        w = ps.Variable(np.zeros(1 << 12, "float32"), name="w")
    for _ in range(3):
        strategy.run(lambda: add_all([(each, np.ones(1 << 12, "float32")) for each in (v, w)]))
        v.numpy()
    strategy.close()


def one(spans: list[Told], name: str, process: object) -> Told:
    (found,) = [span for span in spans if (span.name, span.process) == (name, str(process))]
    return found


def within(spans: list[Told], name: str, above: Told) -> list[Told]:
    return [span for span in spans if (span.name, span.parent) == (name, above.id)]


def test_a_step_is_one_trace_across_four_processes(collector, tmp_path):
    """Two workers on two transports, a server and the chief: one trace, each span below the one that caused it."""
    keys = {"ps": 1, "workers": 2, "chief": "driver", "traces": "otlp"}
    with ProcessCluster(trains, tmp_path, (4, "shm", "tcp"), **keys) as job:
        job.finish()
    traces = collector.traces()
    steps = {trace: spans for trace, spans in traces.items() if any(span.name == "step" for span in spans)}
    assert len(steps) == 4
    rounds = {
        span.said["paramserver.round"]: spans for spans in steps.values() for span in spans if span.name == "step"
    }
    assert sorted(rounds) == [0, 2, 4, 6]  # a step makes two rounds, and they are of one trace

    first = rounds[0]
    assert {span.process for span in first} == {str(task) for task in (W0, W1, PS0, CHIEF)}
    assert {span.service for span in first} == {f"paramserver-{kind}" for kind in ("worker", "server", "chief")}
    for spans in rounds.values():
        pushes: dict[int, dict[str, Told]] = {}
        plans = set[object]()
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
                plans.add(flush.said["paramserver.plan"])
        made = [span for span in spans if span.name == "round"]
        assert {span.process for span in made} == {str(PS0)}
        assert len(made) == len(pushes) == 2
        assert {round.said["paramserver.plan"] for round in made} == plans
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
    with ProcessCluster(reduces, tmp_path, **keys) as job:
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

    with tracer.start_as_current_span("generation") as generation:
        found = generation.get_span_context()
        say("generation", [f"{found.trace_id:032x}", f"{found.span_id:016x}"])
        strategy.run(step)
    strategy.close()


def test_a_span_of_the_users_is_the_parent(collector, tmp_path):
    """Steps are below the span that is current, in its trace; what is current within a step is below the step."""
    with ProcessCluster(spans_of_ones_own, tmp_path, (), ps=1, workers=2, traces="otlp") as job:
        (trace, generation), (other, _) = (job.hear(task, "generation") for task in (W0, W1))
        step, backward = job.hear(W0, "inner")
        job.finish()
    assert trace != other
    mine = collector.traces()[trace]
    assert one(mine, "step", W0).parent == generation
    assert one(mine, "step", W0).id == step
    flush = one(mine, "flush", W0)
    assert flush.parent == backward
    # The round is in the first member's trace, and leads to the other's.
    round = one(mine, "round", PS0)
    assert round.parent == one(mine, "push", W0).id
    assert round.links == ((other, one(collector.traces()[other], "push", W1).id),)


def test_a_collector_that_is_gone_harms_nobody(environ, tmp_path):
    """The job ends as ever; the log says that spans were lost."""
    environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with ProcessCluster(trains, tmp_path, (2,), ps=1, workers=1, traces="otlp") as job:
        assert job.hear(W0, "total") == 1
        job.finish()


SCRIPT = """
import numpy as np, psclient as ps, sys
strategy = ps.ParameterServerStrategy()
with strategy.scope():
    v = ps.Variable(np.zeros(4, "float32"), name="v")
strategy.run(lambda: ps.optimizers.SGD(1.0).apply_gradients([(np.ones(4, "float32"), v)]))
print(v.numpy().sum(), "opentelemetry" in sys.modules)
"""


@pytest.mark.parametrize("traces", ["off", "otlp"])
def test_where_opentelemetry_cannot_be_imported(tmp_path, traces):
    """Without traces nobody imports it, and all end as ever; with them one is told before anything what to install."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "opentelemetry").mkdir()
    text = "raise ImportError('no module named opentelemetry', name='opentelemetry')\n"
    (tmp_path / "opentelemetry" / "__init__.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "psclient", "--standalone", "--workers", "1", "script.py"]
    environ = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "PS_TRACES")}
    environ |= {"PYTHONPATH": str(tmp_path)} | ({"PS_TRACES": traces} if traces != "off" else {})
    done = forks.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path, env=environ)
    if traces == "off":
        assert (done.returncode, "-4.0 False" in done.stdout) == (0, True), done.stderr
    else:
        assert done.returncode == 2
        assert "pip install -e '.[otel]'" in done.stderr
        assert "Traceback" not in done.stderr


def exemplars(url: str) -> dict[str, tuple[str, str]]:
    request = Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urlopen(request, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families if family.name.endswith("phase_seconds") for sample in family.samples]
    found = [(sample.labels["phase"], sample.exemplar.labels) for sample in samples if sample.exemplar]
    return {phase: (labels["trace_id"], labels["span_id"]) for phase, labels in found}
