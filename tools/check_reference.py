"""Checks that docs/reference.md is what the code says; with --write, makes it so.

The page has all flags of all commands, all environment variables, and all keys of the file of `psworker --config`. The
check fails, too, where code or a file for launchers names a variable that pswire/variables.py does not declare.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from psclient._src.config import LaunchConfig
from psclient._src.launch.config_file import SECTIONS
from psclient._src.launch.psworker import command as psworker
from psclient.psctl.cli import command as psctl
from psclient.psctl.settings import CommandSettings
from psserver.cli import command as psserver
from psserver.config import ServerFlags
from pswire.flags import OPTIONS, grouped
from pswire.limits import Timeouts
from pswire.options import OTHER, SWITCH, Option, defaults_of, options_of
from pswire.telemetry.logging_setup import LOG_FORMAT, LOG_LEVEL
from pswire.variables import DECLARED, RETIRED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
PACKAGES = ("pswire", "psserver", "psclient", "pstesting")
OTHERS = re.compile(r"[\"']((?:SLURM|OTEL|NUMBA|XDG|CUDA|RAY|TF|OMP|GRPC|GLIBC|JOB)_[A-Z_]*[A-Z])[\"']")
"""Names of variables of other programs, where they are a whole text in the code."""

BEGIN = """# Reference: flags, environment variables and configuration keys

<!-- `make docs-reference` writes this page from the code: change the descriptions there. -->

A flag overrides the file of `psworker --config`, and the file overrides an environment variable. An environment
variable `PS_...` whose name is almost one of these is an error. All commands have
`--help`, and the three programs `--version`.
"""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown; "" without rows."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    heads = list(heads)
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines, ""]) if lines else ""


def code(text: str) -> str:
    """Returns a text as code; "" for none."""
    return f"`{text}`" if text else ""


def split(about: str) -> tuple[str, str]:
    """Returns a flag's help without its brackets, and what these say of the environment and the default."""
    match = re.fullmatch(r"(?P<about>.*?)\s*\[(?P<notes>(?:env|default): [^\[\]]*|required)\]", about, re.DOTALL)
    return (match["about"], match["notes"]) if match else (about, "")


def note(notes: str, key: str) -> str:
    """Returns what the brackets of help say for `env` or `default`."""
    match = re.search(rf"\b{key}: (?P<value>.*?)(?=; default: |$)", notes)
    return match["value"] if match else ""


def rows_of(command: click.Command, wanted: Callable[[str], bool]) -> dict[str, list[tuple[str, ...]]]:
    """Returns a row for each flag of a command by the headings that are wanted: flag, variable, default, meaning."""
    context = click.Context(command, obj=CommandSettings())
    rows: dict[str, list[tuple[str, ...]]] = {}
    for heading, found in grouped(command, context):
        for each in found if wanted(heading) else ():
            names, about = each.get_help_record(context) or ("", "")
            text, notes = split(about)
            default = notes if notes == "required" else note(notes, "default")
            rows.setdefault(heading, []).append((code(names), code(note(notes, "env")), default, text))
    return rows


def flags(command: click.Command) -> Iterator[str]:
    """Yields a table for each group of a command's flags, after its heading."""
    for heading, rows in rows_of(command, lambda heading: heading != OTHER).items():
        yield f"**{heading}**\n"
        yield table(("flag", "environment variable", "default", "meaning"), rows)


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yields the commands of a group that are no groups, and are of this project, with their whole names."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")
        elif command and command.callback and command.callback.__module__.partition(".")[0] in PACKAGES:
            yield f"{name} {word}", command


def of_psctl() -> Iterator[str]:
    """Yields tables of the flags of `psctl`: those that commands share, then those of one command."""
    yield "Commands that connect to servers have these flags, before or after the command. All have `--json`.\n"
    yield from flags(psctl)
    rows = []
    for name, command in commands(psctl, "psctl"):
        for flag, _, *rest in rows_of(command, lambda heading: heading == OPTIONS).get(OPTIONS, ()):
            rows.append((code(name), flag, *rest))
    yield "**Flags of one command**\n"
    yield table(("command", "flag", "default", "meaning"), rows)


