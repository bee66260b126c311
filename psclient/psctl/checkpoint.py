"""`psctl checkpoint`: what checkpoints have, whether they are whole, how two differ, and all of one in one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from psclient.psctl.checkpoint_diff import DIFFERENCES, differences, other_differences
from psclient.psctl.checkpoint_export import export_npz, export_safetensors, widened
from psclient.psctl.output import WIDTH, table
from psclient.psctl.settings import FILES, CommandSettings, as_json, settings
from pswire.checkpoint.compaction import compact
from pswire.checkpoint.manifest import MANIFEST, Manifest
from pswire.checkpoint.reader import FoundCheckpoint, SavedCheckpoint, open_saved, require
from pswire.checkpoint.storage import storage_at
from pswire.checkpoint.table_tensors import beside
from pswire.errors import ConfigError, DamagedCheckpoint
from pswire.flags import Command, CommandGroup
from pswire.telemetry.views.numbers import shape, size

EXPORTS = {".safetensors": export_safetensors, ".npz": export_npz}


@click.group(
    cls=CommandGroup,
    section=FILES,
    examples=(
        ("List the checkpoints of a run", "psctl checkpoint ls runs/digits"),
        ("Check the newest one for damage", "psctl checkpoint verify runs/digits"),
    ),
    no_args_is_help=False,
)
def checkpoint() -> None:
    """Inspect checkpoints, without a cluster.

    PATH is a checkpoint, or a directory of checkpoints, of which the newest is used: a local path, or an fsspec URL
    such as s3://bucket/run. Exit codes: 0, 1 if a fault or difference was found, 2 after an error.
    """


@checkpoint.command(cls=Command, examples=[("List the checkpoints of a run", "psctl checkpoint ls runs/digits")])
@click.argument("directory")
@as_json
@settings
def ls(settings: CommandSettings, directory: str) -> int:
    """List the checkpoints in DIRECTORY, oldest first."""
    root = storage_at(directory)
    require(root, directory, "a directory of checkpoints")
    listed = FoundCheckpoint.within(root)
    damaged = dict.fromkeys(listed.aside, "a damaged checkpoint that was renamed")
    found: list[SavedCheckpoint] = []
    for name in listed.whole:
        try:
            found.append(SavedCheckpoint.open(root, name))
        except DamagedCheckpoint as error:
            damaged[name] = error.message
    latest = next((name for name in listed.downwards if name not in damaged), None)
    shown = [summary(each) for each in found]
    rows: list[Sequence[str]] = [[*line(each, latest)] for each in shown]
    rows += [(name, f"damaged: {why}") for name, why in damaged.items()]
    rows += [(name, "incomplete: it has no manifest") for name in listed.torn]
    made = table(("checkpoint", "", "changes to", "round", "saved", "variables", "values", "written by"), rows)
    said = {"checkpoints": shown, "incomplete": listed.torn, "damaged": damaged, "latest": latest}
    return settings.tell(said, made if rows else f"there is no checkpoint in {directory}")


@checkpoint.command(
    "show",
    cls=Command,
    examples=(("Show variables, shapes and sizes of the newest one", "psctl checkpoint show runs/digits"),),
)
@click.argument("path")
@as_json
@settings
def show_checkpoint(settings: CommandSettings, path: str) -> int:
    """Show the contents of the checkpoint at PATH."""
    found = open_saved(path)
    manifest = found.manifest
    said = summary(found)
    heading = f"{found.full}\nround {manifest.round}, {said['tensors']} variables of {size(said['nbytes'])}"
    heading += f", saved {_time(said['saved_at'])} by {said['library'] or 'an older version'}"
    paths = _paths(manifest)
    rows = (
        (name, spec.dtype, shape(spec.shape), f"{spec.nbytes:,}", *map(", ".join, (saved.files, paths.get(name, ()))))
        for name, saved in sorted(manifest.variables.items())
        for spec in [saved.spec]
    )
    made = table(("variable", "dtype", "shape", "bytes", "file", "objects"), rows)
    positions = [f"dataset {each.dataset}: epoch {each.epoch}, index {each.index}" for each in manifest.positions]
    state = [f"state of {name}: {json.dumps(value)[:WIDTH]}" for name, value in sorted(manifest.state.items())]
    tables = [_told_of(found, name) for name in manifest.tables]
    said = {"path": found.full, **json.loads(manifest.text())}
    return settings.tell(said, heading, made, *tables, *positions, *state)


@checkpoint.command(
    cls=Command, examples=(("Check a checkpoint in a bucket", "psctl checkpoint verify s3://bucket/run/ckpt-4"),)
)
@click.argument("path")
@as_json
@settings
def verify(settings: CommandSettings, path: str) -> int:
    """Read all files of a checkpoint and check them.

    Compare sizes, names, dtypes, shapes and checksums. Exit with 1 if there is a fault.
    """
    try:
        found = open_saved(path)
    except DamagedCheckpoint as error:
        fault = {"file": MANIFEST, "fault": error.message}
        told = {"path": path, "whole": False, "without_checksum": 0, "faults": [fault]}
        return settings.tell(told, f"{path} is damaged: {error}", wrong=True)
    faults = [{"file": file, "fault": fault} for file, fault in found.verify()]
    count = len(found.manifest.variables)
    pieces = (saved.pieces(name) for name, saved in found.manifest.tensors.items())
    without = sum(not all(one.checksum for one in each) for each in pieces)
    said = {"path": found.full, "whole": not faults, "without_checksum": without, "faults": faults}
    if faults:
        made = table(("file", "fault"), ((each["file"], each["fault"]) for each in faults))
        return settings.tell(said, f"{found.full} is damaged", made, wrong=True)
    note = f"; {without} of them have no checksum, because an older version wrote them" if without else ""
    bases = f", together with its bases: {', '.join(base.name for base in found.bases)}" if found.bases else ""
    return settings.tell(said, f"{found.full} is complete: {count} variables{note}{bases}")


@checkpoint.command(
    cls=Command, examples=(("Compare two checkpoints", "psctl checkpoint diff runs/digits/ckpt-1 runs/digits/ckpt-2"),)
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@as_json
@settings
def diff(settings: CommandSettings, first: str, second: str) -> int:
    """Compare the checkpoints A and B.

    Compare names, dtypes, shapes and values. Exit with 1 if they differ.
    """
    a, b = open_saved(first), open_saved(second)
    found = [*differences(a, b)]
    differing = [each for each in found if not each.same]
    others = other_differences(a.manifest, b.manifest)
    said = {
        "paths": [a.full, b.full],
        "rounds": [a.manifest.round, b.manifest.round],
        "tensors": [each.report() for each in differing],
        "others": others,
    }
    return settings.tell(
        said,
        f"A: {a.full}, round {a.manifest.round}\nB: {b.full}, round {b.manifest.round}",
        *([table(DIFFERENCES, (each.cells() for each in differing))] if differing else []),
        f"{len(found) - len(differing)} of {len(found)} variables are the same",
        *(f"{name} differ" for name in others),
        wrong=bool(differing or others),
    )


@checkpoint.command(
    cls=Command,
    examples=(("Export the newest checkpoint for NumPy", "psctl checkpoint export runs/digits weights.npz"),),
)
@click.argument("path")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@as_json
@settings
def export(settings: CommandSettings, path: str, out: Path, force: bool) -> int:
    """Write all variables into one file, OUT.safetensors or OUT.npz."""
    write = EXPORTS.get(out.suffix)
    if write is None:
        raise ConfigError(f"{out} has an unknown extension; use {' or '.join(EXPORTS)}")
    if out.exists() and not force:
        raise ConfigError(f"{out} already exists; give another name, or --force to replace it")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no directory {out.parent} for {out.name}; create it first")
    found = open_saved(path)
    write(found, out)
    wide = widened(found.manifest) if out.suffix == ".npz" else []
    if wide and not settings.json:
        click.echo(f"NumPy files cannot hold bfloat16; saved as float32, without loss: {', '.join(wide)}", err=True)
    count = len(found.manifest.variables)
    said = {"path": found.full, "file": str(out), "tensors": count, "widened": wide}
    return settings.tell(said, f"{count} variables of {found.full} are in {out}")


@checkpoint.command(
    "compact",
    cls=Command,
    examples=(("Make a delta independent of its base", "psctl checkpoint compact runs/digits/ckpt-7"),),
)
@click.argument("path")
@as_json
@settings
def compact_checkpoint(settings: CommandSettings, path: str) -> int:
    """Turn the delta at PATH into a whole checkpoint.

    Check the files first. The result needs no other checkpoint. Also remove leftovers of a compaction that was killed.
    """
    found = open_saved(path)
    bases = [base.name for base in found.bases]
    whole = compact(found)
    nbytes = sum(whole.manifest.files.values())
    said = {"path": found.full, "bases": bases, "nbytes": nbytes}
    if not bases:
        return settings.tell(said, f"{found.full} is already complete")
    needless = ", ".join(bases)
    return settings.tell(said, f"{found.full} is now complete, {size(nbytes)}; it no longer needs {needless}")


def _told_of(found: SavedCheckpoint, name: str) -> str:
    """A line about a dynamic table: its rows, and the bytes of all that is saved of it."""
    manifest = found.manifest
    nbytes = sum(manifest.tensors[tensor].spec.nbytes for tensor, owner in manifest.owners.items() if owner == name)
    rows, since = manifest.tensors[name].spec.shape[0], manifest.tables[name].since
    what = f"{rows:,} rows"
    if since >= 0 and manifest.base is not None:
        dropped = manifest.tensors[beside(name, "deleted_keys")].spec.shape[0]
        what = f"{rows:,} rows changed and {dropped:,} dropped since {manifest.base.name}"
    return f"table {name}: {what}, {size(nbytes)}, as of its round {manifest.tables[name].round}"


def summary(found: SavedCheckpoint) -> dict[str, Any]:
    """A line about a checkpoint, as `ls --json` gives it."""
    manifest = found.manifest
    return {
        "name": found.name,
        "path": found.full,
        "round": manifest.round,
        "saved_at": manifest.saved_at,
        "base": manifest.base.name if manifest.base else None,
        "tensors": len(manifest.variables),
        "nbytes": sum(saved.spec.nbytes for saved in manifest.tensors.values()),
        "library": manifest.library,
    }


def line(said: Mapping[str, Any], latest: str | None) -> Iterator[str]:
    """The same as a row of the table of `ls`."""
    yield from (said["name"], "latest" if said["name"] == latest else "", said["base"] or "")
    yield from (str(said["round"]), _time(said["saved_at"]))
    yield from (str(said["tensors"]), size(said["nbytes"]), said["library"] or "-")


def _paths(manifest: Manifest) -> dict[str, list[str]]:
    """The objects' paths of each tensor."""
    found: dict[str, list[str]] = {}
    for path, name in sorted(manifest.objects.items()):
        found.setdefault(name, []).append(path)
    return found


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds") if seconds else "-"
    except (OverflowError, ValueError, OSError):  # by a clock of another age
        return "-"
