"""Reading checkpoints where they lie: by servers, by strategies without servers, and by tools."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO

from pswire import tensorfile
from pswire.api import RestoreReply
from pswire.errors import CheckpointError, NoCheckpoint, VariableMismatch
from pswire.manifest import LATEST, MANIFEST, Manifest, Saved, latest_in, rank
from pswire.places import Place, below
from pswire.tensor import DTYPES, Array, TensorSpec
from pswire.tensorfile import Entry, read_saved, told

log = logging.getLogger("pswire")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was opened: it is complete. Used by one thread.

    Attributes:
        place: where it is.
        path: below the place.
        manifest: what it has.
        text: the same, as it was read.
    """

    place: Place
    path: str
    manifest: Manifest
    text: str
    _headers: dict[str, dict[str, Entry]] = field(default_factory=dict, compare=False, repr=False)

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
        """What a server tells of it."""
        return RestoreReply(self.path, self.manifest.positions, self.text)

    @classmethod
    def open(cls, place: Place, path: str = ".") -> SavedCheckpoint:
        """Opens a checkpoint, or the newest in a directory of them.

        Raises:
            NoCheckpoint: there is none.
            CheckpointError: its manifest is broken, or the path leaves the place.
        """
        path = below(path)
        with told(place.full(path)):
            if not place.exists(str(PurePosixPath(path) / MANIFEST)):
                path = newest(place, path)
        where = str(PurePosixPath(path) / MANIFEST)
        with told(place.full(where)), place.open(where) as file:
            text = file.read().decode()
        return cls(place, path, Manifest.parse(text, place.full(where)), text)

    # ---- Its tensors ----

    def read(self, wanted: Sequence[tuple[str, TensorSpec]], cast: bool = False) -> list[Array]:
        """Reads tensors: nothing but these, each file in one go.

        Args:
            wanted: which, and what each has to be.
            cast: whether one may be of another dtype, and is cast.

        Returns:
            In the order of `wanted`; each has memory of its own.

        Raises:
            CheckpointError: the checkpoint does not have one of them, or its bytes are not those that were saved.
            VariableMismatch: it has another shape or dtype.
        """
        saved = [self._check(name, spec, cast) for name, spec in wanted]
        found: dict[int, Array] = {}
        for file in sorted({one.file for one in saved}):
            mine = [place for place, one in enumerate(saved) if one.file == file]
            found |= self._read(file, {place: wanted[place][0] for place in mine})
        return [found[place].astype(DTYPES[spec.dtype], copy=False) for place, (_, spec) in enumerate(wanted)]

    def tensor(self, name: str) -> Array:
        """One tensor, as it was saved; raises as `read`, and `KeyError` where the checkpoint has none of this name."""
        (array,) = self.read([(name, self.manifest.tensors[name].spec)])
        return array

    def _check(self, name: str, spec: TensorSpec, cast: bool) -> Saved:
        tensors = self.manifest.tensors
        if name not in tensors:
            raise CheckpointError(
                f"the checkpoint {self.full} has no variable {name!r}; it has {', '.join(sorted(tensors)[:8])}"
            )
        found = tensors[name].spec
        if found.shape != spec.shape or (found.dtype != spec.dtype and not cast):
            fits = found.shape == spec.shape
            wish = "restore it with CheckpointOptions(cast=True)" if fits else "create the variable as it was saved"
            raise VariableMismatch(f"the checkpoint {self.full} has {name!r} as {found}, not {spec}; {wish}")
        return tensors[name]

    def _read(self, name: str, wanted: Mapping[int, str]) -> dict[int, Array]:
        """Reads tensors of one file."""
        path = str(PurePosixPath(self.path) / name)
        with told(self.place.full(path)), self.place.open(path) as file:
            self._check_size(name, path)
            entries = self._header(name, path, file)
            saved = self.manifest.tensors
            return {place: read_saved(file, entries, tensor, saved[tensor]) for place, tensor in wanted.items()}

    def _check_size(self, name: str, path: str) -> None:
        size, expected = self.place.size(path), self.manifest.files.get(name)
        if expected not in (None, size):
            raise ValueError(f"it has {size} bytes, and had {expected} when it was saved")

    def _header(self, name: str, path: str, file: IO[bytes]) -> dict[str, Entry]:
        if name not in self._headers:
            self._headers[name] = tensorfile.read_header(file, self.place.size(path))
        return self._headers[name]

    # ---- Whether it is whole ----

    def verify(self) -> Iterator[tuple[str, str]]:
        """What is wrong, by file: sizes, headers, tensors that are missing or not known, checksums."""
        tensors = self.manifest.tensors
        for file in self.manifest.shards:
            mine = {name: saved for name, saved in tensors.items() if saved.file == file}
            for fault in self._faults(file, mine):
                yield file, fault

    def _faults(self, name: str, mine: Mapping[str, Saved]) -> Iterator[str]:
        path = str(PurePosixPath(self.path) / name)
        if not self.place.exists(path):
            yield "the file is missing"
            return
        try:
            self._check_size(name, path)
        except ValueError as error:
            yield str(error)
        with self.place.open(path) as file:
            try:
                entries = self._header(name, path, file)
            except (OSError, ValueError) as error:
                yield str(error)
                return
            unknown = sorted(set(entries) - set(mine))
            yield from (f"it has {tensor!r}, which the manifest does not name" for tensor in unknown)
            for tensor, saved in sorted(mine.items()):
                try:
                    read_saved(file, entries, tensor, saved)
                except (OSError, ValueError) as error:
                    yield str(error)


# ---- Those in a directory ----


@dataclass(frozen=True)
class Found:
    """The checkpoints in a directory, by their names.

    Attributes:
        whole: those that are complete, in the order of `rank`.
        torn: directories without a manifest, in that order.
        latest: the newest of the complete ones: which the file `latest` names, else the last; None without any.
    """

    whole: tuple[str, ...]
    torn: tuple[str, ...]
    latest: str | None

    @classmethod
    def within(cls, place: Place, directory: str = ".") -> Found:
        """Looks into a directory; raises `CheckpointError` where it cannot be read."""
        with told(place.full(directory)):
            named = _named(place, directory)
            listed = place.listing(directory)
            # What was named before may have been deleted since, when another one had taken its place.
            while MANIFEST not in listed.get(named or "", ()) and named != (again := _named(place, directory)):
                named, listed = again, place.listing(directory)
            whole = sorted((name for name, files in listed.items() if MANIFEST in files), key=rank)
            torn = sorted(set(listed) - set(whole), key=rank)
        return cls(tuple(whole), tuple(torn), named if named in whole else next(reversed(whole), None))


def _named(place: Place, directory: str) -> str | None:
    """What the file `latest` names; None where there is no such file, or nothing in it that is understood."""
    path = str(PurePosixPath(directory) / LATEST)
    try:
        if not place.exists(path):
            return None
        with place.open(path) as file:
            return latest_in(file.read().decode())
    except (CheckpointError, ValueError) as error:
        log.warning("%s/%s is passed over, and the greatest number is the newest: %s", directory, LATEST, error)
        return None


def newest(place: Place, directory: str = ".") -> str:
    """The path of the newest complete checkpoint in a directory; raises `NoCheckpoint` without one."""
    latest = Found.within(place, directory).latest
    if latest is None:
        raise NoCheckpoint(f"there is no complete checkpoint in {place.full(directory)}; save one first, or train anew")
    return str(PurePosixPath(directory) / latest)
