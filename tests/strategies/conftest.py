"""One suite over every kind of strategy: all modules share one strategy of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from tests.support.strategies import KINDS, opened

AGAIN = ("mirrored-4", "embedded-4", "embedded-1")
"""Kinds of which others show each half: two replicas what four are, `mirrored-1` what one is, and `embedded-2` what a
server is."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves some kinds to `make soak`."""
    for item in items:
        if isinstance(item, pytest.Function) and item.name.partition("[")[2].startswith(AGAIN):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session")
def shared() -> Iterator[Callable[[str], Any]]:
    """Gives the one strategy of a kind, for tests that leave it as they found it: starting a server takes long."""
    with ExitStack() as stack:
        yield cache(lambda kind: stack.enter_context(opened(kind)))


@pytest.fixture(scope="module", params=KINDS)
def strategy(request: pytest.FixtureRequest, shared: Callable[[str], Any]) -> Any:
    """A strategy of each kind, `mirrored-2` being a `MirroredStrategy` of two replicas."""
    return shared(request.param)
