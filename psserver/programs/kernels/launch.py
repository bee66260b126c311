"""Runs a compiled kernel over pieces of memory, by several threads.

Contributions arrive in pieces that are not joined: a kernel is called for one run of elements after the other. A run
lies in one piece of every array. Threads take runs in turn.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt

from pswire.model.tensor import Array, address_of

RUN = 1 << 18
"""Most elements of a run: enough that a call costs nothing, few enough that threads end together."""

TURNS = 4
"""Runs per thread, about, where several calls are shared; each run costs a handover."""

Pieces = Sequence[Array]
"""One array of a kernel: contiguous pieces, 1-D or whole; a scalar is one piece of one element."""


Addresses = tuple[Sequence[int], Sequence[int], int]


@dataclass(frozen=True)
class PieceCopy:
    """An array that is updated in a new place, since the old one has another reader.

    Attributes:
        old: the old array.
        new: an array of the same shape.
    """

    old: Array
    new: Array


class Crew:
    """The threads that run kernels, among them the caller's. May be used by one caller at a time.

    Args:
        threads: number of threads.

    Attributes:
        seconds: seconds for which kernels ran; on a GPU until they were handed over to it.
    """

    def __init__(self, threads: int) -> None:
        self.seconds = 0.0
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="kernel") if self._helpers else None

    def close(self) -> None:
        """Ends the threads."""
        pool, self._pool = self._pool, None
        if pool:
            pool.shutdown()

    def launch(self, kernel: Any, size: int, arrays: Sequence[Pieces | PieceCopy], scalars: Sequence[bool]) -> int:
        """Runs a kernel once over all elements.

        Args:
            kernel: takes a number of elements, and an address for each array.
            size: elements of each array that is no scalar.
            arrays: the arrays, in the kernel's order.
            scalars: one flag per array; True for a scalar.

        Returns:
            The flags that any run of the kernel returned, as bits.
        """
        if not self._helpers:
            addresses = [
                address_of(array[0]) for array in arrays if not isinstance(array, PieceCopy) and len(array) == 1
            ]
            if len(addresses) == len(arrays):
                return self.run(kernel, [(size, *addresses)])[0]
        whole = [_pieces(array) for array, scalar in zip(arrays, scalars, strict=True) if not scalar]
        cuts = _cuts(size, whole)
        columns = [_addresses(_pieces(array), scalar, cuts) for array, scalar in zip(arrays, scalars, strict=True)]
        sizes = [high - low for low, high in pairwise(cuts)]
        copies = [
            (_addresses([array.old], False, cuts), _addresses([array.new], False, cuts), array.old.itemsize)
            for array in arrays
            if isinstance(array, PieceCopy)
        ]
        return reduce(or_, self.run(kernel, list(zip(sizes, *columns, strict=False)), copies), 0)

    def run(self, kernel: Any, calls: Sequence[Sequence[int]], copies: Sequence[Addresses] = ()) -> list[int]:
        """Runs calls of a kernel, in any order.

        Args:
            kernel: takes numbers and addresses.
            calls: arguments of each call; the first is a number of elements, if there are copies.
            copies: copies before each call: source addresses, destination addresses, and bytes of an element.

        Returns:
            The result of each call.
        """
        began = time.perf_counter()
        found = self._run(kernel, calls, copies)
        self.seconds += time.perf_counter() - began
        return found

    def _run(self, kernel: Any, calls: Sequence[Sequence[int]], copies: Sequence[Addresses]) -> list[int]:
        if not (self._helpers or copies):
            return [kernel(*call) for call in calls]
        runs = _Runs(kernel, calls, copies)
        pool, others = self._pool, min(self._helpers, len(runs.calls) - 1)
        futures = [pool.submit(runs.work) for _ in range(others)] if pool else []
        try:
            runs.work()
        finally:
            wait(futures)  # the arrays they write must not be released before
        for future in futures:
            future.result()
        return runs.found

    def run_table(self, kernel: Any, table: npt.NDArray[np.int64], strides: Sequence[int]) -> list[tuple[int, int]]:
        """Runs a kernel once for each row of a table, in any order.

        Args:
            kernel: takes a number of elements, and addresses; a `machine_code.Kernel`.
            table: the arguments of each call, int64.
            strides: for each address, bytes between two elements; 0 for a single one.

        Returns:
            The rows for which the kernel returned flags, with these. A row may come several times.
        """
        if not self._helpers:
            return self._run_rows(kernel, table)
        runs, rows = self._cut(table.tolist(), strides)
        return [(row, flags) for row, flags in zip(rows, self.run(kernel, runs), strict=True) if flags]

    def _run_rows(self, kernel: Any, table: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Does what `run_table` does, in the caller's thread."""
        began = time.perf_counter()
        flags = np.empty(len(table), np.int64)
        seen = kernel.rows(address_of(table), len(table), address_of(flags))
        self.seconds += time.perf_counter() - began
        return [(row, int(flags[row])) for row in np.flatnonzero(flags).tolist()] if seen else []

    def _cut(self, calls: Sequence[Sequence[int]], strides: Sequence[int]) -> tuple[list[tuple[int, ...]], list[int]]:
        """Cuts calls of a kernel into runs, so that threads end together even if a few calls have most elements.

        Returns:
            The runs, and the number of the call of each.
        """
        run = max(RUN, sum(call[0] for call in calls) // (TURNS * (self._helpers + 1)))
        runs = [
            (min(run, size - at), *(address + at * stride for address, stride in zip(addresses, strides, strict=True)))
            for size, *addresses in calls
            for at in range(0, size, run)
        ]
        return runs, [place for place, (size, *_) in enumerate(calls) for _ in range(0, size, run)]


class _Runs:
    """Calls that are still to be run. Threads take them in turn."""

    def __init__(self, kernel: Any, calls: Sequence[Sequence[int]], copies: Sequence[Addresses]) -> None:
        self.kernel, self.calls, self.copies = kernel, calls, copies
        self.found = [0] * len(calls)
        self._next = iter(range(len(calls)))
        self._lock = threading.Lock()

    def _take(self) -> int | None:
        with self._lock:
            return next(self._next, None)

    def work(self) -> None:
        """Runs calls until none is left."""
        while (index := self._take()) is not None:
            call = self.calls[index]
            for old, new, itemsize in self.copies:
                ctypes.memmove(new[index], old[index], call[0] * itemsize)
            self.found[index] = self.kernel(*call)


def _pieces(array: Pieces | PieceCopy) -> Pieces:
    return [array.new] if isinstance(array, PieceCopy) else array


def _cuts(size: int, arrays: Sequence[Pieces]) -> list[int]:
    """Returns the first element of each run, and the end. Runs begin at every piece, and none is longer than `RUN`."""
    cuts = {*range(0, size, RUN), size}
    for pieces in arrays:
        at = 0
        for piece in pieces:
            at += piece.size
            cuts.add(at)
    return sorted(cuts)


def _addresses(pieces: Pieces, scalar: bool, cuts: Sequence[int]) -> list[int]:
    """Returns the address of each run's first element."""
    if scalar:
        return [address_of(pieces[0])] * (len(cuts) - 1)
    return list(_walk(pieces, cuts))


def _walk(pieces: Pieces, cuts: Sequence[int]) -> Iterator[int]:
    runs = iter(cuts[:-1])
    run = next(runs, None)
    start = 0
    for piece in pieces:
        address, end = address_of(piece), start + piece.size
        while run is not None and run < end:
            yield address + (run - start) * piece.itemsize
            run = next(runs, None)
        start = end
