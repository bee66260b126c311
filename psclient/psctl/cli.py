"""The command `psctl`: looks at jobs while they run, and at what they leave behind."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import click

from psclient.psctl.local import clusters, with_values
from psclient.psctl.output import say
from psclient.psctl.settings import OPTIONS, SECTIONS, CommandSettings
from pswire.errors import ConfigError, PSError
from pswire.flags import ABOUT, CommandGroup, explained, version
from pswire.process import INTERRUPTED, ends_with, take_interrupts
from pswire.security.given import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = {
    "certs": "certs:certs",
    "checkpoint": "checkpoint:checkpoint",
    "dashboard": "dashboard:dashboard",
    "doctor": "doctor:doctor",
    "drain": "job:drain",
    "events": "activity:events",
    "health": "health:health",
    "job": "job:job",
    "move": "job:move",
    "read": "variables:read",
    "rebalance": "job:rebalance",
    "status": "status:status",
    "top": "activity:top",
    "vars": "variables:variables",
}
"""The commands, and where they are in this package: only the module of the command that runs is imported."""

GROUP = "paramserver.psctl"
"""The entry points by which other packages give `psctl` commands: it imports them when they are called."""


class Commands(CommandGroup):
    """The commands of this package, and those that others bring."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Returns the names of all of them."""
        return sorted({*COMMANDS, *(found.name for found in _entry_points())})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Returns a command by its name; None where there is none. One of this package wins."""
        if name in COMMANDS:
            module, _, attribute = COMMANDS[name].partition(":")
            command: click.Command = getattr(import_module(f"psclient.psctl.{module}"), attribute)
            return command
        found = next((found for found in _entry_points() if found.name == name), None)
        return None if found is None else _brought(found)


def _entry_points() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and no command of this package needs it

    return entry_points(group=GROUP)


def _brought(found: EntryPoint) -> click.Command:
    """Returns a command of another package; where it cannot be imported one that says so."""
    try:
        command: click.Command = found.load()
    except ImportError as error:
        why = f"psctl {found.name} cannot be loaded ({error}); install what it needs, or uninstall {found.module}"

        def refuse() -> None:
            raise ConfigError(why)

        return click.Command(found.name, callback=refuse, help=why)
    return command


EXAMPLES = (
    ("Show servers, workers and problems of a job", "psctl status --address 10.0.0.7:2222,10.0.0.8:2222"),
    ("Watch the job that psworker --standalone runs on this machine", "psctl --local top"),
)


@click.group(
    name="psctl",
    cls=Commands,
    sections=SECTIONS,
    examples=EXAMPLES,
    last=ABOUT,
    no_args_is_help=False,
    invoke_without_command=True,
    params=[*OPTIONS],
)
@version()
@click.pass_context
def command(context: click.Context) -> int:
    """Inspect running jobs and checkpoints, and move servers.

    Inspection is read-only and does not slow training. Options may stand before or after the command. With --local and
    no command, list the clusters that run on this machine.

    Exit codes: 0, 1 if a fault or difference was found, 2 after an error.
    """
    take_interrupts()  # the subcommand has been imported
    told = context.ensure_object(CommandSettings)
    if context.invoked_subcommand is None:
        if told.local is None:
            context.fail("Missing command.")
        return told.tell(*clusters())
    return 0


def main(args: Sequence[str] | None = None) -> None:
    """The console script; exits with 0, with 1 where faults or differences were found, with 2 after an error."""
    settings = CommandSettings(json="--json" in (sys.argv[1:] if args is None else args))
    try:
        given = with_values(sys.argv[1:] if args is None else args)
        code = command.main(given, prog_name="psctl", standalone_mode=False, obj=settings)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "psctl"
        code = _fail(settings, "UsageError", f"{explained(error)} (see {where} --help)")
    except PSError as error:
        code = _fail(settings, type(error).__name__, str(error), error.task)
    except OSError as error:
        words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        code = _fail(settings, type(error).__name__, words)
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as error:  # a bug of ours is one line, too, and leaves no half of a JSON document behind
        code = _fail(settings, type(error).__name__, f"internal error: {error!r}; please report it")
    sys.exit(ends_with(code))


def _fail(settings: CommandSettings, kind: str, text: str, task: str = "") -> int:
    message = printable(" ".join(text.split()))
    if settings.json:
        say({"error": {"type": kind, "message": message, "task": task}})
    else:
        click.echo(f"psctl: error: {message}", err=True)
    return 2
