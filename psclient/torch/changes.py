"""Changes of parameters that torch does not count: through `.data`, NumPy, or another tensor over the same memory.

torch counts changes in place, by `Tensor._version`. The rest is found by comparing memory with what it was when a step
had ended. Up to `SMALL` bytes of parameters all of it is compared, in every step. Above that `SAMPLES` elements of each
parameter are, and all of it in one step of `EVERY`: a change of few elements may be missed, and is undone by the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from psclient._src.arrays.conversions import on_host
from psclient.torch.parameters import Trained
from pswire.model.tensor import Array

SMALL = 4 << 20
"""Bytes of all parameters up to which all of them is compared in each step."""

SAMPLES = 64
"""Elements of a parameter that are compared in each step."""

EVERY = 100
"""Of so many steps one compares everything."""


class Changes:
    """Remembers what parameters were at the end of a step. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # digests by the `id` of what is trained
        self._places: dict[int, torch.Tensor] = {}
        self._bytes: dict[int, tuple[Array, memoryview]] = {}  # of what is trained its memory, and that in bytes
        self._steps = 0
        self._whole = True

    def memory(self, each: Trained) -> Array | None:
        """Returns a parameter's memory for values of the servers, which are no change; None where it has none."""
        self._known.pop(id(each), None)
        return each.memory()

    def note(self, trained: Sequence[Trained]) -> None:
        """Remembers parameters, all of which have the servers' values now."""
        self._whole = self._steps % EVERY == 0 or sum(each.tensor.nbytes for each in trained) <= SMALL
        self._steps += 1
        for each in trained:
            self._known[id(each)] = self._digest(each)

    def found(self, trained: Sequence[Trained]) -> list[Trained]:
        """Returns the parameters that have changed since, whoever has changed them and however."""
        known = self._known
        return [e for e in trained if e.changed or (id(e) in known and self._digest(e) != known[id(e)])]

    def _digest(self, each: Trained) -> int:
        memory = each.memory()
        if self._whole and memory is not None:
            seen = self._bytes.get(id(each))
            if seen is None or seen[0] is not memory:
                seen = self._bytes[id(each)] = memory, memory.reshape(-1).view("uint8").data
            return xxhash.xxh3_64_intdigest(seen[1])
        whole = self._whole and each.tensor.device.type == "cpu"  # else all of it would have to come to the host
        if not whole and each.tensor.numel() > SAMPLES:
            return xxhash.xxh3_64_intdigest(on_host(torch.take(each.tensor.detach(), self._places_of(each))).tobytes())
        return xxhash.xxh3_64_intdigest(on_host(each.tensor).tobytes())

    def _places_of(self, each: Trained) -> torch.Tensor:
        found = self._places.get(id(each))
        if found is None:
            tensor = each.tensor
            spread = torch.linspace(0, tensor.numel() - 1, SAMPLES, dtype=torch.float64)
            found = self._places[id(each)] = spread.long().to(tensor.device)
        return found
