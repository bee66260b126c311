"""Storage of checkpoints: a directory, or a URL that fsspec reaches. Paths are below the root, and never leave it."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import stat
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol, TypeVar

from pswire.checkpoint.manifest import MANIFEST
from pswire.errors import CheckpointError, ConfigError
from pswire.security.given import open_regular

T = TypeVar("T")

log = logging.getLogger("pswire")

BLOCK = 16 << 20
"""Bytes that are asked of an object store at once."""

FOR_NO_OTHERS = 0o660
"""Permissions of a new file, less the process's umask: a model is for its owner and the group, and for nobody else."""


class Storage(Protocol):
    """The storage of checkpoints. All paths are below the root, as `below` gives them.

    Every method raises `CheckpointError` for a path that leaves the root, and else the errors of the file system or of
    the object store's library: a file counts as missing only where that is known.
    """

    def full(self, path: str) -> str:
        """The path with its root, for people."""

    def open(self, path: str) -> IO[bytes]:
        """Opens a file for reading."""

    def size(self, path: str) -> int:
        """The bytes of a file."""

    def exists(self, path: str) -> bool:
        """Returns whether there is such a file."""

    def is_directory(self, path: str) -> bool:
        """Returns whether there is such a directory; in an object store, whether anything is in it."""

    def write(self, path: str, fill: Callable[[IO[bytes]], T]) -> T:
        """Fills a file and makes it lasting; where the storage knows renaming it is there whole, or not at all."""

    def put(self, path: str, data: bytes) -> None:
        """Writes a small file, which is there whole, or not at all."""

    def remove(self, path: str) -> None:
        """Removes a file, if there is one, and its directory if that is empty then and is not the root."""

    def move(self, path: str, name: str) -> None:
        """Gives a directory another name, which is free, beside the one that it has; what is in it stays whole."""

    def listing(self, path: str) -> Mapping[str, frozenset[str]]:
        """The directories in a directory, and the names of what is in each; nothing where there is none.

        With a warning one that leaves the root through a link is left out, and one that cannot be read seems empty.
        """


def below(path: str) -> str:
    """A path in its plain form; raises `CheckpointError` if it could mean what is not below the root."""
    pure = PurePosixPath(path)
    if "://" in path:
        raise CheckpointError(
            f"{path!r} is a URL; give the URL to the servers with --checkpoint-root, and write a path below it here, "
            "such as 'run1'"
        )
    if not path or "\0" in path or pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(
            f"{path!r} is not a path below the servers' checkpoint root; write a relative path such as 'run1'"
        )
    return str(pure)


def parted(path: str) -> tuple[str, str]:
    """A path or URL of a process's own: the directory above it, a root for `storage_at`, and its name there."""
    protocol, found, rest = path.partition("://")
    above, name = posixpath.split((rest if found else path).rstrip("/"))
    return (f"{protocol}://{above}" if found else above or "."), name


def storage_at(root: str | os.PathLike[str]) -> Storage:
    """The place below a root.

    Args:
        root: a directory, which need not exist yet, or a URL such as `s3://bucket/run`.

    Raises:
        ConfigError: nothing that is installed knows the URL's protocol.
    """
    text = os.fspath(root)
    protocol, found, path = text.partition("://")
    if not found:
        return Directory(Path(text))
    return Directory(Path(path)) if protocol in ("file", "local") else RemoteStorage(text)


class Directory:
    """A directory of this machine.

    Args:
        root: path of the directory; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()  # A process may change its directory later.
        self._passed_over = set[str]()  # warned of once: followers look often

    def full(self, path: str) -> str:
        """Implements `Storage.full`."""
        resolved = (self._root / below(path)).resolve()
        if not resolved.is_relative_to(self._root.resolve()):
            raise CheckpointError(
                f"{path!r} leads out of {self._root} through a link; write a path that stays below it"
            )
        return str(resolved)

    def open(self, path: str) -> IO[bytes]:
        """Implements `Storage.open`."""
        return open(open_regular(self.full(path)), "rb", buffering=0)

    def size(self, path: str) -> int:
        """Implements `Storage.size`."""
        return os.stat(self.full(path)).st_size

    def exists(self, path: str) -> bool:
        """Implements `Storage.exists`."""
        return stat.S_ISREG(_mode(self.full(path)))

    def is_directory(self, path: str) -> bool:
        """Implements `Storage.is_directory`."""
        return stat.S_ISDIR(_mode(self.full(path)))

    def write(self, path: str, fill: Callable[[IO[bytes]], T]) -> T:
        """As `Storage.write`: written beside its place, synced, and renamed into it."""
        pure = PurePosixPath(path)
        directory = Path(self.full(str(pure.parent)))
        beside = directory / f".{pure.name}.{os.getpid()}"
        try:
            with _begun(beside) as file:
                result = fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, directory / pure.name)
        finally:
            beside.unlink(missing_ok=True)
        _sync(directory)
        return result

    def put(self, path: str, data: bytes) -> None:
        """Implements `Storage.put`."""
        self.write(path, lambda file: file.write(data))

    def remove(self, path: str) -> None:
        """Implements `Storage.remove`."""
        pure = PurePosixPath(path)
        directory = Path(self.full(str(pure.parent)))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (directory / pure.name).unlink()
            _sync(directory)
        if directory != self._root.resolve():
            with contextlib.suppress(OSError):  # it is not empty, or not there
                directory.rmdir()

    def listing(self, path: str) -> Mapping[str, frozenset[str]]:
        """Implements `Storage.listing`."""
        directory = Path(self.full(path))
        if not stat.S_ISDIR(_mode(str(directory))):
            return {}
        found = {}
        with os.scandir(directory) as entries:
            for one in entries:
                try:
                    if one.is_dir():
                        if one.is_symlink():  # only a link leads elsewhere, and there may be thousands of directories
                            self.full(str(PurePosixPath(path) / one.name))
                        found[one.name] = frozenset(os.listdir(one.path))
                except (FileNotFoundError, NotADirectoryError):
                    pass  # it has gone meanwhile
                except (OSError, CheckpointError) as error:
                    if not isinstance(error, CheckpointError):
                        found[one.name] = frozenset()
                    if one.name not in self._passed_over:
                        log.warning("skipped %s: %s", one.path, error)
                    self._passed_over.add(one.name)
        return found

    def move(self, path: str, name: str) -> None:
        """As `Storage.move`, in one step; a link is moved, and not what it leads to."""
        pure = PurePosixPath(below(path))
        directory = Path(self.full(str(pure.parent)))
        os.rename(directory / pure.name, directory / name)
        _sync(directory)


def _mode(path: str) -> int:
    """Returns what kind of file there is; 0 where there is none."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _make(directory: Path) -> None:
    """Makes a directory, and those above it; each is lasting once the one above it is synced."""
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(FOR_NO_OTHERS | 0o110, exist_ok=True)
        _sync(directory.parent)


