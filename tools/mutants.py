"""Mutation testing: changes one line of the source at a time and looks whether a test notices.

    python tools/mutants.py draw --seed 39 --count 300 >tests/mutants/first.jsonl
    python tools/mutants.py reach tests/mutants/first.jsonl --reached reached.jsonl -- -n 4 -m 'not soak and not dist'
    python tools/mutants.py kill tests/mutants/first.jsonl --reached reached.jsonl --results results.jsonl

`draw` chooses mutants by a seed, as many from each area of AREAS. `reach` runs the tests once on a copy of the working
tree whose mutated lines record the tests that execute them, child processes included. `kill` applies one mutant after
the other to a copy and runs the tests that execute its line, the cheapest first, until the first failure.

A mutant is found again after a change of the file by its path, its function and the text of its line; `kill` reports
a mutant whose line is gone as `stale`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

AREAS = {
    "state machines": ["psserver/core", "psserver/state", "psserver/values", "psserver/plans", "psclient/_src/chief",
                       "psclient/_src/rounds"],
    "update rules": ["psserver/programs", "psserver/execution", "psclient/optimizers", "psclient/_src/tracing",
                     "psserver/tables"],
    "wire": ["pswire/encoding", "pswire/network", "pswire/model", "psserver/network", "psclient/_src/network"],
    "checkpoints": ["pswire/checkpoint", "psserver/checkpoints", "psclient/train"],
    "front ends": ["psclient/_src/distribute", "psclient/_src/data", "psclient/_src/variables", "psclient/torch",
                   "psclient/jax", "psclient/_src/strategies"],
}  # fmt: skip
"""Folders whose lines are mutated, by what they are for."""

COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
           ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}
COMPILED = {"psserver/tables/index_functions.py", "psserver/tables/first_values.py", "psserver/tables/marks.py",
            "psserver/programs/kernels/functions.py", "psserver/programs/kernels/intrinsics.py",
            "psserver/programs/kernels/row_groups.py", "psserver/programs/kernels/closed_forms.py",
            "pswire/model/first_values.py", "pswire/model/hashing.py"}  # fmt: skip
"""Files whose functions a compiler reads: a recording statement would not compile there."""
WORDS = {"log", "logger", "logging", "warnings", "click", "console"}
"""Callers of texts for people: a changed text is no changed behaviour."""

STAGE = 4.0
"""Seconds of tests that are tried first."""

PROBE = """\
import os

