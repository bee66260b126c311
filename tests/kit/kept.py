"""Kernels of which each is compiled once in a run of all tests."""

from __future__ import annotations

import os
from typing import Any

from psserver.devices import Device
from psserver.programs.kernels.kernels import Kernels
from tests.conftest import KERNELS


def kept_kernels(threads: int = 1, **more: Any) -> Kernels:
    """Returns kernels for the host, whose machine code other processes of the run take over."""
    return Kernels(Device(), threads, folder=os.environ[KERNELS], **more)
