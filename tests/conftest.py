"""What all tests share: compiled kernels, how long hypothesis searches, how a test is interrupted, and two fixtures."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.kit.certificates import Certificates

# A shell starts what it runs in the background with SIGINT ignored; tests that interrupt themselves would not be.
signal.signal(signal.SIGINT, signal.default_int_handler)

# NumPy's BLAS makes a thread for each core when it is imported, and nothing here needs more than one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What hypothesis remembers lies where pytest's own memory does, and not beside the packages.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".pytest_cache" / "hypothesis"))

# A slow machine is no failure. `pytest --hypothesis-profile=soak` searches for as long as one likes to wait.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", settings.get_profile("suite"), max_examples=3_000, stateful_step_count=100)
settings.load_profile("suite")

KERNELS = "PS_KERNEL_CACHE"

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


def pytest_configure(config: pytest.Config) -> None:
    """Gives all servers of the run one folder of compiled kernels: none rests on what earlier runs have left."""
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist have it from the process that starts them
        folder = os.environ[KERNELS] = tempfile.mkdtemp(prefix="paramserver-kernels-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects ten thousand tests without looking for garbage among them, which takes a third of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # they stay until the end
        gc.enable()


INSISTS = "PS_FRAMEWORKS"
"""Set by `make test-frameworks`: what is skipped there, since PyTorch or JAX is not installed, has failed."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fails a module that skips itself, where nothing may be skipped."""
    return _insisting((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that is skipped, where nothing may be."""
    return _insisting((yield))


def _insisting(report: Report) -> Report:
    if os.environ.get(INSISTS) and report.outcome == "skipped":
        report.outcome, report.longrepr = "failed", f"skipped, and {INSISTS} is set: {report.longrepr}"
    return report


EXECS = "PS_TESTS_EXEC"
"""Set by `make soak`, for faults: each process is started by itself, and not forked."""


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Starts the processes of clusters by forks: what most of the time of the tests would be is imports."""
    if os.environ.get(EXECS):
        yield
        return
    from psclient._src.processes import process
    from pstesting.forks import Forked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "popen", Forked)
        yield


@pytest.fixture(scope="session", params=[1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3, 4))])
def search(request: pytest.FixtureRequest) -> int:
    """A search whose examples each take a compiler: one is made in each run, and others like it in the soak."""
    number: int = request.param
    return number


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test enters into it."""
    with ExitStack() as found:
        yield found


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of a cluster, and of another one; no test changes them."""
    from tests.kit.certificates import Certificates  # a server with it, which few tests need

    return Certificates.make(tmp_path_factory.mktemp("certificates"))
