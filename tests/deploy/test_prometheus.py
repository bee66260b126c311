"""Alarms and the dashboard ask for what processes expose; Prometheus, where it is, reads them and scrapes a job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np
import pytest
import yaml
from prometheus_client import REGISTRY

import psclient as ps
from psclient._src.telemetry.exporter import OF_CHIEFS, OF_WORKERS
from pstesting.processes import CHIEF, PS0, PS1, W0, W1, ProcessCluster
from pstesting.script import add, gate, say
from pswire.telemetry.metrics import PROCESS
from tests.kit.internals import SERVER_METRICS as ROWS
from tests.kit.shell import free_port, printed
from tests.kit.telemetry import ALARMS, DOCUMENT, metrics_url, names
from tools.make_dashboard import COLUMNS, TARGET, dashboard

ROOT = Path(__file__).resolve().parents[2]
GIVEN = {"job", "instance"}
"""Labels that Prometheus adds to everything."""

BOARD: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load(ALARMS.read_text(encoding="utf-8"))["groups"][0]["rules"]


def panels() -> Iterator[tuple[str, str]]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def queries() -> Iterator[tuple[str, str]]:
    """All queries of the dashboard and of the alarms, with their titles."""
    yield from panels()
    yield from ((rule["alert"], rule["expr"]) for rule in RULES)


def concrete(query: str) -> str:
    """A query of the dashboard as Grafana sends it."""
    return query.replace("$__rate_interval", "1m").replace("$job", ".*")


def exposed() -> dict[str, set[str]]:
    """The labels of each series that a process of ours may expose."""
    found: dict[str, set[str]] = {}
    for row in (*PROCESS, *ROWS, *OF_WORKERS, *OF_CHIEFS):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(row.kind, ("",))
        found |= {row.name + end: {*row.labels, *(["le"] if end == "_bucket" else [])} for end in ends}
    for family in REGISTRY.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


EXPOSED = exposed()


@pytest.mark.parametrize(("title", "query"), list(queries()), ids=lambda text: re.sub(r"\W+", "-", text)[:40])
def test_queries_ask_for_what_there_is(title: str, query: str) -> None:
    """Each metric is one that a process exposes; each label is one of it, or one that Prometheus adds."""
    found = names(concrete(query))
    assert found.metrics, title
    for metric, labels in found.metrics.items():
        assert metric in EXPOSED, f"{title}: no process exposes {metric}"
        assert labels <= EXPOSED[metric] | GIVEN, f"{title}: {metric} has no label {labels - EXPOSED[metric] - GIVEN}"
    known = GIVEN.union(*(EXPOSED[metric] for metric in found.metrics))
    assert found.labels <= known, f"{title}: nothing there has the label {found.labels - known}"


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_legends_name_labels_that_are_there(panel: dict[str, Any]) -> None:
    """What an aggregation drops cannot be shown, and each panel shows the jobs that are picked alone."""
    for target in panel.get("targets", ()):
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        found = names(concrete(target["expr"]))
        kept = re.match(r"\w+ by \(([^)]*)\)", target["expr"])
        first = next(iter(found.metrics))
        there = set(re.findall(r"\w+", kept[1])) if kept else EXPOSED[first] | GIVEN
        assert shown <= there, f"{panel['title']} shows {shown - there}"
        assert all("job" in labels for labels in found.metrics.values()), target["expr"]


def test_the_dashboard_is_laid_out() -> None:
    """By `python tools/make_dashboard.py`: no panel covers another, and each has its number and its sentence."""
    assert dashboard() == BOARD
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
        assert panel["type"] == "row" or panel["description"].endswith(".")
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert {variable["name"] for variable in BOARD["templating"]["list"]} == {"datasource", "job"}


def test_the_alarms_are_those_of_the_document() -> None:
    """The file and the chart's copy of it say the same, and the page has a row for each of them, in order."""
    text = ALARMS.read_text(encoding="utf-8")
    assert (ROOT / "configs" / "helm" / "files" / "alarms.yaml").read_text(encoding="utf-8") == text
    table = DOCUMENT.read_text(encoding="utf-8").partition("\n## Alerts\n")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [rule["alert"] for rule in RULES]


