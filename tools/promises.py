"""Keeps the list of what the tests promise: tests/promises/FOLDER.tsv, a line for each, with the tests that hold it.

    python tools/promises.py check                    each promise names tests that exist, each test holds a promise
    python tools/promises.py update                   writes the lists anew after tests were added, moved or merged
    python tools/promises.py held BY TEST [TEST ...]  the promises of TEST ... are held by the test BY from now on

A promise is the first sentence of a test's docstring, or the words of its name. A test is `folder/file.py::name`.
`update` finds a test that moved by its promise, adds those of new tests, and takes the words of the tests that exist;
it fails where a promise has lost its test: say which test holds it now (`held`), or take its line out, and say why in
the commit.
"""

from __future__ import annotations

import ast
import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "tests" / "promises"


def tests(pattern: str) -> dict[str, str]:
    """Returns the promise of each test in the files of a pattern, by the test's id without parameters."""
    found = {}
    for path in sorted((ROOT / "tests").glob(pattern)):
        for names, node in _functions(ast.parse(path.read_text()), ()):
            found["::".join([str(path.relative_to(ROOT / "tests")), *names])] = _promise(node)
    return found


def _functions(tree: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _functions(node, (*names, node.name))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield (*names, node.name), node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _functions(node, names)


def _promise(node: ast.FunctionDef) -> str:
    words = node.name.removeprefix("test_").replace("_", " ")
    said = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return " ".join(f"{words}: {said}".split()) if said else words


Rows = list[tuple[str, list[str]]]


def read() -> dict[str, Rows]:
    """Returns promises with their tests, by folder."""
    found: dict[str, Rows] = {}
    for path in sorted(LISTS.glob("*.tsv")):
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        found[path.stem] = [(promise, held.split()) for promise, held in lines]
    return found


def write(lists: dict[str, Rows]) -> None:
    LISTS.mkdir(exist_ok=True)
    for folder, rows in lists.items():
        path = LISTS / f"{folder}.tsv"
        path.write_text("".join(f"{promise}\t{' '.join(held)}\n" for promise, held in sorted(rows)))


@contextmanager
def locked() -> Iterator[None]:
    LISTS.mkdir(exist_ok=True)
    with open(LISTS) if LISTS.is_file() else open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def faults(lists: dict[str, Rows], exist: dict[str, str]) -> list[str]:
    """Returns a line for each promise that no test holds, and each test that holds none."""
    named = {test for rows in lists.values() for _, held in rows for test in held}
    lost = [
        f"{folder}: no test holds this: {promise} (was {', '.join(held)})"
        for folder, rows in lists.items()
        for promise, held in rows
        if not held or any(test not in exist for test in held)
    ]
    return lost + [f"{test} holds no promise that is listed" for test in exist if test not in named]


def update(lists: dict[str, Rows], exist: dict[str, str]) -> dict[str, Rows]:
    """Returns the lists after tests were moved, renamed words and all, and added."""
    by_promise: dict[str, list[str]] = {}
    for test, promise in exist.items():
        by_promise.setdefault(promise, []).append(test)
    found: dict[str, Rows] = {}
    named = set()
    for folder, rows in lists.items():
        for promise, held in rows:
            still = [test for test in held if test in exist] or by_promise.get(promise, [])[:1]
            if len(still) == 1 == len(held) and exist[still[0]].partition(":")[0] == promise.partition(":")[0]:
                promise = exist[still[0]]  # the test's own promise, perhaps in better words
            named.update(still)
            found.setdefault(folder, []).append((promise, still or held))
    for test, promise in exist.items():
        if test not in named:
            folder = test.partition("/")[0] if "/" in test else "top"
            found.setdefault(folder, []).append((promise, [test]))
    return found


def held(lists: dict[str, Rows], by: str, others: list[str]) -> dict[str, Rows]:
    """Returns the lists with `by` in the place of `others`."""

    def new(tests: list[str]) -> list[str]:
        return list(dict.fromkeys(by if test in others else test for test in tests))

    return {folder: [(promise, new(tests)) for promise, tests in rows] for folder, rows in lists.items()}


def main(words: list[str]) -> int:
    verb, *rest = words or ["help"]
    one = verb == "held" and rest
    exist = tests(rest[0].removeprefix("tests/").partition("::")[0] if one else "**/test_*.py")
    with locked():
        lists = read()
        if verb == "update":
            lists = update(lists, exist)
            write(lists)
        elif verb == "held" and len(rest) > 1:
            by, *others = (name.removeprefix("tests/") for name in rest)
            named = {test for rows in lists.values() for _, tests_ in rows for test in tests_}
            unknown = [name for name in others if name not in named] + [by] * (by not in exist)
            if unknown:
                print(f"no such test: {', '.join(unknown)}", file=sys.stderr)
                return 2
            write(held(lists, by, others))
            return 0
        elif verb != "check":
            print(__doc__, file=sys.stderr)
            return 2
    wrong = faults(lists, exist)
    print("\n".join([*wrong, f"{sum(map(len, lists.values()))} promises, {len(exist)} tests"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
