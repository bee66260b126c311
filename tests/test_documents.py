"""Documents and help: what tables name is there and tested, and what stands twice is the same."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import yaml

import psclient as ps
from tests.kit.internals import ABOUT

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


# ---- tests/held_by.md ----

SECTIONS = re.findall(r"^##+ (.+)$", (ROOT / "docs" / "security.md").read_text(encoding="utf-8"), re.MULTILINE)
HELD = (ROOT / "tests" / "held_by.md").read_text(encoding="utf-8")
CLAIM = re.compile(
    r"\| \[(?P<section>[^\]]+)\]\(\.\./docs/security\.md#(?P<anchor>[a-z-]+)\) "
    r"\| (?P<claim>[^|]+) \| (?P<tests>[^|]+) \|"
)
SECURITY = HELD.partition("## docs/security.md\n")[2].partition("\n## ")[0]
LINES = [line for line in SECURITY.strip().splitlines() if line.startswith("|")][2:]

NO_CLAIM = {"What TLS costs"}
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


# ---- links, words ----

DOCS: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "check_docs.py"))


def test_links_lead_to_headings(tmp_path):
    """A link to a heading that is not on its page is found, on its own page and on another; code has no headings."""
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# How `it` works\n\n## A, b & c\n\n```console\n# comment\n```\n")
    page.write_text("# Page\n[x](other.md#how-it-works) [y](#page) [z](other.md#a-b-c)")
    assert DOCS["anchors"](other) == {"how-it-works", "a-b--c", "a-b-c"}
    with mock.patch.dict(DOCS["dead_links"].__globals__, documents=lambda: [page], ROOT=tmp_path):
        assert [*DOCS["dead_links"]()] == []
        page.write_text("# Page\n[x](other.md#comment) [y](#pages)\n[z](none.md#a)")
        assert [*DOCS["dead_links"]()] == [
            *("page.md:2: other.md has no heading #comment", "page.md:2: page.md has no heading #pages"),
            "page.md:3: there is no none.md",
        ]


def test_sentences_of_seven_beginnings_are_counted():
    """At the start of a line, a list's item, a cell or a sentence; not in code, in headings, or within a sentence."""
    found = runpy.run_path(str(ROOT / "tools" / "words.py"))["sentences"]
    assert len(found("Who asks. Of two, one.\n- **Nor** this\n| a | What b |\n1. Nobody")) == 5
    assert found("## What it is\n```text\nWho\n```\nIt knows who. Offers are kept. `Of x`") == []


# ---- --help, and docs/reference.md ----

REFERENCE: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "check_reference.py"))
PROGRAMS: dict[str, click.Command] = DOCS["COMMANDS"]

SHARED = ["Checkpoints", "Security", "Logging and metrics"]
HEADINGS = {
    "psworker": ["Script", "Cluster", "Several hosts", "Server resources", "Communication", *SHARED],
    "psserver": ["Server", "Server resources", *SHARED],
    "psctl": [
        *("Watch a job", "Find faults", "Change a running job", "Checkpoints and certificates", "Measure and plan"),
        *("Cluster", "Security", "Output"),
    ],
}


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yields a command, and those of a group, by their whole names."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            assert found
            yield from commands(found, f"{name} {word}")


ALL = [found for name, program in PROGRAMS.items() for found in commands(program, name)]


def help_of(name: str, command: click.Command, width: int = 80) -> list[str]:
    """Returns the lines of a command's help on a terminal of a width."""
    said = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=str(width)), redirect_stdout(said):
        assert command.main(["--help"], name, standalone_mode=False) == 0
    return said.getvalue().splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_headings(name):
    """Options and commands of a program stand below headings that say what they are for; examples come last."""
    lines = help_of(name, PROGRAMS[name])
    found = [line[:-1] for line in lines if re.fullmatch(r"[A-Z][\w ]*:", line)]
    assert found == [*HEADINGS[name], "Other", "Examples"]
    other = lines[lines.index("Other:") + 1 : lines.index("Examples:")]
    assert [line.split()[0] for line in other if line] == ["--version", "--help"]


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_help_shows_each_option_once(name, command):
    """Below one heading each; lines are as wide as the terminal at most, and use the width of a wide one."""
    shown = [each for each in command.get_params(click.Context(command)) if isinstance(each, click.Option)]
    for width in (80, 120):
        lines = help_of(name, command, width)
        assert (width - 10 if name in PROGRAMS else 0) < max(map(len, lines)) <= width
        flags = [line.split()[0] for line in lines if re.match(r"  --\w", line)]
        assert sorted(flags) == sorted(each.opts[0] for each in shown if not each.hidden)


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_examples_of_help_are_accepted(name, command):
    """They stand in help as they can be typed; programs have two or more, other commands at least one."""
    lines = help_of(name, command)
    assert len(command.examples) >= (2 if name in PROGRAMS else 1)
    for about, example in command.examples:
        assert lines[lines.index(f"  # {about}") + 1] == f"  {example}"
        assert example.startswith(name)
        assert DOCS["check_command"](example) == ""


