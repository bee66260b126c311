"""Transports, one after the other."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["tcp", "shm"])
def name(request):
    """A transport that is no gRPC."""
    return request.param
