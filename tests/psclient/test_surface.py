"""The names that users have: all of them are listed, and retired ones say what they are called now."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from psclient.psctl.cli import command as psctl
from pswire import retired
from pswire.errors import ConfigError
from pswire.flags import explained
from pswire.limits import VARIABLES, Timeouts, check_variables
from tools.surface import LISTED, surface


def test_the_public_surface_is_listed():
    """A name that comes or goes changes the list, which a review sees: `python tools/surface.py --write`."""
    known = LISTED.read_text(encoding="utf-8")
    assert surface(known) == known


@pytest.mark.parametrize("name", retired.VARIABLES)
def test_a_retired_variable_names_the_new_one(name):
    """It would count as absent; there are no aliases."""
    with pytest.raises(ConfigError, match=f"environment variable {name} is called {retired.VARIABLES[name]} now"):
        check_variables({name: "1"})
    known = VARIABLES | Timeouts().environ().keys()
    assert retired.VARIABLES[name] in known
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


def test_a_timeout_is_called_in_the_environment_as_in_python():
    """`PS_SESSION_TIMEOUT` is `Timeouts.session_timeout`, and so on."""
    assert set(Timeouts().environ()) == {f"PS_{name.upper()}" for name in Timeouts.__dataclass_fields__}
    assert Path(LISTED).name == "surface.txt"
