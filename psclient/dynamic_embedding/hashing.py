"""`hash_keys`: keys of tables from texts and bytes."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
import xxhash

from pswire.model.rows import Int64s


def hash_keys(keys: Any, *, bits: SupportsIndex = 64, seed: SupportsIndex = 0) -> Int64s:
    """Returns 64-bit keys for texts or bytes, by XXH64: the same in each process, on each machine, in each version.

        rows = users.lookup(ps.dynamic_embedding.hash_keys(batch["user"]))

    Different texts may have one key, and then share a row. Of n different texts about `n**2 / 2**(bits + 1)` pairs do:
    of a hundred million with 64 bits 0.0003, and with 48 bits 18.

    Source: XXH64 of https://github.com/Cyan4973/xxHash, of the bytes of a text in UTF-8.

    Args:
        keys: a text, bytes, or an array or nested list of them, of any shape. NumPy's dtype "S" drops zeros at the end
            of bytes.
        bits: how many bits keys have. 64 gives any int64. Fewer give numbers from 0 to `2**bits - 1`: tables of a
            group take 48.
        seed: of the hash, from 0 to `2**64 - 1`; secret where strangers choose keys.

    Returns:
        int64 of the shape of the keys.

    Raises:
        TypeError: a key is neither a text nor bytes; numbers are keys already.
        ValueError: `bits` is not from 1 to 64, or the seed out of range.
    """
    width, start = operator.index(bits), operator.index(seed)
    if not 1 <= width <= 64:
        raise ValueError(f"bits is {width}; use 1 to 64")
    if not 0 <= start < 1 << 64:
        raise ValueError(f"seed is {start}; use a number from 0 to 2**64 - 1")
    # NumPy makes one text of each element of a list that has a text.
    given = keys if isinstance(keys, np.ndarray) else np.asarray(keys, object)
    if given.dtype.kind not in "SUTO" and given.size:
        raise TypeError(f"keys to hash must be texts or bytes, not {given.dtype}; use integers as they are")
    hashed = (xxhash.xxh64_intdigest(_bytes(key, place), start) for place, key in enumerate(given.ravel().tolist()))
    found = np.fromiter(hashed, np.uint64, given.size).reshape(given.shape)
    return (found & np.uint64((1 << width) - 1)).view(np.int64)


def _bytes(key: Any, place: int) -> bytes:
    if isinstance(key, str):
        return key.encode("utf-8", "surrogatepass")  # names of files may have what is no text
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise TypeError(f"key {key!r:.60} at position {place} is a {type(key).__name__}; hash texts or bytes")
