"""Options as flags of a command; loaded by commands alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import click

from pswire import retired
from pswire.options import LIST, SWITCH, WHOLE, Option, flag_name, options_of

Command = TypeVar("Command", bound=Callable[..., Any])


def flag(
    name: str, option: Option, default: Any = None, *, unsaid: bool = False, environ: bool = False
) -> Callable[[Command], Command]:
    """Gives a command the flag of an option.

    Args:
        name: name of the command's parameter.
        option: the option that the flag sets.
        default: the value where the flag is not given.
        unsaid: True if the flag is None then, since something else may say it.
        environ: True if click reads the option's variable; else the reader of the others does.
    """
    keys: dict[str, Any] = {"envvar": option.variable} if environ and option.variable else {}
    if option.kind == SWITCH:
        keys["is_flag"] = True
    elif option.choices:
        keys["type"] = click.Choice(option.choices)
    elif option.kind == WHOLE:
        keys["type"] = click.IntRange(option.least, option.most)
    keys |= {"default": None if unsaid else default, "help": option.help(default)}
    return click.option(flag_name(name), name, **keys)


def flags(
    owner: type, *, unsaid: bool = False, environ: bool = False, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Gives a command a flag for each option of a dataclass, but for lists.

    Args:
        owner: the dataclass of the options.
        unsaid, environ: as in `flag`.
        without: names of options that get none.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(owner)}

    def decorate(command: Command) -> Command:
        for name, option in reversed(options_of(owner).items()):
            if name not in without and option.kind != LIST:
                default = None if defaults[name] is dataclasses.MISSING else defaults[name]
                command = flag(name, option, default, unsaid=unsaid, environ=environ)(command)
        return command

    return decorate


def explained(error: click.ClickException) -> str:
    """Returns the message of a command line's error; of a retired flag or command with the name that it has now."""
    if isinstance(error, click.NoSuchOption):
        name = error.option_name.lstrip("-").replace("-", "_").removeprefix("timeout_")
        if name in retired.OPTIONS:
            now = retired.renamed(name, retired.OPTIONS).replace("called ", "called --").replace("_", "-")
            return f"No such option {error.option_name}: it {now}"
    if isinstance(error, click.exceptions.NoSuchCommand) and error.command_name in retired.COMMANDS:
        return f"No such command {error.command_name}: it {retired.renamed(error.command_name, retired.COMMANDS)}"
    return error.format_message()
