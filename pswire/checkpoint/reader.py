"""Reading checkpoints where they lie: by servers, by strategies without servers, and by tools."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import IO

import numpy as np

from pswire.checkpoint import safetensors_stream
from pswire.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    MAX_LATEST,
    MAX_MANIFEST,
    Base,
    Manifest,
    Saved,
    Slice,
    is_aside,
    latest_in,
    number,
    rank,
)
from pswire.checkpoint.safetensors_stream import TensorEntry, TensorReader, entry_of, told
from pswire.checkpoint.storage import Storage, below, parted, storage_at
from pswire.checkpoint.strict_json import Malformed
from pswire.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint, VariableMismatch
from pswire.model.plan import ShardOf
from pswire.model.saved import RestoreReply
from pswire.model.tensor import DTYPES, Array, TensorSpec, spec_of

log = logging.getLogger("pswire")

PIECE_BYTES = 8 << 20
"""Bytes of rows that are read at a time, where they are not read into memory that is there."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was opened: it is complete. Used by one thread.

    Attributes:
        place: the storage that has it.
        path: its path below the storage's root.
        manifest: the checkpoint's table of contents.
        text: text of the manifest.
    """

    place: Storage
    path: str
    manifest: Manifest
    text: str
    _headers: dict[str, dict[str, TensorEntry]] = field(default_factory=dict, compare=False, repr=False)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    @property
    def name(self) -> str:
        """The last part of its path."""
        return PurePosixPath(self.full).name

    @property
    def full(self) -> str:
        """Its path, for people."""
        return self.place.full(self.path)

    @property
    def reply(self) -> RestoreReply:
        """Returns a server's answer about it."""
        return RestoreReply(self.path, self.manifest.positions, self.text)

    @classmethod
    def open(cls, place: Storage, path: str = ".", limit: int = MAX_MANIFEST) -> SavedCheckpoint:
        """Opens a checkpoint, or the newest in a directory of them.

        Args:
            place: the storage that has it.
            path: path of a checkpoint, or of a directory of them.
            limit: greatest size of its manifest, in bytes.

        Raises:
            NoCheckpoint: there is no checkpoint.
            DamagedCheckpoint: its manifest is broken.
            CheckpointError: its manifest cannot be read, or is longer; or the path leaves the storage's root.
        """
        path = below(path)
        return cls.at(place, path if _is_one(place, path) else newest(place, path), limit)

    @classmethod
    def open_whole(
        cls, place: Storage, path: str, damaged: Mapping[str, str] | None = None, limit: int = MAX_MANIFEST
    ) -> tuple[SavedCheckpoint, dict[str, str]]:
        """As `open`, but in a directory a checkpoint is passed over that is damaged, for the one before it.

        Args:
            place, path, limit: as `open` takes them.
            damaged: names of checkpoints in the directory that are known to be damaged, with what is wrong.

        Returns:
            The checkpoint, and with `damaged` those that were found to be so here. Of no manifest more is known than
            that it can be read.

        Raises:
            NoCheckpoint: there is none.
            DamagedCheckpoint: the one that `path` names is, or all are.
            CheckpointError: as `open`.
        """
        path, known = below(path), dict(damaged or {})
        if _is_one(place, path):
            return cls.at(place, path, limit), known
        for name in _some(place, path).downwards:
            if name not in known:
                try:
                    found = cls.at(place, str(PurePosixPath(path) / name), limit)
                    _ = found.bases  # a damaged base damages it
                    return found, known
                except DamagedCheckpoint as error:
                    known[name] = error.message
        raise DamagedCheckpoint(
            f"all checkpoints in {place.full(path)} are damaged: {listed(known)}; restore another checkpoint by its "
            "path, or move these away to start over"
        )

    @classmethod
    def at(cls, place: Storage, path: str, limit: int = MAX_MANIFEST) -> SavedCheckpoint:
        """Opens the checkpoint at a path, which is there; as `open` else."""
        where = str(PurePosixPath(path) / MANIFEST)
        full = place.full(where)
        with told(full):
            text = _text(place, where, MAX_MANIFEST, limit)
        return cls(place, path, Manifest.parse(text, full), text)

    @cached_property
    def bases(self) -> tuple[SavedCheckpoint, ...]:
        """What it has the changes to: the checkpoint before it, what that has the changes to, and so on to a whole one.

        Raises:
            DamagedCheckpoint: one of them is not there, is broken, or is another than it was.
            CheckpointError: a manifest cannot be read.
        """
        found, names = list[SavedCheckpoint](), {self.name}
        while (base := [self, *found][-1].manifest.base) is not None:
            found.append(self._base(base, names))
        return tuple(found)

    def _base(self, base: Base, names: set[str]) -> SavedCheckpoint:
        """Opens a base, which is in the directory of this one; `names` are those that were opened before."""
        place, path = self.place, PurePosixPath(self.path)
        if path.name == "":
            place, path = storage_at(parted(self.full)[0]), PurePosixPath(base.name)
        where = str(path.with_name(base.name))
        told_of = f"{self.full} contains only changes since {base.name!r}"
        with told(place.full(where)):
            is_there = base.name not in names and place.exists(str(PurePosixPath(where) / MANIFEST))
        if not is_there:
            raise DamagedCheckpoint(f"{told_of}, which is not in the same directory")
        names.add(base.name)
        found = SavedCheckpoint.at(place, where)
        if found.manifest.id != base.id:
            raise DamagedCheckpoint(f"{told_of}, but the checkpoint of this name was saved later, or by another run")
        return found

    # ---- Its tensors ----

    def read(
        self, wanted: Sequence[tuple[str, TensorSpec]], cast: bool = False, shards: Sequence[ShardOf | None] = ()
    ) -> list[Array]:
        """Reads tensors: nothing but these, each file in one go.

        Args:
            wanted: names of tensors, with the dtype and shape that each has to have.
            cast: True if a tensor may be of another dtype, and is cast.
            shards: for each the rows of the tensor that are wanted, of which its shape is; None, as by default, for
                all of them. Of other rows nothing is read, but for the checksum: see `TensorReader`.

        Returns:
            The arrays, in the order of `wanted`; each has memory of its own.

        Raises:
            CheckpointError: the checkpoint does not have one of them, or its bytes are not as they were saved.
            VariableMismatch: a tensor has another shape or dtype.
        """
        arrays, rows = list[Array](), list[tuple[str, int, Array]]()
        for (name, spec), shard in zip(wanted, list(shards) or [None] * len(wanted), strict=True):
            saved = self._check(name, spec, cast, shard)
            arrays.append(np.empty(spec.shape, DTYPES[saved.spec.dtype]))
            rows.append((name, shard.first if shard else 0, np.atleast_1d(arrays[-1])))
        self._fill(rows)
        return [array.astype(DTYPES[spec.dtype], copy=False) for array, (_, spec) in zip(arrays, wanted, strict=True)]

    def fill(self, wanted: Sequence[tuple[str, int, Array]]) -> None:
        """Reads rows of tensors into memory that is there, each file in one go.

        Args:
            wanted: names of tensors, each with the number of the first row that is wanted, and an array that takes it
                and the next ones, contiguous, of the tensor's dtype. For checksums see `TensorReader`.

        Raises:
            DamagedCheckpoint, CheckpointError: as `read`.
            VariableMismatch: rows of a tensor are of another shape or dtype, or there are not so many.
        """
        for name, first, out in wanted:
            shard = ShardOf(name, first, self.manifest.tensors[name].spec.shape[0] if name in self else 0)
            self._check(name, spec_of(out), False, shard)
            if first + len(out) > shard.rows:
                raise VariableMismatch(f"the checkpoint {self.full} holds only {shard.rows} rows of {name!r}")
        self._fill(wanted)

    def _fill(self, wanted: Sequence[tuple[str, int, Array]]) -> None:
        """As `fill`, of tensors that `_check` has seen."""
        by_file: dict[str, list[tuple[TensorEntry, int, Array]]] = {}
        for name, first, out in wanted:
            saved = self.manifest.tensors[name]
            for one in saved.pieces(name):
                begin, end = max(first, one.first), min(first + len(out), one.first + one.rows)
                if begin < end:
                    rows = self._entry(saved, one), begin - one.first, out[begin - first : end - first]
                    by_file.setdefault(one.file, []).append(rows)
        for name, pieces in sorted(by_file.items()):
            with self._opened(name) as file:
                for entry, first, out in pieces:
                    tensor = TensorReader(file, entry, first)
                    tensor.read(out)
                    tensor.end()

    def tensor(self, name: str) -> Array:
        """One tensor, as it was saved; raises as `read`, and `KeyError` where the checkpoint has none of this name."""
        (array,) = self.read([(name, self.manifest.tensors[name].spec)])
        return array

    def mapped(self, name: str) -> list[Array]:
        """Maps a tensor into memory, read-only: the rows of each of its pieces, in order. No checksum is looked at.

        Raises:
            DamagedCheckpoint: a file is not as the manifest says.
            CheckpointError: there is no such tensor, or a file cannot be mapped: it has to be one of this machine.
        """
        if name not in self:
            raise CheckpointError(f"the checkpoint {self.full} has no {name!r}")
        saved, found = self.manifest.tensors[name], list[Array]()
        for one in saved.pieces(name):
            with self._opened(one.file, "mapped"):
                entry = self._entry(saved, one)
                dtype, shape = DTYPES[entry.spec.dtype], entry.spec.shape
                path = self.place.full(str(PurePosixPath(self.path) / one.file))
                is_there = entry.spec.nbytes > 0
                found.append(np.memmap(path, dtype, "r", entry.offset, shape) if is_there else np.empty(shape, dtype))
        return found

    def stream(self, name: str, first: int, stop: int) -> Iterator[Array]:
        """Yields rows of a tensor that is there, from one to another, some at a time; raises as `fill` on the way."""
        saved = self.manifest.tensors[name]
        row = TensorSpec(saved.spec.dtype, saved.spec.shape[1:])
        step = max(1, PIECE_BYTES // max(1, row.nbytes))
        for one in saved.pieces(name):
            begin, end = max(first, one.first), min(stop, one.first + one.rows)
            if begin >= end:
                continue
            with self._opened(one.file) as file:
                tensor = TensorReader(file, self._entry(saved, one), begin - one.first)
                for at in range(begin, end, step):
                    rows: Array = np.empty((min(step, end - at), *row.shape), DTYPES[row.dtype])
                    tensor.read(rows)
                    yield rows
                tensor.end()

    def _check(self, name: str, spec: TensorSpec, cast: bool, shard: ShardOf | None) -> Saved:
        """Returns a tensor that is as it is wanted, and that its files have: a manifest alone must not take memory."""
        tensors = self.manifest.tensors
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint {self.full} has no variable {name!r}; it has {', '.join(sorted(tensors)[:8])}"
            )
        found = tensors[name].spec
        if shard is not None:
            spec = TensorSpec(spec.dtype, (shard.rows, *spec.shape[1:]))
        if found.shape != spec.shape or (found.dtype != spec.dtype and not cast):
            fits = found.shape == spec.shape
            wish = "restore it with CheckpointOptions(cast=True)" if fits else "create the variable as it was saved"
            raise VariableMismatch(f"the checkpoint {self.full} holds {name!r} as {found}, not {spec}; {wish}")
        for one in tensors[name].pieces(name):
            self._entry(tensors[name], one)
        return tensors[name]

    def _entry(self, saved: Saved, one: Slice) -> TensorEntry:
        """Returns where a piece of a tensor is in its file; raises as `read`."""
        if one.file not in self._headers:
            with self._opened(one.file):
                pass
        try:
            return entry_of(self._headers[one.file], one.tensor, saved.piece(one))
        except Malformed:
            with told(self.place.full(str(PurePosixPath(self.path) / one.file))):
                raise

    @contextmanager
    def _opened(self, name: str, verb: str = "read") -> Iterator[IO[bytes]]:
        """Opens a file of the size that it had, whose header is known then; errors are as of `told`."""
        path = str(PurePosixPath(self.path) / name)
        with told(self.place.full(path), verb):
            self._check_size(name, path)
            with self.place.open(path) as file:
                self._header(name, path, file)
                yield file

    def _check_size(self, name: str, path: str) -> None:
        if not self.place.exists(path):
            raise Malformed("the file is missing")
        size, expected = self.place.size(path), self.manifest.files.get(name)
        if expected not in (None, size):
            raise Malformed(f"it has {size} bytes, but had {expected} when it was saved")

    def _header(self, name: str, path: str, file: IO[bytes]) -> dict[str, TensorEntry]:
        if name not in self._headers:
            # An entry of a manifest takes more bytes than one of a header, but for names that it has twice.
            self._headers[name] = safetensors_stream.read_header(file, self.place.size(path), 2 * len(self.text) + 4096)
        return self._headers[name]

    # ---- Whether it is whole ----

    def verify(self) -> Iterator[tuple[str, str]]:
        """Returns what is wrong, by file: sizes, headers, tensors that are missing or not known, checksums.

        Raises:
            CheckpointError: a file cannot be read, so that nobody knows.
        """
        for file in self.manifest.shards:
            yield from ((file, fault) for fault in self._faults(file))
        try:
            bases = self.bases
        except DamagedCheckpoint as error:
            yield MANIFEST, error.message
            return
        for base in bases:
            unused = base.manifest.tensors.keys() - base.manifest.owners.keys()
            for file in base.manifest.shards:
                yield from ((f"../{base.name}/{file}", fault) for fault in base._faults(file, unused))

    def check_rest(self, taken: Collection[str], place: int = 0, count: int = 1) -> None:
        """Checks what was not read yet, in bases too; of every `count` files one, from file `place` on.

        Args:
            taken: the names of tensors that `read` has checked, here or elsewhere; of those of tables in bases, too.
            place, count: the share of the files, as above.

        Raises:
            DamagedCheckpoint: a file is not as it was saved.
            CheckpointError: a file cannot be read.
        """
        files = [(self, taken, file) for file in self.manifest.shards]
        for base in self.bases:
            unused = base.manifest.tensors.keys() - base.manifest.owners.keys()
            files += [(base, unused.union(taken), file) for file in base.manifest.shards]
        for saved, but, file in files[place::count]:
            for fault in saved._faults(file, but):
                full = saved.place.full(str(PurePosixPath(saved.path) / file))
                raise DamagedCheckpoint(f"{full} cannot be read: {fault}")

    def _faults(self, name: str, but: Collection[str] = ()) -> Iterator[str]:
        """Returns what is wrong with a file; of the tensors in `but` nothing is read."""
        path = str(PurePosixPath(self.path) / name)
        mine = self.manifest.within(name)
        with told(self.place.full(path)):
            try:
                self._check_size(name, path)
            except Malformed as error:
                yield str(error)
                if not self.place.exists(path):
                    return
            with self.place.open(path) as file:
                try:
                    entries = self._header(name, path, file)
                except Malformed as error:
                    yield str(error)
                    return
                empty = {name for name, entry in entries.items() if not entry.spec.nbytes}  # parts of tables
                unknown = sorted(set(entries) - set(mine) - empty)
                yield from (f"it contains {tensor!r}, which the manifest does not list" for tensor in unknown)
                for tensor, (whole, saved) in sorted(mine.items()):
                    try:
                        if whole not in but:
                            TensorReader(file, entry_of(entries, tensor, saved)).end()
                    except Malformed as error:
                        yield str(error)


