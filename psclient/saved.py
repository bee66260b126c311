"""Checkpoints where they lie, read without servers: what `psctl checkpoint` and evaluators look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO

from fsspec.core import url_to_fs

from pswire import tensorfile
from pswire.errors import ConfigError, NoCheckpoint
from pswire.manifest import MANIFEST, Manifest, Saved, rank
from pswire.tensor import Array
from pswire.tensorfile import Entry, told

BLOCK_BYTES = 16 << 20
"""What is asked of an object store at once."""


class Directory:
    """A directory of this machine, or of an object store.

    Args:
        url: a local path, or an fsspec URL such as `s3://bucket/run`.

    Attributes:
        url: as given.
        path: on its file system.

    Raises:
        ConfigError: the URL is of an unknown kind, or needs a package that is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            # Others write there: what was listed a while ago is not what there is.
            self._files, path = url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url} cannot be opened: {' '.join(str(error).split())}") from error
        self.path = str(path).rstrip("/")

    def full(self, name: str) -> str:
        """The path of what has this name here, for people."""
        return f"{self.path}/{name}"

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        with told(self.url):
            return bool(self._files.isfile(self.full(name)))

    def size(self, name: str) -> int:
        """The bytes of a file."""
        return int(self._files.size(self.full(name)))

    def open(self, name: str) -> IO[bytes]:
        """Opens a file for reading."""
        file: IO[bytes] = self._files.open(self.full(name), "rb", block_size=BLOCK_BYTES)
        return file

    def directories(self) -> list[str]:
        """The names of the directories in it, none where it does not exist."""
        with told(self.url):
            listed = self._files.ls(self.path, detail=True) if self._files.isdir(self.path) else []
        found = [each["name"] for each in listed if each["type"] == "directory"]
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    def require(self, what: str) -> None:
        """Raises `NoCheckpoint`, saying what was expected, unless it exists."""
        with told(self.url):
            there, file = self._files.isdir(self.path), self._files.isfile(self.path)
        if not there:
            wrong = f"is a file, not {what}" if file else "does not exist"
            raise NoCheckpoint(f"{self.url} {wrong}; give a path as it is here, the servers' checkpoint root included")


class SavedCheckpoint:
    """A checkpoint that is complete: it has a manifest. Used by one thread.

    Args:
        directory: where it is.

    Attributes:
        path: of its directory, on its file system.
        name: the last part of the path.
        manifest: what it has.

    Raises:
        CheckpointError: its manifest cannot be read.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._headers: dict[str, dict[str, Entry]] = {}
        self.path = directory.path
        self.name = self.path.rpartition("/")[2]
        with told(directory.full(MANIFEST)), directory.open(MANIFEST) as file:
            text = file.read().decode()
        self.manifest = Manifest.parse(text, directory.full(MANIFEST))

    @classmethod
    def open(cls, url: str) -> SavedCheckpoint:
        """Opens a checkpoint, or the newest in a directory of them.

        Args:
            url: a local path, or an fsspec URL.

        Raises:
            ConfigError: the URL is of an unknown kind, or needs a package that is not installed.
            NoCheckpoint: there is none.
            CheckpointError: what is there cannot be read.
        """
        directory = Directory(url)
        if not directory.has(MANIFEST):
            directory.require("the directory of a checkpoint")
            name = newest(url)
            if name is None:
                raise NoCheckpoint(f"there is no complete checkpoint in {url}: no directory there has a {MANIFEST}")
            directory = Directory(f"{url.rstrip('/')}/{name}")
        return cls(directory)

    def read(self, name: str) -> Array:
        """A tensor.

        Raises:
            KeyError: the checkpoint has no such tensor.
            CheckpointError: its file cannot be read, has it otherwise than the manifest says, or is damaged.
        """
        saved = self.manifest.tensors[name]
        with told(self._directory.full(saved.file)), self._directory.open(saved.file) as file:
            return self._read(file, name, saved)

    def verify(self) -> Iterator[tuple[str, str]]:
        """What is wrong, by file: sizes, headers, tensors that are missing or not known, checksums."""
        tensors = self.manifest.tensors
        for file in sorted({*self.manifest.files, *(saved.file for saved in tensors.values())}):
            mine = {name: saved for name, saved in tensors.items() if saved.file == file}
            for fault in self._faults(file, mine):
                yield file, fault

    def _faults(self, name: str, mine: Mapping[str, Saved]) -> Iterator[str]:
        if not self._directory.has(name):
            yield "the file is missing"
            return
        expected, size = self.manifest.files.get(name), self._directory.size(name)
        if expected not in (None, size):
            yield f"it has {size} bytes, and had {expected} when it was saved"
        with self._directory.open(name) as file:
            try:
                unknown = sorted(set(self._header(file, name)) - set(mine))
            except (OSError, ValueError) as error:
                yield str(error)
                return
            yield from (f"it has {tensor!r}, which the manifest does not name" for tensor in unknown)
            for tensor, saved in sorted(mine.items()):
                try:
                    self._read(file, tensor, saved)
                except (OSError, ValueError) as error:
                    yield str(error)

    def _read(self, file: IO[bytes], name: str, saved: Saved) -> Array:
        """A tensor of an open file; raises `ValueError` where it is not what was saved."""
        return tensorfile.read_saved(file, self._header(file, saved.file), name, saved)

    def _header(self, file: IO[bytes], name: str) -> dict[str, Entry]:
        if name not in self._headers:
            self._headers[name] = tensorfile.read_header(file, self._directory.size(name))
        return self._headers[name]


def names(url: str) -> tuple[list[str], list[str]]:
    """The directories in a directory, by name: complete checkpoints, oldest first, and those without a manifest.

    Raises:
        ConfigError: the URL is of an unknown kind, or needs a package that is not installed.
        CheckpointError: the directory cannot be read.
    """
    found = Directory(url).directories()
    whole = {name for name in found if Directory(f"{url.rstrip('/')}/{name}").has(MANIFEST)}
    return sorted(whole, key=rank), sorted(set(found) - whole, key=rank)


def newest(url: str) -> str | None:
    """The name of the newest complete checkpoint in a directory, None where there is none; raises as `names`."""
    return next(reversed(names(url)[0]), None)
