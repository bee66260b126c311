"""Arrays of other libraries as NumPy's, and NumPy's as theirs: the one conversion of the client.

Libraries are known by the names of their classes, or once the program has imported them: none is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from pswire.model.tensor import Array

WITHOUT_NUMPY: Mapping[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
"""Dtypes by their names in PyTorch, of which NumPy itself knows nothing: PyTorch gives and takes their bits."""


def native(array: Array) -> Array:
    """Returns an array in this machine's byte order: itself, or a copy."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def is_torch(value: object) -> bool:
    """Returns whether a value is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_text(array: Array) -> bool:
    """Returns whether an array has texts or other objects, which have no place on servers and devices."""
    return array.dtype.kind in "OSUT"


def on_host(value: object) -> Array:
    """Returns an array of any library, or whatever `numpy.asarray` takes, in host memory; copies only if it must.

    A tensor of PyTorch that needs a gradient gives its values, as `tensor.detach()` does.

    Raises:
        TypeError: NumPy has no such array: it is sparse, quantized, masked, deleted, or still traced; the message has
            the remedy.
        ValueError: parts of a list have different shapes; NumPy's own error.
    """
    if is_torch(value):
        return _of_torch(value)
    if isinstance(value, list | tuple) and any(map(_is_of_others, value)):
        value = [on_host(part) for part in value]  # NumPy would ask the parts themselves, which cannot always
    check_jax(value)
    kind = type(value)
    if kind.__module__.startswith("scipy.sparse"):
        raise TypeError(f"a SciPy {kind.__name__} is sparse, but a dense array is expected; pass x.toarray()")
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError("an array has masked elements, which have no value; pass x.filled(value)")
    return native(np.asarray(value))


def _is_of_others(part: object) -> bool:
    """Returns whether a part of a list is another library's array, or has such parts."""
    return is_torch(part) or (isinstance(part, list | tuple) and any(map(_is_of_others, part)))


def check_jax(value: Any) -> None:
    """Raises `TypeError` if a value is an array of JAX without values that NumPy could have."""
    jax: Any = sys.modules.get("jax")
    arrays: Any = getattr(jax, "Array", ())
    if not isinstance(value, arrays):
        return
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            "a JAX array is traced and has no value yet; return it from the compiled function, and pass "
            "the returned array"
        )
    if value.is_deleted():
        raise TypeError(
            "a JAX array was deleted, because it was donated to a compiled function or x.delete() was "
            "called; pass the array that the function returned, or a copy"
        )


def _of_torch(value: Any) -> Array:
    if value.is_nested:
        raise TypeError("a tensor is nested, but a dense array is expected; pass torch.nested.to_padded_tensor(x, 0.0)")
    tensor = value.detach()
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided:
        raise TypeError(
            "a tensor is sparse, but a dense array is expected; pass x.to_dense(), or, where slices are "
            "accepted, ps.IndexedSlices(x.coalesce().values(), x.coalesce().indices()[0], x.shape)"
        )
    if tensor.is_quantized:
        raise TypeError("a tensor is quantized, but an array is expected; pass x.dequantize()")
    if tensor.is_meta:
        raise TypeError(
            "a tensor is on the meta device and has no values; move it to another device with to_empty() and "
            "set its values"
        )
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    dtype = WITHOUT_NUMPY.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        whole: Array = tensor.numpy()
        return whole
    bits: Array = tensor.view(getattr(torch, f"int{8 * tensor.itemsize}")).numpy().view(dtype)
    return bits


def to_torch(array: Array) -> Any:
    """Returns an array as a tensor of PyTorch, which is imported: over the same memory, or over a copy.

    A copy is made of what no tensor can be: read-only, flipped, or of another byte order.

    Args:
        array: of numbers.
    """
    torch = sys.modules["torch"]
    found = native(array)
    if not found.flags.writeable or any(stride < 0 or stride % found.itemsize for stride in found.strides):
        found = np.array(found, order="C")
    name = found.dtype.name
    if name not in WITHOUT_NUMPY:
        return torch.from_numpy(found)
    return torch.from_numpy(found.view(f"int{8 * found.itemsize}")).view(getattr(torch, name))


def to_dlpack(array: Array, **options: Any) -> Any:
    """Returns a copy of an array as DLPack has it, for `__dlpack__`: nobody can change the array by it.

    Args:
        array: on the host.
        options: of `__dlpack__`.
    """
    copy = np.array(array, order="C")
    if copy.dtype.name in WITHOUT_NUMPY and "torch" in sys.modules:
        return to_torch(copy).__dlpack__()
    return copy.__dlpack__(**{name: value for name, value in options.items() if name == "max_version"})
