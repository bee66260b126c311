"""The command `psctl`: looks at what jobs leave behind."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from psclient.psctl_checkpoint import checkpoint
from pswire.errors import PSError


@click.group(name="psctl", no_args_is_help=False)
def command() -> None:
    """Looks at checkpoints, without a cluster."""


command.add_command(checkpoint)


def main(args: Sequence[str] | None = None) -> None:
    """The console script; exits with 0, with 1 where faults or differences were found, with 2 after an error."""
    try:
        code = command.main(args, prog_name="psctl", standalone_mode=False)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "psctl"
        code = _fail(f"{error.format_message()} (see {where} --help)")
    except PSError as error:
        code = _fail(str(error))
    except OSError as error:
        code = _fail(f"{error.filename}: {error.strerror}" if error.strerror else str(error))
    except (click.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)


def _fail(text: str) -> int:
    click.echo(f"psctl: error: {' '.join(text.split())}", err=True)
    return 2


if __name__ == "__main__":
    main()
