"""The manifest of a checkpoint: what its files have. JSON, written last; docs/manifest.schema.json has its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import PurePosixPath
from typing import Any

from pswire.checkpoint import strict_json
from pswire.checkpoint.strict_json import Malformed
from pswire.checkpoint.table_specs import slots_from_json, slots_to_json, spec_from_json, spec_to_json
from pswire.checkpoint.table_tensors import BESIDE, beside
from pswire.errors import CheckpointError, DamagedCheckpoint, InvalidRequest
from pswire.model.log import Examples, Position
from pswire.model.saved import SavedTable
from pswire.model.tensor import TensorSpec
from pswire.process import version

MANIFEST = "manifest.json"
"""Its name. A directory without one is no checkpoint: it is what a crash has left behind."""

LATEST = "latest"
"""The file beside checkpoints that names the one to go on from. Without it that is the one with the greatest number."""

MAX_MANIFEST = 16 << 20
"""Bytes of a manifest: some 50,000 variables. What is larger is neither written nor read."""

MAX_LATEST = 4 << 10
"""Bytes of the file `latest`."""

FORMAT = 4
"""The newest format. Format 3 has no dynamic tables, and format 2 no slices either: each is written where it suffices.
Format 1, which is only read, has no checksums, sizes, objects or state."""

_MAX_DATASET = (1 << 32) - 1
_DIGEST = re.compile("[0-9a-f]{1,16}")

_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")
_ID = re.compile("[0-9a-f]{16}")

MAX_ROUND = (1 << 32) - 1
"""The last round of a table."""


def number(name: str) -> tuple[str, int]:
    """A checkpoint's name without its number, and the number: `ckpt-12` is ("ckpt", 12), `best` is ("best", -1)."""
    stem, dash, digits = name.rpartition("-")
    numbered = dash and digits.isascii() and digits.isdecimal() and len(digits) < 20
    return (stem, int(digits)) if numbered else (name, -1)


def rank(name: str) -> tuple[int, str]:
    """The order of the checkpoints in a directory: the newest has the greatest.

    It is the number that tells, then the name; no clock does: files are copied, and the clocks of hosts differ. Those
    without a number come before all that have one.
    """
    stem, found = number(name)
    return found, stem


def shard_name(place: int, count: int, save: str) -> str:
    """Returns the name of a checkpoint's file.

    Args:
        place: index of the file.
        count: number of files.
        save: eight hexadecimal digits that no other save has, so that files of other saves stay as they are.
    """
    return f"shard-{place:05d}-of-{count:05d}-{save}.safetensors"


_ASIDE = re.compile(r"\.damaged(\.[0-9]+)?$")


def aside(name: str, taken: Collection[str]) -> str:
    """The name under which a damaged checkpoint is kept: `ckpt-7.damaged`, or `.damaged.2` where that is taken."""
    first = f"{name}.damaged"
    return next(one for one in chain([first], (f"{first}.{n}" for n in count(2))) if one not in taken)


def is_aside(name: str) -> bool:
    """Returns whether a checkpoint of this name is one that was set aside: no job goes on from it by itself."""
    return _ASIDE.search(name) is not None


def is_ours(file: str) -> bool:
    """Returns whether a save makes files of such a name; it begins with a dot while the file is being written."""
    return file.startswith(("shard-", ".shard-", f".{MANIFEST}."))


def latest_text(name: str) -> str:
    """Returns what the file `latest` says when a checkpoint of this name is the newest."""
    return json.dumps({"format": 1, "latest": name}) + "\n"


def latest_in(text: str) -> str:
    """The name in the text of the file `latest`; raises `Malformed` where it is not as this version writes it."""
    said = strict_json.parse(text)
    name = said.get("latest") if isinstance(said, dict) and said.get("format") == 1 else None
    if not isinstance(name, str):
        raise Malformed(f"{text[:80]!r} does not look like {latest_text('ckpt-3').strip()}")
    return name


@dataclass(frozen=True)
class Slice:
    """Some rows of a tensor, which are a tensor of a file.

    Attributes:
        file: the name of the file, in the checkpoint's directory.
        tensor: its name there.
        first: number of the first row.
        rows: number of rows.
        checksum: of its bytes as they lie in the file, `xxh3:` and 32 hexadecimal digits; "" where there is none.
    """

    file: str
    tensor: str
    first: int
    rows: int
    checksum: str = ""


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint.

    Attributes:
        file: the name of the file that has it, in the checkpoint's directory; "" for one in slices.
        spec: dtype and shape.
        checksum: as of a `Slice`; "" for one in slices.
        slices: of the tensor of a partitioned variable, in order; all its rows are in one. Else empty.
    """

    file: str
    spec: TensorSpec
    checksum: str = ""
    slices: tuple[Slice, ...] = ()

    def pieces(self, name: str) -> tuple[Slice, ...]:
        """Returns its slices; of one that is in one piece that piece.

        Args:
            name: its name.
        """
        return self.slices or (Slice(self.file, name, 0, self.spec.shape[0] if self.spec.shape else 1, self.checksum),)

    def piece(self, one: Slice) -> Saved:
        """Returns one of its pieces as a tensor of its own."""
        spec = TensorSpec(self.spec.dtype, (one.rows, *self.spec.shape[1:])) if self.slices else self.spec
        return Saved(one.file, spec, one.checksum)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that have it."""
        return tuple(dict.fromkeys(one.file for one in self.pieces("")))