def test_prometheus_can_read_each_query(tmp_path: Path) -> None:
    """Those of the dashboard, and those of the document, as rules of a file; the alarms and the configuration."""
    for kind, path in (("rules", ALARMS), ("config", ALARMS.parent / "prometheus.yaml")):
        printed("promtool", "check", kind, path)
    blocks = re.findall(r"```promql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) > 5
    asked = enumerate([*(query for _, query in queries()), *lines])
    rules = [{"record": f"query:{number}", "expr": concrete(query)} for number, query in asked]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    printed("promtool", "check", "rules", path)


FIRING = {
    'server_rounds_total{job="a", instance="a0", outcome="completed"}': "100+0x30",
    'server_sessions{job="a", instance="a0", state="open"}': "2x30",
    'server_rounds_total{job="b", instance="b0", outcome="completed"}': "100+60x30",
    'server_rounds_total{job="b", instance="b0", outcome="failed"}': "0x20 1x10",
    'server_sessions{job="b", instance="b0", state="open"}': "2x30",
    'server_chief_silent_seconds{job="a", instance="a0"}': "0+60x30",
    'server_chief_silent_seconds{job="b", instance="b0"}': "1x30",
    'chief_missing{job="b", instance="b1", task="/job:worker/task:1"}': "1x30",
    'server_session_timeouts_total{job="b", instance="b0"}': "0x20 1x10",
    'chief_checkpoints_total{job="b", instance="b1", outcome="failed"}': "0x20 1x10",
    'certificate_expiry_timestamp_seconds{job="b", instance="b0"}': "86400x30",
    'certificate_expiry_timestamp_seconds{job="a", instance="a0"}': "8640000x30",
    'server_nonfinite_variables{job="b", instance="b0"}': "0x20 3x10",
}
"""What two servers of two jobs say each minute."""

A0, B0, B1 = [{"job": name[0], "instance": name} for name in ("a0", "b0", "b1")]
TASK = "/job:worker/task:1"
GOES_OFF: dict[str, dict[str, str]] = {
    "NoRounds": {"job": "a"},
    "ChiefSilent": A0,
    "TaskMissing": B1 | {"task": TASK},
    "WorkersLost": B0,
    "CheckpointsFail": B1 | {"outcome": "failed"},
    "CertificateEnds": B0,
    "VariablesNotFinite": B0,
    "RoundsFail": B0 | {"outcome": "failed"},
}
"""The labels with which each alarm goes off, at minute 25 of `FIRING`."""


def test_alarms_go_off(tmp_path: Path) -> None:
    """Each for the job that has the trouble, and for no other: Prometheus runs them over half an hour."""
    said = {rule["alert"]: rule["annotations"]["summary"].replace("{{ $labels.task }}", TASK) for rule in RULES}
    assert said.keys() == GOES_OFF.keys()
    alerts = {
        name: [{"exp_labels": labels, "exp_annotations": {"summary": said[name]}}] for name, labels in GOES_OFF.items()
    }
    tests = [{"eval_time": "25m", "alertname": name, "exp_alerts": one} for name, one in alerts.items()]
    given = [{"series": f"paramserver_{name}", "values": values} for name, values in FIRING.items()]
    case = {"interval": "1m", "input_series": given, "alert_rule_test": tests}
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALARMS)], "tests": [case]}), encoding="utf-8")
    printed("promtool", "test", "rules", path)


TASKS = (PS0, PS1, CHIEF, W0, W1)
SECONDS = 60.0

EMPTY = {
    "Missing tasks": "all tasks are there",
    "Certificates expire in": "the job has no certificates",
    "Share of the memory limit": "there is no limit",
}
"""Panels that show nothing in this job, and why."""


def observed() -> None:
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        v = ps.Variable(np.zeros(1 << 12, "float32"), name="v")
        table = ps.dynamic_embedding.get_variable("t", 4)
        optimizer = ps.optimizers.SGD(0.1)
    manager = ps.train.CheckpointManager(ps.train.Checkpoint(v=v), "run", max_to_keep=1)

    def step() -> None:
        add(v, np.ones(1 << 12, "float32"))
        keys = np.arange(8)
        optimizer.apply_gradients([(ps.IndexedSlices(np.ones((8, 4), "float32"), keys), table)])

    for turn in range(600):
        strategy.run(step)
        v.numpy()
        if turn % 200 == 100:
            manager.save()
        time.sleep(0.02)
    say("rounds", strategy.round)
    gate("on")
    strategy.close()


@contextmanager
def prometheus(directory: Path, targets: list[str]) -> Iterator[str]:
    """Runs a Prometheus by the committed configuration, with other targets, pauses and without TLS; gives its URL."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus: nobody scrapes")
    config = yaml.safe_load((ALARMS.parent / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["rule_files"] = [str(ALARMS)]
    scraped = config["scrape_configs"][0]
    scraped["static_configs"] = [{"targets": targets}]
    del scraped["scheme"], scraped["tls_config"]  # this cluster has no certificates
    path = directory / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    words = [f"--config.file={path}", f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"]
    process = subprocess.Popen([program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def ask(url: str, path: str, **words: str) -> dict:
    """What Prometheus answers; nothing while it is starting."""
    try:
        with urlopen(f"{url}/api/v1/{path}?{urlencode(words)}", timeout=10) as answer:
            return json.load(answer)["data"]
    except HTTPError:
        raise
    except URLError:
        return {}


def test_panels_show_a_job(tmp_path: Path) -> None:
    """Every query has an answer while the job trains, every task is up, and every alarm is loaded and silent."""
    keys = {"ps": 2, "workers": 2, "chief": "driver", "metrics_port": 0, "log_format": "json"}
    with ProcessCluster(observed, tmp_path, gates=["on"], **keys) as job:
        urls = [metrics_url(job, task) for task in TASKS]
        targets = [url.removeprefix("http://").removesuffix("/metrics") for url in urls]
        with prometheus(tmp_path, targets) as url:
            missing = {(title, query) for title, query in panels() if title not in EMPTY}
            until = time.monotonic() + SECONDS
            while missing and time.monotonic() < until:
                time.sleep(0.5)
                for title, query in list(missing):
                    if ask(url, "query", query=concrete(query).replace("[1m]", "[10s]")).get("result"):
                        missing.discard((title, query))
            assert not missing
            for title, query in panels():
                if title in EMPTY:
                    assert not ask(url, "query", query=concrete(query))["result"], title
            up = ask(url, "query", query="up")["result"]
            assert [one["value"][1] for one in up] == ["1"] * len(TASKS)
            assert {one["metric"]["job"] for one in up} == {"digits"}
            rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
            assert {(rule["name"], rule["health"], rule["state"]) for rule in rules} == {
                (rule["alert"], "ok", "inactive") for rule in RULES
            }
        job.open("on")
        job.finish()
