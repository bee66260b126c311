"""Tests that need a GPU. They are skipped, visibly, without a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from psclient._src.arrays import devices

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests of this folder, for `-m gpu`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if devices.available_gpus() == 0:
                item.add_marker(pytest.mark.skip("no CUDA device, or CuPy is not installed (extra `gpu`)"))