def _is_one(place: Storage, path: str) -> bool:
    """Returns whether a path is a checkpoint's, and no directory of them."""
    with told(place.full(path)):
        return place.exists(str(PurePosixPath(path) / MANIFEST))


def _text(place: Storage, path: str, most: int, limit: int) -> str:
    """Reads the text of a small file, and no more bytes than it may have.

    Raises:
        Malformed: the file has more than `most` bytes, which no version has ever written, or is no text.
        CheckpointError: the file has more than `limit` bytes.
    """
    size = place.size(path)
    if size > most:
        raise Malformed(f"it has {size:,} bytes, but the maximum is {most:,}")
    if size > limit:
        raise CheckpointError(
            f"{place.full(path)} has {size:,} bytes, but a server can send at most {limit:,} to its processes; read "
            "it with a strategy without servers, and save it with fewer variables or shorter names"
        )
    data = b""
    with place.open(path) as file:
        while len(data) <= limit and (piece := file.read(limit + 1 - len(data))):
            data += piece
    if len(data) > limit:
        raise Malformed(f"it grew beyond {limit:,} bytes while it was read")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Malformed(str(error)) from error


def listed(damaged: Mapping[str, str]) -> str:
    """Damaged checkpoints with what is wrong with each, the newest first, for messages."""
    return "; ".join(f"{name}: {damaged[name]}" for name in sorted(damaged, key=rank, reverse=True))


