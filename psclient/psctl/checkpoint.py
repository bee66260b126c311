"""`psctl checkpoint`: what checkpoints have, whether they are whole, how two differ, and all of one in one file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from psclient.psctl.checkpoint_diff import Difference, difference, other_differences
from psclient.psctl.checkpoint_export import export_npz, export_safetensors, widened
from psclient.psctl.output import WIDTH, say, shape, show, size, table
from psclient.psctl.settings import Settings, as_json, settings
from pswire.checkpoint.manifest import MANIFEST, Manifest
from pswire.checkpoint.reader import Found, SavedCheckpoint, open_saved, require
from pswire.checkpoint.storage import storage_at
from pswire.errors import ConfigError, DamagedCheckpoint

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
@settings
def ls(settings: Settings, directory: str) -> int:
    """Lists the checkpoints in DIRECTORY, oldest first."""
    root = storage_at(directory)
    require(root, directory, "a directory of checkpoints")
    listed = Found.within(root)
    damaged = dict.fromkeys(listed.aside, "it was set aside")
    found: list[SavedCheckpoint] = []
    for name in listed.whole:
        try:
            found.append(SavedCheckpoint.open(root, name))
        except DamagedCheckpoint as error:
            damaged[name] = error.message
    latest = next((name for name in listed.downwards if name not in damaged), None)
    if settings.json:
        shown = [summary(each) for each in found]
        return say({"checkpoints": shown, "incomplete": listed.torn, "damaged": damaged, "latest": latest})
    made = table("checkpoint", "", "round", "saved", "variables", "values", "written by")
    for each in found:
        said = summary(each)
        cells = (str(said["round"]), _time(said["saved_at"]), str(said["tensors"]), size(said["nbytes"]))
        made.add_row(each.name, "latest" if each.name == latest else "", *cells, said["library"] or "-")
    for name, why in damaged.items():
        made.add_row(name, f"damaged: {why}")
    for name in listed.torn:
        made.add_row(name, "incomplete: it has no manifest")
    return show(made if found or damaged or listed.torn else f"there is no checkpoint in {directory}")


@checkpoint.command("show")
@click.argument("path")
@as_json
@settings
def show_checkpoint(settings: Settings, path: str) -> int:
    """Shows what the checkpoint at PATH has."""
    found = open_saved(path)
    manifest = found.manifest
    if settings.json:
        return say({"path": found.full, **json.loads(manifest.text())})
    said = summary(found)
    heading = f"{found.full}\nround {manifest.round}, {said['tensors']} variables of {size(said['nbytes'])}"
    heading += f", saved {_time(said['saved_at'])} by {said['library'] or 'an older version'}"
    paths = _paths(manifest)
    made = table("variable", "dtype", "shape", "bytes", "file", "objects")
    for name, saved in sorted(manifest.tensors.items()):
        spec = saved.spec
        objects = ", ".join(paths.get(name, ()))
        made.add_row(name, spec.dtype, shape(spec.shape), f"{spec.nbytes:,}", saved.file, objects)
    positions = [f"dataset {each.dataset}: epoch {each.epoch}, index {each.index}" for each in manifest.positions]
    state = [f"state of {name}: {json.dumps(value)[:WIDTH]}" for name, value in sorted(manifest.state.items())]
    return show(heading, made, *positions, *state)


@checkpoint.command()
@click.argument("path")
@as_json
@settings
def verify(settings: Settings, path: str) -> int:
    """Reads all of the checkpoint at PATH: sizes, names, dtypes, shapes and checksums; exits with 1 for a fault."""
    try:
        found = open_saved(path)
    except DamagedCheckpoint as error:
        if settings.json:
            said = [{"file": MANIFEST, "fault": error.message}]
            say({"path": path, "whole": False, "without_checksum": 0, "faults": said})
        else:
            show(f"{path} is damaged: {error}")
        return 1
    faults = list(found.verify())
    without = sum(not saved.checksum for saved in found.manifest.tensors.values())
    if settings.json:
        said = [{"file": file, "fault": fault} for file, fault in faults]
        say({"path": found.full, "whole": not faults, "without_checksum": without, "faults": said})
    elif faults:
        made = table("file", "fault")
        for file, fault in faults:
            made.add_row(file, fault)
        show(f"{found.full} is damaged", made)
    else:
        note = f"; {without} of them have no checksum, as older versions wrote them" if without else ""
        show(f"{found.full} is whole: {len(found.manifest.tensors)} variables{note}")
    return int(bool(faults))


@checkpoint.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@as_json
@settings
def diff(settings: Settings, first: str, second: str) -> int:
    """Compares the checkpoints A and B: names, dtypes, shapes and values; exits with 1 where they differ."""
    a, b = open_saved(first), open_saved(second)
    found = [difference(a, b, name) for name in sorted({*a.manifest.tensors, *b.manifest.tensors})]
    differing = [each for each in found if not each.same]
    others = other_differences(a.manifest, b.manifest)
    if settings.json:
        rounds = [a.manifest.round, b.manifest.round]
        tensors = [each.report() for each in differing]
        say({"paths": [a.full, b.full], "rounds": rounds, "tensors": tensors, "others": others})
        return int(bool(differing or others))
    heading = f"A: {a.full}, round {a.manifest.round}\nB: {b.full}, round {b.manifest.round}"
    lines: list[Any] = [_differences(differing)] if differing else []
    lines.append(f"{len(found) - len(differing)} of {len(found)} variables are the same")
    lines += [f"{name} differ" for name in others]
    show(heading, *lines)
    return int(bool(differing or others))


def _differences(found: Iterable[Difference]) -> Table:
    made = table("variable", "A", "B", "elements that differ", "largest difference")
    for each in found:
        largest = "" if each.largest is None else f"{each.largest:.6g}"
        made.add_row(each.name, str(each.a or "-"), str(each.b or "-"), each.counted, largest)
    return made


@checkpoint.command()
@click.argument("path")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
@as_json
@settings
def export(settings: Settings, path: str, out: Path, force: bool) -> int:
    """Writes all variables of the checkpoint at PATH into one file, OUT.safetensors or OUT.npz."""
    write = EXPORTS.get(out.suffix)
    if write is None:
        raise ConfigError(f"{out} has no known ending; write {' or '.join(EXPORTS)}")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; give another name, or --force to replace it")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no directory {out.parent} to write {out.name} into; make it first")
    found = open_saved(path)
    write(found, out)
    wide = widened(found.manifest) if out.suffix == ".npz" else []
    if settings.json:
        return say({"path": found.full, "file": str(out), "tensors": len(found.manifest.tensors), "widened": wide})
    if wide:
        click.echo(f"NumPy's files know no bfloat16; as float32, exactly: {', '.join(wide)}", err=True)
    return show(f"{len(found.manifest.tensors)} variables of {found.full} are in {out}")


def summary(found: SavedCheckpoint) -> dict[str, Any]:
    """A line about a checkpoint, as `ls --json` gives it."""
    manifest = found.manifest
    return {
        "name": found.name,
        "path": found.full,
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
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds") if seconds else "-"
    except (OverflowError, ValueError, OSError):  # by a clock of another age
        return "-"