@pytest.mark.parametrize("example", [line for _, line in PROGRAMS["psworker"].examples])
def test_examples_of_psworker_can_be_started(in_tmp_path, environ, example):
    """Their options fit together, too, where the script is there."""
    Path("train.py").write_text("")
    invocation = PROGRAMS["psworker"].main(shlex.split(example)[1:], standalone_mode=False)
    assert invocation.script == "train.py" or invocation.launch.script == "train.py"


def test_names_of_psctl_commands_have_whole_sentences():
    """The list of commands cuts none of their first sentences on a terminal of 80 columns."""
    group = PROGRAMS["psctl"]
    found = [(name, command) for name, command in commands(group, "psctl") if name.count(" ") == 1]
    assert len(found) > 12
    assert [name for name, command in found if command.get_short_help_str(62).endswith("...")] == []


def test_one_sentence_says_what_this_is():
    """The package, the README, the site and the help of each program say it in the same words, 25 at most."""
    assert len(ABOUT.split()) <= 25
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"] == ABOUT
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["site_description"] == ABOUT
    for page in ("README.md", "docs/index.md"):
        assert (ROOT / page).read_text(encoding="utf-8").split("\n\n")[1].startswith(ABOUT)
    for name, program in PROGRAMS.items():
        assert " ".join(help_of(name, program)).endswith(ABOUT)


def test_the_reference_is_what_the_code_says():
    """The page of flags, variables and keys is up to date, stands in the site, and names each command's options."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert text == REFERENCE["page"]()
    assert "reference.md" in (ROOT / "mkdocs.yml").read_text()
    options = [each for _, command in ALL for each in command.params if isinstance(each, click.Option)]
    assert [each.opts[0] for each in options if not each.hidden and f"`{each.opts[0]}" not in text] == []


def test_each_variable_that_is_read_is_declared(tmp_path):
    """One that code or a file for launchers names, and nobody has described, is named by the check."""
    assert REFERENCE["undeclared"](ROOT) == []
    (tmp_path / "psserver").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "psserver" / "new.py").write_text(
        "SPEED = environ['PS_SPEED'], 'RAY_SPEED', 'PS_TRANSPORT', 'SLURM_PROCID'"
    )
    (tmp_path / "configs" / "run.sh").write_text("exec psserver --port ${PS_PORT:-$PS_GATE} # as PS_TIMEOUT_*")
    assert REFERENCE["undeclared"](tmp_path) == ["PS_GATE", "PS_SPEED", "RAY_SPEED"]


# ---- tables of measurements ----


def test_figures_in_pages_are_those_of_the_results(tmp_path):
    """A page with another figure than its result file differs, and writing makes it the file's; all else stays."""
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "tools" / "make_tables.py")
    assert spec
    assert spec.loader
    tables: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert tables.made(page) == page
    shutil.copytree(tables.RESULTS, tmp_path / "results")
    tables.RESULTS = tmp_path / "results"
    steps = tables.RESULTS / "steps.json"
    steps.write_text(steps.read_text().replace('"steps_per_second": 349', '"steps_per_second": 1234'))
    assert tables.made(page) == page.replace("| 349 |", "| 1,234 |") != page
    assert tables.made(page.replace("| 349 |", "| 9 |")) == tables.made(page)
    steps.write_text(steps.read_text().replace('"machine"', '"device"'))
    with pytest.raises(SystemExit, match=r"steps\.json must have exactly command, load, machine"):
        tables.made(page)
