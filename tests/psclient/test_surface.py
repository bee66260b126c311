"""The names that users have: all of them are listed, and retired ones say what they are called now."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import click
import pytest

from psclient.psctl.cli import command as psctl
from pswire.errors import ConfigError
from pswire.flags import explained
from pswire.limits import Timeouts, check_variables
from pswire.variables import RETIRED, VARIABLES
from tools.surface import LISTED, surface

PACKAGE = LISTED.parents[2] / "psclient"


def test_the_public_surface_is_listed():
    """A name that comes or goes changes the list, which a review sees: `python tools/surface.py --write`."""
    known = LISTED.read_text(encoding="utf-8")
    assert surface(known) == known


@pytest.mark.parametrize("name", RETIRED)
def test_a_retired_variable_names_the_new_one(name):
    """It would count as absent; there are no aliases."""
    with pytest.raises(ConfigError, match=f"environment variable {name} is called {RETIRED[name]} now"):
        check_variables({name: "1"})
    known = VARIABLES | Timeouts().environ().keys()
    assert RETIRED[name] in known
    assert name not in known


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lane", "tcp", "status"], "No such option --lane: it is called --transport now"),
        (["--replication", "1"], "it is called --replication-factor now (2 in place of 1)"),
        (["--timeout-lease", "1"], "it is called --session-timeout now"),
        (["page"], "No such command page: it is called dashboard now"),
        (["recent"], "it is called events now"),
        (["job", "end"], "it is called delete now"),
        (["--lain", "tcp", "status"], "No such option"),
    ],
)
def test_a_retired_flag_or_command_names_the_new_one(words, said):
    """Where the command line is read, before anything is looked at."""
    with pytest.raises(click.ClickException) as caught:
        psctl.main(words, standalone_mode=False, obj=None)
    assert said in explained(caught.value)


@pytest.mark.parametrize("path", [*PACKAGE.glob("torch/*.py"), *PACKAGE.glob("jax/*.py")], ids=lambda path: path.name)
def test_errors_of_front_ends_are_ours(path):
    """`except ps.PSError` catches them all; they are builtin ones as well."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    assert {name for name in raised if hasattr(builtins, name)} <= {"AttributeError"}  # which Python asks of a module


def test_a_timeout_is_called_in_the_environment_as_in_python():
    """`PS_SESSION_TIMEOUT` is `Timeouts.session_timeout`, and so on."""
    assert set(Timeouts().environ()) == {f"PS_{name.upper()}" for name in Timeouts.__dataclass_fields__}


RETIRED_WORDS = re.compile(
    r"\b(lanes?|beats?|taken back|catching up|spare servers?|epochs? of (?:members|membership)|membership epochs?"
    r"|look_ahead|hint_ahead|left_out|whole_rounds|psj\.(?:optax|bind|loader)|ps\.(?:lazily|exactly)"
    r"|PS_(?:LANE|AGGREGATION|REFUSED|REPLICATION|TIMEOUT_[A-Z]+)|psctl (?:page|recent|job end)"
    r"|--(?:lane|aggregation|replication))\b"
)
"""Words that decision 67 has replaced."""

NAMES_OF_BEFORE = re.compile(r"# ---- Names of before ----.*", re.DOTALL)


def said_by(path: Path) -> str:
    """What users may read of a file: all of a page, and of Python all texts that are no docstrings of inner names."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"decisions/[\w-]+\.md", "", text)
    tree = ast.parse(NAMES_OF_BEFORE.sub("", text))
    return "\n".join(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_retired_words_do_not_come_back():
    """In public names, messages, help, the protocol, pages and files for deployment; decisions are of their day."""
    root = LISTED.parents[2]
    pages = [*(root / "docs").glob("*.md"), root / "README.md", LISTED]
    files = [path for name in ("configs", "docker", "protos") for path in (root / name).rglob("*") if path.is_file()]
    code = [path for name in ("psclient", "psserver", "pswire") for path in (root / name).rglob("*.py")]
    found = {
        (path.relative_to(root).as_posix(), word)
        for path in (*pages, *files, *code)
        if path.parent.name != "pb"
        for word in RETIRED_WORDS.findall(said_by(path))
    }
    assert found == set()
