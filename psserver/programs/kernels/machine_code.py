"""Machine code of kernels as bytes: made from Numba's LLVM text, and loaded by llvmlite alone.

What is made calls neither Numba nor Python, so that a process that loads it imports neither Numba nor what that
imports.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import platform
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, cast

from pswire.process import version

ENTRY = "paramserver_kernel"
"""The name of the function in the machine code."""

LOOP = "paramserver_loop"
"""The name of the function beside it that calls a kernel once for each row of a table."""

LIBRARY = {name + suffix for name in ("sqrt", "floor", "ceil", "rint") for suffix in ("", "f")} | {"malloc", "free"}
"""Functions that machine code may call: every C library has them."""

NUMBA_WRAPPER = "cfunc."
"""The prefix of the function that Numba makes for C; it calls the one whose name follows, and reports its errors."""

_RETURN = re.compile(r"^ *ret (.*)$", re.MULTILINE)

Kernel = Callable[..., Any]
"""A function of sizes and addresses that releases the GIL. Its attribute `rows` calls it once for each row of a table:
Python takes as long for one call as the kernel for some hundred elements. `rows` takes the addresses of a table of
int64, with the number of its rows, and of an int64 for each row, where it writes the results; it returns the bits of
all of them."""


def identity(*sources: object) -> str:
    """Returns in words what machine code depends on beside its text: versions, the processor, our own code.

    Args:
        sources: modules of ours that make the text, or what it calls.

    Raises:
        OSError: the text of a module is not installed.
        ImportError: Numba is not installed.
    """
    text = "".join(inspect.getsource(source) for source in (*sources, inspect.getmodule(identity)))  # type: ignore[arg-type]
    packages = [version(name) for name in ("numba", "llvmlite")]
    return "\n".join([hashlib.sha256(text.encode()).hexdigest(), platform.python_version(), *packages, *_host()])


def object_code(llvm_text: str, sizes: int, pointers: int) -> bytes | None:
    """Makes machine code of Numba's LLVM text of a `cfunc`.

    Args:
        llvm_text: what `inspect_llvm` returns.
        sizes: number of integers that the function takes first.
        pointers: number of pointers that follow.

    Returns:
        An object file with `LOOP`, and the function `ENTRY`, which returns an integer, 0 for one without a result; None
        if the function can raise an error or calls more than `LIBRARY`, so that it needs Numba or Python to run.
    """
    llvm = _llvm()
    module = llvm.parse_assembly(llvm_text)
    wrappers = [f.name for f in module.functions if f.name.startswith(NUMBA_WRAPPER) and not f.is_declaration]
    if len(wrappers) != 1:
        return None
    inner = wrappers[0].removeprefix(NUMBA_WRAPPER)
    if not _never_fails(module.get_function(inner)):
        return None
    module = llvm.parse_assembly(llvm_text + _entry(inner, sizes, pointers) + _loop(sizes, pointers))
    for item in (*module.functions, *module.global_variables):
        if item.name not in (ENTRY, LOOP) and not item.is_declaration:
            item.linkage = "internal"
    machine = _machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    needed = {item.name for item in (*module.functions, *module.global_variables) if item.is_declaration}
    if {name for name in needed if not name.startswith("llvm.")} - LIBRARY:
        return None
    made: bytes = machine.emit_object(module)
    return made


def loaded(code: bytes, sizes: int, pointers: int) -> Kernel:
    """Loads what `object_code` made, with the same numbers; returns the function, which releases the GIL."""
    llvm = _llvm()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    function: Any = prototype(sizes, pointers, True)(engine.get_function_address(ENTRY))
    return _with_rows(function, engine)


def with_rows(function: Any, sizes: int, pointers: int) -> Kernel:
    """Gives a compiled function of these numbers of arguments, which returns an integer, the attribute `rows`."""
    return _with_rows(function, _compiled_loop(sizes, pointers))


@cache
def _compiled_loop(sizes: int, pointers: int) -> Any:
    """Returns an engine with `LOOP`. To compile takes 17 MB of a process that has compiled nothing else."""
    llvm = _llvm()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_loop(sizes, pointers)), _machine())
    engine.finalize_object()
    return engine


def _with_rows(function: Any, engine: Any) -> Kernel:
    types = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p]
    loop: Any = ctypes.CFUNCTYPE(ctypes.c_ssize_t, *types)(engine.get_function_address(LOOP))
    loop.engine = engine  # keeps the machine code alive
    function.rows = partial(loop, ctypes.cast(function, ctypes.c_void_p).value)
    return cast(Kernel, function)


def prototype(sizes: int, pointers: int, returns: bool) -> Any:
    """Returns the C type of a kernel."""
    result = ctypes.c_ssize_t if returns else None
    return ctypes.CFUNCTYPE(result, *[ctypes.c_ssize_t] * sizes, *[ctypes.c_void_p] * pointers)


def _never_fails(function: Any) -> bool:
    """Returns True if the status that a function of Numba's returns can be nothing but success."""
    codes = _RETURN.findall(str(function))  # its text: to ask LLVM for each instruction takes a hundred times as long
    return bool(codes) and all(code.split() == ["i32", "0"] for code in codes)


