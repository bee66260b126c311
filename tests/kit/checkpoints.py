"""Checkpoints written with other means than the servers': safetensors' own writer, and a manifest beside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import save_file

from pswire.checkpoint.manifest import MANIFEST, Manifest, Saved
from pswire.model.log import Position
from pswire.model.tensor import Array, as_bytes, spec_of


def write_checkpoint(
    path: Path, values: Mapping[str, Array], shards: int = 2, checksums: bool = True, **more: Any
) -> Path:
    """Writes a checkpoint of some variables, dealt out over files.

    Args:
        path: its directory.
        values: by name.
        shards: how many files.
        checksums: whether the manifest has any.
        more: fields of the manifest; the round is 7 where it is not given.
    """
    path.mkdir(parents=True)
    files, tensors = {}, {}
    for place in range(shards):
        file = f"shard-{place:05d}-of-{shards:05d}.safetensors"
        mine = dict(sorted(values.items())[place::shards])
        parted = {name: "complex128" for name, value in mine.items() if value.dtype == np.complex128}
        save_file({name: _laid_out(value) for name, value in mine.items()}, path / file, parted or None)
        files[file] = (path / file).stat().st_size
        for name, value in mine.items():
            digest = xxhash.xxh3_128_hexdigest(as_bytes(np.ascontiguousarray(value)))
            tensors[name] = Saved(file, spec_of(value), f"xxh3:{digest}" if checksums else "")
    said = {"round": 7, "positions": (Position(0, 1, 5),), "saved_at": 1e9, "library": "a test"} | more
    (path / MANIFEST).write_text(Manifest(tensors=tensors, files=files, **said).text(), encoding="utf-8")
    return path


def _laid_out(value: Array) -> Array:
    if value.dtype != np.complex128:
        return np.ascontiguousarray(value).reshape(value.shape)
    return np.stack([value.real, value.imag], axis=-1)
