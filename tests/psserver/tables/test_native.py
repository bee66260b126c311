"""The compiled functions of tables: kept for other processes, and asked for until they are there."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np

from psserver.devices import Device
from psserver.programs.kernels.compiler import Compiler
from psserver.tables.marks import mark
from psserver.tables.native import FIRST_VALUES, INDEX, Native
from psserver.tables.rows import COUNT, WORDS
from tests.conftest import KERNELS
from tests.kit.tables import compiled


def test_another_process_loads_what_one_has_compiled():
    """All functions are machine code that needs neither Numba nor Python, so that they can be kept."""
    counts = []
    for _ in range(2):
        compiler = Compiler(Device(), 1, os.environ[KERNELS])
        native = Native(compiler)
        native.index()
        native.mark()
        for dtype in FIRST_VALUES:
            native.first_values(dtype)
        compiler.wait()
        assert native.index() is not None
        counts.append((compiler.compiled, compiler.loaded, compiler.failed))
        compiler.close()
    many = len(INDEX) + len(FIRST_VALUES) + 1
    (made, loaded, failed), again = counts
    assert (made + loaded, failed) == (many, 0)  # another process of the run may have compiled some
    assert again == (0, many, 0)


def test_without_a_compiler_there_are_none():
    """Nor on a GPU, where these functions do not run."""
    assert Native().index() is None
    assert Native().first_values("float32") is None
    on_gpu = Compiler(SimpleNamespace(gpu=0), 1)
    assert Native(on_gpu).index() is None
    assert compiled().index() is compiled().index()


def test_rows_are_marked_alike():
    """By the compiled function and by NumPy, also those that come several times; what was known comes back."""
    rng = np.random.default_rng(0)
    books = rng.integers(0, 100, (50, WORDS)).astype(np.uint32)
    books[:, COUNT] = rng.random(50).astype(np.float32).view(np.uint32)
    slots, times = rng.integers(0, 50, 200), rng.integers(1, 9, 200)
    mine, other = books.copy(), books.copy()
    saved = mark(mine, 7, slots, times), mark(other, 7, slots, times, compiled().mark())
    assert compiled().mark() is not None
    assert mine.tobytes() == other.tobytes()
    assert saved[0].tobytes() == saved[1].tobytes() == books[slots].tobytes()
