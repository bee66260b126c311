"""Arrays between NumPy and JAX: what is copied, and what is not.

From JAX a CPU's array comes without a copy: `np.asarray` gives a view, which holds the array, so that no donation
takes its memory. To JAX an array goes without a copy if it begins at a multiple of 64 bytes, as XLA asks for; XLA
treats its memory as constant, so that donating it does no harm. What begins elsewhere is copied once. DLPack is not
used: NumPy exports no read-only array by it, and what has to be copied is released by a thread of XLA that needs
Python's lock, which blocks where a caller holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from pswire.model.tensor import Array, address_of

ALIGNED = 64
"""XLA's alignment of memory, in bytes."""

SMALL = 1 << 16
"""Bytes below which a copy costs less than `device_put` of an array: a compiled call copies all of them at once."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns a new array that JAX takes without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + ALIGNED, np.uint8)
    first = -address_of(memory) % ALIGNED
    made: Array = memory[first : first + size].view(dtype).reshape(shape)
    return made


def to_jax(array: Array) -> jax.Array:
    """Returns an array on JAX's default device; what is not aligned is copied by this thread.

    Args:
        array: on the host, contiguous; nobody may change it any more.
    """
    if array.nbytes and address_of(array) % ALIGNED:
        aligned = empty(array.shape, array.dtype)
        aligned[...] = array
        array = aligned
    moved: jax.Array = jax.device_put(array)
    return moved


def all_to_jax(arrays: Sequence[Array]) -> list[jax.Array]:
    """Returns arrays on JAX's default device, as `to_jax`: the same dtypes and shapes again and again."""
    with jax.transfer_guard("allow"):  # which is for transfers that a user does not know of
        small = _copied([array for array in arrays if array.nbytes < SMALL])
    rest = iter(small)
    return [next(rest) if array.nbytes < SMALL else to_jax(array) for array in arrays]


def _same(arrays: list[Any]) -> list[Any]:
    return arrays


_copied = jax.jit(_same)


def to_host(arrays: Sequence[Any]) -> list[Array]:
    """Returns arrays on the host, once they are computed; those of other devices are copied, all at once."""
    if jax.default_backend() != "cpu":  # else there is nothing to begin, and looking at each array takes longer
        for array in arrays:
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
    with jax.transfer_guard("allow"):
        return [np.asarray(array) for array in arrays]


def scaled(tree: Any, share: float) -> Any:
    """Returns a tree of arrays, each times a number, in its dtype; on their device."""
    return _scaled(tree, np.float64(share))


def _multiply(tree: Any, share: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: (leaf * share).astype(leaf.dtype), tree)


_scaled = jax.jit(_multiply)


def on_cpu() -> AbstractContextManager[Any]:
    """Returns a context in which JAX computes on the CPU, if it has one, whatever its default device is doing."""
    try:
        (device, *_) = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS names others
        return nullcontext()
    scope: AbstractContextManager[Any] = jax.default_device(device)
    return scope
