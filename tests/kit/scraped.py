"""Pages of metrics, read as Prometheus reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from pstesting.processes import ProcessCluster
from pswire.cluster import Task
from pswire.telemetry import logging_setup

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
COUNTED = (
    "sessions",
    "variables",
    "members",
    "missing",
    "differing",
    "up",
    "round",
    "rounds",
    "checkpoints",
    "info",
    "rows",
)
"""What the last word of a name is that has no unit: things that are counted, and numbers of things."""

_ROW = re.compile(r"^\| `(?P<name>paramserver_\w+)` \| (?P<kind>\w+) \|(?P<labels>[^|]*)\|", re.MULTILINE)


class Page:
    """What somebody serves.

    Args:
        text: the page.
    """

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    @classmethod
    def at(cls, url: str) -> Page:
        """The page of a URL."""
        with urlopen(url, timeout=10) as answer:
            return cls(answer.read().decode())

    def __call__(self, name: str, **labels: str) -> float:
        """One value."""
        return self._values["paramserver_" + name, frozenset(labels.items())]

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is such a value."""
        return ("paramserver_" + name, frozenset(labels.items())) in self._values

    @property
    def ours(self) -> list[Metric]:
        """Those of this package."""
        return [family for name, family in self.families.items() if name.startswith("paramserver_")]


def metrics_url(job: ProcessCluster, task: Task) -> str:
    """Where a task of a running job serves its metrics, at the port that it has picked; its log is JSON."""
    if task.job == "ps":
        said = " serves metrics at "
        job.until(lambda: any(said in line for line in job.cluster.output(task)))
        (line,) = [line for line in job.cluster.output(task) if said in line]
        line = (logging_setup.read(line) or {"message": line})["message"]
    else:
        found = logging_setup.read(job.hear_error(task, "metrics are at "))
        assert found is not None
        line = found["message"].partition(",")[0]
    return line.rpartition(" ")[2]


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each metric in the tables of the document its kind and its labels."""
    rows = _ROW.finditer(DOCUMENT.read_text(encoding="utf-8"))
    return {row["name"]: (row["kind"], tuple(re.findall(r"`(\w+)`", row["labels"]))) for row in rows}


def queried() -> set[str]:
    """The metrics that the document's queries and alarms ask for."""
    blocks = re.findall(r"```(?:promql|yaml)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names = {name for block in blocks for name in re.findall(r"paramserver_\w+", block)}
    histograms = {name for name, (kind, _) in documented().items() if kind == "histogram"}
    return {next((whole for whole in histograms if name.startswith(whole + "_")), name) for name in names}


def mistakes(families: Iterable[Metric]) -> list[str]:
    """What Prometheus's conventions have against metrics."""
    found = []
    for family in families:
        unit = family.name.rpartition("_")[2]
        if not family.documentation.endswith("."):
            found.append(f"{family.name} has no sentence")
        if family.type == "counter":
            found += [f"{s.name} is no total" for s in family.samples if not s.name.endswith(("_total", "_created"))]
        elif unit not in ("seconds", "bytes", *COUNTED):
            found.append(f"{family.name} has no unit")
        if family.type not in ("counter", "gauge", "histogram"):
            found.append(f"{family.name} is of type {family.type}")
    return found
