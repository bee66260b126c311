"""Servers of one host compile a kernel once, and load no more than they need for it."""

from __future__ import annotations

import numpy as np

import psclient as ps
from pstesting.forks import EXECS
from pstesting.processes import PS0, PS1, W0, ProcessCluster
from pstesting.script import gate, say
from tests.kit.telemetry import Page, metrics_url

SIZE = 1 << 16
SERVERS = (PS0, PS1)


def program(size):
    strategy = ps.ParameterServerStrategy()
    with strategy.scope():
        variables = [ps.Variable(np.zeros(size, np.float32)) for _ in range(2)]
        optimizer = ps.optimizers.SGD(0.5)

    def step():
        optimizer.apply_gradients([(np.ones(size, np.float32), v) for v in variables])

    for rounds in (3, 2):
        for _ in range(rounds):
            strategy.run(step)
        say("values", [float(v.numpy()[-1]) for v in variables])
        gate(f"after {rounds}")


def libraries(job, task) -> set[str]:
    """Those of these packages whose machine code a task's process has loaded."""
    with open(f"/proc/{job.cluster.processes[task].pid}/maps", encoding="utf-8") as maps:
        text = maps.read()
    return {name for name in ("numba", "llvmlite", "scipy") if f"/site-packages/{name}" in text}


def kernels(found) -> tuple[float, float]:
    """Kernels that a server has compiled, and those that it has loaded."""
    return tuple(found("server_kernels_compiled_total", outcome=how) for how in ("compiled", "loaded"))


def run(directory) -> dict:
    """Runs a job of two servers that update by kernels; returns what each has compiled, loaded, and imported."""
    directory.mkdir()
    keys = {"ps": 2, "workers": 1, "metrics_port": 0}
    with ProcessCluster(program, directory, (SIZE,), gates=["after 3", "after 2"], **keys) as job:
        assert job.hear(W0, "values") == [-1.5] * 2
        job.until(lambda: all(sum(kernels(Page.at(metrics_url(job, task)))) == 1 for task in SERVERS))
        job.open("after 3")
        assert job.hear(W0, "values") == [-2.5] * 2
        pages = {task: Page.at(metrics_url(job, task)) for task in SERVERS}
        assert all(each("server_kernel_seconds_total") > 0 for each in pages.values())
        found = {task: (*kernels(pages[task]), libraries(job, task)) for task in SERVERS}
        job.open("after 2")
        job.finish()
    return found


def test_a_host_compiles_a_kernel_once(tmp_path, environ):
    """Of two servers one compiles, with Numba but no SciPy; the other, and those of the next job, load by LLVM."""
    environ |= {"PS_KERNEL_CACHE": str(tmp_path / "kernels"), EXECS: "1"}  # a fork has the compiler from the beginning
    first = run(tmp_path / "first")
    assert sorted(first.values(), key=repr) == [(0, 1, {"llvmlite"}), (1, 0, {"llvmlite", "numba"})]
    assert set(map(repr, run(tmp_path / "second").values())) == {repr((0.0, 1.0, {"llvmlite"}))}


def test_without_a_folder_every_server_compiles(tmp_path, environ):
    """`PS_KERNEL_CACHE=0`: nothing is written; and without it Numba comes without SciPy as well."""
    environ |= {"PS_KERNEL_CACHE": "0", EXECS: "1", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "caches")}
    found = run(tmp_path / "job")
    assert list(found.values()) == [(1, 0, {"llvmlite", "numba"})] * 2
    assert not (tmp_path / "caches").exists()
