"""What a metric is, for both sides: a name, a sentence, and how to read it. Nothing is counted for it: it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from pswire.histogram import Histogram

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
