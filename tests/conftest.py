"""What all tests share: compiled kernels, how long hypothesis searches, how a test is interrupted, and fixtures."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

# A shell may forbid to keep what is compiled; hundreds of processes would compile all modules anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

from psserver.network import unix_socket
from tests.kit import cases

if TYPE_CHECKING:
    from tests.kit.certificates import Certificates

# A shell starts what it runs in the background with SIGINT ignored; tests that interrupt themselves would not be.
signal.signal(signal.SIGINT, signal.default_int_handler)

# NumPy's BLAS makes a thread for each core when it is imported, and nothing here needs more than one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What hypothesis remembers lies where pytest's own memory does, and not beside the packages.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".pytest_cache" / "hypothesis"))

cases.load()

KERNELS = "PS_KERNEL_CACHE"

OPTIONAL = ("ci", "soak", "dist")
"""Marks of tests that are made only where `--run` names them."""

Report = TypeVar("Report", pytest.CollectReport, pytest.TestReport)


def pytest_configure(config: pytest.Config) -> None:
    """Gives all servers of the run one folder of compiled kernels: none rests on what earlier runs have left.

    At the end the sockets of servers that tests have killed are removed, as the next server would remove them.
    """
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist have it from the process that starts them
        folder = os.environ[KERNELS] = tempfile.mkdtemp(prefix="paramserver-kernels-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: unix_socket._remove_dead(unix_socket.SHARED))
    from tests.kit import fixtures  # and NumPy with it, which looks at the environment

    config.pluginmanager.register(fixtures, "tests.kit.fixtures")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--run`."""
    text = "make tests with this mark as well; may be repeated"
    parser.addoption("--run", action="append", default=[], choices=OPTIONAL, help=text)


def _is_excluded(config: pytest.Config, marks: Iterable[pytest.Mark | pytest.MarkDecorator]) -> bool:
    run: list[str] = config.getoption("--run")
    return any(mark.name in OPTIONAL and mark.name not in run for mark in marks)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Makes no items of optional tests: thousands would be made by each process, and then dropped."""
    marks = getattr(obj, "pytestmark", None)
    own = marks if isinstance(marks, list) else []
    return [] if _is_excluded(collector.config, [*own, *collector.iter_markers()]) else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Makes no items of the optional values of parameters and fixtures either."""
    parametrize = metafunc.parametrize

    def fewer(names: Any, values: Iterable[Any], *args: Any, ids: Any = None, **options: Any) -> None:
        given = list(values)
        kept = [n for n, value in enumerate(given) if not _is_excluded(metafunc.config, getattr(value, "marks", ()))]
        kept = kept or [*range(len(given))]  # without a value a test would be made, and skipped
        if isinstance(ids, Sequence) and not isinstance(ids, str):
            ids = [ids[n] for n in kept]
        parametrize(names, [given[n] for n in kept], *args, ids=ids, **options)

    metafunc.parametrize = fewer  # type: ignore[method-assign]
    return (yield)


@pytest.hookimpl
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops tests all of whose values are optional; several processes get files of all folders each.

    Jobs wait and other tests compute: where one process has all jobs, they come last, and half of the machine is idle.
    """
    items[:] = [item for item in items if not _is_excluded(config, item.iter_markers())]
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: zlib.crc32(item.nodeid.partition("::")[0].encode()))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects ten thousand tests without looking for garbage among them, which takes a third of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # they stay until the end
        gc.enable()


COSTS = "PS_TEST_COSTS"
"""Names a file for the processor time of each test (`tools/cost.py`)."""


def _spent() -> float:
    """Returns the processor seconds of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Adds what a test cost to a file, where one is named."""
    begun = _spent()
    try:
        return (yield)
    finally:
        if file := os.environ.get(COSTS):
            with open(file, "a") as costs:
                costs.write(f"{_spent() - begun:.3f}\t{item.nodeid}\n")


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


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Starts the processes of clusters by forks: what most of the time of the tests would be is imports.

    With `PS_TESTS_EXEC` in their environment, as in `make soak`, each starts by itself.
    """
    from psclient._src.processes import process
    from pstesting.forks import Forked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "popen", Forked)
        yield


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test enters into it."""
    with ExitStack() as found:
        yield found


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Takes no warnings of calls from threads of tests before: these may still retry when their cluster has ended."""
    before = set(threading.enumerate()) - {threading.current_thread()}
    with caplog.filtering(lambda record: record.name != "psclient.calls" or threading.current_thread() not in before):
        yield caplog


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of a cluster, and of another one; no test changes them."""
    from tests.kit.certificates import Certificates  # a server with it, which few tests need

    return Certificates.make(tmp_path_factory.mktemp("certificates"))
