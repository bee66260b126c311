"""The manifest of a checkpoint: what its files have. JSON, written last; docs/checkpoints.md has its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

from pswire.errors import CheckpointError
from pswire.log import Position
from pswire.tensor import DTYPES, TensorSpec

MANIFEST = "manifest.json"
"""Its name. A directory without one is no checkpoint: it is what a crash has left behind."""

FORMAT = 2
"""What is written. Format 1 has no checksums, sizes, objects or state; it is read, too."""


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint.

    Attributes:
        file: the name of the file that has it, in the checkpoint's directory.
        spec: dtype and shape.
        checksum: of its bytes as they lie in the file, `xxh3:` and 32 hexadecimal digits; "" where there is none.
    """

    file: str
    spec: TensorSpec
    checksum: str = ""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint has.

    Attributes:
        round: the round whose state it is.
        positions: the datasets' positions after that round.
        tensors: by the names that checkpoints have variables by.
        files: the bytes of each file.
        objects: for each path in what `Checkpoint(**objects)` tracked the name of its tensor.
        state: by path what `state_dict` of other objects gave: JSON.
        saved_at: seconds since 1970.
        library: what has written it.
    """

    round: int
    positions: tuple[Position, ...]
    tensors: Mapping[str, Saved]
    files: Mapping[str, int] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    saved_at: float = 0.0
    library: str = ""

    def text(self) -> str:
        """The JSON text."""
        tensors = {
            name: {
                "file": saved.file,
                "dtype": saved.spec.dtype,
                "shape": list(saved.spec.shape),
                "checksum": saved.checksum,
            }
            for name, saved in self.tensors.items()
        }
        content = {
            "format": FORMAT,
            "library": self.library or f"paramserver {version('paramserver')}",
            "saved_at": self.saved_at,
            "round": self.round,
            "positions": [vars(position) for position in self.positions],
            "files": dict(self.files),
            "tensors": tensors,
            "objects": dict(self.objects),
            "state": dict(self.state),
        }
        return json.dumps(content, indent=1, sort_keys=True)

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """Reads a JSON text.

        Args:
            text: what was in the file.
            where: the file, for messages.

        Raises:
            CheckpointError: it is no manifest, or one of a newer format, or names what is outside of its directory.
        """
        try:
            found = cls._read(json.loads(text), where)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{where} is no manifest of a checkpoint: {error!r}") from error
        outside = [file for file in found.files if PurePosixPath(file).name != file]
        outside += [saved.file for saved in found.tensors.values() if PurePosixPath(saved.file).name != saved.file]
        if outside:
            raise CheckpointError(f"{where} names a file outside of its directory: {outside[0]!r}")
        return found

    @classmethod
    def _read(cls, data: dict[str, Any], where: str) -> Manifest:
        if data["format"] not in (1, FORMAT):
            raise CheckpointError(f"{where} has format {data['format']!r}; this version reads 1 and {FORMAT}")
        tensors = {name: _saved(entry) for name, entry in data["tensors"].items()}
        return cls(
            int(data["round"]),
            tuple(Position(**position) for position in data["positions"]),
            tensors,
            {str(file): int(size) for file, size in data.get("files", {}).items()},
            {str(path): str(name) for path, name in data.get("objects", {}).items()},
            dict(data.get("state", {})),
            float(data.get("saved_at", 0.0)),
            str(data.get("library", "")),
        )


def _saved(entry: Mapping[str, Any]) -> Saved:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the dtype {entry['dtype']!r} is not known")
    spec = TensorSpec(entry["dtype"], tuple(int(n) for n in entry["shape"])).check()
    return Saved(str(entry["file"]), spec, str(entry.get("checksum", "")))
