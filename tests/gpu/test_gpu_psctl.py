"""What psctl doctor sees of a GPU. Skipped, visibly, without a device."""

from __future__ import annotations

import re

import pytest

from psclient._src.devices import available_gpus, gpu_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(available_gpus() == 0, reason="no CUDA device, or CuPy is not installed (extra `gpu`)"),
]


def test_gpus_are_named() -> None:
    """Each that this process can use, with the versions of CuPy, of CUDA and of the driver."""
    report = gpu_report()
    assert len(report.names) == available_gpus()
    assert all(report.names)
    assert re.fullmatch(r"\d+\.\d+", report.runtime)
    assert re.fullmatch(r"\d+\.\d+", report.driver)
    assert (report.error, bool(report.cupy)) == ("", True)
