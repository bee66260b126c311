"""psctl doctor on a GPU."""

from __future__ import annotations

import re

from tests.kit.internals import available_gpus, gpu_report


def test_gpus_are_named() -> None:
    """Each that this process can use, with the versions of CuPy, of CUDA and of the driver."""
    report = gpu_report()
    assert len(report.names) == available_gpus()
    assert all(report.names)
    assert re.fullmatch(r"\d+\.\d+", report.runtime)
    assert re.fullmatch(r"\d+\.\d+", report.driver)
    assert (report.error, bool(report.cupy)) == ("", True)
