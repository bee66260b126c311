"""What tests of rounds share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from psserver.programs.kernels.kernels import Kernels
from tests.kit.programs import kept_kernels


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """Kernels for arrays of any size, from the second round on."""
    made = kept_kernels(patience=1, smallest=0)
    yield made
    made.close()
