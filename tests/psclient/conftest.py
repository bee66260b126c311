"""A job for the tests of several rooms."""

from __future__ import annotations

import pytest

from tests.kit.rig import Job, serving


@pytest.fixture
def job(tmp_path):
    """Two servers and a chief that does nothing by itself."""
    with serving("core", 2, tmp_path) as servers:
        yield Job(servers)
