"""Arrays in which replicas compute what they contribute, so that it is sent from where it is.

Of each variable there are two, which alternate: one is written while the other may still be read. What is handed in is
the round's until that is answered. So it needs no copy, however large it is, and its call does not wait for it. On the
shm lane the arrays lie in the memory that this process shares with the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from psclient._src.devices import Device, empty_host
from psclient._src.rounds.under_way import UnderWay
from psclient._src.transport.lane import Lane
from psclient._src.transport.staging import Sent
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import DTYPES, Array, TensorSpec, address_of, align, as_bytes
from pswire.transport.payload import Chunk, Payload


@dataclass(eq=False)
class Buffer:
    """One of the two arrays of a variable.

    Args:
        base: the array itself.

    Attributes:
        array: a view of it, as the program has it.
        lane: the lane on which it is sent; None for none.
        memory, place: the memory that the lane shares, and the array's offset there; None for memory of its own.
        handed_in: True once it was given to a reduction.
        round: the round that sent it; None while none has since it was handed in last.
    """

    base: Array
    lane: Lane | None = None
    memory: memoryview | None = None
    place: int = 0

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Makes a new view, which may be written."""
        self.array = self.base.view()
        self.handed_in = False
        self.round: UnderWay | None = None


class Buffers:
    """The buffers of this process's variables. May be used by any thread.

    Args:
        lane: returns the lane to a server, by its number; None where there is none.
        take: waits until a round is answered.
    """

    def __init__(self, lane: Callable[[int], Lane | None], take: Callable[[UnderWay], None]) -> None:
        self._lane = lane
        self._take = take
        self._lock = threading.Lock()
        self._pairs: dict[int, list[Buffer]] = {}  # of each variable; the first is the one in use
        self._at: dict[int, Buffer] = {}  # by address

    def give(self, variable: PlacedVariable, device: Device) -> Array:
        """Returns the array for the next round: the same until it is handed in.

        Waits where both arrays of the variable are in rounds that are not answered.

        Args:
            variable: on the servers.
            device: the replica's; where that is a GPU, the array is pinned memory of the host.

        Raises:
            PSError: the session is over.
        """
        pair = self._pairs.setdefault(variable.id, [])
        if pair and not pair[0].handed_in:
            return pair[0].array
        if len(pair) == 2 and (round := pair[1].round) is not None:
            self._take(round)
        with self._lock:
            if pair and not pair[0].handed_in:  # another thread was faster
                return pair[0].array
            old = pair.pop() if len(pair) == 2 else None
            lane = self._lane(variable.servers[0]) if device.kind == "cpu" and len(variable.servers) == 1 else None
            if old is not None and old.lane is lane and old.round is not None:
                old.renew()
                pair.insert(0, old)
            else:
                # An old one without a round may be in a section that is not sent.
                pair.insert(0, _make(variable.spec.tensor, device, lane, shared=old is None or old.round is not None))
                if old is not None:
                    self._at.pop(address_of(old.base), None)
                self._at[address_of(pair[0].base)] = pair[0]
            return pair[0].array

    def hand_in(self, array: Sent | None) -> Buffer | None:
        """Returns the buffer that an array is, and makes it read-only for the program; None where it is none."""
        if not self._at or not isinstance(array, np.ndarray):
            return None
        buffer = self._at.get(address_of(array))
        if buffer is None or array.nbytes != buffer.base.nbytes or not array.flags.c_contiguous:
            return None
        buffer.handed_in, buffer.round = True, None
        buffer.array.flags.writeable = False
        return buffer

    def among(self, arrays: Sequence[Sent | None]) -> dict[int, Buffer]:
        """Hands in those of some arrays that are buffers; returns them by the arrays' `id`."""
        if not self._at:
            return {}
        return {id(array): buffer for array in arrays if (buffer := self.hand_in(array)) is not None}


def _make(spec: TensorSpec, device: Device, lane: Lane | None, shared: bool) -> Buffer:
    dtype = DTYPES[spec.dtype]
    reserved = lane.reserve(spec.nbytes) if lane is not None and shared and spec.nbytes else None
    if reserved is None:
        return Buffer(empty_host(device, dtype, spec.shape), lane)
    memory, place = reserved
    array = np.frombuffer(memory, np.uint8, spec.nbytes, place).view(dtype).reshape(spec.shape)
    return Buffer(array, lane, memory, place)


def pack(arrays: Sequence[Array], buffers: Mapping[int, Buffer]) -> Payload:
    """Makes a payload over arrays; buffers that lie one after another as they travel are one chunk of it.

    Args:
        arrays: in the order in which they travel, `portable`.
        buffers: those that are buffers, by their `id`.
    """
    chunks: list[Chunk] = []
    end, at, first = 0, 0, None  # at the end the buffer with which the last chunk begins, and where that is
    for array in arrays:
        if not array.nbytes:
            continue
        start, end = align(end), align(end) + array.nbytes
        buffer = buffers.get(id(array))
        memory = None if buffer is None else buffer.memory
        if buffer is None or memory is None:
            first = None
        elif first is not None and first.memory is memory and buffer.place - first.place == start - at:
            chunks[-1] = at, memory[first.place : buffer.place + array.nbytes]
            continue
        else:
            first, at = buffer, start
        chunks.append((start, as_bytes(array)))
    return Payload(chunks, end)
