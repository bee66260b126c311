"""Each test of this folder runs over a core in process, and behind carriers; `make soak` has the whole product."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.rig import WORKERS, Job, Servers, Worker, serving

Serve = Callable[..., Servers]

NETWORK = ("grpc", "tcp", "calls", "shm")
"""Carriers; `calls` is gRPC without streams of calls. A core behind one has a thread for array work."""

CARRIERS = {
    **dict.fromkeys(("rounds", "errors"), NETWORK),
    **dict.fromkeys(("checkpoints", "log", "looking", "restore", "sessions"), ("grpc", "core", "core")),
}
"""On which a module's tests run beside the core: one or two of them each, in turn. Transports carry pushes and pulls
alone; for each other message `tests/pswire/encoding` has both ends, so that every third test of a module is enough."""

DEAR = {"test_there_is_an_end_to_it"}
"""Tests that fill a server, over the core alone."""


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Deals carriers to tests."""
    given = any(mark.args[0] == "serve" for mark in metafunc.definition.iter_markers("parametrize"))
    if given or "serve" not in metafunc.fixturenames:
        return
    about = metafunc.module.__name__.rpartition("test_contract_")[2]
    carriers = CARRIERS.get(about, ("grpc", "tcp", "shm"))
    tests = [name for name, found in vars(metafunc.module).items() if inspect.isfunction(found) and name[:5] == "test_"]
    turn = tests.index(metafunc.function.__name__)
    count = 0 if metafunc.function.__name__ in DEAR else 2 if carriers == NETWORK else 1
    chosen = {carriers[(turn + number) % len(carriers)] for number in range(count)}
    kinds = [
        pytest.param(kind, marks=() if kind == "core" or kind in chosen else pytest.mark.soak)
        for kind in ("core", "thread", *NETWORK)
    ]
    metafunc.parametrize("serve", kinds, indirect=True)


@pytest.fixture
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers: `serve(count, memory_limit)`."""
    with ExitStack() as stack:
        yield lambda count=1, memory_limit=0: stack.enter_context(
            serving(request.param, count, tmp_path / "root", memory_limit)
        )


@pytest.fixture
def job(serve: Serve) -> Job:
    """A job on two servers."""
    return Job(serve(2))


@pytest.fixture
def worker(job: Job) -> Worker:
    """A member of the job."""
    return job.join(WORKERS[0])[0]


@pytest.fixture
def two(job: Job) -> list[Worker]:
    """Two members of the job."""
    return job.join(*WORKERS[:2])
