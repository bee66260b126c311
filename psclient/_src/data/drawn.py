"""The indices that the sampler of a PyTorch `DataLoader` draws, batch by batch, and what they are in words."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any


class DrawnIndices:
    """Reads the batches of a `DataLoader`, and notes the indices of each.

    The process that iterates draws them, in the order of the batches, also where others read the examples.

    Args:
        loader: the `DataLoader`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = getattr(loader, self._place)
        self._noting = _Noting(self._sampler)
        cuts = type(self._sampler).__name__ == "BatchSampler"  # what another one draws
        self._name = type(self._sampler.sampler if cuts else self._sampler).__name__
        # The sampler of a dataset without numbers draws nothing that says which examples come.
        self._noted = all(kind.__name__ != "IterableDataset" for kind in type(loader.dataset).__mro__)

    def items(self) -> Iterator[tuple[Any, object]]:
        """Yields the batches of a pass, each with the indices that were drawn for it; None where they are not known."""
        batches = self._begun()
        drawn = self._noting.drawn
        for batch in batches:
            yield batch, drawn.popleft() if drawn else None

    def _begun(self) -> Iterator[Any]:
        """Begins a pass, and reads its first batch; returns an iterator over all of them.

        The loader has the noting sampler no longer than that: its iterator keeps it, and the script finds its own.
        """
        self._noting.drawn = deque()
        try:
            if self._noted:
                vars(self._loader)[self._place] = self._noting  # the loader refuses an assignment
            iterator = iter(self._loader)
            return chain(list(islice(iterator, 1)), iterator)
        finally:
            vars(self._loader)[self._place] = self._sampler

    def words(self, indices: object) -> str:
        """Returns what says which examples a batch has: the sampler, a sum over indices, and the number of batches."""
        if not self._noted:
            return ""
        found = f"{self._name} {_digest(indices)}".strip()
        try:
            return f"{found}, of {len(self._sampler)} batches"
        except (TypeError, NotImplementedError):  # not every sampler knows its length
            return found


class _Noting:
    """A sampler that gives what another one gives, and notes it. Else it is like the other.

    Args:
        sampler: the other one.

    Attributes:
        drawn: what the newest iterator has given, from the oldest batch that was not taken on.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.drawn: deque[object] = deque()

    def __iter__(self) -> _Drawn:
        self.drawn = deque()
        return _Drawn(iter(self._sampler), self.drawn)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _Drawn:
    """An iterator that notes what another one gives. Else it is like the other."""

    def __init__(self, indices: Iterator[object], drawn: deque[object]) -> None:
        self._indices, self._drawn = indices, drawn

    def __iter__(self) -> _Drawn:
        return self

    def __next__(self) -> object:
        found = next(self._indices)
        self._drawn.append(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indices, name)


def _digest(indices: object) -> str:
    """Returns a sum over indices; "" where they are of a kind that need not look alike in two processes."""
    try:
        return f"{zlib.crc32(repr(_plain(indices)).encode()):08x}"
    except TypeError:
        return ""


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    raise TypeError(f"a {type(value).__name__} cannot be used as an index; use an integer")
