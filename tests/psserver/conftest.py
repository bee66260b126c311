"""What tests of a server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.rig import Job, serving


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job on one server, which works in the test's thread."""
    with serving("core", 1, tmp_path) as servers:
        yield Job(servers)
