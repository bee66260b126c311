"""All variables of a checkpoint in one file, of which one is held at a time."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pswire.checkpoint import safetensors_stream
from pswire.checkpoint.compaction import whole_columns
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.reader import SavedCheckpoint


def export_safetensors(found: SavedCheckpoint, out: Path) -> None:
    """Writes one safetensors file; its metadata names those of complex128, whose parts are one dimension more.

    Of a delta dynamic tables are whole.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        OSError: the file cannot be written.
    """
    columns = {column.name: column for column in whole_columns(found)}
    specs = {name: column.spec for name, column in columns.items()}
    with _written(out) as file:
        file.write(safetensors_stream.header(specs))
        for name in safetensors_stream.ordered(specs):
            safetensors_stream.append(file, columns[name].pieces())


def export_npz(found: SavedCheckpoint, out: Path) -> None:
    """Writes one file that `numpy.load` reads; bfloat16 becomes float32. Raises as `export_safetensors`."""
    with _written(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for column in sorted(whole_columns(found), key=lambda column: column.name):
            pieces = [*column.pieces()]
            value = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            with archive.open(f"{column.name}.npy", "w", force_zip64=True) as member:
                wide = value.astype(np.float32) if column.spec.dtype == "bfloat16" else value
                np.lib.format.write_array(member, wide, allow_pickle=False)


def widened(manifest: Manifest) -> list[str]:
    """The variables that `export_npz` writes as float32, because NumPy's files know no bfloat16."""
    return sorted(name for name, saved in manifest.tensors.items() if saved.spec.dtype == "bfloat16")


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A file that is there only when all of it is written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
