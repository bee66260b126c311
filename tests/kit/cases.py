"""Fewer cases than a product of parameters has, and how long hypothesis searches.

A choice is fixed: `pytest --collect-only` prints it, and `make soak` runs the whole product. `PS_SEARCH`, or
`--hypothesis-profile`, chooses a search: `suite`, for `make test`, tries a few examples, the same in each run; `ci`
draws others each time; `soak` searches for as long as one likes to wait.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

Row = tuple[int, ...]


def pairwise(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test so that any two values of two parameters meet in a row; the rest of the product is soak."""
    columns = [[*column] for column in values.values()]
    return _covering([*values], columns, pairs_of([len(column) for column in columns]))


def once(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test so that each value stands in a row; the rest of the product is soak."""
    columns = [[*column] for column in values.values()]
    sizes = [len(column) for column in columns]
    rows = [tuple(n % size for size in sizes) for n in range(max(sizes))]
    return _covering([*values], columns, rows)


def _covering(names: list[str], columns: list[list[Any]], rows: Collection[Row]) -> pytest.MarkDecorator:
    """Marks those rows of a product that are not chosen; a parameter `strategy` is that of the fixture."""
    chosen = {*rows}
    given = [
        pytest.param(
            *(column[place] for column, place in zip(columns, row, strict=True)),
            marks=() if row in chosen else pytest.mark.soak,
        )
        for row in itertools.product(*(range(len(column)) for column in columns))
    ]
    return pytest.mark.parametrize(names, given, indirect=[n for n in names if n == "strategy"], scope="module")


def pairs_of(sizes: Sequence[int]) -> list[Row]:
    """Returns rows of places, in which each pair of places of two columns stands; as few as a simple search finds."""
    order = sorted(range(len(sizes)), key=lambda column: -sizes[column])
    first, *rest = (sizes[column] for column in order)
    rows = [[place] for place in range(first)]
    for number, size in enumerate(rest, 1):
        _extended(rows, number, size)
    back = [order.index(column) for column in range(len(sizes))]
    return sorted(tuple(row[place] for place in back) for row in rows)


def _extended(rows: list[list[int]], number: int, size: int) -> None:
    """Adds a column of so many places to rows that have `number` of them, and rows for the pairs that are left."""
    known = [sorted({row[column] for row in rows}) for column in range(number)]
    left = {(column, old, new) for column in range(number) for old in known[column] for new in range(size)}
    used = [0] * size
    for row in rows:
        gains = [sum((column, old, new) in left for column, old in enumerate(row)) for new in range(size)]
        new = max(range(size), key=lambda new: (gains[new], -used[new], -new))
        left -= {(column, old, new) for column, old in enumerate(row)}
        used[new] += 1
        row.append(new)
    while left:
        _, _, new = min(left, key=lambda pair: pair[::-1])
        row = [min((old for c, old, n in left if (c, n) == (column, new)), default=0) for column in range(number)]
        left -= {(column, old, new) for column, old in enumerate(row)}
        rows.append([*row, new])


EXAMPLES = {"suite": 15, "ci": 50, "soak": 3_000}
STEPS = {"suite": 30, "ci": 40, "soak": 100}


def load() -> None:
    """Registers the profiles, and loads the one that PS_SEARCH names."""
    for name, examples in EXAMPLES.items():
        same: dict[str, Any] = {"derandomize": True, "database": None} if name == "suite" else {}
        settings.register_profile(
            name,
            max_examples=examples,
            stateful_step_count=STEPS[name],
            deadline=None,  # a slow machine is no failure
            suppress_health_check=[HealthCheck.too_slow],
            **same,
        )
    settings.load_profile(os.environ.get("PS_SEARCH", "suite"))


def search(share: float = 1, steps: float = 1, suppress: tuple[HealthCheck, ...] = ()) -> settings:
    """Returns the profile's settings with `share` of its examples, and of a machine's `steps`."""
    profile = settings()
    return settings(
        max_examples=max(1, round(share * profile.max_examples)),
        stateful_step_count=max(1, round(steps * profile.stateful_step_count)),
        suppress_health_check=[*profile.suppress_health_check, *suppress],
    )
