"""What a metric is, for both sides: a name, a sentence, and how to read it. Nothing is counted for it: it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pswire.cluster import Task
from pswire.telemetry.histogram import Histogram
from pswire.versions import versions

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
Values = Mapping[Labels, float | Histogram]
"""What there is now, by the values of the labels."""

Source = TypeVar("Source")

ALL: Labels = ()
"""The labels' values where there are no labels."""


@dataclass(frozen=True)
class Row(Generic[Source]):
    """One metric.

    Attributes:
        name: by Prometheus's conventions, with its unit; of a counter without `_total`.
        kind: what it is.
        about: one sentence.
        read: gives its values.
        labels: the names of its labels.
    """

    name: str
    kind: Kind
    about: str
    read: Callable[[Source], Values]
    labels: Labels = ()


Reading = tuple[Sequence[Row[Any]], Any]
"""Metrics, and what they are read of."""


@dataclass(frozen=True)
class Process:
    """What every process tells of itself.

    Attributes:
        task: which one it is.
        expiry: until when the certificates are good that it has read, in Unix seconds; 0 without TLS.
    """

    task: Task
    expiry: float


PROCESS: tuple[Row[Process], ...] = (
    Row(
        "paramserver_build_info",
        "gauge",
        "What runs here: always 1.",
        lambda p: {(versions()["paramserver"], str(p.task)): 1.0},
        ("version", "task"),
    ),
    Row(
        "paramserver_certificate_expiry_timestamp_seconds",
        "gauge",
        "Until when the certificates are good that this process has read, its own and its CA's; nothing without TLS.",
        lambda p: {ALL: p.expiry} if p.expiry else {},
    ),
)
