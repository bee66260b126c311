"""The tables of docs/api-coverage.md and docs/security.md: what they name is there, and is tested."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

import psclient as ps

ROOT = Path(__file__).resolve().parent.parent
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")

# ---- docs/api-coverage.md ----

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "api-coverage.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| name |", "| words |"))
]
PLACES = sorted({place for row in ROWS for place in re.findall(r"`((?:ps|psclient)\.[\w.]+)`", row[1])})


def test_every_row_has_its_test():
    """It has a name, where it lives, and its test; `make check` looks that this is there."""
    assert len(ROWS) > 70
    assert [row for row in ROWS if len(row) != 3 or not all(row) or not TEST.fullmatch(row[2])] == []


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("place", PLACES)
def test_what_is_named_is_there(place):
    """Every name that a row gives can be reached, and says what it is."""
    parts = re.sub(r"^ps\.", "psclient.", place).split(".")
    depth = next(n for n in range(len(parts), 0, -1) if is_module(".".join(parts[:n])))
    found = importlib.import_module(".".join(parts[:depth]))
    for name in parts[depth:]:
        found = getattr(found, name)
    assert found.__doc__


@pytest.mark.parametrize("name", ["TPUStrategy", "estimator", "keras", "saved_model", "function"])
def test_what_is_tensorflows_own_is_not_here(name):
    with pytest.raises(AttributeError, match=name):
        getattr(ps, name)


# ---- docs/security.md ----

TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)
TABLE = "Which test holds what"
CLAIM = re.compile(r"\| \[(?P<section>[^\]]+)\]\(#(?P<anchor>[a-z-]+)\) \| (?P<claim>[^|]+) \| (?P<tests>[^|]+) \|")
LINES = [line for line in TEXT.partition(f"## {TABLE}\n")[2].strip().splitlines() if line.startswith("|")][2:]

NO_CLAIM = {TABLE, "What it costs"}
"""Sections that claim nothing that a test could hold: figures, which a benchmark gives."""


@cache
def found_in(path: str) -> frozenset[str]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[2].strip()[:50])
def test_a_claim_names_tests_that_are_there(line: str) -> None:
    """At least one, and nothing beside their names, so that a wrong one is not taken for prose."""
    row = CLAIM.fullmatch(line)
    assert row
    named = TEST.findall(row["tests"])
    assert row["tests"] == ", ".join(f"`{path}::{name}`" for path, name in named)
    assert named
    for path, name in named:
        assert name in found_in(path), f"{path} has no {name}"
    assert row["section"] in SECTIONS
    assert row["anchor"] == re.sub(r"[^a-z0-9 -]", "", row["section"].lower()).replace(" ", "-")


def test_each_section_has_a_claim() -> None:
    """A section that is added says which test holds what it says."""
    held = {line.partition("[")[2].partition("]")[0] for line in LINES}
    assert {title for title in SECTIONS if title not in held} == NO_CLAIM
