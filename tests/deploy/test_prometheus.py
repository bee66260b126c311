"""Alarms and the dashboard ask for what processes expose; and Prometheus itself, where it is, understands them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from psclient._src.telemetry.exporter import OF_CHIEFS, OF_WORKERS
from pswire.telemetry.metrics import PROCESS
from tests.kit.internals import SERVER_METRICS as ROWS
from tests.kit.telemetry import DOCUMENT, names
from tools.make_dashboard import COLUMNS, TARGET, dashboard

ROOT = Path(__file__).resolve().parents[2]
ALARMS = ROOT / "configs" / "prometheus" / "alarms.yaml"
GIVEN = {"job", "instance"}
"""Labels that Prometheus adds to everything."""

BOARD: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = yaml.safe_load(ALARMS.read_text(encoding="utf-8"))["groups"][0]["rules"]


def panels() -> Iterator[tuple[str, str]]:
    """All queries of the dashboard, with their titles."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def queries() -> Iterator[tuple[str, str]]:
    """All queries of the dashboard and of the alarms, with their titles."""
    yield from panels()
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def concrete(query: str) -> str:
    """A query of the dashboard as Grafana sends it."""
    return query.replace("$__rate_interval", "1m").replace("$job", ".*")


def exposed() -> dict[str, set[str]]:
    """The labels of each series that a process of ours may expose."""
    found: dict[str, set[str]] = {}
    for row in (*PROCESS, *ROWS, *OF_WORKERS, *OF_CHIEFS):
        labels = set(row.labels)
        if row.kind == "counter":
            found[row.name + "_total"] = labels
        elif row.kind == "histogram":
            found |= {row.name + "_bucket": labels | {"le"}, row.name + "_sum": labels, row.name + "_count": labels}
        else:
            found[row.name] = labels
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


def test_the_committed_dashboard_is_what_the_table_says() -> None:
    """`python tools/make_dashboard.py` has been run since the panels changed."""
    assert dashboard() == BOARD


def test_the_dashboard_is_laid_out() -> None:
    """No panel covers another or stands beside the grid, and each has its number and its sentence."""
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
    """The file, the chart's copy of it, and the page say the same."""
    text = ALARMS.read_text(encoding="utf-8")
    assert (ROOT / "configs" / "helm" / "files" / "alarms.yaml").read_text(encoding="utf-8") == text
    (block,) = re.findall(r"```yaml\n(groups:.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert yaml.safe_load(block) == yaml.safe_load(text)


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Prometheus's own checker; skips the test where it is not at hand."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool: queries are taken apart by the tests alone")
    return subprocess.run([found, *words], capture_output=True, text=True, timeout=60)


def test_prometheus_takes_the_alarms_and_the_configuration() -> None:
    """By its own word."""
    for kind, path in (("rules", ALARMS), ("config", ALARMS.parent / "prometheus.yaml")):
        done = promtool("check", kind, str(path))
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_can_read_each_query(tmp_path: Path) -> None:
    """Those of the dashboard, and those of the document, as rules of a file."""
    blocks = re.findall(r"```promql\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) > 5
    rules = [
        {"record": f"query:{number}", "expr": concrete(query)}
        for number, query in enumerate([*(query for _, query in queries()), *lines])
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def series(name: str, values: str) -> dict[str, str]:
    """A series of a test of alarms: what two servers of two jobs say each minute."""
    return {"series": name, "values": values}


FIRING = [
    series('paramserver_server_rounds_total{job="a", instance="a0", outcome="completed"}', "100+0x30"),
    series('paramserver_server_sessions{job="a", instance="a0", state="open"}', "2x30"),
    series('paramserver_server_rounds_total{job="b", instance="b0", outcome="completed"}', "100+60x30"),
    series('paramserver_server_rounds_total{job="b", instance="b0", outcome="failed"}', "0x20 1x10"),
    series('paramserver_server_sessions{job="b", instance="b0", state="open"}', "2x30"),
    series('paramserver_server_chief_silent_seconds{job="a", instance="a0"}', "0+60x30"),
    series('paramserver_server_chief_silent_seconds{job="b", instance="b0"}', "1x30"),
    series('paramserver_chief_missing{job="b", instance="b1", task="/job:worker/task:1"}', "1x30"),
    series('paramserver_server_lease_losses_total{job="b", instance="b0"}', "0x20 1x10"),
    series('paramserver_chief_checkpoints_total{job="b", instance="b1", outcome="failed"}', "0x20 1x10"),
    series('paramserver_certificate_expiry_timestamp_seconds{job="b", instance="b0"}', "86400x30"),
    series('paramserver_certificate_expiry_timestamp_seconds{job="a", instance="a0"}', "8640000x30"),
    series('paramserver_server_nonfinite_variables{job="b", instance="b0"}', "0x20 3x10"),
]
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
    tests = [
        {
            "eval_time": "25m",
            "alertname": name,
            "exp_alerts": [{"exp_labels": labels, "exp_annotations": {"summary": said[name]}}],
        }
        for name, labels in GOES_OFF.items()
    ]
    path = tmp_path / "tests.yaml"
    case = {"interval": "1m", "input_series": FIRING, "alert_rule_test": tests}
    path.write_text(yaml.safe_dump({"rule_files": [str(ALARMS)], "tests": [case]}), encoding="utf-8")
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
