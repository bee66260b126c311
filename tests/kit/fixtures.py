"""Fixtures of all folders: strategies of each kind, opened once, and what a test changes for its own time alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pstesting import forks
from pswire.variables import EXECS
from tests.kit import strategies


class _Shared:
    """The one strategy of each kind, opened when it is first asked for."""

    def __init__(self) -> None:
        self.opened: dict[str, tuple[Any, ExitStack]] = {}

    def __call__(self, kind: str) -> Any:
        if kind not in self.opened:
            stack = ExitStack()
            self.opened[kind] = stack.enter_context(strategies.opened(kind)), stack
        return self.opened[kind][0]

    def close(self, kept: Collection[str] = ()) -> None:
        """Closes all but those that are kept; the next call opens anew."""
        for kind in [kind for kind in self.opened if kind not in kept]:
            self.opened.pop(kind)[1].close()


_shared = _Shared()

Calls = list[tuple[Any, ...]]
"""What calls were given, one item for each."""


def pytest_configure(config: pytest.Config) -> None:
    """Adds the mark of `tests.kit.strategies.kinds`."""
    config.addinivalue_line("markers", "kinds: the kinds of the fixture `strategy` that a test runs on")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives the fixture `strategy` the kinds that the test or its module names."""
    marked = metafunc.definition.get_closest_marker("kinds")
    given = any(mark.args and "strategy" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if marked and not given and "strategy" in metafunc.fixturenames:
        chosen = pytest.mark.parametrize("strategy", marked.args, indirect=True, scope="module")
        metafunc.definition.add_marker(chosen)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Closes all strategies where a test of another folder is next, and rare ones where one of another module is.

    Idle servers take time from what runs then.
    """
    try:
        return (yield)
    finally:
        if _shared.opened and (nextitem is None or nextitem.path != item.path):
            near = nextitem is not None and nextitem.path.parent == item.path.parent
            _shared.close(strategies.USUAL if near else ())


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Any]:
    """Gives the one strategy of a kind, for tests that leave it as they found it: starting a server takes long."""
    return _shared


@pytest.fixture(scope="module", params=strategies.kinds(*strategies.USUAL, soak=strategies.KINDS).args)
def strategy(request: pytest.FixtureRequest, shared: Callable[[str], Any]) -> Any:
    """A strategy of each kind that `kinds` names for the test or its module; without it of the usual ones."""
    return shared(request.param)


@pytest.fixture
def in_tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Works in the test's own directory, below which servers that this process starts keep checkpoints."""
    with chdir(tmp_path):
        yield tmp_path


@pytest.fixture
def environ() -> Iterator[MutableMapping[str, str]]:
    """The environment of this process, which is put back after the test."""
    with mock.patch.dict(os.environ):
        yield os.environ


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """Notes what a function of some objects is given, one item for each call; the calls are made all the same."""

    def noted(name: str, *owners: Any) -> Calls:
        seen: Calls = []

        def noting(own: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **keys: seen.append(args) or own(*args, **keys)

        for owner in owners:
            monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
        return seen

    return noted


@pytest.fixture
def leaves_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher in this process waits for no server to leave: each waits for a job, and none begins."""
    monkeypatch.setattr("psclient._src.launch.cluster.LEAVE_SECONDS", 0.1)


COMPILED_ROUNDS = "TESTS_COMPILED_ROUNDS"
"""Names a file to which servers add a byte for each compiled round; see `small_kernels`."""


@pytest.fixture
def compiled_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Servers of the test's clusters compile rounds of small arrays, too; fails if none has run a compiled round.

    Where processes are not forked (`PS_TESTS_EXEC`), servers compile as they do for users.
    """
    file = tmp_path / "compiled-rounds"
    file.touch()
    monkeypatch.setenv(COMPILED_ROUNDS, str(file))
    with forks.having("tests.kit.small_kernels"):
        yield
    assert file.stat().st_size or os.environ.get(EXECS), "no round was compiled, as most of a real job are"
