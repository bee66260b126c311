"""Counts words per page of the site, and sentences that begin as a reader stumbles: `python tools/words.py [--limit]`.

With `--limit` it prints only what is over a limit, and exits with 1. Pages and tables made by programs do not count.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 38_000  # 36,000, and what local steps and quorums need
MOST_SENTENCES = 10
GENERATED = ("docs/reference.md", "docs/api-reference.md")

_TABLE = re.compile(r"<!-- table: \w+ -->.*?<!-- end -->", re.DOTALL)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_SEVEN = "Who|What|Whoever|Whose|Of|Nor|Nobody"
_BEGINNING = re.compile(
    rf"(?:^(?!#)[\s>*|-]*(?:\d+\. )?|[.!?:]\s+|\|\s*)[*\[]*({_SEVEN})\b(?=([^\n]{{0,60}}))",
    re.MULTILINE,
)


def pages() -> list[Path]:
    """README, CHANGELOG and the pages of the site's navigation, in its order."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    return [
        ROOT / "README.md",
        *(ROOT / "docs" / name for name in re.findall(r"[\w/-]+\.md", navigation)),
        ROOT / "CHANGELOG.md",
    ]


def sentences(text: str) -> list[str]:
    """Beginnings of the sentences outside of code and headings which begin with one of seven words."""
    return [match[1] + match[2] for match in _BEGINNING.finditer(_CODE.sub("`code`", text))]


def main(*flags: str) -> None:
    """Prints a line per page, then sums; exits with 1 where a limit is exceeded and `--limit` is given."""
    total, found = 0, list[str]()
    for path in pages():
        name, text = str(path.relative_to(ROOT)), _TABLE.sub("", path.read_text(encoding="utf-8"))
        words = len(text.split())
        if flags != ("--limit",):
            print(f"{words:6,}  {name}{' (generated)' if name in GENERATED else ''}")
        if name not in GENERATED:
            total += words
            found += [f"{name}: {begin}" for begin in sentences(text)]
    over = total > MOST_WORDS or len(found) > MOST_SENTENCES
    if over or flags != ("--limit",):
        print(f"{total:6,}  words together, of at most {MOST_WORDS:,}", *found, sep="\n")
        print(f"{len(found)} sentences begin with one of {_SEVEN}; at most {MOST_SENTENCES}")
    if over and flags:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
