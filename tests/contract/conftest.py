"""The contract suite runs over each way to have a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rig import Job, Servers, serving


@pytest.fixture(params=["core", "thread", "grpc"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    """Two servers: cores in process, cores whose array work runs beside, and cores behind a network."""
    with serving(request.param, 2, tmp_path) as found:
        yield found


@pytest.fixture
def job(servers: Servers) -> Job:
    """A job that a chief has begun."""
    return Job(servers)
