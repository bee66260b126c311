"""Measures how the code hangs together: `python tools/measure_house.py [--json] [--names]`.

- code lines of each package: no docstrings, comments, blank lines and imports; all lines; lines of tests
- a push that completes a round, in the server's core: Python calls, functions, files, and changes of file between calls
- a step of four variables with Adam, in the worker, from the user's line until its push is sent: the same numbers; with
  `psclient.optimizers`, and with `psclient.torch` where torch is installed
- files of server and wire that mention a mode in an identifier or a text, outside of the mode's own package
- fields of the classes that stand for a round
- names that several classes have (--names lists them)

The counts do not depend on the machine, so two commits are compared by running it at both.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PACKAGES = ("psclient", "psserver", "pswire")
OURS = tuple(f"{ROOT / each}/" for each in PACKAGES)
STEPS = 8
"""So many steps come before the one that is measured."""

T = TypeVar("T")

MODES = {
    "asynchronous": r"(^|_)async$|asynchronous|^Async$|(^|_)alone(_|$)|[Ss]trand|(^|_)own_round|SessionSequence",
    "replication": r"replicat|replicas_of|[Ss]tandby|(^|_)copied$|[Hh]andover|(^|_)recover",
    "bounded staleness": r"[Bb]ounded(?!Semaphore)|[Ss]taleness|(^|_)[Cc]locks$",
    "host sums": r"host_sum|local_reduction|(^|_)summed$|shares_of|check_sum|by_host",
    "backup workers": r"backup",
}
"""What an identifier looks like that belongs to a mode."""

OWN = {
    "asynchronous": r"rounds/sequences",
    "replication": r"services/standbys|rounds/(backlog|digests)|checkpoints/handover|servers/|network/joining",
    "bounded staleness": r"rounds/clocks",
    "host sums": r"rounds/sums",
    "backup workers": r"plans/policy",
}
"""The modes' own modules."""

ROUND_CLASSES = ("Contribution", "PendingRound", "ReadyRound", "Runner", "Execution", "Record", "RoundReply")


def files(*packages: str) -> list[Path]:
    """The modules of some packages, without generated ones."""
    return sorted(p for each in packages for p in (ROOT / each).rglob("*.py") if "/pb/" not in str(p))


def code_lines(path: Path) -> int:
    """Lines with code other than docstrings and imports."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node):
            skipped |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    held: set[int] = set()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            held |= {*range(token.start[0], token.end[0] + 1)}
    return len(held - skipped)


def _is_text(node: ast.AST) -> bool:
    """Returns True for a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def identifiers(path: Path) -> Iterator[str]:
    """Names of all kinds in a module, its own, and the words of its short texts."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            yield str(node.arg)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def mentions() -> dict[str, int]:
    """Files of server and wire, by mode, that name the mode outside of its own modules."""
    found: dict[str, int] = {}
    names = {path: set(identifiers(path)) for path in files("psserver", "pswire")}
    for mode, looks in MODES.items():
        here = [p for p, words in names.items() if any(re.search(looks, word) for word in words)]
        found[mode] = len([p for p in here if not re.search(OWN[mode], str(p))])
    return found


def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    """All classes by name, with their modules."""
    found: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    for path in files(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append((str(path.relative_to(ROOT)), node))
    return found


def fields(node: ast.ClassDef) -> int:
    """Fields that a class declares, or sets in its constructor."""
    declared = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for n in ast.walk(method):
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and isinstance(n.value, ast.Name):
                    declared |= {n.attr} if n.value.id == "self" else set()
    return len(declared)


def calls(work: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """Returns what a function returns, and what it calls of ours in this thread."""
    codes: list[CodeType] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            codes.append(frame.f_code)

    sys.setprofile(watch)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    paths = [code.co_filename for code in codes]
    changes = sum(a != b for a, b in pairwise(paths))
    found = {"calls": len(codes), "functions": len({*codes}), "files": len({*paths}), "changes of file": changes}
    return result, found


def push() -> dict[str, int]:
    """What the core calls for the second of two pushes, which completes a round that adds to a variable."""
    import numpy as np

    from tests.kit import rig

    with rig.serving("core", 1, "/nowhere") as servers:
        job = rig.Job(servers)
        one, two = job.join(*rig.WORKERS[:2])
        plan = job.adder(one, np.zeros(256, "float32"))[1]
        compiler = rig.compiler_of(servers.cores[0])
        for number in range(305):
            if number == 300:
                compiler.wait()  # as in a job: the kernels are there
            rig.together(*(worker.push(plan, [np.ones(256, "float32")]) for worker in (one, two)))
            one.round, two.round = one.round + 1, two.round + 1
        first = one.push(plan, [np.ones(256, "float32")])
        last, found = calls(lambda: two.push(plan, [np.ones(256, "float32")]))
        rig.together(first, last)
    return found


def step() -> dict[str, int]:
    """What a worker calls for a step of four variables with Adam, which computes nothing."""
    import numpy as np

    import psclient as ps

    gradient = np.ones(256, "float32")
    with ps.ParameterServerStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            variables = [ps.Variable(np.zeros(256, "float32")) for _ in range(4)]
            optimizer = ps.optimizers.Adam(0.01)
        pairs = [(gradient, v) for v in variables]

        def run() -> None:
            strategy.run(lambda: optimizer.apply_gradients(pairs))

        for _ in range(STEPS):
            run()
            variables[0].numpy()
        return calls(run)[1]


def torch_step() -> dict[str, int]:
    """What `psclient.torch.Optimizer.step` calls for such a step; nothing without torch."""
    try:
        import torch
    except ImportError:
        return {}
    import psclient as ps
    import psclient.torch as pst

    with ps.ParameterServerStrategy(["cpu:0"]) as strategy:
        module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(256)) for _ in range(4)])
        optimizer = pst.Optimizer(module, torch.optim.Adam, lr=0.01, strategy=strategy)
        found = []
        for _ in range(2 * STEPS):
            for each in module:
                each.grad = torch.ones(256)
            found.append(calls(optimizer.step)[1])
        # This thread receives the answer itself, if no other one has by then: that is some calls more.
        return min(found[STEPS:], key=lambda each: each["calls"])


def measure() -> dict[str, Any]:
    """All measures, by their names."""
    known = classes()
    twice = sorted(name for name, places in known.items() if len(places) > 1 and not name.startswith("_"))
    return {
        "code lines": {each: sum(map(code_lines, files(each))) for each in PACKAGES},
        "all lines": {each: sum(p.read_text(encoding="utf-8").count("\n") for p in files(each)) for each in PACKAGES},
        "core, state, plans and rounds": sum(
            map(code_lines, files("psserver/core", "psserver/state", "psserver/plans", "psserver/rounds"))
        ),
        "lines of tests": sum(p.read_text(encoding="utf-8").count("\n") for p in files("tests")),
        "a push that completes a round": push(),
        "a step": step(),
        "a step with torch": torch_step(),
        "files that mention": mentions(),
        "fields": {name: max(fields(n) for _, n in known[name]) for name in ROUND_CLASSES if name in known},
        "class names twice": len(twice),
        "names": {name: [place for place, _ in known[name]] for name in twice},
    }


def main(*flags: str) -> None:
    """Prints the measures."""
    found = measure()
    if "--names" not in flags:
        del found["names"]
    if "--json" in flags:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        shown = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main(*sys.argv[1:])
