"""Compiles kernels, in the background, and remembers them by their text.

The only place where text is run, and that text comes from `source`. Numba is imported with the first kernel, so that a
server starts without it, and goes on interpreting where it cannot be imported.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import import_module
from typing import Any

import numpy as np

from psserver.arrays import Device
from psserver.kernels.source import Form, Parameter, parameters
from pswire.tensor import DTYPES

log = logging.getLogger("psserver")

PATIENCE = 2
"""A kernel is compiled when it is asked for the second time: what runs once is interpreted in less time."""

MAX_POINTERS = 200
"""What a kernel on the CPU takes at most; more takes the compiler long, and ctypes has a limit."""

MAX_KERNELS = 1000
"""Kernels of one server. Whoever makes more has a program that is another one in each round."""

NumbaKernel = Callable[..., None]
"""Takes sizes and addresses; releases the GIL while it runs."""


class Compiler:
    """Kernels of one device, by their text. May be called from any thread.

    Args:
        device: for which they are.
        patience: see `PATIENCE`.
    """

    def __init__(self, device: Device, patience: int = PATIENCE) -> None:
        self._device = device
        self._patience = patience
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None  # Guarded by the lock, as all below.
        self._asked: dict[object, int] = {}
        self._kernels: dict[object, Future[Any]] = {}
        self._told = False

    def elementwise(self, form: Form) -> Any | None:
        """The kernel of a form: a `NumbaKernel` or a `cupy.ElementwiseKernel`; None while there is none."""
        if self._device.gpu is not None:
            return self._get(form.cuda, lambda: self._device.elementwise(*form.cuda))
        return self._pointed(form.numba, 1, parameters(form))

    def rows(self, form: Form) -> NumbaKernel | None:
        """The kernel of a form for rows of tables in host memory; None while there is none."""
        buffers = [p for p in parameters(form) if p.role == "part"]
        index = Parameter("array", 0, "int64")
        return self._pointed(form.rows, 4, [index] * 3 + parameters(form) + buffers)

    def _pointed(self, text: str, sizes: int, taken: list[Parameter]) -> NumbaKernel | None:
        """The kernel of a text for these pointers: the same text may be of several dtypes."""
        if len(taken) > MAX_POINTERS:
            return None
        key = (text, *(parameter.dtype for parameter in taken))
        return self._get(key, lambda: compile_numba(text, sizes, taken))

    @property
    def texts(self) -> tuple[object, ...]:
        """The texts of the kernels that are compiled, or are about to be."""
        with self._lock:
            return tuple(self._kernels)

    def wait(self) -> None:
        """Returns when everything that was asked for often enough is compiled, or has failed."""
        with self._lock:
            pending = list(self._kernels.values())
        wait(pending)

    def close(self) -> None:
        """Compiles no more; waits for what is being compiled."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._patience = sys.maxsize
        if pool:
            pool.shutdown(cancel_futures=True)

    def _get(self, key: object, build: Callable[[], Any]) -> Any | None:
        with self._lock:
            found = self._kernels.get(key)
            if found is None:
                self._ask(key, build)
                return None
        return found.result() if found.done() and not found.cancelled() else None

    def _ask(self, key: object, build: Callable[[], Any]) -> None:
        if len(self._asked) >= MAX_KERNELS:
            return
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] >= self._patience:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="kernels")
            self._kernels[key] = self._pool.submit(self._build, build)

    def _build(self, build: Callable[[], Any]) -> Any | None:
        try:
            with self._device.scope():
                return build()
        except Exception:  # Whatever a compiler says, there is still the interpreter.
            with self._lock:
                told, self._told = self._told, True
            if not told:
                log.exception("an update program cannot be compiled; it runs interpreted, as will others like it")
            return None


def compile_numba(text: str, sizes: int, taken: list[Parameter]) -> NumbaKernel:
    """Compiles a text of `source` to machine code.

    Args:
        text: defines `kernel`.
        sizes: how many numbers it takes first.
        taken: the pointers that follow.
    """
    logging.getLogger("numba").setLevel(logging.WARNING)  # at debug level it writes a book for each kernel
    numba: Any = import_module("numba")
    types = numba.types
    scope: dict[str, Any] = {**_FUNCTIONS, "carray": numba.carray, "range": range, "min": min}
    scope |= {name: numba.njit(function, error_model="numpy") for name, function in _HELPERS.items()}
    scope |= {str(dtype): getattr(types, str(dtype)) for dtype in DTYPES if hasattr(types, str(dtype))}
    scope |= {"bool": types.boolean, "prefetch": _prefetch()}
    exec(text, scope)  # Generated by `source` from the table of ops; nothing received is in it.
    pointers = [types.CPointer(numba.from_dtype(DTYPES[p.dtype])) for p in taken]
    signature = types.void(*[types.intp] * sizes, *pointers)
    compiled = numba.cfunc(signature, error_model="numpy", nogil=True)(scope["kernel"])
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * sizes, *[ctypes.c_void_p] * len(taken))
    function = prototype(compiled.address)
    function.compiled = compiled  # type: ignore[attr-defined]  # keeps the machine code alive
    return function


def _prefetch() -> Any:
    """A function of a kernel: has an element of an array fetched, to be written soon."""
    extending, ir = import_module("numba.extending"), import_module("llvmlite.ir")
    types: Any = import_module("numba.core.types")

    def prefetch(typing: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(array)(context, builder, args[0]).data
            byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            address = builder.bitcast(builder.gep(data, [args[1]]), byte)
            builder.call(function, [address, i32(1), i32(3), i32(1)])  # to write, to keep, as data
            return context.get_dummy_value()

        return types.void(array, types.intp), generate

    return extending.intrinsic(prefetch)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


def _maximum(a: Any, b: Any) -> Any:
    # Of equal ones the second, as NumPy has it: they may be zeros of different signs.
    return a if (a > b) | (a != a) else b


def _minimum(a: Any, b: Any) -> Any:
    return a if (a < b) | (a != a) else b


def _sign(a: Any) -> Any:
    return 1 if a > 0 else -1 if a < 0 else 0 if a == 0 else a


_HELPERS = {"where": _where, "maximum": _maximum, "minimum": _minimum, "sign": _sign}
_FUNCTIONS: dict[str, Any] = {"sqrt": math.sqrt, "floor": np.floor, "ceil": np.ceil, "rint": np.rint}
