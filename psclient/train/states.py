"""The states of objects as JSON: what is read is equal to what was written, and of the same types; else it is refused.

Numbers, words, lists, and dicts with words as keys stand as they are. Anything else is a dict with one key, `TAG` and
the name of its type.
"""

from __future__ import annotations

import base64
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pswire.checkpoint import strict_json

TAG = "$"
"""The first character of the key that says a type; a dict of the user's that has such a key says its type as well."""

MOST_BYTES = 1 << 16
"""Bytes of an array within a state, such as that of a random generator."""

_PAIRS: Mapping[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_ITEMS: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
    np.random.RandomState: (lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(state)),
    random.Random: (random.Random.getstate, random.Random.setstate),
}
"""How states of random generators are read and written, by their kinds."""


class Generator:
    """A random generator as an object that says its state.

    Args:
        generator: of a kind that is known.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._get, self._set = next(both for kind, both in _GENERATORS.items() if isinstance(generator, kind))

    def state_dict(self) -> Any:
        """Its state, as the generator says it."""
        return self._get(self._generator)

    def load_state_dict(self, state: Any) -> None:
        """Goes on from a state that `state_dict` gave."""
        self._set(self._generator, state)


def register_generator(kind: type, get: Callable[[Any], Any], put: Callable[[Any, Any], object]) -> None:
    """Has checkpoints keep random generators of another library.

    Args:
        kind: their class.
        get: returns a generator's state, as `to_json` takes it.
        put: gives it a state.
    """
    _GENERATORS[kind] = get, put


def is_generator(value: object) -> bool:
    """Returns whether a value is a random generator of a kind that is known."""
    return isinstance(value, tuple(_GENERATORS))


def to_json(path: str, state: object) -> Any:
    """Returns a state as JSON has it.

    Args:
        path: of the object, for messages.
        state: numbers, words, bytes, booleans, None; lists, tuples, sets, deques; dicts with such keys, `OrderedDict`,
            `Counter`; small arrays and scalars of NumPy.

    Raises:
        TypeError: something in it is of another type, which would not come back as it is.
    """
    try:
        return strict_json.shallow(_written(state, ""))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"state_dict() of {path!r} cannot be saved: {error}; keep arrays in variables, and return "
            "numbers, strings, lists and dicts. PyTorch modules and optimizers are saved through their "
            "psclient.torch.Optimizer: Checkpoint(optimizer=optimizer)"
        ) from error


def of_json(said: Any) -> Any:
    """Returns a state as it was given to `to_json`; one that an older version has written as it stands."""
    if isinstance(said, list):
        return [of_json(item) for item in said]
    if not isinstance(said, dict):
        return said
    if len(said) == 1:
        ((key, value),) = said.items()
        if key.startswith(TAG):
            return _read(key.removeprefix(TAG), value)
    return {key: of_json(value) for key, value in said.items()}


def _written(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {f"{TAG}float": str(value)}
    if kind is list:
        return [_written(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith(TAG) for key in value):
        return {key: _written(item, f"{where}[{key!r}]") for key, item in value.items()}
    if kind.__name__ in _PAIRS and kind in (dict, OrderedDict, Counter):
        pairs = [[_written(key, f"{where}, a key"), _written(v, f"{where}[{key!r}]")] for key, v in value.items()]
        return {f"{TAG}{kind.__name__}": pairs}
    if kind in (tuple, set, frozenset):
        return {f"{TAG}{kind.__name__}": [_written(item, f"{where}, an item") for item in value]}
    if kind is deque:
        items = [_written(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return {f"{TAG}deque": [value.maxlen, items]}
    if kind is bytes:
        return {f"{TAG}bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {f"{TAG}complex": [_written(value.real, where), _written(value.imag, where)]}
    if isinstance(value, np.generic) or kind is np.ndarray:
        return {f"{TAG}array": _written_array(np.asarray(value), kind is np.ndarray, where)}
    raise TypeError(f"{_at(where)}an instance of {kind.__qualname__} cannot be restored unchanged")


def _written_array(array: Any, whole: bool, where: str) -> list[Any]:
    if array.dtype.kind not in "biufc" or array.nbytes > MOST_BYTES:
        what = f"an array {array.dtype}{[*array.shape]}"
        raise TypeError(f"{_at(where)}{what} cannot be restored unchanged, or is larger than {MOST_BYTES} bytes")
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return [array.dtype.name, [*array.shape], base64.b64encode(plain.tobytes()).decode(), whole]


def _at(where: str) -> str:
    return f"at {where}: " if where else ""


def _read(kind: str, said: Any) -> Any:
    if kind == "float":
        return _FLOATS[said]
    if kind in _PAIRS:
        return _PAIRS[kind]({of_json(key): of_json(value) for key, value in said})
    if kind in _ITEMS:
        return _ITEMS[kind](map(of_json, said))
    if kind == "deque":
        return deque(map(of_json, said[1]), said[0])
    if kind == "bytes":
        return base64.b64decode(said)
    if kind == "complex":
        return complex(*map(of_json, said))
    if kind == "array":
        dtype = np.dtype(said[0])
        found = np.frombuffer(base64.b64decode(said[2]), dtype.newbyteorder("<")).astype(dtype).reshape(said[1])
        return found if said[3] else found[()]
    raise ValueError(f"the checkpoint contains a state of type {kind!r}, which this version does not support")
