"""`Reader`: the dynamic tables of a checkpoint, for those who look rows up and train nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from psclient.dynamic_embedding.views import TableView
from pswire.checkpoint.reader import SavedCheckpoint, open_whole
from pswire.checkpoint.table_layers import TableLayer, kind_of, layers_of
from pswire.errors import ConfigError
from pswire.model.tables import TableSpec
from pswire.model.tensor import Array


class TableReader:
    """One table of a `Reader`; uses the newest deltas that the reader has read. Any thread may use it."""

    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self.name = name

    def __repr__(self) -> str:
        return f"<TableReader {self.name!r}, {len(self)} rows of {self.spec.row}>"

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._view.size

    @property
    def _view(self) -> TableView:
        return self._reader.view(self.name)

    @property
    def spec(self) -> TableSpec:
        """The table's description."""
        return self._view.table.spec

    @property
    def round(self) -> int:
        """The number of the table's last update."""
        return self._view.table.round

    def lookup(self, keys: npt.ArrayLike) -> Array:
        """Returns the rows of some keys, as a new array.

        Args:
            keys: integers of any shape.

        Returns:
            (*shape of the keys, *row shape), of the table's dtype. A key without a row has its initial value, as in a
            lookup on servers; zeros if the table has a filter and was made with `refused="zeros"`.

        Raises:
            TypeError: the keys are not integers.
        """
        words = _words(keys)
        rows = self._view.rows(words.reshape(-1))
        return rows.reshape(*words.shape, *rows.shape[1:])

    def contains(self, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Returns for each key, an integer array of any shape, whether it has a row; raises the errors of `lookup`."""
        words = _words(keys)
        return np.asarray(self._view.find(words.reshape(-1)).layers >= 0).reshape(words.shape)

    def keys(self) -> Array:
        """Returns all keys [n], in the order of their hashes."""
        return self._view.keys()


class Reader(Mapping[str, TableReader]):
    """Reads the dynamic tables of a checkpoint, without servers: its files are mapped into memory, read-only.

    Only the rows that are looked up are read, so that a table may be larger than memory, and processes on one machine
    share the pages they have read. Keys are found without an index; only changes from deltas take memory. Checksums are
    not verified: use `psctl checkpoint verify`.

        reader = ps.dynamic_embedding.Reader("runs/run1")
        rows = reader["users"].lookup([3, 17])
        reader.refresh()        # switches to a newer checkpoint of the directory, if there is one

    Any thread may use it. The result of one call comes from one checkpoint.

    Args:
        path: a local directory: a checkpoint, or a directory of checkpoints, whose newest complete one is used.

    Raises:
        NoCheckpoint: there is no checkpoint.
        DamagedCheckpoint: the checkpoint, or one that it is a delta to, differs from what was saved.
        CheckpointError: a file cannot be read.
        ConfigError: the path is a URL.
    """

    def __init__(self, path: str) -> None:
        if "://" in path:
            raise ConfigError(f"{path} is a URL, but only local files can be read; copy the checkpoint to this machine")
        self._path = path
        self._saved = open_whole(path)[0]
        self._views = _views(self._saved)

    def __repr__(self) -> str:
        return f"<Reader of {self.path!r}: {', '.join(map(repr, self._views)) or 'no tables'}>"

    @property
    def path(self) -> str:
        """The path of the checkpoint."""
        return self._saved.full

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of its tables."""
        return tuple(self._views)

    def view(self, name: str) -> TableView:
        """Returns the rows of a table as of now."""
        return self._views[name]

    def __getitem__(self, name: str) -> TableReader:
        """Returns a table; raises `KeyError` where the checkpoint has none of this name."""
        if name not in self._views:
            raise KeyError(f"the checkpoint {self.path} has no table {name!r}; it has {', '.join(self._views)}")
        return TableReader(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def refresh(self) -> bool:
        """Switches to the newest checkpoint of the directory, if there is a newer one.

        If that is a delta to the current one, only the changes are read; else all files are mapped again. Existing
        `TableReader`s use it as well.

        Returns:
            True if there was a newer one.

        Raises:
            DamagedCheckpoint: the checkpoint is damaged; the current one stays in use.
            CheckpointError: the checkpoint cannot be read; the current one stays in use.
        """
        newest = open_whole(self._path)[0]
        if _is_same(newest, self._saved):
            return False
        chain = [newest, *newest.bases]
        known = next((number for number, each in enumerate(chain) if _is_same(each, self._saved)), None)
        views = dict(self._views)
        kinds = {name: kind_of(view.table.spec) for name, view in views.items()}
        if known is None or {name: kind_of(t.spec) for name, t in newest.manifest.tables.items()} != kinds:
            views = _views(newest)
        else:
            for saved in reversed(chain[:known]):
                tables = saved.manifest.tables.items()
                views = {name: views[name].followed_by(TableLayer(saved, table)) for name, table in tables}
        self._saved, self._views = newest, views
        return True


def _views(saved: SavedCheckpoint) -> dict[str, TableView]:
    return {name: TableView.of(layers_of(saved, name)) for name in saved.manifest.tables}


def _is_same(one: SavedCheckpoint, other: SavedCheckpoint) -> bool:
    """Returns whether two are the same, perhaps in other files; one without tables has no id."""
    if one.manifest.id or other.manifest.id:
        return one.manifest.id == other.manifest.id
    return (one.full, one.manifest.saved_at) == (other.full, other.manifest.saved_at)


def _words(keys: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Returns the 64 bits of each key."""
    found = np.asarray(keys)
    if found.dtype.kind not in "iu" and found.size:
        raise TypeError(f"keys must be integers, not {found.dtype}")
    return found.astype(np.uint64 if found.dtype.kind == "u" else np.int64).view(np.uint64)