@dataclass(frozen=True)
class Base:
    """The checkpoint to which a delta has the changes, beside it.

    Attributes:
        name: its name.
        id: its id: another checkpoint that was saved under its name since is not it.
    """

    name: str
    id: str


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint.

    Attributes:
        round: the round whose state it is.
        positions: the datasets' positions after that round.
        tensors: the tensors, by the names that checkpoints have variables by.
        files: size of each file, in bytes.
        objects: for each path in the objects of `Checkpoint(**objects)` the name of its tensor.
        state: by path the results of other objects' `state_dict`: JSON.
        saved_at: seconds since 1970.
        library: name and version of the program that has written it.
        tables: the dynamic tables, by name. A tensor of one has its rows in the order of the hashes of their keys.
        id: sixteen hexadecimal digits, by which deltas know it, whatever files it is in; "" without tables.
        base: of a delta, whose tables are changes, what they are changes to; None of one that is whole.
    """

    round: int
    positions: tuple[Position, ...]
    tensors: Mapping[str, Saved]
    files: Mapping[str, int] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    saved_at: float = 0.0
    library: str = ""
    tables: Mapping[str, SavedTable] = field(default_factory=dict)
    id: str = ""
    base: Base | None = None

    @property
    def format(self) -> int:
        """The oldest format that has all of it; at least 2."""
        return 4 if self.tables else 3 if any(saved.slices for saved in self.tensors.values()) else 2

    @property
    def owners(self) -> dict[str, str]:
        """Returns the table of each tensor that is one of a table: its rows, what lies beside them, and the rest."""
        found: dict[str, str] = {}
        for name, table in self.tables.items():
            known = (name, *(slot.name for slot in table.slots), *(beside(name, kind) for kind in BESIDE))
            found |= {tensor: name for tensor in known if tensor in self.tensors}
        return found

    @property
    def variables(self) -> dict[str, Saved]:
        """Returns the tensors that are variables: those by which tables are known beside their rows are left out."""
        extra = {beside(name, kind) for name in self.tables for kind in BESIDE}
        return {name: saved for name, saved in self.tensors.items() if name not in extra}

    @property
    def shards(self) -> list[str]:
        """The names of its files, of which an older format gives no sizes."""
        return sorted({*self.files, *(file for saved in self.tensors.values() for file in saved.files)})

    def within(self, file: str) -> dict[str, tuple[str, Saved]]:
        """Returns what a file has, by the names of its tensors: of which tensor it is a piece, and the piece."""
        return {
            one.tensor: (name, saved.piece(one))
            for name, saved in self.tensors.items()
            for one in saved.pieces(name)
            if one.file == file
        }

    def text(self) -> str:
        """The JSON text: a line for each tensor, so that one of many thousands still travels in one message."""
        content = {
            "format": self.format,
            "library": self.library or f"paramserver {version('paramserver')}",
            "saved_at": self.saved_at,
            "round": self.round,
            "positions": [_position_entry(position) for position in self.positions],
            "files": dict(self.files),
            "objects": dict(self.objects),
            "state": dict(self.state),
        }
        if self.tables:
            content |= {"id": self.id, "base": self.base and vars(self.base)}
            content["tables"] = {name: _table_entry(table) for name, table in self.tables.items()}
        head = json.dumps(content, indent=1).removesuffix("\n}")
        lines = (f"  {json.dumps(name)}: {_entry(saved)}" for name, saved in sorted(self.tensors.items()))
        return f'{head},\n "tensors": {{\n' + ",\n".join(lines) + "\n }\n}\n"

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """Reads a JSON text.

        Args:
            text: content of the file.
            where: path of the file, for messages.

        Raises:
            DamagedCheckpoint: the text is no manifest, or names files outside of its directory.
            CheckpointError: the manifest is of a newer format.
        """
        try:
            data = strict_json.fields(strict_json.parse(text))
            if strict_json.integer(strict_json.field(data, "format")) > FORMAT:
                raise CheckpointError(f"{where} has format {data['format']}; this version reads 1 to {FORMAT}")
            found = cls._read(data)
        except (Malformed, InvalidRequest) as error:
            raise DamagedCheckpoint(f"{where} is not a checkpoint manifest: {error}") from error
        outside = [
            file for file in found.shards if file in ("", "..") or "\0" in file or PurePosixPath(file).name != file
        ]
        if outside:
            raise DamagedCheckpoint(f"{where} names a file outside of its directory: {outside[0][:80]!r}")
        return found

    @classmethod
    def _read(cls, data: dict[str, Any]) -> Manifest:
        def words(key: str) -> Iterator[tuple[str, Any]]:
            return iter(strict_json.fields(data.get(key, {})).items())

        tables = {name: _table(name, table) for name, table in words("tables")}
        return cls(
            strict_json.integer(strict_json.field(data, "round")),
            tuple(map(_position, strict_json.items(strict_json.field(data, "positions")))),
            {name: _saved(entry) for name, entry in strict_json.fields(strict_json.field(data, "tensors")).items()},
            {file: strict_json.integer(size) for file, size in words("files")},
            {path: strict_json.text(name) for path, name in words("objects")},
            {path: strict_json.shallow(state) for path, state in words("state")},
            strict_json.number(data.get("saved_at", 0)),
            strict_json.text(data.get("library", "")),
            tables,
            _id(data.get("id", "")) if tables else "",
            _base(data.get("base")) if tables else None,
        )


def _entry(saved: Saved) -> str:
    spec = {"dtype": saved.spec.dtype, "shape": saved.spec.shape}
    if saved.slices:
        return json.dumps({**spec, "slices": [vars(one) for one in saved.slices]})
    return json.dumps({"file": saved.file, **spec, "checksum": saved.checksum})


def _table_entry(table: SavedTable) -> dict[str, Any]:
    said = {"spec": spec_to_json(table.spec), "slots": slots_to_json(table.slots)}
    return {**said, "since": table.since, "round": table.round}


def _table(name: str, data: Any) -> SavedTable:
    said = strict_json.fields(data)
    spec, slots = spec_from_json(strict_json.field(said, "spec")), slots_from_json(strict_json.field(said, "slots"))
    round = strict_json.integer(strict_json.field(said, "round"), MAX_ROUND)
    since = strict_json.field(said, "since")
    return SavedTable(name, spec, slots, -1 if since == -1 else strict_json.integer(since, round), round)


def _id(data: Any) -> str:
    found = strict_json.text(data)
    if found and not _ID.fullmatch(found):
        raise Malformed(f"{found[:80]!r} is not an id")
    return found


def _base(data: Any) -> Base | None:
    if data is None:
        return None
    said = strict_json.fields(data)
    name, id = strict_json.text(strict_json.field(said, "name")), _id(strict_json.field(said, "id"))
    if name in ("", ".", "..") or "\0" in name or PurePosixPath(name).name != name:
        raise Malformed(f"{name[:80]!r} is not the name of a checkpoint in the same directory")
    return Base(name, id)


def _position(data: Any) -> Position:
    said = strict_json.fields(data)
    dataset, epoch, index = (strict_json.integer(strict_json.field(said, key)) for key in ("dataset", "epoch", "index"))
    returned = tuple(map(_examples, strict_json.items(said.get("returned", []))))
    source = strict_json.text(said.get("source", "0"))
    if not _DIGEST.fullmatch(source):
        raise Malformed(f"{source[:80]!r} is not the digest of a dataset")
    return Position(strict_json.integer(dataset, _MAX_DATASET), epoch, index, returned, int(source, 16))


def _examples(data: Any) -> Examples:
    numbers = [strict_json.integer(number) for number in strict_json.items(data)]
    if len(numbers) != 3 or numbers[1] >= numbers[2]:
        raise Malformed(f"{str(data)[:80]} is not a batch number with a range of examples")
    return Examples(*numbers)


def _position_entry(position: Position) -> dict[str, Any]:
    said: dict[str, Any] = {"dataset": position.dataset, "epoch": position.epoch, "index": position.index}
    if position.returned:
        said["returned"] = [[each.index, each.first, each.stop] for each in position.returned]
    if position.source:
        said["source"] = f"{position.source:016x}"
    return said


def _saved(data: Any) -> Saved:
    entry = strict_json.fields(data)
    shape = tuple(map(strict_json.integer, strict_json.items(strict_json.field(entry, "shape"))))
    spec = TensorSpec(strict_json.text(strict_json.field(entry, "dtype")), shape).check()
    if "slices" not in entry:
        return Saved(strict_json.text(strict_json.field(entry, "file")), spec, _checksum(entry))
    slices = tuple(map(_slice, strict_json.items(entry["slices"])))
    ends = [one.first + one.rows for one in slices]
    if not shape or [one.first for one in slices] != [0, *ends[:-1]] or ends[-1:] != [shape[0]]:
        raise Malformed(f"slices of the rows {[(one.first, one.rows) for one in slices][:8]} do not make {spec}")
    return Saved("", spec, "", slices)


def _slice(data: Any) -> Slice:
    said = strict_json.fields(data)
    file, tensor = (strict_json.text(strict_json.field(said, key)) for key in ("file", "tensor"))
    first, rows = (strict_json.integer(strict_json.field(said, key)) for key in ("first", "rows"))
    if rows < 1:
        raise Malformed(f"a slice of {tensor[:80]!r} has {rows} rows")
    return Slice(file, tensor, first, rows, _checksum(said))


def _checksum(entry: dict[str, Any]) -> str:
    checksum = strict_json.text(entry.get("checksum", ""))
    if checksum and not _CHECKSUM.fullmatch(checksum):
        raise Malformed(f"{checksum[:80]!r} is not a checksum")
    return checksum
