"""Queries of Prometheus, taken apart as far as their names go: metrics, and the labels that a query asks of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)\s*(?:\{(?P<matchers>[^}]*)\})?\s*(?P<call>\()?")
_MATCHER = re.compile(r"\s*(\w+)\s*(?:=~|!~|!=|=)\s*\"\"\s*")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_WINDOW = re.compile(r"\[[^\]]*\]")

WORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}


@dataclass(frozen=True)
class Names:
    """What a query names.

    Attributes:
        metrics: for each metric the labels of its matchers, together.
        labels: the labels by which it groups and joins.
    """

    metrics: dict[str, frozenset[str]]
    labels: frozenset[str]


def names(query: str) -> Names:
    """The names in a query.

    Raises:
        ValueError: its matchers cannot be read.
    """
    bare = _WINDOW.sub("", _STRING.sub('""', query))
    labels = {label for found in _GROUPED.findall(bare) for label in re.findall(r"\w+", found)}
    metrics: dict[str, frozenset[str]] = {}
    for name, matchers in _selectors(_GROUPED.sub(" ", bare)):
        metrics[name] = metrics.get(name, frozenset()) | matchers
    return Names(metrics, frozenset(labels))


def _selectors(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    for found in _SELECTOR.finditer(text):
        if found["name"] in WORDS or found["call"]:
            continue
        parts = [part for part in (found["matchers"] or "").split(",") if part.strip()]
        read = [_MATCHER.fullmatch(part) for part in parts]
        if None in read:
            raise ValueError(f"cannot read the matchers of {found[0]!r}")
        yield found["name"], frozenset(one[1] for one in read if one)