def _entry(inner: str, sizes: int, pointers: int) -> str:
    """Writes the function `ENTRY`, which calls one of Numba's: that returns a status, and writes its result."""
    word = f"i{8 * ctypes.sizeof(ctypes.c_ssize_t)}"
    taken = [f"{word} %n{i}" for i in range(sizes)] + [f"ptr %p{i}" for i in range(pointers)]
    return f"""
define {word} @{ENTRY}({", ".join(taken)}) {{
  %result = alloca {word}
  %error = alloca ptr
  store {word} 0, ptr %result
  %status = call i32 @"{inner}"({", ".join(["ptr %result", "ptr %error", *taken])})
  %value = load {word}, ptr %result
  ret {word} %value
}}
"""


def _loop(sizes: int, pointers: int) -> str:
    """Writes the function `LOOP` for kernels of these numbers of arguments; it takes the kernel's address first."""
    types = ["i64"] * sizes + ["ptr"] * pointers
    loads = "\n".join(
        f"  %at{n} = getelementptr i64, ptr %row, i64 {n}\n  %arg{n} = load {type}, ptr %at{n}"
        for n, type in enumerate(types)
    )
    args = ", ".join(f"{type} %arg{n}" for n, type in enumerate(types))
    return f"""
define i64 @{LOOP}(ptr %kernel, ptr %table, i64 %rows, ptr %results) {{
begin:
  %empty = icmp eq i64 %rows, 0
  br i1 %empty, label %end, label %each
each:
  %i = phi i64 [0, %begin], [%next, %each]
  %before = phi i64 [0, %begin], [%after, %each]
  %first = mul i64 %i, {len(types)}
  %row = getelementptr i64, ptr %table, i64 %first
{loads}
  %result = call i64 %kernel({args})
  %place = getelementptr i64, ptr %results, i64 %i
  store i64 %result, ptr %place
  %after = or i64 %before, %result
  %next = add i64 %i, 1
  %over = icmp eq i64 %next, %rows
  br i1 %over, label %end, label %each
end:
  %all = phi i64 [0, %begin], [%after, %each]
  ret i64 %all
}}
"""


@cache
def _llvm() -> Any:
    """Returns LLVM for this machine. It is imported with the first kernel: a server starts without it."""
    llvm: Any = import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _host() -> Sequence[str]:
    """Returns the processor's kind, its name, and what it can do."""
    llvm = _llvm()
    features = llvm.get_host_cpu_features()
    return [llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten()]


def _machine() -> Any:
    """Returns the target that Numba compiles for, with its options; a new one, since an engine takes it over."""
    triple, cpu, features = _host()
    target = _llvm().Target.from_triple(triple)
    reloc = "static" if target.name.startswith("x86") else "default"
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc=reloc, codemodel="jitdefault", jit=True
    )