def _begun(path: Path) -> IO[bytes]:
    """A new file; its directory is made, once more where a save that failed has removed it meanwhile."""
    _make(path.parent)
    try:
        return open(path, "wb", opener=_follow_no_link)
    except FileNotFoundError:
        _make(path.parent)
        return open(path, "wb", opener=_follow_no_link)


def _follow_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, FOR_NO_OTHERS)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteStorage:
    """Storage that fsspec reaches. There is no renaming; a file is there once it is written to its end, or earlier.

    Args:
        url: URL of the root.

    Raises:
        ConfigError: no installed package knows its protocol.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        try:
            # Others write there, too: what was listed a while ago is not what there is.
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{url} cannot be opened: {' '.join(str(error).split())}") from error
        self._url = url.rstrip("/")
        self._root = str(root).rstrip("/")

    def full(self, path: str) -> str:
        """Implements `Storage.full`."""
        path = below(path)
        return self._url if path == "." else f"{self._url}/{path}"

    def _key(self, path: str) -> str:
        return f"{self._root}/{below(path)}".removesuffix("/.")

    def open(self, path: str) -> IO[bytes]:
        """Implements `Storage.open`."""
        file: IO[bytes] = self._fs.open(self._key(path), "rb", block_size=BLOCK)
        return file

    def size(self, path: str) -> int:
        """Implements `Storage.size`."""
        return int(self._fs.size(self._key(path)))

    def exists(self, path: str) -> bool:
        """Implements `Storage.exists`."""
        return self._kind(path) == "file"

    def is_directory(self, path: str) -> bool:
        """Implements `Storage.is_directory`."""
        return self._kind(path) == "directory"

    def _kind(self, path: str) -> str:
        """Asks fsspec for the type of a path; "" for nothing. Its `isfile` says so of a store that does not answer."""
        try:
            return str(self._fs.info(self._key(path))["type"])
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def write(self, path: str, fill: Callable[[IO[bytes]], T]) -> T:
        """As `Storage.write`: what fails half way is given up, where the object store can do that."""
        file: Any = self._fs.open(self._key(path), "wb", block_size=BLOCK, autocommit=False)
        try:
            result = fill(file)
            file.close()
        except BaseException:
            self._give_up(path, file)
            raise
        file.commit()
        return result

    def _give_up(self, path: str, file: Any) -> None:
        from fsspec.spec import AbstractBufferedFile

        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # else it would be written to its end when it is collected
        with contextlib.suppress(Exception):  # the first error is the one to raise
            file.discard()
            self.remove(path)

    def put(self, path: str, data: bytes) -> None:
        """Implements `Storage.put`."""
        self._fs.pipe_file(self._key(path), data)

    def remove(self, path: str) -> None:
        """Implements `Storage.remove`."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._key(path))

    def move(self, path: str, name: str) -> None:
        """As `Storage.move`: all is copied before anything is removed, the manifest last, and first."""
        old, new = self._key(path), f"{self._key(str(PurePosixPath(below(path)).parent))}/{name}"
        files = [key.strip("/").removeprefix(old.strip("/")) for key in self._fs.find(old)]
        files.sort(key=lambda file: file == f"/{MANIFEST}")
        for file in files:
            self._fs.cp_file(old + file, new + file)
        for file in reversed(files):
            self._fs.rm_file(old + file)

    def listing(self, path: str) -> Mapping[str, frozenset[str]]:
        """Implements `Storage.listing`."""
        found: dict[str, frozenset[str]] = {}
        for entry in self._entries(self._key(path)):
            if entry["type"] == "directory":
                name = _last(entry["name"])
                try:
                    inner = frozenset(_last(one["name"]) for one in self._entries(entry["name"]))
                    found |= {name: inner} if inner else {}
                except PermissionError as error:
                    log.warning("skipped %s/%s: %s", self.full(path), name, error)
                    found[name] = frozenset()
        return found

    def _entries(self, key: str) -> list[dict[str, Any]]:
        """Returns what is in a directory, less the directory itself; nothing where there is none."""
        try:
            found: list[dict[str, Any]] = self._fs.ls(key, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [entry for entry in found if entry["name"].strip("/") != key.strip("/")]


def _last(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]