def described() -> dict[str, tuple[Option, str]]:
    """Returns the options that environment variables set, and their defaults, by the names of variables."""
    found = {LOG_LEVEL.variable: (LOG_LEVEL, LOG_LEVEL.otherwise), LOG_FORMAT.variable: (LOG_FORMAT, "text")}
    for owner in (LaunchConfig, ServerFlags):  # of a single task, where both have one
        for name, each in options_of(owner).items():
            if each.variable and each.variable not in (LOG_LEVEL.variable, LOG_FORMAT.variable):
                found[each.variable] = each, each.default(defaults_of(owner)[name])
    return found


def variables() -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each environment variable; those with the same meaning share one."""
    options = described()
    shared: dict[tuple[str, str, str], list[str]] = {}
    for name, each in DECLARED.items():
        option, default = options.get(name, (None, each.default))
        about = each.about if option is None else f"{option.about} 1 or 0." if option.kind == SWITCH else option.about
        shared.setdefault((each.default or default, each.readers, about), []).append(name)
    for name, option in options_of(Timeouts).items():
        default = option.default(defaults_of(Timeouts)[name])
        shared[default, "all tasks", f"Seconds: {option.about[0].lower()}{option.about[1:]}"] = [f"PS_{name.upper()}"]
    for (default, readers, about), names in sorted(shared.items(), key=lambda item: not item[1][0].startswith("PS_")):
        yield ", ".join(map(code, names)), default, readers, about


def keys(owner: type) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each key of a mapping in the file."""
    defaults = defaults_of(owner)
    for name, each in options_of(owner).items():
        kind = ", ".join(map(code, each.choices)) or each.kind
        yield code(name), kind, each.default(defaults[name]) or ("false" if each.kind == SWITCH else ""), each.about


def page() -> str:
    """Returns the page."""
    heads = ("key", "value", "default", "meaning")
    parts = [BEGIN]
    for name, command in (("psworker", psworker), ("psserver", psserver)):
        parts += [f"## {name}\n", *flags(command)]
    parts += ["## psctl\n", *of_psctl()]
    parts += ["## Environment variables\n", table(("variable", "default", "read by", "meaning"), variables())]
    parts += ["## Keys of the configuration file\n"]
    parts += ["`psworker --config FILE` reads YAML; [schema.json](../configs/schema.json) is its schema for editors.\n"]
    parts += [table(heads, keys(LaunchConfig))]
    for name, owner in SECTIONS.items():
        parts += [f"**Keys of `{name}`**\n", table(heads, keys(owner))]
    return "\n".join(parts)


def undeclared(root: Path) -> list[str]:
    """Returns the variables that code, or a file for launchers, names, and that nobody has declared."""
    known = {f"PS_{field.name.upper()}" for field in dataclasses.fields(Timeouts)} | DECLARED.keys() | RETIRED.keys()
    patterns = [name.removesuffix("*") for name in known if name.endswith("*")]
    found = set[str]()
    for path in (path for name in PACKAGES for path in (root / name).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found |= ours(text) | set(OTHERS.findall(text))
    for path in (path for name in ("configs", "docker") for path in (root / name).rglob("*") if path.is_file()):
        found |= ours(path.read_text(encoding="utf-8", errors="ignore"))
    return sorted(name for name in found - known if not any(map(name.startswith, patterns)))


def ours(text: str) -> set[str]:
    """Returns the names of this project's variables in a text; what ends with `_` is a prefix, and no name."""
    return set(re.findall(r"\bPS_[A-Z0-9_]*[A-Z0-9]\b", text))


def main() -> None:
    """Exits with 1 where the page differs, or a variable is not declared."""
    missing = undeclared(ROOT)
    if missing:
        sys.exit(f"check_reference: {', '.join(missing)} must be declared in pswire/variables.py")
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit("check_reference: docs/reference.md is not what the code says; run `make docs-reference`")


if __name__ == "__main__":
    main()
