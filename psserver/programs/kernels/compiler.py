"""Compiles kernels in the background, and keeps them by their text; for other processes, too, where there is a folder.

The only place where text is run, and that text comes from `codegen`. Numba is imported with the first kernel that has
to be compiled, so that a server starts without it, and goes on interpreting where it cannot be imported.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, cast

from psserver.devices import ServerDevice
from psserver.programs.kernels import functions, intrinsics, machine_code, row_groups
from psserver.programs.kernels.background import Background
from psserver.programs.kernels.codegen import HALVES, Form, Parameter, parameters
from psserver.programs.kernels.kept import KeptCode, kept_in
from psserver.programs.kernels.row_codegen import RowForm, bits
from psserver.programs.kernels.row_groups import ARRAYS, NUMBERS, grouping
from pswire.model.tensor import DTYPES

log = logging.getLogger("psserver")

PATIENCE = 2
"""Requests after which a kernel is compiled: to interpret a program that runs once takes less time."""

MAX_POINTERS = 200
"""Most pointers of a kernel on the CPU; more take the compiler long, and ctypes has a limit."""

STOP_SECONDS = 1.0
"""Seconds that a server's end waits for a kernel that is being compiled."""

WAIT_SECONDS = 20.0
"""Seconds that a round waits for a kernel where interpreting would take longer."""

MAX_KERNELS = 1000
"""Most kernels of one server. A job with more has a program that changes in each round."""

NumbaKernel = Callable[..., Any]
"""A compiled function of sizes and addresses that releases the GIL. A kernel made from a text returns a number."""

Definition = Callable[[Any], Callable[..., None]]
"""A function that returns one for Numba, given Numba's `carray`."""


@dataclass(frozen=True)
class Tools:
    """What functions of ours for Numba are made with, as Numba is imported only where they are compiled.

    Attributes:
        carray: Numba's `carray`.
        njit: makes a function callable from others, which it becomes a part of: one that may fail could not be kept.
        fetch: `fetch(array, index)` prefetches an element into the first-level cache.
        bits: `bits(number)` returns the bits of a float64 as an int64.
        malloc: `malloc(bytes)`, of the C library, returns an address as a uint64; 0 if there is no memory.
        free: `free(address)`, of the C library.
    """

    carray: Any
    njit: Callable[[Callable[..., Any]], Any]
    fetch: Any
    bits: Any
    malloc: Any
    free: Any


