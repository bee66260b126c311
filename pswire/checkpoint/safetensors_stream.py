"""The safetensors format, as a stream: tensor after tensor, none of them held twice, each with its checksum.

A file is the length of its header in eight bytes, the header, which is JSON, and the tensors' bytes without a gap. It
says for each tensor where it lies. `safetensors.numpy.load_file` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
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
        spec: its dtype and shape.
        offset: of its first byte in the file.
    """

    spec: TensorSpec
    offset: int


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
    return TensorEntry(spec, base + bounds[0])


def read(file: IO[bytes], entry: TensorEntry) -> tuple[Array, str]:
    """A tensor, in memory of its own, and the checksum of its bytes; `Malformed` where the file is cut short."""
    array: Array = np.empty(entry.spec.shape, DTYPES[entry.spec.dtype])
    digest, data = xxhash.xxh3_128(), as_bytes(array)
    file.seek(entry.offset)
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        _fill(file, piece)
        digest.update(piece)
    return array, f"xxh3:{digest.hexdigest()}"


def read_rows(file: IO[bytes], entry: TensorEntry, first: int, out: Array, sums: bool) -> str:
    """Reads some rows of a tensor.

    Args:
        file: the open file.
        entry: the tensor in it.
        first: number of the first row.
        out: takes the rows; contiguous, of the tensor's dtype.
        sums: True to read the others, too, in little memory, for the checksum of all of them.

    Returns:
        The checksum of the tensor's bytes; "" unless `sums`.

    Raises:
        Malformed: the file is cut short.
    """
    data, digest = as_bytes(out), xxhash.xxh3_128()
    start = first * (entry.spec.nbytes // entry.spec.shape[0])
    rest = memoryview(bytearray(min(PIECE, entry.spec.nbytes) if sums else 0))

    def spare(count: int) -> Iterator[memoryview]:
        for at in range(0, count, PIECE):
            yield rest[: count - at]

    own = (data[at : at + PIECE] for at in range(0, len(data), PIECE))
    behind = entry.spec.nbytes - start - len(data)
    file.seek(entry.offset + (0 if sums else start))
    for piece in chain(spare(start), own, spare(behind)) if sums else own:
        _fill(file, piece)
        if sums:
            digest.update(piece)
    return f"xxh3:{digest.hexdigest()}" if sums else ""


def _checksum(file: IO[bytes], entry: TensorEntry) -> str:
    """The checksum of a tensor's bytes, which are not kept; `Malformed` where the file is cut short."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(PIECE, entry.spec.nbytes)))
    file.seek(entry.offset)
    for start in range(0, entry.spec.nbytes, PIECE):
        piece = buffer[: entry.spec.nbytes - start]
        _fill(file, piece)
        digest.update(piece)
    return f"xxh3:{digest.hexdigest()}"


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


def read_saved(file: IO[bytes], entries: Mapping[str, TensorEntry], name: str, saved: Saved) -> Array:
    """Reads a tensor of a checkpoint into memory of its own.

    Args:
        file: the open file.
        entries: the file's header.
        name: name of the tensor.
        saved: the manifest's row of it.

    Raises:
        Malformed: the file does not have the tensor, or not as it was saved.
    """
    array, checksum = read(file, entry_of(entries, name, saved))
    _compare(name, saved, checksum)
    return array


def read_saved_rows(
    file: IO[bytes], entries: Mapping[str, TensorEntry], name: str, saved: Saved, first: int, out: Array
) -> None:
    """Reads some rows of a tensor of a checkpoint; whoever takes the first one checks all of it.

    So each tensor of which all rows are read, by whomever, is checked once.

    Args:
        file, entries, name, saved: as `read_saved` takes them.
        first: number of the first row.
        out: takes the rows; contiguous, of the tensor's dtype.

    Raises:
        Malformed: as `read_saved`.
    """
    checksum = read_rows(file, entry_of(entries, name, saved), first, out, first == 0)
    if checksum:
        _compare(name, saved, checksum)


def verify_saved(file: IO[bytes], entries: Mapping[str, TensorEntry], name: str, saved: Saved) -> None:
    """As `read_saved`, in little memory: raises `Malformed` unless the tensor is as it was saved."""
    _compare(name, saved, _checksum(file, entry_of(entries, name, saved)))


def entry_of(entries: Mapping[str, TensorEntry], name: str, saved: Saved) -> TensorEntry:
    """Returns where a tensor of a checkpoint is; raises `Malformed` where the file does not have it, or as another."""
    if name not in entries:
        raise Malformed(f"it does not contain {name!r}, which the manifest lists")
    if entries[name].spec != saved.spec:
        raise Malformed(f"it holds {name!r} as {entries[name].spec}, not {saved.spec}")
    return entries[name]


def _compare(name: str, saved: Saved, checksum: str) -> None:
    if saved.checksum not in ("", checksum):
        raise Malformed(f"{name!r} has another checksum than when it was saved: {checksum}, not {saved.checksum}")


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
