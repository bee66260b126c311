"""W3C's traceparent: the text by which one process's span is known to another.

Source: https://www.w3.org/TR/trace-context
"""

from __future__ import annotations

import re

SAMPLED = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]")
"""A span that is exported. Of one that is not nobody is told."""


def well_formed(text: str) -> str:
    """Returns a peer's traceparent, "" for anything else: a trace is no reason to refuse a call."""
    return text if text and SAMPLED.fullmatch(text) else ""


def trace_of(text: str) -> str:
    """Returns the trace id of a traceparent, 32 hexadecimal digits."""
    return text[3:35]


def span_of(text: str) -> str:
    """Returns the span id of a traceparent, 16 hexadecimal digits."""
    return text[36:52]


def labels_of(text: str) -> dict[str, str]:
    """Returns a span as an exemplar's labels, by the names that Grafana expects."""
    return {"trace_id": trace_of(text), "span_id": span_of(text)}