# ---- Those in a directory ----


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoints in a directory, by their names.

    Attributes:
        whole: names of complete ones, in the order of `rank`.
        torn: directories in which no manifest can be seen, in that order.
        aside: damaged ones that were set aside, in that order.
        latest: the newest of the complete ones: the one that the file `latest` names, else the last; None without any.
        named: the name in the file `latest`, be it there or not.
    """

    whole: tuple[str, ...]
    torn: tuple[str, ...]
    aside: tuple[str, ...]
    latest: str | None
    named: str | None

    @classmethod
    def within(cls, place: Storage, directory: str = ".") -> FoundCheckpoint:
        """Looks into a directory; raises `CheckpointError` where it cannot be read."""
        with told(place.full(directory)):
            named = named_latest(place, directory)
            found = place.listing(directory)
            # What was named before may have been deleted since, when another one had taken its place.
            while MANIFEST not in found.get(named or "", ()) and named != (again := named_latest(place, directory)):
                named, found = again, place.listing(directory)
            names = sorted(found, key=rank)
            aside = tuple(filter(is_aside, names))
            whole = tuple(name for name in names if MANIFEST in found[name] and name not in aside)
            torn = tuple(name for name in names if MANIFEST not in found[name] and name not in aside)
        return cls(whole, torn, aside, named if named in whole else next(reversed(whole), None), named)

    @property
    def downwards(self) -> list[str]:
        """From where a job may go on: the newest, then those before it, nearest first, of its own stem at first.

        Those above it, from which a job has once gone back, are left out.
        """
        if self.latest is None:
            return []
        stem, top = number(self.latest)[0], rank(self.latest)
        older = [name for name in self.whole if rank(name) < top]
        return [self.latest, *sorted(older, key=lambda name: (number(name)[0] == stem, rank(name)), reverse=True)]


def named_latest(place: Storage, directory: str) -> str | None:
    """Returns what the file `latest` names; None where there is no such file, or nothing in it that is understood."""
    path = str(PurePosixPath(directory) / LATEST)
    try:
        return latest_in(_text(place, path, MAX_LATEST, MAX_LATEST)) if place.exists(path) else None
    except (CheckpointError, Malformed) as error:
        log.warning(
            "cannot use %s/%s (%s); the checkpoint with the highest number is taken as the newest",
            directory,
            LATEST,
            error,
        )
        return None


def newest(place: Storage, directory: str = ".") -> str:
    """The path of the newest complete checkpoint in a directory.

    Raises:
        NoCheckpoint: there is none.
        CheckpointError: one that may be newer cannot be seen.
    """
    return str(PurePosixPath(directory) / str(_some(place, directory).latest))


def _some(place: Storage, directory: str) -> FoundCheckpoint:
    """Returns what is in a directory, which has at least one complete checkpoint; raises as `newest`."""
    found = FoundCheckpoint.within(place, directory)
    hidden = [name for name in found.torn if name == found.named]
    if found.named is None or found.named not in (*found.whole, *found.torn):
        last = rank(found.latest or "")
        hidden = [name for name in found.torn if number(name)[1] >= 0 and rank(name) > last]
    for name in hidden:
        with told(place.full(directory)):
            place.exists(str(PurePosixPath(directory) / name / MANIFEST))  # raises what keeps it from being seen
    if found.latest is None:
        raise NoCheckpoint(
            f"there is no complete checkpoint in {place.full(directory)}; save one first, or train from the start"
        )
    return found


def open_saved(url: str) -> SavedCheckpoint:
    """Opens a checkpoint, or the newest in a directory of them.

    Args:
        url: a local path, or an fsspec URL such as `s3://bucket/run`.

    Raises:
        ConfigError: the URL is of an unknown kind, or needs a package that is not installed.
        NoCheckpoint: there is no checkpoint.
        DamagedCheckpoint: its manifest is broken.
        CheckpointError: a file cannot be read.
    """
    return SavedCheckpoint.open(_root(url))


def open_whole(url: str, damaged: Mapping[str, str] | None = None) -> tuple[SavedCheckpoint, dict[str, str]]:
    """As `open_saved`, but of a directory the newest that is not damaged; see `SavedCheckpoint.open_whole`."""
    return SavedCheckpoint.open_whole(_root(url), ".", damaged)


def _root(url: str) -> Storage:
    """The place at a URL, where there is a directory."""
    root = storage_at(url)
    with told(url):
        complete = root.exists(MANIFEST)
    if not complete:
        require(root, url, "the directory of a checkpoint")
    return root


def require(root: Storage, url: str, what: str) -> None:
    """Raises `NoCheckpoint`, saying what was expected, unless a place is a directory that exists."""
    with told(url):
        there, file = root.is_directory("."), root.exists(".")
    if not there:
        wrong = f"is a file, not {what}" if file else "does not exist"
        raise NoCheckpoint(
            f"{url} {wrong}; give the whole path on this machine, including the servers' checkpoint root"
        )