_FILE = os.open(os.environ.get("MUTANTS_REACHED", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
_SEEN = set()


def at(mutant):
    key = mutant, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if key not in _SEEN:
        _SEEN.add(key)
        os.write(_FILE, f"{mutant}\\t{key[1]}\\n".encode())
"""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one line.

    Attributes:
        area: What the mutated code is for, a key of AREAS.
        path: The file, relative to the root of the repository.
        function: The qualified name of the function that has the line.
        line: The number of the line when the mutant was drawn.
        before: The line as it stands.
        after: The line as the mutant has it; lines after it that belong to the same expression are not touched.
    """

    area: str
    path: str
    function: str
    line: int
    before: str
    after: str

    def find(self, lines: list[str]) -> int | None:
        """Returns the index of its line in `lines`, the nearest where it stands more than once, or None."""
        found = [number for number, line in enumerate(lines) if line == self.before]
        return min(found, key=lambda number: abs(number + 1 - self.line), default=None)

    def apply(self, root: Path) -> bool:
        """Changes the file below `root`, if its line is there."""
        file = root / self.path
        lines = file.read_text().split("\n") if file.exists() else []
        index = self.find(lines)
        if index is None:
            return False
        lines[index] = self.after
        file.write_text("\n".join(lines))
        return True


def read(path: Path) -> list[Mutant]:
    return [Mutant(**json.loads(line)) for line in path.read_text().splitlines()]


class Mutator(ast.NodeVisitor):
    """Finds what could be changed in the functions of one file."""

    def __init__(self, area: str, path: str, source: str) -> None:
        self.area, self.path, self.lines = area, path, source.split("\n")
        self.names: list[str] = []
        self.found: list[Mutant] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.visit(child)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if any("overload" in ast.unparse(each) for each in node.decorator_list):
            return
        self.names.append(node.name)
        for child in node.body:
            self.visit(child)
        self.names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).rpartition(".")[2] in WORDS:
            return
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leaves the texts of errors as they are."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leaves what is claimed for type checkers as it is."""

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._between(node, node.left, node.comparators[0], COMPARE.get(type(node.ops[0])))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between(node, node.left, node.right, ARITHMETIC.get(type(node.op)))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between(node, node.values[0], node.values[1], "or" if isinstance(node.op, ast.And) else "and")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, ast.unparse(node.operand) if not isinstance(node.operand, ast.BoolOp) else None)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        self._replace(node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
        self.generic_visit(node)

    def _replace(self, node: ast.expr | ast.stmt, by: str | None) -> None:
        if by is None or not self.names or node.lineno != node.end_lineno or node.end_col_offset is None:
            return
        self._add(node.lineno, node.col_offset, node.end_col_offset, by)

    def _between(self, node: ast.expr, left: ast.expr, right: ast.expr, by: str | None) -> None:
        if by is None or not self.names or left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        text = self.lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        if text.strip(" ()") != text.strip():
            return  # parentheses of the operands: the text between them is no operator alone
        self._add(right.lineno, left.end_col_offset, right.col_offset, f" {by} ")

    def _add(self, number: int, begin: int, end: int, by: str) -> None:
        before = self.lines[number - 1]
        line = before.encode()
        after = (line[:begin] + by.encode() + line[end:]).decode()
        changed = "\n".join([*self.lines[: number - 1], after, *self.lines[number:]])
        try:
            compile(changed, self.path, "exec")
        except SyntaxError:
            return
        self.found.append(Mutant(self.area, self.path, ".".join(self.names), number, before, after))


def draw(seed: str, count: int) -> Iterator[Mutant]:
    """Draws `count` mutants, the same number from each area, at most one of a line."""
    chance = random.Random(seed)
    for number, (area, folders) in enumerate(AREAS.items()):
        files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
        files = [path for path in files if str(path.relative_to(ROOT)) not in COMPILED]
        wanted = (count + number) // len(AREAS)
        drawn: dict[tuple[Path, int], Mutant] = {}
        weights = [path.read_text().count("\n") for path in files]
        while len(drawn) < wanted:
            path = chance.choices(files, weights)[0]
            mutator = Mutator(area, str(path.relative_to(ROOT)), path.read_text())
            mutator.visit(ast.parse(path.read_text()))
            if mutator.found:
                mutant = chance.choice(mutator.found)
                drawn.setdefault((path, mutant.line), mutant)
        yield from drawn.values()


def copy_tree(into: Path) -> None:
    """Copies the files that git tracks, and those that it would."""
    shutil.rmtree(into, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    subprocess.run(["git", "init", "-q"], cwd=into, check=True)  # tests ask git what is there
    subprocess.run(["git", "add", "-A"], cwd=into, check=True)


def probe(mutants: list[Mutant], root: Path) -> None:
    """Inserts a recording statement before the statement of each mutant."""
    (root / "_mutants_probe.py").write_text(PROBE)
    by_path = defaultdict(list)
    for number, mutant in enumerate(mutants):
        by_path[mutant.path].append((number, mutant))
    for path, those in by_path.items():
        file = root / path
        if not file.exists():
            continue
        lines = file.read_text().split("\n")
        statements = sorted(
            (node.lineno, node.end_lineno or node.lineno, node.col_offset)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.stmt)
        )
        places: dict[int, tuple[int, list[int]]] = {}
        for number, mutant in those:
            index = mutant.find(lines)
            if index is None:
                continue
            begin, _, column = max(each for each in statements if each[0] <= index + 1 <= each[1])
            while lines[begin - 1].lstrip().startswith(("elif ", "@")):  # no statement may stand there
                begin, _, column = max(each for each in statements if each[0] < begin <= each[1])
            places.setdefault(begin, (column, []))[1].append(number)
        for begin, (column, numbers) in sorted(places.items(), reverse=True):
            calls = "; ".join(f"__import__('_mutants_probe').at({number})" for number in numbers)
            lines.insert(begin - 1, " " * column + calls)
        file.write_text("\n".join(lines))


def environment(root: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), **more}


def reach(mutants: list[Mutant], work: Path, reached: Path, arguments: list[str]) -> int:
    """Runs the tests once with probes; writes the tests of each mutant, with what each test costs."""
    copy_tree(work)
    probe(mutants, work)
    lines, costs = work.with_suffix(".reached"), work.with_suffix(".costs")
    for file in (lines, costs):
        file.write_text("")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        cwd=work,
        env=environment(work, MUTANTS_REACHED=str(lines), PS_TEST_COSTS=str(costs)),
    )
    spent = dict(reversed(line.split("\t", 1)) for line in costs.read_text().splitlines())
    tests: dict[int, set[str]] = defaultdict(set)
    for line in lines.read_text().splitlines():
        number, _, test = line.partition("\t")
        if test:
            tests[int(number)].add(test)
    with reached.open("w") as file:
        for number in range(len(mutants)):
            found = sorted(tests[number], key=lambda test: float(spent.get(test, 0)))
            file.write(
                json.dumps({"mutant": number, "tests": {test: float(spent.get(test, 0)) for test in found}}) + "\n"
            )
    return run.returncode


