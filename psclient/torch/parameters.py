"""The parameters of a module and their variables: names, checks, and parameters as arrays of NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from psclient._src.arrays.conversions import on_host
from psclient._src.arrays.devices import pack_layout, packs
from psclient._src.variables.variable import Variable
from pswire.errors import InvalidArgument, InvalidCall
from pswire.model.tensor import Array, as_bytes

DTYPES: Mapping[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
"""Dtypes that parameters may have, and NumPy's."""

COMPILED = "_orig_mod."
"""What `torch.compile` puts before the names of the module that it compiles."""


class Gate(torch.nn.Parameter):
    """A parameter without elements, which stands in a module for rows that are on servers.

    `requires_grad` says whether they are trained; `grad` is there while they have gradients, so that
    `module.zero_grad()` reaches those as well. It is in no state of a module.
    """

    def __new__(cls) -> Gate:
        """Creates an empty tensor."""
        return super().__new__(cls, torch.empty(0))  # type: ignore[no-any-return, unused-ignore]


class Trained:
    """A parameter of a module, which servers train.

    Args:
        path: where it is in the module, by torch's name.
        tensor: the parameter.
        variable: its variable on servers.
        by_rows: True if its gradient is sparse: of some of its rows.

    Attributes:
        name: its name for variables and messages.
        version: torch's count of changes in place, as of the last one that came from the servers.
        device, shape, dtype: what it had when it was bound to its variable.
        on_host: True if its memory is the host's, contiguous: rounds can write there.
        is_plain: True if its gradient is one of the host, of all its elements.
    """

    def __init__(self, path: str, tensor: torch.Tensor, variable: Variable, by_rows: bool) -> None:
        self.path, self.tensor, self.variable, self.by_rows = path, tensor, variable, by_rows
        self.name = name_of(path)
        self.device, self.shape, self.dtype = tensor.device, tuple(tensor.shape), tensor.dtype
        self.is_plain = self.device.type == "cpu" and not by_rows
        self.bind()

    def bind(self) -> None:
        """Takes the parameter's memory of now for the variable's."""
        self._address, self.version = self.tensor.data_ptr(), self.tensor._version
        self.on_host = self.device.type == "cpu" and self.tensor.is_contiguous()
        self._memory = on_host(self.tensor) if self.on_host else None

    def memory(self) -> Array | None:
        """Returns the parameter's memory of now as a flat array that rounds may write; None where they cannot.

        torch may give a parameter other memory at any time, as `share_memory` and `to` do: an address is good for one
        look alone.
        """
        tensor = self.tensor
        if self._memory is None or tensor.data_ptr() != self._address:
            usable = tensor.device.type == "cpu" and tensor.is_contiguous()
            same = (tuple(tensor.shape), tensor.dtype) == (self.shape, self.dtype)
            return on_host(tensor) if usable and same else None
        return self._memory

    @property
    def changed(self) -> bool:
        """True if the script has changed it, or given it other memory."""
        return self.tensor._version != self.version or self.tensor.data_ptr() != self._address

    def check(self, tensor: torch.Tensor) -> None:
        """Raises `RuntimeError` if the parameter is not what its variable is any more, or what is in its place."""
        for what, now, before in (
            ("shape", tuple(tensor.shape), self.shape),
            ("dtype", tensor.dtype, self.dtype),
            ("device", tensor.device, self.device),
        ):
            if now != before:
                raise InvalidCall(
                    f"parameter {self.name!r} has {what} {now}, but had {before} when its optimizer was "
                    "created; change the module before, or create another optimizer afterwards"
                )

    def check_in(self, module: torch.nn.Module) -> None:
        """Raises `RuntimeError` if the module has another parameter in its place, which nobody trains."""
        try:
            now = module.get_parameter(self.path)
        except AttributeError:
            return  # it has none there, and does not use this one
        if now is not self.tensor:
            self.check(now)
            raise InvalidCall(
                f"parameter {self.name!r} of the module was replaced after its optimizer was created; "
                "create another optimizer"
            )


def copy_together(device: torch.device, tensors: Sequence[torch.Tensor], values: Sequence[Array]) -> None:
    """Copies values of the host into tensors of a device: a pack of small ones by one copy.

    CUDA's copies are not waited for: what torch's current stream is given next comes after them.

    Args:
        device: that of all tensors.
        tensors: of any strides.
        values: of the same dtypes and shapes, contiguous.
    """
    at, on_cuda = 0, device.type == "cuda"
    for pack in packs(values):
        places, size = pack_layout(pack)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        memory = host.numpy()
        for value, place in zip(pack, places, strict=True):
            memory[place] = as_bytes(value)
        there = host.to(device, non_blocking=on_cuda)
        some = list(tensors[at : at + len(pack)])
        views = [there[place].view(t.dtype).view(t.shape) for t, place in zip(some, places, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(some, views)
        at += len(pack)


def name_of(path: str) -> str:
    """Returns the name of a parameter or buffer, without what `torch.compile` puts before it."""
    return path.replace(COMPILED, "")


def paths_of(module: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Returns the parameters of a module by `id`, and by what path: of several the first."""
    return {id(p): (path, p) for path, p in module.named_parameters() if not isinstance(p, Gate)}


def check_parameter(name: str, tensor: torch.Tensor) -> None:
    """Raises `ValueError` if servers cannot train a parameter.

    Args:
        name: its name, for the message.
        tensor: the parameter.
    """
    what = f"parameter {name!r}"
    if tensor.is_meta:
        raise InvalidArgument(
            f"{what} is on the meta device and has no values; set its values first, with module.to_empty(...)"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgument(f"{what} has no shape yet; call the lazy module once before creating its optimizer")
    if tensor.is_complex():
        raise InvalidArgument(
            f"{what} is {tensor.dtype}, but parameters on servers must be real; use real and imaginary "
            "parts, and combine them with torch.view_as_complex in forward"
        )
    if tensor.dtype not in DTYPES:
        raise InvalidArgument(
            f"{what} is {tensor.dtype}, which cannot hold fractional steps; register it as a buffer, or use "
            f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )


def limited_of(module: torch.nn.Module) -> dict[int, float]:
    """Returns by the `id` of the parameter the `max_norm` of embeddings, whose forward changes rows in place."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(m.weight): m.max_norm for m in module.modules() if isinstance(m, kinds) and m.max_norm is not None}


def sparse_of(module: torch.nn.Module) -> set[int]:
    """Returns the `id`s of the parameters of `nn.Embedding(sparse=True)` and its bags: their gradients are sparse."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(m.weight) for m in module.modules() if isinstance(m, kinds) and m.sparse}


def names_of(parameters: Iterable[Trained]) -> str:
    """Returns the names of a few parameters, for messages."""
    found = [repr(each.name) for each in parameters]
    more = len(found) - 5
    return ", ".join(found[:5]) + (f" and {more} more" if more > 0 else "")
