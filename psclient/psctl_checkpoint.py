"""`psctl checkpoint`: what checkpoints have, whether they are whole, how two differ, and all of one in one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from psclient.saved import Directory, SavedCheckpoint, names
from psclient.saved_diff import Difference, difference, other_differences
from psclient.saved_export import export_npz, export_safetensors, widened
from pswire.errors import ConfigError
from pswire.manifest import Manifest

Command = TypeVar("Command", bound=Callable[..., object])

WIDTH = 200
"""Of tables in characters, where they go into a file or a pipe."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")

EXPORTS = {".safetensors": export_safetensors, ".npz": export_npz}


@click.group(no_args_is_help=False)
def checkpoint() -> None:
    """Looks at checkpoints, without a cluster.

    A PATH is a checkpoint, or a directory of them, whose newest is meant: a local path or an fsspec URL such as
    s3://bucket/run. Exits with 1 where faults or differences were found, and with 2 after an error.
    """


@checkpoint.command()
@click.argument("directory")
@as_json
def ls(directory: str, as_json: bool) -> int:
    """Lists the checkpoints in DIRECTORY, oldest first."""
    Directory(directory).require("a directory of checkpoints")
    whole, torn = names(directory)
    found = [SavedCheckpoint(Directory(f"{directory.rstrip('/')}/{name}")) for name in whole]
    if as_json:
        return _say({"checkpoints": [summary(each) for each in found], "incomplete": torn})
    table = _table("checkpoint", "round", "saved", "variables", "values", "written by")
    for each in found:
        said = summary(each)
        cells = (str(said["round"]), _time(said["saved_at"]), str(said["tensors"]), decimal(said["nbytes"]))
        table.add_row(each.name, *cells, said["library"] or "-")
    for name in torn:
        table.add_row(name, "incomplete: it has no manifest")
    return _show(table if found or torn else f"there is no checkpoint in {directory}")


@checkpoint.command()
@click.argument("path")
@as_json
def show(path: str, as_json: bool) -> int:
    """Shows what the checkpoint at PATH has."""
    found = SavedCheckpoint.open(path)
    manifest = found.manifest
    if as_json:
        return _say({"path": found.path, **json.loads(manifest.text())})
    said = summary(found)
    heading = f"{found.path}\nround {manifest.round}, {said['tensors']} variables of {decimal(said['nbytes'])}"
    heading += f", saved {_time(said['saved_at'])} by {said['library'] or 'an older version'}"
    paths = _paths(manifest)
    table = _table("variable", "dtype", "shape", "bytes", "file", "objects")
    for name, saved in sorted(manifest.tensors.items()):
        spec = saved.spec
        objects = ", ".join(paths.get(name, ()))
        table.add_row(name, spec.dtype, _shape(spec.shape), f"{spec.nbytes:,}", saved.file, objects)
    positions = [f"dataset {each.dataset}: epoch {each.epoch}, index {each.index}" for each in manifest.positions]
    state = [f"state of {name}: {json.dumps(value)[:WIDTH]}" for name, value in sorted(manifest.state.items())]
    return _show(heading, table, *positions, *state)


@checkpoint.command()
@click.argument("path")
@as_json
def verify(path: str, as_json: bool) -> int:
    """Reads all of the checkpoint at PATH: sizes, names, dtypes, shapes and checksums; exits with 1 for a fault."""
    found = SavedCheckpoint.open(path)
    faults = list(found.verify())
    without = sum(not saved.checksum for saved in found.manifest.tensors.values())
    if as_json:
        said = [{"file": file, "fault": fault} for file, fault in faults]
        _say({"path": found.path, "whole": not faults, "without_checksum": without, "faults": said})
    elif faults:
        table = _table("file", "fault")
        for file, fault in faults:
            table.add_row(file, fault)
        _show(f"{found.path} is damaged", table)
    else:
        note = f"; {without} of them have no checksum, as older versions wrote them" if without else ""
        _show(f"{found.path} is whole: {len(found.manifest.tensors)} variables{note}")
    return int(bool(faults))


@checkpoint.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@as_json
def diff(first: str, second: str, as_json: bool) -> int:
    """Compares the checkpoints A and B: names, dtypes, shapes and values; exits with 1 where they differ."""
    a, b = SavedCheckpoint.open(first), SavedCheckpoint.open(second)
    found = [difference(a, b, name) for name in sorted({*a.manifest.tensors, *b.manifest.tensors})]
    differing = [each for each in found if not each.same]
    others = other_differences(a.manifest, b.manifest)
    if as_json:
        rounds = [a.manifest.round, b.manifest.round]
        tensors = [each.report() for each in differing]
        _say({"paths": [a.path, b.path], "rounds": rounds, "tensors": tensors, "others": others})
        return int(bool(differing or others))
    heading = f"A: {a.path}, round {a.manifest.round}\nB: {b.path}, round {b.manifest.round}"
    lines: list[Any] = [_differences(differing)] if differing else []
    lines.append(f"{len(found) - len(differing)} of {len(found)} variables are the same")
    lines += [f"{name} differ" for name in others]
    _show(heading, *lines)
    return int(bool(differing or others))


def _differences(found: Iterable[Difference]) -> Table:
    table = _table("variable", "A", "B", "elements that differ", "largest difference")
    for each in found:
        largest = "" if each.largest is None else f"{each.largest:.6g}"
        table.add_row(each.name, str(each.a or "-"), str(each.b or "-"), each.counted, largest)
    return table


@checkpoint.command()
@click.argument("path")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def export(path: str, out: Path, force: bool) -> int:
    """Writes all variables of the checkpoint at PATH into one file, OUT.safetensors or OUT.npz."""
    write = EXPORTS.get(out.suffix)
    if write is None:
        raise ConfigError(f"{out} has no known ending; write {' or '.join(EXPORTS)}")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; give another name, or --force to replace it")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no directory {out.parent} to write {out.name} into; make it first")
    found = SavedCheckpoint.open(path)
    write(found, out)
    wide = widened(found.manifest) if out.suffix == ".npz" else []
    if wide:
        click.echo(f"NumPy's files know no bfloat16; as float32, exactly: {', '.join(wide)}", err=True)
    return _show(f"{len(found.manifest.tensors)} variables of {found.path} are in {out}")


def summary(found: SavedCheckpoint) -> dict[str, Any]:
    """A line about a checkpoint, as `ls --json` gives it."""
    manifest = found.manifest
    return {
        "name": found.name,
        "path": found.path,
        "round": manifest.round,
        "saved_at": manifest.saved_at,
        "tensors": len(manifest.tensors),
        "nbytes": sum(saved.spec.nbytes for saved in manifest.tensors.values()),
        "library": manifest.library,
    }


def _paths(manifest: Manifest) -> dict[str, list[str]]:
    """The objects' paths of each tensor."""
    found: dict[str, list[str]] = {}
    for path, name in sorted(manifest.objects.items()):
        found.setdefault(name, []).append(path)
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds") if seconds else "-"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _show(*shown: str | Table) -> int:
    console = Console()
    console.width = console.width if console.is_terminal else WIDTH
    for each in shown:
        console.print(each, markup=False, highlight=False, soft_wrap=isinstance(each, str))
    return 0


def _say(said: dict[str, Any]) -> int:
    click.echo(json.dumps(said, indent=1, sort_keys=True))
    return 0
