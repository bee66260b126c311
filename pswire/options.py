"""Options, each described once: a field of a frozen dataclass gives a flag, a key of a file, and the help of both.

`pswire.flags` makes the flags, `psclient._src.launch.config_file` reads the file and makes its JSON schema, and
`tools/check_reference.py` writes docs/reference.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHOLE, SECONDS, SWITCH, TEXT = "a whole number", "a positive number of seconds", "true or false", "text"
BYTES, DEVICE, LIST, PATH = (
    "a number of bytes with a unit, such as 4GiB",
    "cpu or gpu:N",
    "a list, one item for each argument",
    "a path",
)
"""Kinds of values, by the words that messages have for them."""

METAVARS = {WHOLE: "N", BYTES: "SIZE", DEVICE: "DEVICE", TEXT: "TEXT", PATH: "PATH"}
"""What help shows in the place of a flag's value, by its kind."""

GROUPS = SCRIPT, CLUSTER, HOSTS, SERVER, RESOURCES, NETWORK, CHECKPOINTS, SECURITY, LOGGING, OUTPUT, OTHER = (
    *("Script", "Cluster", "Several hosts", "Server", "Server resources", "Communication", "Checkpoints", "Security"),
    *("Logging and metrics", "Output", "Other"),
)
"""Headings of help, in this order, under which options stand together."""


@dataclass(frozen=True)
class Option:
    """The description of an option, kept with its field.

    Attributes:
        about: its meaning, in a sentence or two.
        kind: kind of its values, one of those above.
        least: smallest number, which seconds may not reach themselves; None for any.
        most: the greatest number of a flag; None for any.
        choices: the only words that are allowed; () for any.
        variable: the environment variable with the same meaning; "" for none.
        otherwise: the default in words; "" for the field's default.
        group: the heading of help under which it stands, one of `GROUPS`.
        metavar: what help shows in the place of the value; "" for the name of its kind.
    """

    about: str
    kind: str = TEXT
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    variable: str = ""
    otherwise: str = ""
    group: str = OTHER
    metavar: str = ""

    def field(self, default: Any) -> Any:
        """A field of a dataclass.

        Args:
            default: its default, or a function that gives one.
        """
        key = "default_factory" if callable(default) else "default"
        return dataclasses.field(metadata={"option": self}, **{key: default})

    def default(self, default: Any) -> str:
        """The default in words; "" where the option has none.

        Args:
            default: the default of its field.
        """
        known = f"{default:g}" if isinstance(default, float) else str(default)
        return self.otherwise or ("" if default in (None, ()) or default is False else known)

    def help(self, default: Any) -> str:
        """A text for `--help`, with the environment variable and the default in brackets."""
        variable = f"env: {self.variable}" if self.variable else ""
        known = f"default: {self.default(default)}" if self.default(default) else ""
        notes = "; ".join(filter(None, (variable, known)))
        return f"{self.about} [{notes}]" if notes else self.about


def option(default: Any, about: str, kind: str = TEXT, least: int | None = None, **more: Any) -> Any:
    """A field of a dataclass that is an option: its default, or a function that gives one, and as in `Option`."""
    return Option(about, kind, least, **more).field(default)


def options_of(owner: type) -> dict[str, Option]:
    """The options of a dataclass by the names of their fields; fields that are none are left out."""
    found = {field.name: field.metadata.get("option") for field in dataclasses.fields(owner)}
    return {name: each for name, each in found.items() if each}


def defaults_of(owner: type) -> dict[str, Any]:
    """The defaults of a dataclass's options; None where a function gives one."""
    known = {field.name: field.default for field in dataclasses.fields(owner)}
    return {name: None if known[name] is dataclasses.MISSING else known[name] for name in options_of(owner)}


def said(owner: type, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a dataclass that a command line says something for."""
    found = {name: flags.get(name) for name in options_of(owner)}
    return {name: value for name, value in found.items() if value is not None and value is not False}


def flag_name(name: str) -> str:
    """The flag of a field: `--memory-limit`."""
    return "--" + name.replace("_", "-")
