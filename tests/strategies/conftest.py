"""One suite over every kind of strategy: all modules share one strategy of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.kit.strategies import KINDS, opened

AGAIN = ("mirrored-4", "embedded-4", "embedded-1")
"""Kinds of which others show each half: two replicas what four are, `mirrored-1` what one is, and `embedded-2` what a
server is."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves some kinds to `make soak`."""
    for item in items:
        if isinstance(item, pytest.Function) and item.name.partition("[")[2].startswith(AGAIN):
            item.add_marker(pytest.mark.soak)


class Shared:
    """The one strategy of each kind, opened when it is first asked for."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._opened: dict[str, Any] = {}

    def __call__(self, kind: str) -> Any:
        if kind not in self._opened:
            self._opened[kind] = self._stack.enter_context(opened(kind))
        return self._opened[kind]

    def close(self) -> None:
        """Closes all; who asks again opens anew."""
        self._opened.clear()
        self._stack.close()


_shared = Shared()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Closes all strategies where a test of another suite is next: idle servers take time from what runs then."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            _shared.close()


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Any]:
    """Gives the one strategy of a kind, for tests that leave it as they found it: starting a server takes long."""
    return _shared


@pytest.fixture(scope="module", params=KINDS)
def strategy(request: pytest.FixtureRequest, shared: Callable[[str], Any]) -> Any:
    """A strategy of each kind, `mirrored-2` being a `MirroredStrategy` of two replicas."""
    return shared(request.param)
