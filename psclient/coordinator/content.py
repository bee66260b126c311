"""Arguments and results of scheduled functions as bytes: never code, and nothing that only one process has.

A length of 8 bytes, a JSON text of that length, padding, and the arrays that it names, one after another as in a
payload. The text has the structure: numbers and strings as they are, and what JSON has not as an object with one key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from psclient._src.arrays.conversions import is_torch
from psclient._src.arrays.devices import to_numpy
from psclient._src.data.array_dataset import ArrayDataset
from psclient._src.values import DistributedValues
from psclient._src.variables.variable import Variable
from pswire.errors import InvalidRequest
from pswire.model.tensor import Array, TensorSpec, align, portable, spec_of
from pswire.network.payload import Payload

HEAD = 8
"""Bytes of the length."""

Refer = Callable[[object], Mapping[str, Any] | None]
"""Returns what stands for a value that is elsewhere; None for one that is not."""

Resolve = Callable[[str, Any], Any]
"""Returns the value of a reference, by its kind and what was said of it."""

SCALARS = (bool, int, float, str, type(None))


class _Encoder:
    def __init__(self, refer: Refer) -> None:
        self.arrays: list[Array] = []
        self._refer = refer

    def encode(self, value: Any, path: str) -> Any:
        """Returns a value as JSON has it; its arrays go into `arrays`."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is tuple:
            return {"tuple": [self.encode(each, f"{path}[{n}]") for n, each in enumerate(value)]}
        if kind is list:
            return [self.encode(each, f"{path}[{n}]") for n, each in enumerate(value)]
        if kind is dict:
            if any(type(key) not in SCALARS for key in value):
                raise TypeError(f"{path} has keys that are not strings or numbers; use strings or numbers")
            return {"dict": [[key, self.encode(each, f"{path}[{key!r}]")] for key, each in value.items()]}
        if (reference := self._refer(value)) is not None:
            return dict(reference)
        if kind is bytes:
            return {"bytes": self._put(np.frombuffer(value, np.uint8))}
        if isinstance(value, Variable):
            raise TypeError(
                f"{path} is a variable, which is available in every process; use it in the function instead of "
                "passing it"
            )
        if isinstance(value, DistributedValues):
            raise TypeError(f"{path} has a value for each replica; pass strategy.experimental_local_results of it")
        return {"scalar" if isinstance(value, np.generic) else "array": self._put(self._array(value, path))}

    def _array(self, value: Any, path: str) -> Array:
        if is_torch(value) or hasattr(value, "__array__") or hasattr(value, "__cuda_array_interface__"):
            try:
                array = portable(to_numpy(value))
                spec_of(array)
            except (TypeError, InvalidRequest) as error:
                raise TypeError(f"{path}: {error}") from None
            return array
        what = f"the function {value.__name__}" if hasattr(value, "__name__") else f"a {type(value).__name__}"
        if hasattr(value, "__next__") or hasattr(value, "element_spec") or isinstance(value, ArrayDataset):
            raise TypeError(
                f"{path} is {what}, and datasets cannot be sent to workers; let a registered function "
                "return the dataset, and pass iter(coordinator.create_per_worker_dataset(function)), so "
                "that each worker has its own"
            )
        raise TypeError(
            f"{path} is {what}, which cannot be sent to workers; pass numbers, strings, arrays, "
            "RemoteValues or PerWorkerValues, or tuples, lists and dicts of these"
        )

    def _put(self, array: Array) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


def encode(value: Any, what: str, refer: Refer = lambda value: None) -> bytes:
    """Returns a nest as bytes, a copy.

    Args:
        value: the nest.
        what: words for it, for messages.
        refer: finds what is elsewhere.

    Raises:
        TypeError: something in it does not travel; the message has its place.
    """
    encoder = _Encoder(refer)
    try:
        text = {"value": encoder.encode(value, what), "arrays": [_spec(array) for array in encoder.arrays]}
    except RecursionError:
        raise TypeError(f"{what} is nested too deeply") from None
    head = json.dumps(text).encode()
    start = align(HEAD + len(head))
    packed = Payload.pack(encoder.arrays)
    content = bytearray(start + packed.size)
    content[:HEAD] = len(head).to_bytes(HEAD, "little")
    content[HEAD : HEAD + len(head)] = head
    for offset, chunk in packed.chunks:
        content[start + offset : start + offset + len(chunk)] = chunk
    return bytes(content)


def _spec(array: Array) -> list[Any]:
    spec = spec_of(array)
    return [spec.dtype, list(spec.shape)]


def _refuse(kind: str, said: Any) -> Any:
    raise InvalidRequest(f"{kind} does not exist in this process")


def decode(content: bytes | bytearray, resolve: Resolve = _refuse) -> Any:
    """Returns the nest of some bytes; its arrays may be written, and are the only ones.

    Args:
        content: what `encode` made.
        resolve: gives the values of references.

    Raises:
        InvalidRequest: the bytes are no such content.
    """
    try:
        length = int.from_bytes(content[:HEAD], "little")
        text = json.loads(bytes(content[HEAD : HEAD + length]))
        specs = [TensorSpec(dtype, tuple(map(int, shape))).check() for dtype, shape in text["arrays"]]
        rest = memoryview(bytearray(content[align(HEAD + length) :]))
        found = Payload([(0, rest)] if rest else [], len(rest)).tensors(specs)
        value = text["value"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{len(content)} bytes are not valid values of a closure: {error}") from None
    return _decode(value, found, resolve)


def _decode(value: Any, arrays: Sequence[Array], resolve: Resolve) -> Any:
    if isinstance(value, list):
        return [_decode(each, arrays, resolve) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, said),) = value.items()
    match kind:
        case "tuple":
            return tuple([_decode(each, arrays, resolve) for each in said])
        case "dict":
            return {key: _decode(each, arrays, resolve) for key, each in said}
        case "array":
            return arrays[said]
        case "scalar":
            return arrays[said][()]
        case "bytes":
            return arrays[said].tobytes()
        case _:
            return resolve(kind, said)