class Compiler:
    """The kernels of one device, by their text. May be called from any thread.

    Args:
        device: the device.
        patience: see `PATIENCE`.
        folder: where machine code for the CPU is kept for other processes; "" for nowhere.

    Attributes:
        compiled, loaded, failed: number of kernels that were compiled, that another process had compiled, and that
            failed to compile.
        seconds: seconds spent on compiling and loading.
    """

    def __init__(self, device: ServerDevice, patience: int = PATIENCE, folder: str = "") -> None:
        self._device = device
        self._patience = patience
        self._folder = folder
        self.compiled = self.loaded = self.failed = 0  # written by the background's thread alone, as the seconds are
        self.seconds = 0.0
        self._background = Background("kernels")
        self._made: dict[object, Any] = {}  # kernels that are done: each round asks for them, without the lock
        self._lock = threading.Lock()
        self._asked: dict[object, int] = {}  # guarded by the lock, as all below
        self._kernels: dict[object, Future[Any]] = {}
        self._late = set[object]()  # waited for in vain: a round may request one for each variable
        self._told = False

    def elementwise(self, form: Form, now: bool = False) -> Any | None:
        """Returns the kernel of a form: a `NumbaKernel` or a `cupy.ElementwiseKernel`; None while there is none.

        Args:
            form: the computation.
            now: True to compile at the first request, and wait for it at most `WAIT_SECONDS`.
        """
        if self._device.gpu is not None:
            scalars = [p.single for p in parameters(form) if p.role != "output"]
            return self._get(form.cuda, lambda: self._cuda(form, scalars), now)
        return self._pointed(form.numba, 1, parameters(form), now)

    def rows(self, form: RowForm) -> NumbaKernel | None:
        """Returns the kernel of a form for rows of tables in host memory; None while there is none."""
        index = Parameter("array", 0, "int64")
        return self._pointed(form.rows, 4, [index] * 3 + parameters(form) + form.rooms)

    def replay(self, form: RowForm) -> NumbaKernel | None:
        """Returns the kernel that makes up updates which rows have missed; None while there is none."""
        return self._replayed(form, form.replay)

    def once(self, form: RowForm) -> NumbaKernel | None:
        """Returns the kernel that makes one update of rows, by numbers of each row's own; None while there is none."""
        return self._replayed(form, form.once)

    def _replayed(self, form: RowForm, text: str) -> NumbaKernel | None:
        taken = [p for p in parameters(form) if p.role != "part"]
        index = Parameter("array", 0, "int64")
        return self._pointed(text, 5, [index] * 2 + taken + form.replay_rooms + bits(form))

    def groups(self) -> NumbaKernel | None:
        """Returns `row_groups.grouping`, compiled; None while it is not."""
        return self._get(grouping, lambda: self._numba(grouping, NUMBERS, ["int64"] * ARRAYS))

    def function(
        self,
        definition: Callable[[Tools], Callable[..., None]],
        sizes: int,
        dtypes: Sequence[str],
        sources: Sequence[ModuleType],
    ) -> NumbaKernel | None:
        """Returns a function of ours for host memory, compiled; None while it is not.

        Args:
            definition: returns the function.
            sizes: number of integers that the function takes first.
            dtypes: dtypes of the pointers that follow.
            sources: the modules whose text the function is made of; machine code that is kept depends on it.
        """
        if self._device.gpu is not None:
            return None
        return self._get((definition, *dtypes), lambda: self._numba(_WithTools(definition, sources), sizes, dtypes))

    def _pointed(self, text: str, sizes: int, taken: list[Parameter], now: bool = False) -> NumbaKernel | None:
        """Returns the kernel of a text for these pointers, as the same text may serve several dtypes."""
        if len(taken) > MAX_POINTERS:
            return None
        dtypes = [parameter.dtype for parameter in taken]
        return self._get((text, *dtypes), lambda: self._numba(text, sizes, dtypes), now)

    def _cuda(self, form: Form, scalars: Sequence[bool]) -> Any:
        built = self._device.elementwise(*form.cuda, scalars)
        self.compiled += 1
        return built

    def _numba(self, kernel: str | Definition, sizes: int, dtypes: Sequence[str]) -> NumbaKernel:
        if self._kept is None:
            return self._compile(kernel, sizes, dtypes)
        kept, identity = self._kept
        text = kernel if isinstance(kernel, str) else getattr(kernel, "text", "") or kernel.__qualname__
        name = hashlib.sha256("\0".join([identity, text, str(sizes), *dtypes]).encode()).hexdigest()
        # Another process that has begun with it is waited for: that is sooner than a second one beside it.
        found = self._load(kept, name, sizes, len(dtypes))
        if found is None:
            with kept.locked(name, lambda: self._background.closed):
                found = self._load(kept, name, sizes, len(dtypes))
                if found is None:
                    found = self._compile(kernel, sizes, dtypes)
                    self._keep(kept, name, found, sizes, len(dtypes))
        return found

    def _load(self, kept: KeptCode, name: str, sizes: int, pointers: int) -> NumbaKernel | None:
        code = kept.read(name)
        found = machine_code.loaded(code, sizes, pointers) if code else None
        self.loaded += found is not None
        return found

    def _keep(self, kept: KeptCode, name: str, kernel: Any, sizes: int, pointers: int) -> None:
        try:
            code = machine_code.object_code(kernel.compiled.inspect_llvm(), sizes, pointers)
        except Exception:  # whatever LLVM says, the kernel works
            log.debug("a compiled kernel cannot be cached", exc_info=True)
            return
        if code:
            kept.write(name, code)

    def _compile(self, kernel: str | Definition, sizes: int, dtypes: Sequence[str]) -> NumbaKernel:
        with _stoppable(self._background):
            made = compile_numba(kernel, sizes, dtypes)
        self.compiled += 1
        return made

    @cached_property
    def _kept(self) -> tuple[KeptCode, str] | None:
        """The folder, and what all machine code depends on; None if none is kept. For the background's thread."""
        kept = kept_in(self._folder)
        try:
            return (
                None
                if kept is None
                else (kept, machine_code.identity(row_groups, functions, intrinsics, sys.modules[__name__]))
            )
        except (ImportError, OSError) as error:
            log.info("compiled kernels are not cached: %s", error)
            return None

    @property
    def texts(self) -> tuple[object, ...]:
        """Texts of the kernels that are compiled, or are about to be."""
        with self._lock:
            return tuple(self._kernels)

    def wait(self) -> None:
        """Waits until every kernel that was requested often enough is compiled, or has failed."""
        with self._lock:
            pending = list(self._kernels.values())
        wait(pending)

    def close(self) -> None:
        """Stops compiling; interrupts the running compilation, or leaves it behind if it does not end soon."""
        self._background.close(STOP_SECONDS)

    def _get(self, key: object, build: Callable[[], Any], now: bool = False) -> Any | None:
        made = self._made.get(key)
        if made is not None:
            return made
        with self._lock:
            if key not in self._kernels:
                self._ask(key, build, 1 if now else self._patience)
            found = self._kernels.get(key)
        if found is not None and now and key not in self._late and wait([found], WAIT_SECONDS).not_done:
            self._late.add(key)
        made = found.result() if found and found.done() and not found.cancelled() else None
        if made is not None:
            self._made[key] = made
        return made

    def _ask(self, key: object, build: Callable[[], Any], patience: int) -> None:
        if len(self._asked) >= MAX_KERNELS:
            return
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] >= patience:
            self._kernels[key] = self._background.submit(lambda: self._build(build))

    def _build(self, build: Callable[[], Any]) -> Any | None:
        began = time.perf_counter()
        try:
            with self._device.scope():
                return build()
        except _Stopped:
            return None
        except Exception:  # whatever the compiler says, the interpreter is left
            self.failed += 1
            with self._lock:
                told, self._told = self._told, True
            if not told:
                log.exception(
                    "an update function cannot be compiled, so it runs interpreted, which is slower; the "
                    "same may hold for others"
                )
            return None
        finally:
            self.seconds += time.perf_counter() - began


