"""The safetensors format, as a stream: tensor after tensor, none of them held twice, each with its checksum.

A file is the length of its header in eight bytes, the header, which is JSON, and the tensors' bytes without a gap. It
says for each tensor where it lies. `safetensors.numpy.load_file` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import xxhash

from pswire.checkpoint import strict_json
from pswire.checkpoint.manifest import Saved
from pswire.checkpoint.strict_json import Malformed
from pswire.errors import CheckpointError, DamagedCheckpoint, InvalidRequest, PSError
from pswire.model.tensor import DTYPES, Array, TensorSpec, as_bytes

_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""The format's names of our dtypes. It knows no complex128: its parts lie in one more dimension, and the metadata says
so."""

_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

_METADATA = "__metadata__"

MAX_HEADER = 100_000_000
"""Bytes: no reader of the format takes more."""

PIECE = 1 << 20
"""Bytes that are summed while they are in the cache, and then written, or were just read."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        name: its name there.
        spec: its dtype and shape.
        offset: of its first byte in the file.
        checksum: the checksum that it has to have; "" where none is known.
    """

    name: str
    spec: TensorSpec
    offset: int
    checksum: str = ""


def ordered(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The names in the order of their bytes: large items first, so that each tensor is aligned to its own."""
    return sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].itemsize, name))


def header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Returns what comes before the tensors, which follow as `ordered` says; its length is a multiple of 8."""
    if _METADATA in specs:
        raise CheckpointError(f"the safetensors format reserves the name {_METADATA!r}; rename the variable")
    parted = {name: "complex128" for name in ordered(specs) if specs[name].dtype == "complex128"}
    content: dict[str, Any] = {_METADATA: parted} if parted else {}
    end = 0
    for name in ordered(specs):
        spec, start = specs[name], end
        end += spec.nbytes
        dtype, shape = ("F64", (*spec.shape, 2)) if name in parted else (_NAMES[spec.dtype], spec.shape)
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"{len(specs)} variables of one server are too many for a safetensors file; add servers")
    return len(text).to_bytes(8, "little") + text


def append(file: IO[bytes], arrays: Iterable[Array]) -> str:
    """Writes the next tensor, which is in C order, and comes in pieces of some rows; returns its checksum."""
    digest = xxhash.xxh3_128()
    for data in map(as_bytes, arrays):
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            digest.update(piece)
            file.write(piece)
    return f"xxh3:{digest.hexdigest()}"


def read_header(file: IO[bytes], size: int, limit: int = MAX_HEADER) -> dict[str, TensorEntry]:
    """Returns the tensors of a file by name, from its header.

    Args:
        file: the open file.
        size: size of the file, in bytes.
        limit: greatest size of its header: a manifest of few bytes must not make a reader take many here.

    Raises:
        Malformed: the file is no safetensors file, or is cut short; the message says why.
    """
    length = int.from_bytes(_exactly(file, min(8, size)), "little")
    if not 2 <= length <= min(limit, MAX_HEADER, size - 8):
        raise Malformed("its header is damaged, or the file is truncated")
    try:
        content = strict_json.fields(strict_json.parse(_exactly(file, length)))
        parted = strict_json.fields(content.pop(_METADATA, {}))
        found = {name: _entry(name, entry, parted, 8 + length) for name, entry in content.items()}
    except (Malformed, InvalidRequest) as error:
        raise Malformed(f"its header is damaged: {error}") from error
    if any(entry.offset + entry.spec.nbytes > size for entry in found.values()):
        raise Malformed("its header lists bytes that the file does not have, so it is damaged or truncated")
    return found


