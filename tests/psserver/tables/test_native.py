"""The compiled functions of tables: kept for other processes, and asked for until they are there."""

from __future__ import annotations

from types import SimpleNamespace

from psserver.devices import Device
from psserver.programs.kernels.compiler import Compiler
from psserver.tables.native import FIRST_VALUES, INDEX, Native
from tests.support.table_functions import compiled


def test_another_process_loads_what_one_has_compiled(tmp_path):
    """All functions are machine code that needs neither Numba nor Python, so that they can be kept."""
    counts = []
    for _ in range(2):
        compiler = Compiler(Device(), 1, str(tmp_path / "kernels"))
        native = Native(compiler)
        native.index()
        for dtype in FIRST_VALUES:
            native.first_values(dtype)
        compiler.wait()
        assert native.index() is not None
        counts.append((compiler.compiled, compiler.loaded, compiler.failed))
        compiler.close()
    many = len(INDEX) + len(FIRST_VALUES)
    assert counts == [(many, 0, 0), (0, many, 0)]


def test_without_a_compiler_there_are_none():
    """Nor on a GPU, where these functions do not run."""
    assert Native().index() is None
    assert Native().first_values("float32") is None
    on_gpu = Compiler(SimpleNamespace(gpu=0), 1)
    assert Native(on_gpu).index() is None
    assert compiled().index() is compiled().index()
