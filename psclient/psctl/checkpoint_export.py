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
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.reader import SavedCheckpoint


def export_safetensors(found: SavedCheckpoint, out: Path) -> None:
    """Writes one safetensors file; its metadata names those of complex128, whose parts are one dimension more.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        OSError: the file cannot be written.
    """
    specs = {name: saved.spec for name, saved in found.manifest.tensors.items()}
    with _written(out) as file:
        file.write(safetensors_stream.header(specs))
        for name in safetensors_stream.ordered(specs):
            safetensors_stream.append(file, (found.tensor(name),))


def export_npz(found: SavedCheckpoint, out: Path) -> None:
    """Writes one file that `numpy.load` reads; bfloat16 becomes float32. Raises as `export_safetensors`."""
    with _written(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, saved in sorted(found.manifest.tensors.items()):
            value = found.tensor(name)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                wide = value.astype(np.float32) if saved.spec.dtype == "bfloat16" else value
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