class _Stopped(BaseException):
    """The exception that stops a compilation at the server's end; no `except Exception` of a compiler catches it."""


class _Stop:
    """A listener to the passes of Numba's compiler that stops a thread's compilation once its background is closed."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._thread = threading.get_ident()

    def notify(self, event: Any) -> None:
        """Raises `_Stopped` if the compilation must stop. Called by Numba, in the compiling thread."""
        if event.is_start and self._background.closed and threading.get_ident() == self._thread:
            raise _Stopped


def _stoppable(background: Background) -> ExitStack:
    """Returns a context in which Numba stops compiling in the calling thread once the background is closed."""
    events: Any = import_module("numba.core.event")
    events.Listener.register(_Stop)
    stop, stack = _Stop(background), ExitStack()
    for kind in ("numba:compile", "numba:run_pass"):
        stack.enter_context(events.install_listener(kind, stop))
    return stack


def compile_numba(kernel: str | Definition, sizes: int, dtypes: Sequence[str]) -> NumbaKernel:
    """Compiles a text of `codegen`, or a function of ours, to machine code.

    Args:
        kernel: a text that defines `kernel`, or a function that returns one, given Numba's `carray`.
        sizes: number of integers that it takes first.
        dtypes: dtypes of the pointers that follow.
    """
    logging.getLogger("numba").setLevel(logging.WARNING)  # at debug level it writes a book for each kernel
    numba: Any = import_module("numba")
    types = numba.types
    stored = [DTYPES["uint16" if dtype in HALVES else dtype] for dtype in dtypes]
    pointers = [types.CPointer(numba.from_dtype(dtype)) for dtype in stored]
    is_text = isinstance(kernel, str)
    signature = (types.intp if is_text else types.void)(*[types.intp] * sizes, *pointers)
    function = _defined(kernel, numba) if isinstance(kernel, str) else kernel(numba.carray)
    compiled = numba.cfunc(signature, error_model="numpy", nogil=True)(function)
    made: Any = machine_code.prototype(sizes, len(dtypes), returns=is_text)(compiled.address)
    made.compiled = compiled  # keeps the machine code alive
    return machine_code.with_rows(made, sizes, len(dtypes)) if is_text else cast(NumbaKernel, made)


class _WithTools:
    """A definition that takes `Tools`, as one that takes `carray`."""

    def __init__(self, definition: Callable[[Tools], Callable[..., None]], sources: Sequence[ModuleType]) -> None:
        self._definition = definition
        self.text = "\0".join([definition.__qualname__, *map(inspect.getsource, sources)])

    def __call__(self, carray: Any) -> Callable[..., None]:
        numba: Any = import_module("numba")
        types, njit = numba.types, numba.njit(error_model="numpy", forceinline=True)
        fetch, bits = intrinsics.prefetch(to_write=0, near=3), intrinsics.bits()
        malloc = types.ExternalFunction("malloc", types.uint64(types.uint64))
        free = types.ExternalFunction("free", types.void(types.uint64))
        return self._definition(Tools(carray, njit, fetch, bits, malloc, free))


def _defined(text: str, numba: Any) -> Callable[..., None]:
    """Runs a text, with the functions that it calls; returns its function."""
    types = numba.types
    scope: dict[str, Any] = {**functions.functions(), "carray": numba.carray, "range": range, "min": min}
    scope |= {str(dtype): getattr(types, str(dtype)) for dtype in DTYPES if hasattr(types, str(dtype))}
    scope["bool"] = types.boolean
    exec(text, scope)  # generated by `codegen` from the table of ops; nothing received is in it
    defined: Callable[..., None] = scope["kernel"]
    return defined
