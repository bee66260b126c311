"""Checks the documents: Python compiles, `python run` blocks run, sessions print what they say, commands exist,
links lead to files and headings, and tests that are named are there. Sessions in docstrings of psclient run as well.

    python tools/check_docs.py                all of it; blocks whose framework is not installed are named, and not run
    python tools/check_docs.py --frameworks   only the blocks that import a framework, which has to be installed
    python tools/check_docs.py docs/jax.md    some pages
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import click

from psclient._src.launch.psworker import command as psworker
from psclient.psctl.cli import command as psctl
from psclient.psctl.local import with_values
from psserver.cli import command as psserver
from pstesting import forks

ROOT = Path(__file__).resolve().parent.parent
RUN_SECONDS = 300
_FENCE = re.compile(r"^```(?P<info>[a-z][^\n]*)\n(?P<text>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_TEST = re.compile(r"`(?P<path>tests/[\w/]+\.py)(?:::(?P<name>\w+))?`")
FRAMEWORKS = ("torch", "jax", "optax", "flax", "keras")
"""Packages that are no part of the environment for development."""

_ENDS = {"|", "&&", "||", "&", ">", ">>", "2>", "<", ";", "#"}


@dataclass(frozen=True)
class Snippet:
    """A fenced block: where it is, as `README.md:12`, what its fence says, and its text."""

    where: str
    info: str
    text: str


def documents() -> list[Path]:
    """All documents, or those that are asked for."""
    some = [Path(name).resolve() for name in sys.argv[1:] if name.endswith(".md")]
    return some or [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def snippets() -> Iterator[Snippet]:
    """All fenced blocks of the documents."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            yield Snippet(_where(path, text, match.start()), match["info"].strip(), match["text"])


def docstring_sessions() -> Iterator[Snippet]:
    """Sessions in the docstrings of psclient, unless some documents are asked for."""
    if any(name.endswith(".md") for name in sys.argv[1:]):
        return
    for path in sorted((ROOT / "psclient").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if ">>> " not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(said))) if ">>> " in said:
                    yield Snippet(f"{path.relative_to(ROOT)}:{node.lineno}", "pycon", said)


def dead_links() -> Iterator[str]:
    """Links of the documents to files and headings that are not there, one line for each."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for match in _LINK.finditer(text):
            target = path.parent / match["path"] if match["path"] else path
            if not target.exists():
                yield f"{_where(path, text, match.start())}: there is no {match['path']}"
            elif match["anchor"] and target.suffix == ".md" and match["anchor"] not in anchors(target):
                yield f"{_where(path, text, match.start())}: {target.name} has no heading #{match['anchor']}"


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by the rules of GitHub and of MkDocs: they differ in rows of hyphens."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    github = [re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in plain]
    return {*github, *(re.sub(r"-+", "-", anchor) for anchor in github)}


def missing_tests() -> Iterator[str]:
    """Tests that the documents name and that are not there, one line for each."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for match in _TEST.finditer(text):
            file = ROOT / match["path"]
            if not file.is_file() or (
                match["name"] and f"def {match['name']}(" not in file.read_text(encoding="utf-8")
            ):
                yield f"{_where(path, text, match.start())}: there is no test {match[0]}"


def _where(path: Path, text: str, start: int) -> str:
    line = text.count("\n", 0, start) + 1
    return f"{path.relative_to(ROOT)}:{line}"


