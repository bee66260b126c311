"""`psctl checkpoint`: what checkpoints have, whether they are whole, how two differ, and all of one in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import click

from psclient.psctl.checkpoint_diff import VariableDifference, differences, other_differences
from psclient.psctl.checkpoint_export import export_npz, export_safetensors, widened
from psclient.psctl.output import WIDTH, table, table_of
from psclient.psctl.settings import FILES, CommandSettings, command
from pswire.checkpoint.compaction import compact
from pswire.checkpoint.manifest import MANIFEST, Manifest
from pswire.checkpoint.reader import FoundCheckpoint, SavedCheckpoint, open_saved, require
from pswire.checkpoint.storage import storage_at
from pswire.checkpoint.table_tensors import beside
from pswire.errors import ConfigError, DamagedCheckpoint
from pswire.flags import COMMANDS, CommandGroup
from pswire.telemetry.views.columns import cells_of, column, columns_of
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


of_files = partial(command, COMMANDS, group=checkpoint, connects=False)
"""Makes a function one of its commands."""


@of_files(("List the checkpoints of a run", "psctl checkpoint ls runs/digits"))
@click.argument("directory")
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
    shown = [CheckpointView.of(each) for each in found]
    rows: list[Sequence[str]] = []
    for each in shown:
        name, *cells = cells_of(each).values()
        rows.append((name, "latest" if name == latest else "", *cells))
    rows += [(name, f"damaged: {why}") for name, why in damaged.items()]
    rows += [(name, "incomplete: it has no manifest") for name in listed.torn]
    first, *others = columns_of(CheckpointView)
    made = table((first, "", *others), rows)
    said = {"checkpoints": shown, "incomplete": listed.torn, "damaged": damaged, "latest": latest}
    return settings.tell(said, made if rows else f"there is no checkpoint in {directory}")


@of_files(("Show variables, shapes and sizes of the newest one", "psctl checkpoint show runs/digits"), name="show")
@click.argument("path")
def show_checkpoint(settings: CommandSettings, path: str) -> int:
    """Show the contents of the checkpoint at PATH."""
    found = open_saved(path)
    manifest = found.manifest
    view = CheckpointView.of(found)
    heading = f"{found.full}\nround {view.round}, {view.tensors} variables of {size(view.nbytes)}"
    heading += f", saved {_time(view.saved_at)} by {view.library or 'an older version'}"
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


@of_files(("Check a checkpoint in a bucket", "psctl checkpoint verify s3://bucket/run/ckpt-4"))
@click.argument("path")
def verify(settings: CommandSettings, path: str) -> int:
    """Read all files of a checkpoint and check them.

    Compare sizes, names, dtypes, shapes and checksums. Exit with 1 if there is a fault.
    """
    try:
        found = open_saved(path)
    except DamagedCheckpoint as error:
        told = {"path": path, "whole": False, "without_checksum": 0, "faults": [Fault(MANIFEST, error.message)]}
        return settings.tell(told, f"{path} is damaged: {error}", wrong=True)
    faults = [Fault(*each) for each in found.verify()]
    count = len(found.manifest.variables)
    pieces = (saved.pieces(name) for name, saved in found.manifest.tensors.items())
    without = sum(not all(one.checksum for one in each) for each in pieces)
    said = {"path": found.full, "whole": not faults, "without_checksum": without, "faults": faults}
    if faults:
        return settings.tell(said, f"{found.full} is damaged", table_of(Fault, faults), wrong=True)
    note = f"; {without} of them have no checksum, because an older version wrote them" if without else ""
    bases = f", together with its bases: {', '.join(base.name for base in found.bases)}" if found.bases else ""
    return settings.tell(said, f"{found.full} is complete: {count} variables{note}{bases}")


@of_files(("Compare two checkpoints", "psctl checkpoint diff runs/digits/ckpt-1 runs/digits/ckpt-2"))
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
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
        *([table_of(VariableDifference, differing)] if differing else []),
        f"{len(found) - len(differing)} of {len(found)} variables are the same",
        *(f"{name} differ" for name in others),
        wrong=bool(differing or others),
    )


@of_files(("Export the newest checkpoint for NumPy", "psctl checkpoint export runs/digits weights.npz"))
@click.argument("path")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite OUT.")
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


@of_files(("Make a delta independent of its base", "psctl checkpoint compact runs/digits/ckpt-7"), name="compact")
@click.argument("path")
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


@dataclass(frozen=True)
class Fault:
    """A fault of a checkpoint.

    Attributes:
        file: the file that has it.
        fault: the fault in words.
    """

    file: str = column("file")
    fault: str = column("fault")


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint in a list.

    Attributes:
        name, path: its name, and its full path.
        round, saved_at: the round that it saves; when it was saved, in seconds since 1970 (0 if unknown).
        base: of a delta, the checkpoint that it changes; else null.
        tensors, nbytes: number of variables; bytes of all values.
        library: the version that wrote it, or `""`.
    """

    path: str
    name: str = column("checkpoint")
    base: str | None = column("changes to", lambda v: v.base or "")
    round: int = column("round")
    saved_at: float = column("saved", lambda v: _time(v.saved_at))
    tensors: int = column("variables")
    nbytes: int = column("values", lambda v: size(v.nbytes))
    library: str = column("written by", lambda v: v.library or "-")

    @classmethod
    def of(cls, found: SavedCheckpoint) -> CheckpointView:
        """The view of a checkpoint."""
        manifest = found.manifest
        return cls(
            name=found.name,
            path=found.full,
            base=manifest.base.name if manifest.base else None,
            round=manifest.round,
            saved_at=manifest.saved_at,
            tensors=len(manifest.variables),
            nbytes=sum(saved.spec.nbytes for saved in manifest.tensors.values()),
            library=manifest.library,
        )


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
