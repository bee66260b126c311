"""A hook of MkDocs: fences such as `python run`, which check_docs runs, are Python to who reads them."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leaves of each fence's words the first."""
    return re.sub(r"^```(\w+) \w+$", r"```\1", markdown, flags=re.MULTILINE)
