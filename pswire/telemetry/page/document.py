"""The page as a whole: one file with its style and its script, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources

from pswire.telemetry.page.markup import Html, escaped
from pswire.telemetry.page.sections import SECTIONS

RELOAD_SECONDS = 5
"""Seconds after which a browser without JavaScript loads the page again."""


def _read(name: str) -> str:
    return resources.files("pswire.telemetry.page").joinpath(name).read_text(encoding="utf-8")


STYLE, SCRIPT = _read("page.css"), _read("page.js")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(STYLE)}",
        f"script-src {_hash(SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The content security policy: our style and our script by their hashes, and nothing else."""

KIND = "text/html; charset=utf-8"


def document(task: str, parts: Mapping[str, Html]) -> bytes:
    """Returns the page.

    Args:
        task: the task whose page it is.
        parts: its parts, as `sections.render` gives them.
    """
    body = "".join(_place(name, title, parts.get(name, Html(""))) for name, (title, _) in SECTIONS.items())
    refresh = f'<noscript><meta http-equiv="refresh" content="{RELOAD_SECONDS}"></noscript>'
    return _whole(
        f"paramserver {task}",
        f"{refresh}<style>{STYLE}</style>",
        f'<h1>paramserver <small>{escaped(task)}</small></h1><p id="live" role="status">'
        f"<noscript>This page is loaded again every {RELOAD_SECONDS} seconds.</noscript></p>"
        f"<main>{body}</main><script>{SCRIPT}</script>",
    )


def refusal(text: str) -> bytes:
    """Returns a page that says why nothing else is shown."""
    return _whole("paramserver", f"<style>{STYLE}</style>", f"<h1>paramserver</h1><main><p>{escaped(text)}</p></main>")


def _place(name: str, title: str, part: Html) -> str:
    if not title:
        return f'<div id="{name}" class="part">{part}</div>'
    place = f'<div id="{name}" class="part" role="region" aria-labelledby="{name}-title" tabindex="0">{part}</div>'
    return f'<section><h2 id="{name}-title">{escaped(title)}</h2>{place}</section>'


def _whole(title: str, head: str, body: str) -> bytes:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,">{head}</head><body>{body}</body></html>'
    ).encode()
