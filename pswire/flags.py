"""Options as flags of a command, and help with headings and examples; loaded by commands alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import click

from pswire.options import (
    GROUPS,
    LIST,
    METAVARS,
    OTHER,
    PATH,
    SWITCH,
    WHOLE,
    Option,
    defaults_of,
    flag_name,
    options_of,
)
from pswire.variables import RETIRED_COMMANDS, RETIRED_OPTIONS, renamed

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

ABOUT = (
    "A parameter server for PyTorch, JAX and NumPy, with the API of tf.distribute: servers hold the parameters and run "
    "the optimizer, workers compute the gradients."
)
"""The sentence that says what this project is: in `--help`, pyproject.toml, README.md, mkdocs.yml and docs/index.md."""

OPTIONS = "Options"
"""The heading of options that have none of `GROUPS`: those that only one command has."""

COMMANDS = "Commands"
"""The heading of commands without a section."""

WIDTH = 120
"""The greatest width of help, in characters, on terminals that have it."""


class Flag(click.Option):
    """A flag under a heading of help.

    Args:
        arguments, keys: as of `click.Option`.
        group: the heading, one of `GROUPS`.
    """

    def __init__(self, *arguments: Any, group: str = OPTIONS, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.group = group

    def get_help_extra(self, context: click.Context) -> Any:
        """Returns what help adds in brackets: not the range of a number, which an error names."""
        found = super().get_help_extra(context)
        found.pop("range", None)
        return found


class Command(click.Command):
    """A command with options under headings, and examples at the end of its help.

    Args:
        arguments, keys: as of `click.Command`.
        section: the heading under which the group of this command lists it.
        examples: pairs of what a command line does, and the line.
        last: the last paragraph of help.
    """

    def __init__(
        self,
        *arguments: Any,
        section: str = COMMANDS,
        examples: Sequence[tuple[str, str]] = (),
        last: str = "",
        **keys: Any,
    ) -> None:
        keys["context_settings"] = {"max_content_width": WIDTH, **keys.get("context_settings", {})}
        super().__init__(*arguments, **keys)
        self.section, self.examples, self.last = section, tuple(examples), last

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options of each group below its heading."""
        for heading, parameters in grouped(self, context):
            with formatter.section(heading):
                formatter.write_dl([found for each in parameters if (found := each.get_help_record(context))])

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples, which are not wrapped, so that they can be copied, and the last paragraph."""
        if self.examples:
            with formatter.section("Examples"):
                for about, line in self.examples:
                    formatter.write(f"  # {about}\n  {line}\n")
        if self.last:
            formatter.write_paragraph()
            formatter.write_text(self.last)


class CommandGroup(Command, click.Group):
    """A group of commands, each under the heading of its `section`.

    Args:
        sections: headings in the order of help; others come after them. All other arguments are those of `Command`.
    """

    def __init__(self, *arguments: Any, sections: Sequence[str] = (), **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.sections = tuple(sections)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes commands, then options."""
        self.format_commands(context, formatter)
        super().format_options(context, formatter)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the names of commands and their first sentences, below headings."""
        sections: dict[str, list[tuple[str, click.Command]]] = {heading: [] for heading in self.sections}
        for name in self.list_commands(context):
            command = self.get_command(context, name)
            if command is not None and not command.hidden:
                sections.setdefault(getattr(command, "section", COMMANDS), []).append((name, command))
        room = formatter.width - 6 - max((len(name) for found in sections.values() for name, _ in found), default=0)
        for heading, found in ((heading, found) for heading, found in sections.items() if found):
            with formatter.section(heading):
                formatter.write_dl([(name, command.get_short_help_str(room)) for name, command in found])


def grouped(command: click.Command, context: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
    """Yields each heading of a command's help with its options, in the order of help; hidden ones are left out."""
    shown = [each for each in command.get_params(context) if isinstance(each, click.Option) and not each.hidden]
    for heading in (OPTIONS, *GROUPS):
        found = [each for each in shown if _group(each) == heading]
        if found:
            yield heading, found


def _group(option: click.Option) -> str:
    return getattr(option, "group", OTHER if option.is_eager else OPTIONS)


def flag(
    name: str, option: Option, default: Any = None, *, unsaid: bool = False, environ: bool = False
) -> Callable[[Decorated], Decorated]:
    """Gives a command the flag of an option.

    Args:
        name: name of the command's parameter.
        option: the option that the flag sets.
        default: the value where the flag is not given.
        unsaid: True if the flag is None then, since something else may say it.
        environ: True if click reads the option's variable, but for switches; else the reader of the others does.
    """
    keys: dict[str, Any] = {"envvar": option.variable} if environ and option.variable else {}
    if option.kind == SWITCH:
        keys = {"is_flag": True}  # a variable is 1 or 0 alone, and click would take other words
    elif option.choices:
        keys["type"] = click.Choice(option.choices)
    elif option.kind == WHOLE:
        keys["type"] = click.IntRange(option.least, option.most)
    elif option.kind == PATH:
        keys["type"] = click.Path()
    if option.kind != SWITCH and not option.choices:
        keys["metavar"] = option.metavar or METAVARS[option.kind]
    keys |= {"default": None if unsaid else default, "help": option.help(default), "group": option.group}
    return click.option(flag_name(name), name, cls=Flag, **keys)


def flags(
    owner: type, *, unsaid: bool = False, environ: bool = False, without: Collection[str] = ()
) -> Callable[[Decorated], Decorated]:
    """Gives a command a flag for each option of a dataclass, but for lists.

    Args:
        owner: the dataclass of the options.
        unsaid, environ: as in `flag`.
        without: names of options that get none.
    """
    defaults = defaults_of(owner)

    def decorate(command: Decorated) -> Decorated:
        for name, option in reversed(options_of(owner).items()):
            if name not in without and option.kind != LIST:
                command = flag(name, option, defaults[name], unsaid=unsaid, environ=environ)(command)
        return command

    return decorate


def version() -> Callable[[Decorated], Decorated]:
    """Gives a command the flag `--version`."""
    return click.version_option(package_name="paramserver", message="%(prog)s %(version)s")


def explained(error: click.ClickException) -> str:
    """Returns the message of a command line's error; of a retired flag or command with the name that it has now."""
    if isinstance(error, click.NoSuchOption):
        name = error.option_name.lstrip("-").replace("-", "_").removeprefix("timeout_")
        if name in RETIRED_OPTIONS:
            now = renamed(name, RETIRED_OPTIONS).replace("called ", "called --").replace("_", "-")
            return f"No such option {error.option_name}: it {now}"
    if isinstance(error, click.exceptions.NoSuchCommand) and error.command_name in RETIRED_COMMANDS:
        return f"No such command {error.command_name}: it {renamed(error.command_name, RETIRED_COMMANDS)}"
    return error.format_message()
