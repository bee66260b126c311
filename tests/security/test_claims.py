"""docs/security.md: each section's claims name tests, and these are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TABLE = "Which test holds what"

NO_CLAIM = {TABLE, "What it costs"}
"""Sections that claim nothing that a test could hold: figures, which a benchmark gives."""

ROW = re.compile(r"\| \[(?P<section>[^\]]+)\]\(#(?P<anchor>[a-z-]+)\) \| (?P<claim>[^|]+) \| (?P<tests>[^|]+) \|")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def sections() -> list[str]:
    """The titles of all sections."""
    return re.findall(r"^##+ (.+)$", TEXT, re.MULTILINE)


def rows() -> list[re.Match[str]]:
    """The claims."""
    lines = TEXT.partition(f"## {TABLE}\n")[2].strip().splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    found = [ROW.fullmatch(line) for line in table]
    assert table, "there is no table"
    assert all(found), [line for line, match in zip(table, found, strict=True) if not match]
    return [match for match in found if match]


@cache
def found_in(path: str) -> frozenset[str]:
    """The tests of a module."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def anchor(title: str) -> str:
    """The fragment of a link to a section."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["claim"][:50])
def test_a_claim_names_tests_that_are_there(row: re.Match[str]) -> None:
    """At least one, and nothing beside their names, so that a wrong one is not taken for prose."""
    named = TEST.findall(row["tests"])
    assert row["tests"] == ", ".join(f"`{path}::{name}`" for path, name in named)
    assert named
    for path, name in named:
        assert name in found_in(path), f"{path} has no {name}"
    assert row["section"] in sections()
    assert row["anchor"] == anchor(row["section"])


def test_each_section_has_a_claim() -> None:
    """A section that is added says which test holds what it says."""
    held = {row["section"] for row in rows()}
    assert {title for title in sections() if title not in held} == NO_CLAIM
