"""Fewer rows than a product of parameters has: each pair of values once, or each value once; `make soak` runs all.

The choice is fixed, and `pytest --collect-only` prints it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

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
