"""Certificates, made once."""

from __future__ import annotations

import pytest

from tests.support.certificates import Certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of a cluster, and of another one."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))
