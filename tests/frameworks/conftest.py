"""Tests of what needs PyTorch or JAX, by folder: skipped, visibly and before any import, where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit.strategies import opened

NAMES = {"torch": "PyTorch", "jax": "JAX"}


class Missing(pytest.Module):
    """A module of tests without what it needs."""

    def collect(self) -> Iterator[pytest.Item]:
        folder = self.path.parent.name
        reason = f"{NAMES[folder]} is not installed; it comes with paramserver[{folder}]: make test-frameworks"
        pytest.skip(reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Leaves out what could not be imported."""
    folder = module_path.parent.name
    if folder in NAMES and find_spec(folder) is None:
        return Missing.from_parent(parent, path=module_path)
    return None


@pytest.fixture(scope="module")
def strategy() -> Iterator[Any]:
    """One worker, and two servers."""
    with opened("servers-2x1") as found:
        yield found
