"""Checkpoints by a process's own paths, without servers: what `psctl checkpoint` and evaluators look at."""

from __future__ import annotations

from collections.abc import Mapping

from pswire.checkpoint.manifest import MANIFEST
from pswire.checkpoint.reader import SavedCheckpoint
from pswire.checkpoint.safetensors_stream import told
from pswire.checkpoint.storage import Place, place
from pswire.errors import NoCheckpoint


def open_saved(url: str) -> SavedCheckpoint:
    """Opens a checkpoint, or the newest in a directory of them.

    Args:
        url: a local path, or an fsspec URL such as `s3://bucket/run`.

    Raises:
        ConfigError: the URL is of an unknown kind, or needs a package that is not installed.
        NoCheckpoint: there is none.
        DamagedCheckpoint: its manifest is broken.
        CheckpointError: what is there cannot be read.
    """
    return SavedCheckpoint.open(_root(url))


def open_whole(url: str, damaged: Mapping[str, str] | None = None) -> tuple[SavedCheckpoint, dict[str, str]]:
    """As `open_saved`, but of a directory the newest that is not damaged; see `SavedCheckpoint.open_whole`."""
    return SavedCheckpoint.open_whole(_root(url), ".", damaged)


def _root(url: str) -> Place:
    """The place at a URL, where there is a directory."""
    root = place(url)
    with told(url):
        complete = root.exists(MANIFEST)
    if not complete:
        require(root, url, "the directory of a checkpoint")
    return root


def require(root: Place, url: str, what: str) -> None:
    """Raises `NoCheckpoint`, saying what was expected, unless a place is a directory that exists."""
    with told(url):
        there, file = root.is_directory("."), root.exists(".")
    if not there:
        wrong = f"is a file, not {what}" if file else "does not exist"
        raise NoCheckpoint(f"{url} {wrong}; give a path as it is here, the servers' checkpoint root included")
