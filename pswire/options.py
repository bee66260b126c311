"""Options, each said once: a field of a frozen dataclass gives a flag, a key of a file, and the help of both.

`pswire.flags` makes the flags; `psclient._src.launch.config_file` reads the file, and makes its JSON schema.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHOLE, SECONDS, SWITCH, TEXT = "a whole number", "a positive number of seconds", "true or false", "text"
BYTES, DEVICE, LIST = (
    "a number of bytes with a unit, such as 4GiB",
    "cpu or gpu:N",
    "a list, one item for each argument",
)
"""Kinds of values, by the words that messages have for them."""


@dataclass(frozen=True)
class Option:
    """The description of an option, kept with its field.

    Attributes:
        about: its meaning, in one sentence.
        kind: kind of its values, one of those above.
        least: smallest number, which seconds may not reach themselves; None for any.
        most: the greatest number of a flag; None for any.
        choices: the only words that are allowed; () for any.
        variable: the environment variable that says the same; "" for none.
        otherwise: the default in words; "" for the field's default.
        hint: additional help of the flag.
    """

    about: str
    kind: str = TEXT
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    variable: str = ""
    otherwise: str = ""
    hint: str = ""

    def field(self, default: Any) -> Any:
        """A field of a dataclass.

        Args:
            default: its default, or a function that gives one.
        """
        key = "default_factory" if callable(default) else "default"
        return dataclasses.field(metadata={"option": self}, **{key: default})

    def help(self, default: Any) -> str:
        """A line for `--help`, with what holds where the flag is not given."""
        known = "" if default is None or default is False else str(default)
        found = [self.variable, self.otherwise or known]
        about = "; ".join(filter(None, (self.about.removesuffix("."), self.hint)))
        return f"{about} [default: {', else '.join(filter(None, found))}]." if any(found) else f"{about}."


def option(default: Any, about: str, kind: str = TEXT, least: int | None = None, **more: Any) -> Any:
    """A field of a dataclass that is an option: its default, or a function that gives one, and as in `Option`."""
    return Option(about, kind, least, **more).field(default)


def options_of(owner: type) -> dict[str, Option]:
    """The options of a dataclass by the names of their fields; fields that are none are left out."""
    found = {field.name: field.metadata.get("option") for field in dataclasses.fields(owner)}
    return {name: each for name, each in found.items() if each}


def said(owner: type, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a dataclass that a command line says something for."""
    found = {name: flags.get(name) for name in options_of(owner)}
    return {name: value for name, value in found.items() if value is not None and value is not False}


def flag_name(name: str) -> str:
    """The flag of a field: `--memory-limit`."""
    return "--" + name.replace("_", "-")
