"""docs/api-coverage.md: what it names is there, and is tested."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import psclient as ps

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "api-coverage.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| name |", "| words |"))
]
PLACES = sorted({place for row in ROWS for place in re.findall(r"`((?:ps|psclient)\.[\w.]+)`", row[1])})


def test_every_row_has_three_cells():
    """A name, where it lives, and its test."""
    assert len(ROWS) > 70
    assert [row for row in ROWS if len(row) != 3 or not all(row)] == []


@pytest.mark.parametrize("place", PLACES)
def test_what_is_named_is_there(place):
    """Every name that a row gives can be reached, and says what it is."""
    parts = re.sub(r"^ps\.", "psclient.", place).split(".")
    depth = next(n for n in range(len(parts), 0, -1) if _is_module(parts[:n]))
    found = importlib.import_module(".".join(parts[:depth]))
    for name in parts[depth:]:
        found = getattr(found, name)
    assert found.__doc__


def _is_module(parts: list[str]) -> bool:
    try:
        importlib.import_module(".".join(parts))
    except ModuleNotFoundError:
        return False
    return True


def test_every_row_has_its_test():
    """Each row names a test; `make check` looks that it is there."""
    assert [row for row in ROWS if not re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", row[2])] == []


@pytest.mark.parametrize("name", ["TPUStrategy", "estimator", "keras", "saved_model", "function"])
def test_what_is_tensorflows_own_is_not_here(name):
    """There is no such name, and Python says so."""
    with pytest.raises(AttributeError, match=name):
        getattr(ps, name)
