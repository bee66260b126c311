"""Tables that follow from dataclasses: a field of a row says under which heading it is shown, and how.

The fields are the keys of the same row in JSON, and the docstring says what they mean: `docs/psctl-json.md` has it
from there (`python tools/make_tables.py --write`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

Cell = Callable[[Any], str]
"""Returns what stands in a column, given the row."""


def column(heading: str, cell: Cell | None = None, default: Any = MISSING, **metadata: Any) -> Any:
    """A field of a row that a table shows; fields without it are keys of JSON alone.

    Args:
        heading: the column's heading. Columns stand in the order of the fields.
        cell: what stands there; None for the field's value as it is.
        default: the field's default, or a function that gives one; none if it is left out.
        metadata: more of the field.
    """
    key = "default_factory" if callable(default) else "default"
    return dataclasses.field(metadata={"column": (heading, cell), **metadata}, **{key: default})


def columns_of(kind: type) -> list[str]:
    """The headings of a table whose rows are of a class."""
    return [field.metadata["column"][0] for field in dataclasses.fields(kind) if "column" in field.metadata]


def cells_of(row: Any) -> dict[str, str]:
    """What stands in the columns of a row, by their headings."""
    shown = [(field.name, *field.metadata["column"]) for field in dataclasses.fields(row) if "column" in field.metadata]
    return {heading: cell(row) if cell else str(getattr(row, name)) for name, heading, cell in shown}
