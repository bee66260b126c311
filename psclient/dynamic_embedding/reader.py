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
    """One table of a `Reader`: follows it where that takes newer deltas. May be used by any thread."""

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
        """The round of the table: it grows with each update."""
        return self._view.table.round

    def lookup(self, keys: npt.ArrayLike) -> Array:
        """Returns the rows of some keys, as a new array.

        Args:
            keys: integers of any shape.

        Returns:
            (*shape of the keys, *row shape), of the table's dtype. A key without a row has its first value, as in a
            lookup on servers; zeros if the table was made with `refused="zeros"`, and has a filter.

        Raises:
            TypeError: the keys are no integers.
        """
        words = _words(keys)
        rows = self._view.rows(words.reshape(-1))
        return rows.reshape(*words.shape, *rows.shape[1:])

    def contains(self, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Returns for each of some keys, integers of any shape, if it has a row; raises as `lookup`."""
        words = _words(keys)
        return np.asarray(self._view.find(words.reshape(-1)).layers >= 0).reshape(words.shape)

    def keys(self) -> Array:
        """Returns all keys [n], in the order of their hashes."""
        return self._view.keys()


class Reader(Mapping[str, TableReader]):
    """The dynamic tables of a checkpoint, without servers: its files are mapped into memory, read-only.

    Only what is looked up is read, so that a table may be larger than memory, and processes of one machine share what
    they have read. A key is found without an index: memory is taken for what deltas have changed alone. Checksums are
    not looked at; `psctl checkpoint verify` does that.

        reader = ps.dynamic_embedding.Reader("runs/run1")
        rows = reader["users"].lookup([3, 17])
        reader.refresh()        # takes a newer checkpoint of the directory, if there is one

    May be used by any thread; what one call returns is of one checkpoint.

    Args:
        path: a directory of this machine: a checkpoint, or a directory of them, whose newest is taken that is whole.

    Raises:
        NoCheckpoint: there is no checkpoint.
        DamagedCheckpoint: the checkpoint, or what it has the changes to, is not as it was saved.
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
        """Returns the rows of a table as they are now."""
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
        """Takes the newest checkpoint of the directory, if it is another one than this.

        Where it is a delta to what is here, only what has changed is taken; else all files are mapped anew. Tables that
        somebody holds show it as well.

        Returns:
            True if there was one.

        Raises:
            DamagedCheckpoint, CheckpointError: it cannot be read; what is here stays.
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
