"""JSON that somebody else has written: parsed strictly, and read by fields of known types.

Python's own parser takes NaN, numbers that become infinite and keys that come twice, and what it gives may be of any
type. Here all of that is `Malformed`, before anything is made of it.
"""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Greatest depth of nested values; what is deeper could be neither compared nor written again."""

MAX_INTEGER = (1 << 63) - 1
MAX_REAL = sys.float_info.max


class Malformed(ValueError):
    """A text or file that is not as it was written: broken, cut short, or never right. The message says why."""


def parse(data: str | bytes | bytearray) -> Any:
    """Parses a JSON text, of UTF-8 where it is bytes.

    Raises:
        Malformed: the text is no JSON; it has NaN, a number that is not finite, a key twice, or too deep values.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)
    except RecursionError:
        raise Malformed(f"its values are nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # not only JSONDecodeError: text that is no UTF-8, integers of many digits
        raise Malformed(" ".join(str(error).split())) from None


def _refuse(word: str) -> NoReturn:
    raise Malformed(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits[:40])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise Malformed(f"the key {twice[:80]!r} appears twice")
    return found


# ---- Values by their types ----


def _wrong(value: Any, wanted: str) -> NoReturn:
    raise Malformed(f"{reprlib.repr(value)} is not {wanted}")


def integer(value: Any, high: int = MAX_INTEGER) -> int:
    """A value that is an integer from 0 to `high`; raises `Malformed` for any other."""
    return value if type(value) is int and 0 <= value <= high else _wrong(value, f"an integer from 0 to {high}")


def number(value: Any) -> float:
    """A value that is a finite number, not negative; raises `Malformed` for any other."""
    return float(value) if type(value) in (int, float) and 0 <= value <= MAX_INTEGER else _wrong(value, "such a number")


def real(value: Any) -> float:
    """A value that is a finite number; raises `Malformed` for any other."""
    return float(value) if type(value) in (int, float) and abs(value) <= MAX_REAL else _wrong(value, "a finite number")


def text(value: Any) -> str:
    """A value that is text, which UTF-8 can write; raises `Malformed` for any other."""
    if not isinstance(value, str):
        _wrong(value, "text")
    try:
        value.encode()
    except UnicodeEncodeError:
        _wrong(value, "text that UTF-8 can write")
    return value


def items(value: Any) -> list[Any]:
    """A value that is a list; raises `Malformed` for any other."""
    return value if isinstance(value, list) else _wrong(value, "a list")


def fields(value: Any) -> dict[str, Any]:
    """A value that is an object; raises `Malformed` for any other, and for keys that UTF-8 cannot write."""
    if not isinstance(value, dict):
        _wrong(value, "an object")
    for key in value:
        text(key)
    return value


def field(of: dict[str, Any], key: str) -> Any:
    """Returns what an object has under a key; raises `Malformed` where it has nothing."""
    return of[key] if key in of else _wrong(list(of), f"a list of keys with {key!r}")


def shallow(value: Any) -> Any:
    """The value itself; raises `Malformed` where something in it lies more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise Malformed(f"its values are nested more than {MAX_DEPTH} levels deep")
