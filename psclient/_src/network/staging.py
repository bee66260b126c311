"""Payloads that are sent while they are still being made: read from a GPU, or computed, tensor after tensor."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from psclient._src.arrays.devices import Coming, Download, Pending
from pswire.model.tensor import Array, align, as_bytes
from pswire.network.parts import Cutter, Part
from pswire.network.payload import Payload

Sent = Array | Pending
"""A host array, `portable`, or one that a copy from a GPU is filling, or the program still computes."""

_PENDING = frozenset({Coming, Download})


def any_pending(arrays: Iterable[Sent | None]) -> bool:
    """Returns whether some of these are not known to be there."""
    return not _PENDING.isdisjoint(map(type, arrays))


class StagedPayload(Payload):
    """A payload over host arrays of which some are still being filled: it grows, and is sent meanwhile.

    Pinned memory is held by the payload, and the payload by whoever may have to send it again: by the push until it is
    answered, and by the transport until all is sent. Nothing else of it is kept, so that the memory is in its pool
    again when the round's values are there, and the next round takes the same.

    Args:
        arrays: in the order in which they travel.
    """

    def __init__(self, arrays: Iterable[Sent]) -> None:
        end = 0
        self._left: deque[tuple[int, Sent]] = deque()
        for array in arrays:
            if array.nbytes:
                self._left.append((align(end), array))
                end = align(end) + array.nbytes
        super().__init__((), end)
        for _, array in self._left:
            if isinstance(array, Coming):
                array.when(lambda _: self.grow())
        self.grow()

    def grow(self) -> None:
        """Takes in what is there, up to the first array that is not. Called by one thread."""
        while self._left:
            offset, array = self._left[0]
            here = array.here if isinstance(array, Pending) else array
            if here is None:
                return
            self._left.popleft()
            self.add(offset, as_bytes(here))


def pack(arrays: Sequence[Sent]) -> Payload:
    """Makes a payload over arrays; if copies of some are under way it must be filled."""
    if any_pending(arrays):
        return StagedPayload(arrays)
    return Payload.pack(arrays)  # type: ignore[arg-type]


def keep(arrays: Sequence[Sent]) -> Payload:
    """Makes a payload with memory of its own, so that the arrays may change; as `pack`.

    What comes from a GPU lies in pinned memory that is nobody else's, and nobody changes what the program promised.
    """
    if any_pending(arrays):
        return StagedPayload([array if isinstance(array, Pending) else array.copy() for array in arrays])
    return Payload.copied(arrays)  # type: ignore[arg-type]


def host(array: Sent) -> Array:
    """Returns an array on the host, once it is there; raises the device's error if its copy has failed.

    Raises:
        ValueError: the program still computes it, so that nobody can wait for it.
    """
    if not isinstance(array, Pending):
        return array
    found = array.wait() if isinstance(array, Download) else array.here
    if found is None:
        raise ValueError("an array that is still computed is looked at")
    return found


def fill(arrays: Iterable[Sent | None], payloads: Iterable[Payload]) -> None:
    """Waits for copies from a GPU in the order in which they were begun; payloads grow with each.

    Args:
        arrays: all that are on their way in the payloads, and others.
        payloads: of which some may be staged.

    Raises:
        Exception: the device's error, if a copy has failed; the payloads will never be whole.
    """
    staged = [payload for payload in payloads if isinstance(payload, StagedPayload)]
    if not staged:
        return
    for array in arrays:
        if isinstance(array, Download):
            array.wait()
            for payload in staged:
                payload.grow()


class StagedParts:
    """The parts of a payload, each as soon as it is there. Iterated by one thread, ended by any.

    Args:
        payload: whole, or growing.
    """

    def __init__(self, payload: Payload) -> None:
        self._cutter = Cutter(payload)
        self._more = threading.Event()
        self._ended = False

    def end(self) -> None:
        """Ends the parts: an iterator that waits for one gets none."""
        self._ended = True
        self._more.set()

    def __iter__(self) -> Iterator[Part]:
        while not self._ended:
            part = self._cutter.next()
            if part is not None:
                yield part
            elif self._cutter.done:
                return
            else:
                self._cutter.when(0, self._more.set)
                self._more.wait()
                self._more.clear()
