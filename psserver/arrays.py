"""Where a server keeps its arrays: NumPy on the CPU, CuPy on a GPU, by the same code.

The only module of the server that imports CuPy, and only for a GPU. CuPy imports without a driver, so
what is looked for is a device, not the package.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from array_api_compat import numpy as numpy_api

from pswire.errors import ConfigError
from pswire.tensor import Array

_NAME = re.compile(r"cpu(?::0)?|gpu(?::(?P<gpu>\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """The CPU, or one GPU. May be used from any thread.

    Attributes:
        gpu: which GPU; None for the CPU.
    """

    gpu: int | None = None

    def __str__(self) -> str:
        return "cpu" if self.gpu is None else f"gpu:{self.gpu}"

    @classmethod
    def parse(cls, text: str) -> Device:
        """Reads `cpu`, `gpu` or `gpu:1`.

        Raises:
            ConfigError: it is none of these, or that GPU is not there; the message says what to do.
        """
        match = _NAME.fullmatch(text)
        if not match:
            raise ConfigError(f"{text!r} is no device; write cpu or gpu:0")
        if text.lower().startswith("cpu"):
            return cls()
        index = int(match["gpu"] or 0)
        count = _gpu_count()
        if index >= count:
            seen = "gpu:0" if count == 1 else f"gpu:0 to gpu:{count - 1}"
            raise ConfigError(
                f"there is no gpu:{index}: "
                + (f"this machine has {seen}" if count else "CUDA finds no device; check the driver (nvidia-smi)")
                + "; or start with --device cpu"
            )
        return cls(index)

    @property
    def xp(self) -> Any:
        """The array API namespace of this device's arrays."""
        if self.gpu is None:
            return numpy_api
        _cupy()
        from array_api_compat import cupy as cupy_api

        return cupy_api

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which new arrays of the calling thread are made on this device."""
        if self.gpu is None:
            return contextlib.nullcontext()
        scope: contextlib.AbstractContextManager[Any] = _cupy().cuda.Device(self.gpu)
        return scope

    def put(self, array: Array) -> Any:
        """A host array on this device; on the CPU it is the array itself."""
        if self.gpu is None:
            return array
        with self.scope():
            return _cupy().asarray(array)

    def get(self, array: Any) -> Array:
        """An array of this device in host memory; on the CPU it is the array itself."""
        return np.asarray(array) if self.gpu is None else np.asarray(_cupy().asnumpy(array))

    def elementwise(self, inputs: str, outputs: str, operation: str, preamble: str, scalars: Sequence[bool]) -> Any:
        """A `cupy.ElementwiseKernel`, compiled, for this GPU.

        Args:
            inputs, outputs: parameters such as `float32 a0, float32 a1`.
            operation: CUDA statements for one element.
            preamble: CUDA functions that they call.
            scalars: for each input whether it has one element, for all.
        """
        cupy = _cupy()
        # Without contraction a product is rounded before it is added to something, as the interpreter does.
        kernel = cupy.ElementwiseKernel(
            inputs, outputs, operation, "update", preamble=preamble, options=("--fmad=false",)
        )
        # CuPy compiles at a call, and once more for arguments that lie otherwise: these lie as those of rounds.
        taken = zip(inputs.split(", "), scalars, strict=True)
        kernel(*(cupy.zeros(() if scalar else 2, parameter.split()[0]) for parameter, scalar in taken))
        return kernel


def _cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"a GPU is asked for, but CuPy cannot be imported ({error}); install paramserver[gpu], or start "
            "with --device cpu"
        ) from None
    return cupy  # type: ignore[no-any-return,unused-ignore]


def _gpu_count() -> int:
    cupy = _cupy()
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # also: there is no driver
        return 0
