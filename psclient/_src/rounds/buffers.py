"""Arrays of the program: those in which replicas compute what they contribute, and those that have variables' values.

What is computed in a buffer is sent from where it is.

Of each variable there are two, which alternate: one is written while the other may still be read. What is handed in is
the round's until that is answered. So it needs no copy, however large it is, and its call does not wait for it. On the
shm transport the arrays lie in the memory that this process shares with the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from psclient._src.arrays.devices import Device, empty_host
from psclient._src.network.staging import Sent
from psclient._src.network.transport import Transport
from psclient._src.rounds.under_way import UnderWay
from pswire.model.plan import PlacedVariable
from pswire.model.tensor import DTYPES, Array, TensorSpec, address_of, align, as_bytes
from pswire.network.payload import Chunk, Payload


@dataclass(eq=False)
class Buffer:
    """One of the two arrays of a variable.

    Args:
        base: the array itself.

    Attributes:
        array: a view of it, as the program has it.
        transport: the transport on which it is sent; None for none.
        memory, place: the memory that the transport shares, and the array's offset there; None for memory of its own.
        handed_in: True once it was given to a reduction.
        round: the round that sent it; None while none has since it was handed in last.
    """

    base: Array
    transport: Transport | None = None
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
        transport: returns the transport to a server, by its number; None where there is none.
        take: waits until a round is answered.
    """

    def __init__(self, transport: Callable[[int], Transport | None], take: Callable[[UnderWay], None]) -> None:
        self._transport = transport
        self._take = take
        self._lock = threading.Lock()
        self._pairs: dict[int, list[Buffer]] = {}  # of each variable; the first is the one in use
        self._at: dict[int, Buffer] = {}  # by address
        self._shown: dict[int, Buffer] = {}  # by the `id` of what the program has, which costs less to find

    def give(self, variable: PlacedVariable, device: Device) -> Array:
        """Returns the array for the next round: the same until it is handed in.

        Waits where both arrays of the variable are in rounds that are not answered.

        Args:
            variable: on the servers.
            device: the replica's; where that is a GPU, the array is pinned memory of the host.

        Raises:
            PSError: the session is over.
        """
        return self.give_all((variable,), device)[0].array

    def give_all(self, variables: Iterable[PlacedVariable], device: Device) -> list[Buffer]:
        """Returns the buffer of each of some variables, as `give`."""
        pairs = [(variable, self._pairs.setdefault(variable.id, [])) for variable in variables]
        used = [(variable, pair) for variable, pair in pairs if not pair or pair[0].handed_in]
        for round in dict.fromkeys([pair[1].round for _, pair in used if len(pair) == 2]):
            if round is not None:
                self._take(round)
        transports: dict[int, Transport | None] = {}
        with self._lock:
            for variable, pair in used:
                if not pair or pair[0].handed_in:  # no other thread was faster
                    self._turn(variable, pair, device, transports)
        return [pair[0] for _, pair in pairs]

    def _turn(
        self, variable: PlacedVariable, pair: list[Buffer], device: Device, transports: dict[int, Transport | None]
    ) -> None:
        """Makes the other array of a variable the one in use; `transports` are those that are known, by servers."""
        old = pair.pop() if len(pair) == 2 else None
        server = variable.servers[0]
        if server not in transports:
            transports[server] = self._transport(server)
        transport = transports[server] if device.kind == "cpu" and len(variable.servers) == 1 else None
        if old is not None:
            self._shown.pop(id(old.array), None)
        if old is not None and old.transport is transport and old.round is not None:
            old.renew()
            made = old
        else:  # An old one without a round may be in a section that is not sent.
            made = _make(variable.spec.tensor, device, transport, shared=old is None or old.round is not None)
            if old is not None:
                self._at.pop(address_of(old.base), None)
            self._at[address_of(made.base)] = made
        pair.insert(0, made)
        self._shown[id(made.array)] = made

    def hand_in(self, array: Sent | None) -> Buffer | None:
        """Returns the buffer that an array is, and makes it read-only for the program; None where it is none."""
        if not self._at or not isinstance(array, np.ndarray):
            return None
        buffer = self._shown.get(id(array)) or self._at.get(address_of(array))
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


def _make(spec: TensorSpec, device: Device, transport: Transport | None, shared: bool) -> Buffer:
    dtype = DTYPES[spec.dtype]
    reserved = transport.reserve(spec.nbytes) if transport is not None and shared and spec.nbytes else None
    if reserved is None:
        return Buffer(empty_host(device, dtype, spec.shape), transport)
    memory, place = reserved
    array = np.frombuffer(memory, np.uint8, spec.nbytes, place).view(dtype).reshape(spec.shape)
    return Buffer(array, transport, memory, place)


def pack(arrays: Sequence[Array], buffers: Mapping[int, Buffer | None]) -> Payload:
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
        start = align(end)
        end = start + array.nbytes
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


Memory = Callable[[], Array | None]
"""Returns where rounds write a variable's values: an array of its dtype and shape, contiguous; None for nowhere now."""


class Targets:
    """The arrays of this process's variables, as far as they have any. Guarded by the lock of `ReadCache`.

    The value of a variable that has one comes with each round that assigns the variable, and is kept nowhere else.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[PlacedVariable, Memory]] = {}
        self._outdated: set[int] = set()
        self.ids: Set[int] = self._arrays.keys()
        """The numbers of the variables that have an array."""

    def add(self, variable: PlacedVariable, memory: Memory) -> None:
        """Gives a variable an array, in place of the one that it has; asked for each time that it is written."""
        self._arrays[variable.id] = variable, memory
        self._outdated.add(variable.id)

    def remove(self, id: int) -> None:
        """Takes a variable's array away."""
        self._arrays.pop(id, None)
        self._outdated.discard(id)

    def of(self, ids: Sequence[int]) -> dict[int, Array]:
        """Returns the arrays of some variables, each by its place among them."""
        found = {place: self._arrays[id][1]() for place, id in enumerate(ids) if id in self._arrays}
        return {place: array for place, array in found.items() if array is not None}

    def among(self, ids: Iterable[int]) -> list[PlacedVariable]:
        """Returns those of some variables that have arrays."""
        return [self._arrays[id][0] for id in ids if id in self._arrays]

    def outdate(self) -> None:
        """All variables may have other values by now."""
        self._outdated.update(self._arrays)

    def written(self, ids: Iterable[int]) -> None:
        """Notes that arrays have the values of now."""
        if self._outdated:
            self._outdated.difference_update(ids)

    @property
    def outdated(self) -> list[PlacedVariable]:
        """The variables whose arrays have other values."""
        return [self._arrays[id][0] for id in self._outdated]

    def write(self, variables: Collection[PlacedVariable], values: Collection[Array]) -> None:
        """Writes values that were read."""
        for variable, value in zip(variables, values, strict=True):
            array = self._arrays[variable.id][1]()
            if array is not None:
                array[...] = value
        self.written(variable.id for variable in variables)
