"""Text and tables as HTML. All that comes from elsewhere, such as names of variables, goes through `escaped`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NewType

Html = NewType("Html", str)
"""Text that is HTML already."""

GOOD = frozenset(("up", "open", "saved", "left", "over"))
"""States in which nothing is wrong."""


def escaped(text: object) -> Html:
    """A text as HTML; what is HTML already is not for this function."""
    return Html(escape("".join(each if each.isprintable() else " " for each in str(text))))


def paragraph(text: str) -> Html:
    """A paragraph of text."""
    return Html(f"<p>{escaped(text)}</p>")


def items(texts: Iterable[str]) -> Html:
    """A list of texts."""
    return Html(f"<ul>{''.join(f'<li>{escaped(text)}</li>' for text in texts)}</ul>")


def table(caption: str, headings: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Html:
    """A table whose first column names its rows; columns that are empty in all of them are left out.

    Args:
        caption: a sentence about the table.
        headings: of the columns, in order.
        rows: of each row the cells by heading: texts, or `Html` in the columns of `MARKED`.
    """
    found = list(rows)
    shown = [name for name in headings if any(row.get(name) for row in found)]
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in shown)
    body = "".join(f"<tr>{''.join(_cell(name, row, name == shown[0]) for name in shown)}</tr>" for row in found)
    return Html(
        f"<table><caption><span>{escaped(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


WORDS = frozenset(("said", "why", "until"))
"""Headings of columns of sentences, which may take several lines."""

MARKED = frozenset(("shares", "life"))
"""Headings of columns whose cells are HTML."""


def _cell(name: str, row: Mapping[str, str], heads: bool) -> str:
    text = row.get(name, "")
    inner = text if name in MARKED else escaped(text)
    if heads:
        return f'<th scope="row">{inner}</th>'
    if name == "state" and text:
        return f'<td class="{"good" if text in GOOD else "bad"}">{inner}</td>'
    return f'<td class="words">{inner}</td>' if name in WORDS else f"<td>{inner}</td>"
