"""Runs a command and says what it cost in processor time, by folder of tests.

    python tools/cost.py make test                    a table at the end
    python tools/cost.py --limit 1050 make test       exit status 1 where it cost more
    python tools/cost.py --write make test            the table goes to tests/README.md

A cost is processor time, user and system, of all processes that the command started, in seconds of a machine on which
`reference` takes REFERENCE: other work beside does not change it. Tests write what each cost to the file that
PS_TEST_COSTS names (`tests/conftest.py`); the rest of a folder's row is not known, and stands in a row of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "README.md"

REFERENCE = 0.48
"""Seconds that `reference` takes on the machine whose seconds are counted."""

DEAR = 20.0
"""Seconds that one test may cost."""

PR_SET_CHILD_SUBREAPER = 36


def reference() -> float:
    """Returns the processor seconds of a fixed piece of work, the best of five."""

    def work() -> None:
        table, text = {}, b""
        for number in range(400_000):
            table[number % 4096] = table.get(number % 4096, 0) + number
        for _ in range(40):
            text = json.dumps(table).encode()
            json.loads(text)
        for _ in range(200):
            hashlib.sha256(text).digest()
        array = np.arange(200_000, dtype="float32")
        for _ in range(300):
            np.sqrt(array * 1.5 + 2.0).sum()

    def once() -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    return min(once() for _ in range(5))


def run(command: list[str], costs: Path) -> tuple[int, float]:
    """Runs a command; returns its exit status, and the processor seconds of all processes that it started."""
    # Processes whose parents have ended become children of this one, so that none is missed.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, env={**os.environ, "PS_TEST_COSTS": str(costs)})
    spent, code = 0.0, 1
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return code, spent
        spent += usage.ru_utime + usage.ru_stime
        if pid == process.pid:
            code = os.waitstatus_to_exitcode(status)


def rows(total: float, costs: Path, scale: float) -> tuple[list[str], list[str]]:
    """Returns the rows of a table in Markdown, and a line for each test that costs too much."""
    seconds, items, dear = Counter[str](), Counter[str](), []
    for line in costs.read_text().splitlines() if costs.exists() else []:
        spent, _, test = line.partition("\t")
        folder = (*test.partition("::")[0].split("/")[1:-1], "top")[0]
        seconds[folder] += float(spent) * scale
        items[folder] += 1
        if float(spent) * scale > DEAR:
            dear.append(f"{test}: {float(spent) * scale:.1f} s, {DEAR:.0f} at most")
    rest = total - sum(seconds.values())
    table = [f"| {folder} | {items[folder]:,} | {spent:.0f} |" for folder, spent in seconds.most_common()]
    return [
        "| folder | tests | processor seconds |",
        "| --- | ---: | ---: |",
        *table,
        f"| start, collection, checks | | {rest:.0f} |",
        f"| together | {sum(items.values()):,} | {total:.0f} |",
    ], dear


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=float("inf"), help="processor seconds that it may cost")
    parser.add_argument("--write", action="store_true", help="write the table to tests/README.md")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    before = reference()
    with tempfile.TemporaryDirectory() as folder:
        code, spent = run(options.command, Path(folder, "costs"))
        scale = 2 * REFERENCE / (before + reference())
        table, dear = rows(spent * scale, Path(folder, "costs"), scale)
    print(
        f"\n{' '.join(options.command)}: exit status {code}; 1 s here is {scale:.2f} s there", *table, *dear, sep="\n"
    )
    if options.write:
        text = re.sub(
            r"(<!-- cost -->\n).*?(<!-- /cost -->)", rf"\1{chr(10).join(table)}\n\2", PAGE.read_text(), flags=re.S
        )
        PAGE.write_text(text)
    if spent * scale > options.limit:
        print(f"it cost {spent * scale:.0f} processor seconds, and {options.limit:.0f} is the limit", file=sys.stderr)
    return code or int(spent * scale > options.limit or bool(dear))


if __name__ == "__main__":
    sys.exit(main())