def frameworks(snippet: Snippet) -> list[str]:
    """Returns the frameworks that a block of Python, or a session, imports."""
    found: set[str] = set()
    typed = [example.source for example in doctest.DocTestParser().get_examples(snippet.text)]
    for node in ast.walk(ast.parse("".join(typed) if snippet.info == "pycon" else snippet.text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
    tops = {name.removeprefix("psclient.").partition(".")[0] for name in found}
    return [name for name in FRAMEWORKS if name in tops]


def check_python(snippet: Snippet) -> str:
    """Returns what is wrong, "" for nothing."""
    try:
        compile(snippet.text, snippet.where, "exec")
    except SyntaxError as error:
        return f"{error.msg} in its line {error.lineno}"
    return ""


def check_run(snippet: Snippet) -> str:
    """Runs the block in an empty directory, where the frameworks are installed that it needs."""
    if wrong := check_python(snippet):
        return wrong
    if lacks_frameworks(snippet):
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", snippet.text]
        try:  # forked: a block and its server would import for seconds what this process has imported
            done = forks.run(command, cwd=scratch, capture_output=True, text=True, timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"still runs after {RUN_SECONDS} s"
    return f"exit code {done.returncode}\n{done.stderr}" if done.returncode else ""


def lacks_frameworks(snippet: Snippet) -> bool:
    """Whether a snippet cannot be run here; then its frameworks that are missing are named."""
    without = [name for name in frameworks(snippet) if importlib.util.find_spec(name) is None]
    if without:
        sys.stderr.write(f"{snippet.where}: not run, without {' and '.join(without)}\n")
    return bool(without)


def check_session(snippet: Snippet) -> str:
    """Types what follows `>>>` into an interpreter, and compares what it prints; `...` stands for anything."""
    if lacks_frameworks(snippet):
        return ""
    test = doctest.DocTestParser().get_doctest(snippet.text, {}, snippet.where, snippet.where, 0)
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    return said.getvalue() if runner.run(test, out=said.write).failed else ""


def check_console(snippet: Snippet) -> str:
    """Looks at every `$ command`."""
    text = snippet.text.replace("\\\n", " ")
    wrong = [check_command(line[2:]) for line in text.splitlines() if line.startswith("$ ")]
    return "; ".join(filter(None, wrong))


def check_command(line: str) -> str:
    """Whether a command's program, options and targets exist; programs that are not ours are believed."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    end = next((i for i, word in enumerate(words) if word in _ENDS), len(words))
    program, *args = words[:end] or [""]
    if program in COMMANDS:
        return _options(COMMANDS[program], program, args)
    if program == "make":
        dry = ["make", "-n", "-C", str(ROOT), *args]
        return "" if subprocess.run(dry, capture_output=True).returncode == 0 else f"no target: {line}"
    scripts = [word for word in args[:1] if program.startswith("python") and word.endswith(".py") and "/" in word]
    return "".join(f"no script {script}" for script in scripts if not (ROOT / script).exists())


def _options(command: click.Command, program: str, args: list[str]) -> str:
    if "--help" in args:
        return ""
    try:
        args = with_values(args) if program == "psctl" else args
        while isinstance(command, click.Group) and args:
            given = list(takewhile(lambda word: word.startswith("-"), args))
            command.make_context(program, list(given))
            args = args[len(given) :]
            if not args:
                return ""
            _, found, args = command.resolve_command(click.Context(command, info_name=program), args)
            command = found or command
        context = command.make_context(program, list(args))
    except click.ClickException as error:
        return f"{program}: {error.format_message()}"
    script = context.params.get("script")
    if script and script.startswith("examples/") and not (ROOT / script).exists():
        return f"no script {script}"
    return ""


COMMANDS: dict[str, click.Command] = {"psctl": psctl, "psworker": psworker, "psserver": psserver}
CHECKS: dict[str, Callable[[Snippet], str]] = {
    "python": check_python,
    "python run": check_run,
    "pycon": check_session,
    "console": check_console,
}


def main(*flags: str) -> None:
    """Exits with 1 and one line for each snippet and link that is wrong."""
    if flags == ("--frameworks",):
        runs = [each for each in (*snippets(), *docstring_sessions()) if each.info in ("python run", "pycon")]
        chosen = [each for each in runs if frameworks(each)]
        wrong = [f"{name} is not installed" for name in FRAMEWORKS if importlib.util.find_spec(name) is None]
    else:
        chosen, wrong = [*snippets(), *docstring_sessions()], [*dead_links(), *missing_tests()]
    for snippet in chosen:
        check = CHECKS.get(snippet.info)
        said = check(snippet) if check else ""
        wrong += [f"{snippet.where}: {said}"] if said else []
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
