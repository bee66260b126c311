"""Each test of this folder runs over a core in process, and one behind each lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kit.rig import Job, Servers, serving

Serve = Callable[..., Servers]

ON_GRPC = {"checkpoints", "failed_saves", "joins", "log", "looking", "restore", "rows", "sessions"}
"""What is hardly about pushes and pulls, the only verbs that lanes carry."""

ON_CALLS = {"rounds", "errors"}
"""What is tried without streams of calls as well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the other lanes, and by single calls, the rest is repeated by `make soak`; and with a thread but no lane.

    For behind each lane is a core with a thread for array work.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent and "thread" in item.keywords:
            item.add_marker(pytest.mark.soak)
        about = item.path.stem.removeprefix("test_contract_")
        if item.path.parent == Path(__file__).parent and about in ON_GRPC and {"tcp", "shm"} & {*item.keywords}:
            item.add_marker(pytest.mark.soak)
        if item.path.parent == Path(__file__).parent and about not in ON_CALLS and "calls" in item.keywords:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(params=["core", "thread", "grpc", "calls", "tcp", "shm"])
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
