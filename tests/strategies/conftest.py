"""One suite over every kind of strategy: a module's tests share one strategy of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from strategies import KINDS, opened

import psclient as ps


@pytest.fixture(scope="module", params=KINDS)
def strategy(request: pytest.FixtureRequest) -> Iterator[ps.Strategy]:
    """A strategy of each kind, `mirrored-2` being a `MirroredStrategy` of two replicas."""
    with opened(request.param) as strategy:
        yield strategy