def kill(
    mutants: list[Mutant], work: Path, reached: Path, results: Path, limit: float, budget: float, only: set[int]
) -> None:
    """Runs each mutant, and adds a line for it to `results`; mutants that stand there are not run again."""
    copy_tree(work)
    known = {row["mutant"]: row["tests"] for row in map(json.loads, reached.read_text().splitlines())}
    done = {json.loads(line)["mutant"] for line in results.read_text().splitlines()} if results.exists() else set()
    for number, mutant in enumerate(mutants):
        if number in done or (only and number not in only):
            continue
        begun = time.monotonic()
        outcome, test = _kill(mutant, work, known.get(number, {}), limit, budget)
        row = {"mutant": number, "outcome": outcome, "by": test, "seconds": round(time.monotonic() - begun, 1)}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number:4} {outcome:9} {row['seconds']:6.1f} s  {mutant.path}:{mutant.line}  {test}", flush=True)


def _kill(mutant: Mutant, work: Path, tests: dict[str, float], limit: float, budget: float) -> tuple[str, str]:
    file = work / mutant.path
    original = file.read_text() if file.exists() else ""
    if not mutant.apply(work):
        return "stale", ""
    _forget(file)
    try:
        if not tests:
            return "unreached", ""
        for chosen in _stages(tests, budget):
            spent = sum(tests[test] for test in chosen)
            code, output = _pytest(work, chosen, limit + 3 * spent)
            if code == "timeout":
                return "killed", "(ran out of time)"
            if code != "0":
                failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                # 1: tests failed; 2: a file could not be imported. Others say that pytest was called wrongly.
                outcome = "killed" if failed and code in ("1", "2") else "broken"
                return outcome, (failed or output.splitlines()[-1:] or [""])[0][:300]
        tried = sum(map(len, _stages(tests, budget)))
        return ("survived" if tried == len(tests) else "undecided"), f"({tried} of {len(tests)} tests)"
    finally:
        file.write_text(original)
        _forget(file)


def _stages(tests: dict[str, float], budget: float) -> list[list[str]]:
    """Returns the tests of a run, then those of the next: few and cheap ones notice most mutants, and endless loops."""
    found: list[list[str]] = [[]]
    ends, spent = [STAGE, 6 * STAGE, budget], 0.0
    for test, cost in tests.items():  # the cheapest first
        spent += cost
        while found[-1] and spent > ends[0]:
            found.append([])
            ends.pop(0)
            if not ends:
                return found[:-1]
        found[-1].append(test)
    return found


def _forget(file: Path) -> None:
    """Removes what Python keeps of a module: it tells files apart by their sizes and whole seconds."""
    for kept in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        kept.unlink()


def _pytest(work: Path, chosen: list[str], limit: float) -> tuple[str, str]:
    """Runs the chosen tests until one fails; ends what they leave running."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
    (work / "_mutants_chosen.py").write_text(
        "import pytest\n\n\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        f"    order = {{test: number for number, test in enumerate({chosen!r})}}\n"
        "    items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])\n"
    )
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "_mutants_chosen", "-p", "no:cacheprovider", *files],
            cwd=work,
            env=environment(work, MUTANTS_MARK=mark),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = str(process.wait(limit))
        except subprocess.TimeoutExpired:
            code = "timeout"
        _end(mark, process)
        output.seek(0)
        return code, output.read()


def _end(mark: str, process: subprocess.Popen[bytes]) -> None:
    """Ends all processes whose environment has the mark: those of one run, and what it started."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"MUTANTS_MARK={mark}".encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("draw", help="choose mutants by a seed; prints them, one JSON object a line")
    verb.add_argument("--seed", required=True)
    verb.add_argument("--count", type=int, default=300)
    for name, text in (("reach", "find the tests that execute each mutated line"), ("kill", "run the mutants")):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("mutants", type=Path)
        verb.add_argument("--reached", type=Path, required=True)
        verb.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "mutants")
    verb.add_argument("--results", type=Path, required=True)
    verb.add_argument("--limit", type=float, default=60.0, help="seconds a mutant may take beside its tests' own")
    verb.add_argument("--budget", type=float, default=120.0, help="seconds of tests that are tried, the cheapest first")
    verb.add_argument("--only", type=int, nargs="*", default=[], help="numbers of mutants")
    options, arguments = parser.parse_known_args()
    if options.verb == "draw":
        for mutant in draw(options.seed, options.count):
            print(json.dumps(dataclasses.asdict(mutant)))
        return 0
    mutants = read(options.mutants)
    if options.verb == "reach":
        return reach(mutants, options.work, options.reached.absolute(), [each for each in arguments if each != "--"])
    kill(mutants, options.work, options.reached, options.results, options.limit, options.budget, set(options.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
