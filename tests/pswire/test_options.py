"""Options that are said once, as flags of a command; numbers of bytes, and names, as people write them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from psserver.config import ServerConfig, server_config
from pswire.cluster import Task
from pswire.errors import ConfigError
from pswire.flags import flags
from pswire.limits import refuse_unknown
from pswire.options import LIST, SWITCH, WHOLE, flag_name, option, options_of, said
from pswire.server_options import ServerOptions
from pswire.sizes import human, parse_bytes


@dataclass(frozen=True)
class Boat:
    """Something with options."""

    crew: int = option(2, "Sailors.", WHOLE, 1, most=9)
    anchored: bool = option(False, "At rest.", SWITCH, variable="BOAT_ANCHORED")
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
    """Its kind, limits, choices and variable are those of the option; what is no option has no flag. The variable of a
    switch is read elsewhere, by a reader that takes 1 and 0 alone, and not many words."""
    assert json.loads(sail(unsaid=False).output)[0] == {"crew": 2, "anchored": False, "sail": "jib"}
    told = sail("--crew", "3", "--anchored", unsaid=False, BOAT_SAIL="genoa")
    assert json.loads(told.output)[0] == {"crew": 3, "anchored": True, "sail": "genoa"}
    for words in (["--crew", "0"], ["--crew", "10"], ["--sail", "kite"], ["--ports", "a"], ["--owner", "me"]):
        assert sail(*words, unsaid=False).exit_code == 2
    assert not json.loads(sail(unsaid=False, BOAT_ANCHORED="yes").output)[0]["anchored"]


def test_what_is_not_said_leaves_the_rest_to_others():
    """A flag that is not given is told from one that says the default, and from 0."""
    assert json.loads(sail(unsaid=True).output)[1] == {}
    assert json.loads(sail("--crew", "2", unsaid=True).output)[1] == {"crew": 2}
    assert said(Boat, {"crew": 0, "anchored": False, "sail": None, "other": 1}) == {"crew": 0}


def test_help_says_what_holds_otherwise():
    """The sentence, the variable, and the default in words or as it is."""
    options = options_of(Boat)
    assert options["crew"].help(2) == "Sailors. [default: 2]"
    assert options["crew"].help(0) == "Sailors. [default: 0]"
    assert options["anchored"].help(False) == "At rest. [env: BOAT_ANCHORED]"
    assert options["sail"].help("jib") == "Which sail is set. [env: BOAT_SAIL; default: a jib]"


@pytest.mark.parametrize("name", options_of(ServerOptions))
def test_a_server_has_the_defaults_of_its_options(name):
    """A server that is told nothing is what a server is that was never asked."""
    assert flag_name(name) == "--" + name.replace("_", "-")
    told, made = server_config({}), ServerConfig(Task("ps", 0))
    assert name == "checkpoint_root" or getattr(told, name) == getattr(made, name)


# ---- Numbers of bytes ----


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("17", 17), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2GB", 2 * 10**9), ("3mib", 3 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    """Binary and decimal units mean what they say."""
    assert parse_bytes(text, "--memory-limit") == size


NO_SIZES = ("", "GiB", "-1", "1e9", "4 Gi", "1,5GiB", "abc")


@pytest.mark.parametrize(
    ("text", "wrong"), [*((text, "not a size") for text in NO_SIZES), ("0", "too small"), ("1023KiB", "too small")]
)
def test_a_size_may_have_a_least(text: str, wrong: str) -> None:
    """Nothing is guessed: what is no size, and what is less, is told the least, and not sent to 0, which is less."""
    with pytest.raises(ConfigError, match=f"--in-flight .*{wrong}.*at least 1 MiB$"):
        parse_bytes(text, "--in-flight", 1 << 20)
    assert parse_bytes("1MiB", "--in-flight", 1 << 20) == 1 << 20


@pytest.mark.parametrize("text", ["0 bytes", "1023 bytes", "1 KiB", "1.5 MiB", "7 GiB", "2048 TiB"])
def test_sizes_are_read_as_they_are_written(text: str) -> None:
    """What people are shown means the same on a command line."""
    size = parse_bytes(text.removesuffix("bytes"), "here")
    assert human(size) == text


# ---- Names ----


@pytest.mark.parametrize(
    ("known", "hint"),
    [(["lease", "round"], "did you mean lease?"), (["b", "a"], "known are a, b"), ([], "known are none")],
)
def test_a_name_that_is_not_known_is_refused(known, hint):
    """With the one that may be meant, or all that there are, be it none; those that are known pass."""
    refuse_unknown(known, known, "key")
    with pytest.raises(ConfigError) as caught:
        refuse_unknown(["leese"], known, "key")
    assert str(caught.value) == f"key leese is unknown; {hint}"
