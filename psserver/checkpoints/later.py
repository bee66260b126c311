"""What a restored checkpoint has for variables that are created later, as one server tells it another."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pswire.checkpoint import strict_json


@dataclass(frozen=True)
class DeferredRestore:
    """What a server has of a restored checkpoint beside its variables.

    Attributes:
        path: the checkpoint; "" for none.
        names: names of the tensors that later variables take.
        cast: True if these may have another dtype.
        begun: numbers of the variables that have got their first value so.
    """

    path: str = ""
    names: tuple[str, ...] = ()
    cast: bool = False
    begun: tuple[int, ...] = ()

    def text(self) -> bytes:
        """Returns it as JSON."""
        return json.dumps([self.path, self.names, self.cast, self.begun]).encode()

    @classmethod
    def of(cls, text: bytes) -> DeferredRestore:
        """Reads it; raises `Malformed`."""
        path, names, cast, begun = strict_json.items(strict_json.parse(text.decode()))
        numbers = map(strict_json.integer, strict_json.items(begun))
        return cls(
            strict_json.text(path), tuple(map(strict_json.text, strict_json.items(names))), cast is True, tuple(numbers)
        )
