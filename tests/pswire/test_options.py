"""Options that are said once: fields of a dataclass as flags of a command."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from psserver.config import ServerConfig, server_config
from pswire.cluster import Task
from pswire.flags import flags
from pswire.options import LIST, SWITCH, WHOLE, flag_name, option, options_of, said
from pswire.server_options import ServerOptions


@dataclass(frozen=True)
class Boat:
    """Something with options."""

    crew: int = option(2, "Sailors.", WHOLE, 1, most=9, hint="the captain included")
    anchored: bool = option(False, "At rest.", SWITCH)
    sail: str = option("jib", "Which sail is set.", choices=("jib", "genoa"), variable="BOAT_SAIL", otherwise="a jib")
    ports: tuple[str, ...] = option((), "Where it goes.", LIST)
    owner: str = "nobody"


def sail(*words: str, unsaid: bool, **environ: str) -> click.testing.Result:
    """Runs a command with a boat's flags, which prints what it was told."""

    @click.command()
    @flags(Boat, unsaid=unsaid, environ=True)
    def command(**given: object) -> None:
        click.echo(json.dumps([given, said(Boat, given)]))

    return CliRunner().invoke(command, words, env=environ)


def test_a_field_is_a_flag():
    """Its kind, limits, choices and variable are those of the option; what is no option has no flag."""
    assert json.loads(sail(unsaid=False).output)[0] == {"crew": 2, "anchored": False, "sail": "jib"}
    told = sail("--crew", "3", "--anchored", unsaid=False, BOAT_SAIL="genoa")
    assert json.loads(told.output)[0] == {"crew": 3, "anchored": True, "sail": "genoa"}
    for words in (["--crew", "0"], ["--crew", "10"], ["--sail", "kite"], ["--ports", "a"], ["--owner", "me"]):
        assert sail(*words, unsaid=False).exit_code == 2


def test_what_is_not_said_leaves_the_rest_to_others():
    """A flag that is not given is told from one that says the default, and from 0."""
    assert json.loads(sail(unsaid=True).output)[1] == {}
    assert json.loads(sail("--crew", "2", unsaid=True).output)[1] == {"crew": 2}
    assert said(Boat, {"crew": 0, "anchored": False, "sail": None, "other": 1}) == {"crew": 0}


def test_help_says_what_holds_otherwise():
    """The sentence, its hint, the variable, and the default in words or as it is."""
    options = options_of(Boat)
    assert options["crew"].help(2) == "Sailors; the captain included [default: 2]."
    assert options["crew"].help(0) == "Sailors; the captain included [default: 0]."
    assert options["anchored"].help(False) == "At rest."
    assert options["sail"].help("jib") == "Which sail is set [default: BOAT_SAIL, else a jib]."


@pytest.mark.parametrize("name", options_of(ServerOptions))
def test_a_server_has_the_defaults_of_its_options(name):
    """A server that is told nothing is what a server is that was never asked."""
    assert flag_name(name) == "--" + name.replace("_", "-")
    told, made = server_config({}), ServerConfig(Task("ps", 0))
    assert name == "checkpoint_root" or getattr(told, name) == getattr(made, name)