def _entry(name: str, data: Any, parted: Mapping[str, Any], base: int) -> TensorEntry:
    entry = strict_json.fields(data)
    kind = strict_json.text(strict_json.field(entry, "dtype"))
    if kind not in _DTYPES:
        raise Malformed(f"the dtype {kind[:80]!r} is not known")
    shape = tuple(map(strict_json.integer, strict_json.items(strict_json.field(entry, "shape"))))
    dtype = _DTYPES[kind]
    if parted.get(name) == "complex128" and dtype == "float64" and shape[-1:] == (2,):
        dtype, shape = "complex128", shape[:-1]
    spec = TensorSpec(dtype, shape).check()
    bounds = [strict_json.integer(one) for one in strict_json.items(strict_json.field(entry, "data_offsets"))]
    if len(bounds) != 2 or bounds[1] - bounds[0] != spec.nbytes:
        raise Malformed(f"{name!r} has bytes {bounds[:3]}, not the {spec.nbytes} bytes of {spec}")
    return TensorEntry(name, spec, base + bounds[0])


class TensorReader:
    """Reads a tensor of a file from front to back, and checks that its bytes are as they were saved.

    Args:
        file: the open file, which nobody else reads meanwhile.
        entry: the tensor in it, with the checksum that it has to have.
        first: number of the first row to read. From row 0 on all of the tensor is checked, and else nothing: so a
            tensor of which all rows are read, by whomever, is checked once.
    """

    def __init__(self, file: IO[bytes], entry: TensorEntry, first: int = 0) -> None:
        start = first * (entry.spec.nbytes // entry.spec.shape[0]) if first else 0
        self._file = file
        self._entry = entry
        self._digest = None if first else xxhash.xxh3_128()
        self._left = entry.spec.nbytes - start
        file.seek(entry.offset + start)

    def read(self, out: Array) -> None:
        """Fills an array, contiguous and of the tensor's dtype, with what comes next.

        Raises:
            Malformed: the file is cut short.
        """
        data = as_bytes(out)
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            _fill(self._file, piece)
            if self._digest is not None:
                self._digest.update(piece)
        self._left -= len(data)

    def end(self) -> None:
        """Reads what is left of a tensor that is checked, in little memory.

        Raises:
            Malformed: the tensor has another checksum, or the file is cut short.
        """
        if self._digest is None:
            return
        rest: Array = np.empty(min(PIECE, self._left), np.uint8)
        while self._left:
            self.read(rest[: self._left])
        name, checksum, expected = self._entry.name, f"xxh3:{self._digest.hexdigest()}", self._entry.checksum
        if expected not in ("", checksum):
            raise Malformed(f"{name!r} has another checksum than when it was saved: {checksum}, not {expected}")


def _exactly(file: IO[bytes], size: int) -> bytearray:
    data = bytearray(size)
    _fill(file, memoryview(data))
    return data


def _fill(file: Any, data: memoryview) -> None:
    while len(data):
        count = file.readinto(data)
        if not count:
            raise Malformed("it is truncated")
        data = data[count:]


def entry_of(entries: Mapping[str, TensorEntry], name: str, saved: Saved) -> TensorEntry:
    """Returns where a tensor of a checkpoint is; raises `Malformed` where the file does not have it, or as another."""
    if name not in entries:
        raise Malformed(f"it does not contain {name!r}, which the manifest lists")
    if entries[name].spec != saved.spec:
        raise Malformed(f"it holds {name!r} as {entries[name].spec}, not {saved.spec}")
    return replace(entries[name], checksum=saved.checksum)


@contextmanager
def told(where: str, verb: str = "read") -> Iterator[None]:
    """Raises errors of the block anew, with their place: libraries of object stores have errors of their own.

    A `Malformed` becomes a `DamagedCheckpoint`, all else a `CheckpointError`.

    Args:
        where: path of the file, or of its directory.
        verb: past participle of what was tried, such as "written".
    """
    try:
        yield
    except PSError:
        raise
    except Malformed as error:
        raise DamagedCheckpoint(f"{where} cannot be {verb}: {error}") from error
    except Exception as error:
        why = str(error) if isinstance(error, OSError | ValueError) else repr(error)
        raise CheckpointError(f"{where} cannot be {verb}: {why}") from error
