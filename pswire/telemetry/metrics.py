"""Metrics for both sides: a name, a sentence, and a function that reads it. Nothing is counted for them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

from pswire.cluster import Task
from pswire.process import versions

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds for what takes from half a millisecond to a minute."""


class Histogram:
    """Counts values by size. Whoever observes from several threads has a lock around it.

    Args:
        bounds: upper bounds of the buckets, each included, in increasing order; beyond the last is one more bucket.

    Attributes:
        total: the sum of all values.
        exemplars: by the number of a bucket the last value in it that has labels, and these first.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.total = 0.0
        self.exemplars: dict[int, tuple[Mapping[str, str], float]] = {}
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """One more value; `exemplar` are labels that lead to its trace."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self.total += value
        if exemplar is not None:
            self.exemplars[bucket] = exemplar, value

    def buckets(self) -> list[tuple[str, float]]:
        """For each upper bound, the last of which is "+Inf", how many values are not above it."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
Values = Mapping[Labels, float | Histogram]
"""Current values of a metric, by the values of its labels."""

Source = TypeVar("Source")

ALL: Labels = ()
"""The labels' values where there are no labels."""


@dataclass(frozen=True)
class Row(Generic[Source]):
    """A row of the table of metrics.

    Attributes:
        name: name by Prometheus's conventions, with its unit; of a counter without `_total`.
        kind: kind of the metric.
        about: its meaning, in one sentence.
        read: returns its values.
        labels: names of its labels.
    """

    name: str
    kind: Kind
    about: str
    read: Callable[[Source], Values]
    labels: Labels = ()


Reading = tuple[Sequence[Row[Any]], Any]
"""Metrics, and what they are read of."""


@dataclass(frozen=True)
class ProcessReadings:
    """Readings that every process has.

    Attributes:
        task: the task that the process is.
        expiry: returns the end of the validity of the certificates that it uses, in Unix seconds; 0 without TLS.
    """

    task: Task
    expiry: Callable[[], float]


PROCESS: tuple[Row[ProcessReadings], ...] = (
    Row(
        "paramserver_build_info",
        "gauge",
        "Version and task of this process; always 1.",
        lambda p: {(versions()["paramserver"], str(p.task)): 1.0},
        ("version", "task"),
    ),
    Row(
        "paramserver_certificate_expiry_timestamp_seconds",
        "gauge",
        "Expiry time of this process's certificates and of their CA; absent without TLS.",
        lambda p: {ALL: expiry} if (expiry := p.expiry()) else {},
    ),
)
