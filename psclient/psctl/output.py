"""Output of `psctl`: tables for people, JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pswire.security.given import printable
from pswire.telemetry.views.columns import cells_of, columns_of

WIDTH = 200
"""Of tables in characters, where they go into a file or a pipe."""


def table(headings: Iterable[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table that shows all of each cell, on several lines where it has to; short rows are filled up."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*map(_plain, row))
    return made


def table_of(kind: type, rows: Iterable[Any]) -> Table:
    """A table of rows that are of one dataclass, whose fields say which columns it has."""
    return table(columns_of(kind), (tuple(cells_of(row).values()) for row in rows))


def _shown(each: RenderableType) -> RenderableType:
    return _plain(each) if isinstance(each, str | Text) else each


def _plain(cell: str | Text) -> str | Text:
    """Returns a cell with what steers a terminal written out, before its width is measured."""
    if isinstance(cell, str):
        return printable(cell)
    return cell if printable(cell.plain) == cell.plain else Text(printable(cell.plain), cell.style)


class _Terminal(Console):
    """Writes out whatever steers a terminal and is no style of ours, wherever it stands."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def terminal() -> Console:
    """Returns where we print: as wide as the terminal, or `WIDTH` characters where there is none."""
    console = _Terminal(markup=False, highlight=False)
    console.width = console.width if console.is_terminal else WIDTH
    return console


def breadth(table: Table) -> int:
    """Returns how many characters a table takes with each cell on one line."""
    return Console(width=10_000).measure(table).maximum


def show(*shown: RenderableType) -> None:
    """Prints texts and tables, as wide as the terminal; texts are not wrapped."""
    console = terminal()
    for each in map(_shown, shown):
        console.print(each, soft_wrap=isinstance(each, str | Text))


def say(said: Mapping[str, object]) -> None:
    """Prints JSON, in which keys are sorted; dataclasses are objects with the keys of their fields."""
    click.echo(json.dumps(said, indent=1, sort_keys=True, default=vars))


def plain(value: object) -> Any:
    """A number, or lists of them, as JSON knows them: what it does not know is a text there, such as "nan"."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
